# SPDX-License-Identifier: Apache-2.0
"""Two trainers never hold one directory; the lock of a killed trainer is free."""

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
from tests import naming


@pytest.fixture
def quick_lease(monkeypatch):
  monkeypatch.setattr(logdir_lock, 'BEAT_SECONDS', 0.02)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 0.3)
  monkeypatch.setattr(logdir_lock, 'SETTLE_SECONDS', 0.02)


def testASecondTrainerIsRefusedUntilTheFirstEnds(tmp_path):
  directory = str(tmp_path / 'run' / 'train')
  with logdir_lock.HoldLock(directory):
    for _ in range(2):
      with pytest.raises(logdir_lock.InUseError) as e, logdir_lock.HoldLock(directory):
        pass
    assert naming.Names(str(e.value), f"'{directory}'", f'process {os.getpid()}', '--logdir')
    assert re.search(r'since [\d-]+ [\d:]+ UTC\)', str(e.value))
  with logdir_lock.HoldLock(directory) as lock:
    lock.Check()


@pytest.mark.filterwarnings('ignore:This process .* is multi-threaded')
def testADirectoryTooDeepForPythonCannotBeWritten(tmp_path):
  with pytest.raises(OSError, match=naming.Naming(logdir_lock.FILE_NAME, 'recursion')):
    with logdir_lock.HoldLock(str(tmp_path) + '/x' * 2500):
      pass


def testAForkedProcessDoesNotKeepTheLock(tmp_path):
  to_child, to_parent = os.pipe(), os.pipe()
  with logdir_lock.HoldLock(str(tmp_path)):
    child = os.fork()
    if not child:
      os.write(to_parent[1], b'.')
      os.read(to_child[0], 1)
      os._exit(0)
    os.read(to_parent[0], 1)
  try:
    with logdir_lock.HoldLock(str(tmp_path)):
      pass
  finally:
    os.write(to_child[1], b'.')
    os.waitpid(child, 0)
    for file in (*to_child, *to_parent):
      os.close(file)


@pytest.mark.parametrize('change', ['removed', 'replaced', 'a file'])
def testCheckNoticesALostDirectory(tmp_path, change):
  directory = tmp_path / 'train'
  with logdir_lock.HoldLock(str(directory)) as lock:
    lock.Check()
    shutil.move(directory, tmp_path / 'moved')
    if change == 'replaced':
      shutil.copytree(tmp_path / 'moved', directory)
    elif change == 'a file':
      directory.write_text('')
    with pytest.raises(logdir_lock.LostError, match=naming.Naming(repr(str(directory)), 'nothing')):
      lock.Check()


def _WithoutLocks(monkeypatch):
  def Refuse(file, operation):
    raise OSError(95, 'Operation not supported')

  monkeypatch.setattr(logdir_lock.fcntl, 'flock', Refuse)


@pytest.mark.parametrize('place', ['ram://', 'no locks'])
def testALeaseIsHeldByOneTrainer(tmp_path, monkeypatch, quick_lease, place):
  _WithoutLocks(monkeypatch)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1000.0)  # The test must not wait for it.
  directory = str(tmp_path) if place == 'no locks' else f'ram://lease_test{tmp_path}'
  with logdir_lock.HoldLock(directory) as lock:
    for _ in range(2):
      with (
        pytest.raises(
          logdir_lock.InUseError, match=naming.Naming(f'process {os.getpid()}', directory)
        ),
        logdir_lock.HoldLock(directory),
      ):
        pass
    lock.Check()
  assert not tf.io.gfile.exists(f'{directory}/{logdir_lock.FILE_NAME}')
  with logdir_lock.HoldLock(directory):
    pass


@pytest.mark.parametrize('place', ['file', 'ram://', 'no locks'])
def testAWatchMeasuresHowLongADirectoryIsFree(tmp_path, monkeypatch, quick_lease, place):
  if place == 'no locks':
    _WithoutLocks(monkeypatch)
  clock = [100.0]
  directory = f'ram://watch_test{tmp_path}' if place == 'ram://' else str(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
    watch = logdir_lock.Watch(directory)
    clock[0] += 7.0
    assert watch.SecondsFree() == 7.0  # Nobody ever held it.
  with logdir_lock.HoldLock(directory) as lock:
    monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1e9)
    for _ in range(3):
      assert watch.SecondsFree() == 0.0
    lock.Check()
  with monkeypatch.context() as patched:
    patched.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
    clock[0] = watch._last_held + 1000.0
    assert watch.SecondsFree() == pytest.approx(1000.0)


def testALeaseOfAnotherMachineIsValidForItsLifetime(tmp_path, monkeypatch):
  _WithoutLocks(monkeypatch)
  clock = [100.0]
  monkeypatch.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
  record = {**logdir_lock._OwnRecord(), 'machine': 'another', 'beat': 3}
  (tmp_path / logdir_lock.FILE_NAME).write_text(json.dumps(record))
  watch = logdir_lock.Watch(str(tmp_path))
  for seconds, free in ((50.0, 0.0), (59.0, 0.0), (2.0, 61.0)):
    clock[0] += seconds
    assert watch.SecondsFree() == free
  (tmp_path / logdir_lock.FILE_NAME).write_text(json.dumps({**record, 'beat': 4}))
  assert watch.SecondsFree() == 0.0


