# SPDX-License-Identifier: Apache-2.0
"""Two do not hold one directory, and what a killed process held is free."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import logdir_lock
from lingvo_gpipe.core import files


@pytest.fixture
def quick_lease(monkeypatch):
  monkeypatch.setattr(logdir_lock, 'BEAT_SECONDS', 0.02)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 0.3)
  monkeypatch.setattr(logdir_lock, 'SETTLE_SECONDS', 0.02)


def testTheSecondIsRefusedUntilTheFirstIsGone(tmp_path):
  directory = str(tmp_path / 'run' / 'train')
  with logdir_lock.Held(directory):
    for _ in range(2):
      with pytest.raises(logdir_lock.InUseError) as e, logdir_lock.Held(directory):
        pass
    assert re.fullmatch(
      rf"'{directory}' is in use: another trainer works there \(process {os.getpid()} on \S+, "
      r'since [\d-]+ [\d:]+ UTC\)\. Wait for its end or stop it, or give another --logdir\.',
      str(e.value),
    )
  with logdir_lock.Held(directory) as lock:
    lock.Check()


@pytest.mark.filterwarnings('ignore:This process .* is multi-threaded')
def testAForkedProcessDoesNotKeepTheLock(tmp_path):
  to_child, to_parent = os.pipe(), os.pipe()
  with logdir_lock.Held(str(tmp_path)):
    child = os.fork()
    if not child:
      os.write(to_parent[1], b'.')
      os.read(to_child[0], 1)
      os._exit(0)
    os.read(to_parent[0], 1)
  try:
    with logdir_lock.Held(str(tmp_path)):
      pass
  finally:
    os.write(to_child[1], b'.')
    os.waitpid(child, 0)
    for file in (*to_child, *to_parent):
      os.close(file)


@pytest.mark.parametrize('what', ['removed', 'replaced', 'a file'])
def testADirectoryThatIsLostIsNoticed(tmp_path, what):
  directory = tmp_path / 'train'
  with logdir_lock.Held(str(directory)) as lock:
    lock.Check()
    shutil.move(directory, tmp_path / 'moved')
    if what == 'replaced':
      shutil.copytree(tmp_path / 'moved', directory)
    elif what == 'a file':
      directory.write_text('')
    with pytest.raises(logdir_lock.LostError, match=r'train. is no longer the directory.*Nothing'):
      lock.Check()


def _WithoutLocks(monkeypatch):
  def Refuse(file, operation):
    raise OSError(95, 'Operation not supported')

  monkeypatch.setattr(logdir_lock.fcntl, 'flock', Refuse)


@pytest.mark.parametrize('place', ['ram://', 'no locks'])
def testALeaseIsHeldByOne(tmp_path, monkeypatch, quick_lease, place):
  _WithoutLocks(monkeypatch)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1000.0)  # Nothing waits for it.
  directory = str(tmp_path) if place == 'no locks' else f'ram://lease_test{tmp_path}'
  with logdir_lock.Held(directory) as lock:
    for _ in range(2):
      with (
        pytest.raises(logdir_lock.InUseError, match=f'process {os.getpid()} on '),
        logdir_lock.Held(directory),
      ):
        pass
    lock.Check()
  assert not tf.io.gfile.exists(f'{directory}/{logdir_lock.FILE_NAME}')
  with logdir_lock.Held(directory):
    pass


@pytest.mark.parametrize('place', ['file', 'ram://', 'no locks'])
def testFromOutsideOneSeesForHowLongNobodyHoldsIt(tmp_path, monkeypatch, quick_lease, place):
  if place == 'no locks':
    _WithoutLocks(monkeypatch)
  clock = [100.0]
  directory = f'ram://watch_test{tmp_path}' if place == 'ram://' else str(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
    watch = logdir_lock.Watch(directory)
    clock[0] += 7.0
    assert watch.SecondsFree() == 7.0  # Nobody was ever there.
  with logdir_lock.Held(directory) as lock:
    monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1e9)
    for _ in range(3):
      assert watch.SecondsFree() == 0.0
    lock.Check()
  with monkeypatch.context() as patched:
    patched.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
    clock[0] = watch._since + 1000.0
    assert watch.SecondsFree() == pytest.approx(1000.0)


def testALeaseThatIsNotWrittenCountsForItsLifetime(tmp_path, monkeypatch):
  """Its holder is on another machine."""
  _WithoutLocks(monkeypatch)
  clock = [100.0]
  monkeypatch.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
  record = {**logdir_lock._Myself(), 'machine': 'another', 'beat': 3}
  (tmp_path / logdir_lock.FILE_NAME).write_text(json.dumps(record))
  watch = logdir_lock.Watch(str(tmp_path))
  for seconds, free in ((50.0, 0.0), (59.0, 0.0), (2.0, 61.0)):
    clock[0] += seconds
    assert watch.SecondsFree() == free
  (tmp_path / logdir_lock.FILE_NAME).write_text(json.dumps({**record, 'beat': 4}))
  assert watch.SecondsFree() == 0.0


def testOneWhoLooksHoldsNobodyUp(tmp_path, monkeypatch):
  """It looks at the moment at which a trainer begins."""
  (tmp_path / logdir_lock.FILE_NAME).touch()
  file = os.open(tmp_path / logdir_lock.FILE_NAME, os.O_RDONLY)
  logdir_lock.fcntl.flock(file, logdir_lock.fcntl.LOCK_SH)
  monkeypatch.setattr(logdir_lock.time, 'sleep', lambda seconds: os.close(file))
  with logdir_lock.Held(str(tmp_path)) as lock:
    lock.Check()


def testAStaleLeaseIsTakenOver(tmp_path, quick_lease, monkeypatch):
  path = tmp_path / logdir_lock.FILE_NAME
  _WithoutLocks(monkeypatch)
  gone = subprocess.Popen(
    [sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE
  )
  started = logdir_lock._Started(gone.pid)
  gone.stdin.close()
  os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
  here = {**logdir_lock._Myself(), 'token': 'x', 'beat': 3}
  # On another machine it may be alive: it is watched.
  for record in ({**here, 'machine': 'another'}, {'unknown': 1}):
    path.write_text(json.dumps(record))
    with logdir_lock.Held(str(tmp_path)) as lock:
      lock.Check()
  path.write_text('half a reco')
  with logdir_lock.Held(str(tmp_path)):
    pass
  # Here it is known to be gone, at once; also where nobody has taken note of its end yet, and where
  # another process has its number now.
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1e9)
  for record in (
    {**here, 'pid': gone.pid, 'started': started},
    {**here, 'pid': gone.pid},
    {**here, 'started': '1'},
  ):
    path.write_text(json.dumps(record))
    with logdir_lock.Held(str(tmp_path)):
      pass
  gone.wait()


def testOfTwoThatTakeAFreeLeaseOneHasIt(quick_lease, monkeypatch):
  # Threads may stand still between what they read and what they write.
  monkeypatch.setattr(logdir_lock, 'SETTLE_SECONDS', 1.0)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 60.0)
  directory = 'ram://lease_race'
  barrier = threading.Barrier(4)
  outcomes = []

  def Take():
    barrier.wait()
    try:
      with logdir_lock.Held(directory):
        outcomes.append('held')
        barrier.wait()  # Until all others were refused.
    except logdir_lock.InUseError:
      outcomes.append('refused')
      barrier.wait()

  threads = [threading.Thread(target=Take) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(outcomes) == ['held'] + ['refused'] * 3


def testAReadThatFailsIsTriedAgainWithinTheLifetimeOfALease(quick_lease, monkeypatch):
  failed = tf.errors.UnavailableError(None, None, 'the network is down')
  monkeypatch.setattr(logdir_lock._Lease, '_Beat', lambda self: None)  # It reads, too.
  read = logdir_lock._ReadRecord
  outcomes = [failed, failed, None]

  def Read(path):
    if outcome := outcomes.pop(0):
      raise outcome
    return read(path)

  with logdir_lock.Held('ram://lease_read') as lock, monkeypatch.context() as patched:
    patched.setattr(logdir_lock, '_ReadRecord', Read)
    patched.setattr(logdir_lock, 'LIFETIME_SECONDS', 60.0)
    lock.Check()
    assert outcomes == []
    patched.setattr(logdir_lock, 'LIFETIME_SECONDS', 0.1)
    outcomes += [failed] * 10_000
    with pytest.raises(logdir_lock.LostError, match='the network is down'):
      lock.Check()


def testALeaseThatWasTakenIsNoticed(quick_lease, monkeypatch):
  monkeypatch.setattr(logdir_lock, 'BEAT_SECONDS', 600.0)  # Not between the lines of this test.
  directory = 'ram://lease_taken'
  path = f'{directory}/{logdir_lock.FILE_NAME}'
  with logdir_lock.Held(directory) as lock:
    files.WriteWhole(path, json.dumps({'host': 'other', 'pid': 7, 'since': 'then', 'token': 'y'}))
    with pytest.raises(logdir_lock.LostError, match='process 7 on other, since then has it'):
      lock.Check()
  assert tf.io.gfile.exists(path)  # The other's.
  tf.io.gfile.remove(path)
  with logdir_lock.Held(directory) as lock:
    tf.io.gfile.remove(path)
    with pytest.raises(logdir_lock.LostError, match='its lock file was removed'):
      lock.Check()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
