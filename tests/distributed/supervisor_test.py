# SPDX-License-Identifier: Apache-2.0
"""The supervisor replaces a failed child; the children here do no real training."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import supervisor
from tests import naming

_ROOT = pathlib.Path(__file__).parents[2]
# The tests name its functions for the child and for the start of workers.
_PROGRAM = _ROOT / 'tests' / 'toys' / 'programs' / 'supervised_children.py'
_SECONDS = 60
# The time limit of a step.
_STEP_SECONDS = 1.0


def _Start(directory, train, last='-1', workers='Nothing', step_seconds=_STEP_SECONDS):
  return subprocess.Popen(
    [sys.executable, str(_PROGRAM), directory, train, last, workers, str(step_seconds)],
    env={**os.environ, 'PYTHONPATH': str(_ROOT), 'PYTHONUNBUFFERED': ''},
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def _Run(directory, train, last='-1', step_seconds=_STEP_SECONDS):
  """Returns (exit status, stderr, number of children)."""
  process = _Start(directory, train, last, step_seconds=step_seconds)
  try:
    _, stderr = process.communicate(timeout=_SECONDS)
  finally:
    process.kill()
  # Each child gets new workers.
  assert (directory / 'closed').read_text() == (directory / 'children').read_text()
  return process.returncode, stderr, int((directory / 'children').read_text()) + 1


_FAIL = 'FailUntil:100'


@pytest.mark.parametrize(
  'train, last, expected, names',
  [
    ('Return:3', '-1', (3, 1), ()),
    ('Raise', '-1', (1, 1), ('ValueError: a mistake',)),
    ('FailUntil:2', '-1', (0, 3), ('beginning',)),
    ('FailUntil:1', '7', (0, 2), ('step 7',)),
    (_FAIL, '7', (1, 6), ('worker failed', '6 times', 'giving up')),
    ('FailUntil:8', 'counted', (0, 9), ('step 8',)),
    ('Crash', '-1', (1, 6), ('training process', 'signal 11')),
    ('HangOnce', '-1', (0, 2), ('no step', f'{_STEP_SECONDS} s', 'may hang')),
    ('LoseAWorkerOnce', '-1', (0, 2), ('local worker', 'beginning')),
    ('SuspendTheLimit', '-1', (0, 1), ()),
    ('PauseBetweenSteps', '-1', (0, 1), ()),
    # The child has reported its status, but its exit hangs.
    ('HangAfterTheEnd', '-1', (4, 1), ()),
    # The child crashes after it reported its status.
    ('CrashAfterTheEnd', '-1', (1, 1), ()),
  ],
)
def testAChildIsReplacedIfAWorkerFailed(tmp_path, train, last, expected, names):
  status, stderr, children = _Run(tmp_path, train, last)
  assert (status, children) == expected, stderr
  assert naming.Names(stderr, *names)
  assert names or not stderr


def testAChildIsReplacedIfItsWriteHangs(tmp_path):
  status, stderr, children = _Run(tmp_path, 'HangInAWriteOnce', step_seconds=10.0)
  assert (status, children) == (0, 2), stderr
  assert naming.Names(stderr, 'no checkpoint', '0.5 s', 'may hang')


@pytest.mark.parametrize(
  'train, last, expected',
  [
    ('Return:3', '-1', None),
    (_FAIL, '7', [7, {'worker_failed': 6, 'gave_up': 1}]),
    ('FailInEachWay', '-1', [-1, {'process_died': 1, 'no_step': 1, 'worker_failed': 1}]),
  ],
)
def testFailuresAreRecordedByKind(tmp_path, train, last, expected):
  _Run(tmp_path, train, last)
  path = tmp_path / 'failures'
  assert (json.loads(path.read_text()) if path.exists() else None) == expected


def _AwaitFile(path):
  deadline = time.monotonic() + _SECONDS
  while not (path.exists() and path.read_text()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  return path.read_text()


def testSignalsReachTheChildAndItsStatusIsReturned(tmp_path):
  process = _Start(tmp_path, 'ExitAtASignal')
  _AwaitFile(tmp_path / 'ready')
  process.send_signal(signal.SIGTERM)
  _, stderr = process.communicate(timeout=_SECONDS)
  assert (process.returncode, stderr) == (143, '')


def testASignalDuringTheStartOfWorkersEndsEverything(tmp_path):
  process = _Start(tmp_path, 'Return:0', workers='StopTheSupervisor')
  _, stderr = process.communicate(timeout=_SECONDS)
  assert (process.returncode, stderr) == (143, '')
  assert not [*tmp_path.iterdir()]


def testWorkersThatDoNotServeYetEndWithTheSupervisor(tmp_path):
  sleeper = tmp_path / 'sleeper'
  sleeper.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n')
  sleeper.chmod(0o755)
  process = _Start(tmp_path, 'Return:0', workers='StartSlowly')
  worker = int(_AwaitFile(tmp_path / 'pid'))
  _AwaitFile(tmp_path / 'waits')
  process.send_signal(signal.SIGTERM)
  try:
    _, stderr = process.communicate(timeout=_SECONDS)
  finally:
    is_alive = os.path.exists(f'/proc/{worker}')
    process.kill()
    if is_alive:
      os.kill(worker, signal.SIGKILL)
  assert (process.returncode, stderr, is_alive) == (143, '', False)


def testAHangingChildIsNotReplacedAfterASignal(tmp_path):
  process = _Start(tmp_path, 'IgnoreSignals')
  _AwaitFile(tmp_path / 'ready')
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=_SECONDS)
  assert process.returncode == 143
  assert (tmp_path / 'children').read_text() == '0'


def testAFailedRestartOfWorkersIsRetried(tmp_path):
  process = _Start(tmp_path, 'FailUntil:2', workers='FailAtTheRestart')
  _, stderr = process.communicate(timeout=_SECONDS)
  assert process.returncode == 0, stderr
  assert naming.AnyLineNames(stderr, 'worker 0', 'resuming')


def testAFailedFirstStartOfWorkersIsAnError(tmp_path):
  process = _Start(tmp_path, 'Return:0', workers='FailAtTheStart')
  _, stderr = process.communicate(timeout=_SECONDS)
  assert process.returncode == 1 and naming.AnyLineNames(stderr, 'OSError', 'worker 0')


def testASignalDuringTheForkIsForwardedOnce(tmp_path):
  process = _Start(tmp_path, 'Sleep', workers='StopDuringTheFork')
  _, stderr = process.communicate(timeout=_SECONDS)
  assert (process.returncode, stderr) == (143, '')
  assert (tmp_path / 'kills').read_text() == '0'


def testOutputBeforeTheForkIsWrittenOnce(tmp_path):
  process = _Start(tmp_path, 'Return:0', workers='Print')
  assert process.communicate(timeout=_SECONDS) == ('workers start\n', '')


def testASignalEndsThePauseBeforeARestart(tmp_path):
  process = _Start(tmp_path, _FAIL, workers='PauseLong')
  _AwaitFile(tmp_path / 'closed')
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=_SECONDS)
  assert process.returncode == 143
  assert (tmp_path / 'children').read_text() == (tmp_path / 'closed').read_text() == '0'


def testAnUnreadableCheckpointDoesNotEndTheSupervisor():
  def Fail():
    raise OSError('the file server is away')

  for GetProgress, expected in ((Fail, 7), (lambda: 9, 9)):
    work = supervisor.Work('training', 'a new checkpoint', GetProgress)
    assert supervisor.Supervisor(lambda *_: 0, work)._ReadProgress(7) == expected


def testPausesDoubleUpToAMinute():
  pauses = [supervisor._PauseSeconds(failures) for failures in range(1, 9)]
  assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def _Signs(step_timeout, *read):
  signs = supervisor._Signs(step_timeout, 0.0)
  for now, message in read:
    signs.Take(message, now)
  return signs


def _Limit(signs):
  """Returns the deadline, the seconds and the missing event's kind: step, batch or checkpoint."""
  deadline, seconds, event = signs.limit
  return deadline, seconds, event.split()[0]