def testAWatchDoesNotBlockATrainerThatStarts(tmp_path, monkeypatch):
  (tmp_path / logdir_lock.FILE_NAME).touch()
  file = os.open(tmp_path / logdir_lock.FILE_NAME, os.O_RDONLY)
  logdir_lock.fcntl.flock(file, logdir_lock.fcntl.LOCK_SH)
  monkeypatch.setattr(logdir_lock.time, 'sleep', lambda seconds: os.close(file))
  with logdir_lock.HoldLock(str(tmp_path)) as lock:
    lock.Check()


def testAStaleLeaseIsTakenOver(tmp_path, quick_lease, monkeypatch):
  path = tmp_path / logdir_lock.FILE_NAME
  _WithoutLocks(monkeypatch)
  gone = subprocess.Popen(
    [sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE
  )
  started = logdir_lock._StartTime(gone.pid)
  gone.stdin.close()
  os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
  own_record = {**logdir_lock._OwnRecord(), 'token': 'x', 'beat': 3}
  # A process on another machine may be alive, so the lease is watched.
  for record in ({**own_record, 'machine': 'another'}, {'unknown': 1}):
    path.write_text(json.dumps(record))
    with logdir_lock.HoldLock(str(tmp_path)) as lock:
      lock.Check()
  path.write_text('half a reco')
  with logdir_lock.HoldLock(str(tmp_path)):
    pass
  # A process of this machine is known to have ended at once, even if it is a zombie or another
  # process has its id now.
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 1e9)
  for record in (
    {**own_record, 'pid': gone.pid, 'started': started},
    {**own_record, 'pid': gone.pid},
    {**own_record, 'started': '1'},
  ):
    path.write_text(json.dumps(record))
    with logdir_lock.HoldLock(str(tmp_path)):
      pass
  gone.wait()


def testOneOfSeveralTrainersGetsAFreeLease(quick_lease, monkeypatch):
  # Threads may pause between reading and writing.
  monkeypatch.setattr(logdir_lock, 'SETTLE_SECONDS', 1.0)
  monkeypatch.setattr(logdir_lock, 'LIFETIME_SECONDS', 60.0)
  directory = 'ram://lease_race'
  barrier = threading.Barrier(4)
  outcomes = []

  def Take():
    barrier.wait()
    try:
      with logdir_lock.HoldLock(directory):
        outcomes.append('held')
        barrier.wait()  # Until all other threads were refused.
    except logdir_lock.InUseError:
      outcomes.append('refused')
      barrier.wait()

  threads = [threading.Thread(target=Take) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(outcomes) == ['held'] + ['refused'] * 3


def testCheckRetriesAFailedReadForTheLifetimeOfALease(quick_lease, monkeypatch):
  failed = tf.errors.UnavailableError(None, None, 'the network is down')
  monkeypatch.setattr(logdir_lock._Lease, '_Beat', lambda self: None)  # Beats read the file, too.
  read = logdir_lock._ReadRecord
  outcomes = [failed, failed, None]

  def Read(path):
    if outcome := outcomes.pop(0):
      raise outcome
    return read(path)

  with logdir_lock.HoldLock('ram://lease_read') as lock, monkeypatch.context() as patched:
    patched.setattr(logdir_lock, '_ReadRecord', Read)
    patched.setattr(logdir_lock, 'LIFETIME_SECONDS', 60.0)
    lock.Check()
    assert outcomes == []
    patched.setattr(logdir_lock, 'LIFETIME_SECONDS', 0.1)
    outcomes += [failed] * 10_000
    with pytest.raises(
      logdir_lock.LostError, match=naming.Naming('ram://lease_read', 'the network is down')
    ):
      lock.Check()


def testCheckNoticesATakenLease(quick_lease, monkeypatch):
  monkeypatch.setattr(logdir_lock, 'BEAT_SECONDS', 600.0)  # No beat during this test.
  directory = 'ram://lease_taken'
  path = f'{directory}/{logdir_lock.FILE_NAME}'
  with logdir_lock.HoldLock(directory) as lock:
    files.WriteWhole(path, json.dumps({'host': 'other', 'pid': 7, 'since': 'then', 'token': 'y'}))
    with pytest.raises(
      logdir_lock.LostError, match=naming.Naming(directory, 'process 7', 'other', 'then')
    ):
      lock.Check()
  assert tf.io.gfile.exists(path)  # The other trainer keeps its lease.
  tf.io.gfile.remove(path)
  with logdir_lock.HoldLock(directory) as lock:
    tf.io.gfile.remove(path)
    with pytest.raises(logdir_lock.LostError, match=naming.Naming(directory, 'lock file')):
      lock.Check()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