def testTheLimitDependsOnTheKindOfTheStepInProgress():
  batches = [(float(i), b'V' if i % 2 else b'v') for i in range(100)]
  steps = [(100.0 + 20 * i, b'T' if i % 2 else b't') for i in range(100)]
  long = supervisor._LONG_SECONDS
  assert _Signs(None, *batches).limit.seconds == 60
  assert _Signs(None, *batches, (100.0, b'v')).limit.seconds == long
  assert _Signs(None, *batches, (100.0, b'v'), (101.0, b'T')).limit.seconds == long
  assert _Signs(None, *batches, *steps).limit.seconds == 200
  assert _Signs(None, *batches, *steps, (9e3, b'V')).limit.seconds == 60
  # Steps with a long operation do not count, nor do signs that were read late.
  traced = [(20.0 * i, sign) for i, sign in enumerate([b'T', b'l', b't'] * 9)]
  assert _Signs(None, *traced, (9e3, b'T')).limit.seconds == long
  assert _Signs(None, *batches, *steps, (9e3, b'TtTt' * 50 + b'T')).limit.seconds == 200
  assert _Signs(5.0, (0.0, b'T')).limit.seconds == 5
  assert _Signs(5.0, (0.0, b'TtTl')).limit.seconds == long


def testAWriteHasALimitOfItsOwn():
  writes = [(90.0 * i, b'w' if i % 2 else b'W') for i in range(10)]
  signs = _Signs(5.0, *writes, (900.0, b'W'), (1000.0, b'T'))
  assert _Limit(signs) == (1005.0, 5.0, 'step')
  signs.Take(b't', 1001.0)
  assert _Limit(signs) == (1800.0, 900.0, 'checkpoint')
  signs.Take(b'R', 1002.0)
  assert _Limit(signs) == (1007.0, 5.0, 'batch')
  signs.Take(b'w', 1003.0)
  assert _Limit(signs) == (1007.0, 5.0, 'batch')
  signs.Take(b'Wl', 1004.0)
  assert _Limit(signs) == (1904.0, 900.0, 'checkpoint')
  # After fast writes, a slow one still has ten minutes.
  quick = [(float(i), b'w' if i % 2 else b'W') for i in range(10)]
  assert _Signs(None, *quick, (10.0, b'W')).limit.seconds == 600


def testAReadHasAtLeastTenMinutes():
  """It may wait for a file, or fill a shuffle buffer after many reads from a full one."""
  ready = [(i / 100, b'r' if i % 2 else b'R') for i in range(100)]
  assert _Limit(_Signs(None, *ready, (2.0, b'R'))) == (602.0, 600.0, 'batch')
  assert _Signs(5.0, *ready, (2.0, b'R')).limit.seconds == 5
  slow = [(90.0 * i, b'r' if i % 2 else b'R') for i in range(10)]
  assert _Signs(None, *slow, (900.0, b'R')).limit.seconds == 900


def testAnEndSignMayBeReadInPieces():
  end = heartbeat.END + bytes([heartbeat.END[0]])  # A status that looks like a sign.
  for read in ([(0.0, b'Tt' + end)], [(0.0, b'Tt' + end[:1]), (1.0, end[1:])]):
    signs = _Signs(5.0, *read)
    assert (signs.status, signs.limit.seconds) == (heartbeat.END[0], supervisor._END_SECONDS)
  assert _Signs(5.0, (0.0, b'Tt' + end[:1])).status is None


@pytest.mark.parametrize('workers', ['Nothing', 'OutliveTheSupervisor'])
def testTheChildEndsWithTheSupervisor(tmp_path, workers):
  process = _Start(tmp_path, 'Sleep', workers=workers)
  pid = int(_AwaitFile(tmp_path / 'pid'))
  process.kill()
  process.communicate(timeout=_SECONDS)
  deadline = time.monotonic() + _SECONDS
  while _IsRunning(pid):
    assert time.monotonic() < deadline
    time.sleep(0.01)


def _IsRunning(pid):
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return text.rpartition(')')[2].split()[0] != 'Z'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
