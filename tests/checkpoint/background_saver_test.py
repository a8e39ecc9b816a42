# SPDX-License-Identifier: Apache-2.0
"""Saves in the background hold the values of their step, and every failure is reported."""

import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import background_saver, checkpointer, logdir_lock, tensor_bundle
from lingvo_gpipe.core import heartbeat
from tests import naming


class _Gate:
  """Blocks each write until `go` is set."""

  def __init__(self, monkeypatch):
    self.began, self.go = threading.Event(), threading.Event()
    write = tensor_bundle.Write

    def Write(*args):
      self.began.set()
      assert self.go.wait(60)
      return write(*args)

    monkeypatch.setattr(tensor_bundle, 'Write', Write)


def _Saver(directory, **kwargs):
  return background_saver.BackgroundSaver(checkpointer.Checkpointer(directory), **kwargs)


def _Saved(directory):
  """Returns (step, value of v) of the last checkpoint."""
  v = tf.Variable(0.0)
  restored = checkpointer.Checkpointer(directory).RestoreLatest({'v': v})
  return restored and (restored[0].step, float(v))


def testASaveHoldsTheValuesOfItsStep(tmp_path, monkeypatch):
  gate = _Gate(monkeypatch)
  values = {
    'f32': tf.random.stateless_normal([50, 40], [1, 2]),
    'half': tf.cast(tf.random.stateless_normal([7], [3, 4]), tf.bfloat16),
    'step': tf.constant(2**60, tf.int64),
    'flags': tf.constant([True, False]),
    'text': tf.constant([b'a\x00', b'']),
  }
  variables = {}
  for i, (name, value) in enumerate(values.items()):
    with tf.device(f'/device:CPU:{i % 4}'):
      variables[name] = tf.Variable(value)
  array, metadata = np.arange(3.0), {'n': [1]}
  saver = _Saver(tmp_path)
  saver.Save(7, {**variables, 'array': array}, metadata)
  assert gate.began.wait(60)
  # Changes the variable in place, as a training step does.
  tf.function(lambda: variables['f32'].assign_add(tf.ones([50, 40])))()
  for name in ('half', 'step', 'flags', 'text'):
    variables[name].assign(tf.zeros_like(values[name]))
  array[:] = -1.0
  metadata['n'].append(2)
  saver.Check()  # Does not wait.
  assert checkpointer.Checkpointer(tmp_path).All() == []
  gate.go.set()
  saver.Wait()
  (info,) = checkpointer.Checkpointer(tmp_path).All()
  assert info.step == 7 and info.metadata == {'n': [1]}
  saved = tf.train.load_checkpoint(info.prefix)
  for name, value in {**values, 'array': np.arange(3.0)}.items():
    actual, expected = saved.get_tensor(name), np.asarray(value)
    assert actual.dtype == expected.dtype and actual.tolist() == expected.tolist(), name
  assert saver.num_saves == 1 and 0 < saver.blocked_seconds and 0 < saver.write_seconds
  assert naming.Names(saver.Report(), '1 checkpoint', 'paused')


def testASaveWaitsForThePreviousSave(tmp_path, monkeypatch):
  gate = _Gate(monkeypatch)
  saver, v = _Saver(tmp_path), tf.Variable(1.0)
  saver.Save(1, {'v': v}, {})
  threading.Timer(0.1, gate.go.set).start()
  v.assign(2.0)
  saver.Save(2, {'v': v}, {})
  assert [info.step for info in checkpointer.Checkpointer(tmp_path).All()][:1] == [1]
  saver.Close()
  assert _Saved(tmp_path) == (2, 2.0) and saver.num_saves == 2
  assert saver.Report().startswith('2 checkpoints: ')


@pytest.mark.parametrize('call', ['Check', 'Save', 'Wait', 'Close'])
def testAnErrorInTheBackgroundIsRaisedAtTheNextCall(tmp_path, monkeypatch, caplog, call):
  saver, v = _Saver(tmp_path), tf.Variable(1.0)
  saver.Save(1, {'v': v}, {})
  saver.Wait()
  write = tensor_bundle.Write

  def Fail(*unused_args):
    raise tf.errors.ResourceExhaustedError(None, None, 'No space left on device')

  monkeypatch.setattr(tensor_bundle, 'Write', Fail)
  saver.Save(2, {'v': v}, {})
  saver._thread.join()
  monkeypatch.setattr(tensor_bundle, 'Write', write)
  names = 'step 2', tmp_path, 'No space left on device'
  if call == 'Close':
    saver.Close()
    assert naming.Names(caplog.text, *names)
  else:
    with pytest.raises(OSError, match=naming.Naming(*names)):
      {'Check': saver.Check, 'Wait': saver.Wait}.get(call, lambda: saver.Save(3, {'v': v}, {}))()
  assert _Saved(tmp_path) == (1, 1.0) and saver.num_saves == 1
  # The error is raised once; the next save succeeds.
  v.assign(4.0)
  saver.Save(4, {'v': v}, {})
  saver.Wait()
  assert _Saved(tmp_path) == (4, 4.0)


@pytest.mark.parametrize('in_background', [True, False])
def testALostDirectoryIsNotWritten(tmp_path, in_background):
  directory = tmp_path / 'train'
  with logdir_lock.HoldLock(str(directory)) as lock:
    saver = _Saver(directory, in_background=in_background, lock=lock)
    saver.Save(1, {'v': tf.Variable(1.0)}, {})
    saver.Wait()
    directory.rename(tmp_path / 'moved')
    with pytest.raises(
      logdir_lock.LostError, match=naming.Naming(f"'{directory}'", 'trainer.lock')
    ):
      saver.Save(2, {'v': tf.Variable(2.0)}, {})
    assert not directory.exists()
  assert _Saved(tmp_path / 'moved') == (1, 1.0)


@pytest.mark.parametrize('in_background', [True, False])
def testADirectoryLostDuringWritingGetsNoCommit(tmp_path, in_background):
  class Lock:
    num_checks = 0

    def Check(self):
      self.num_checks += 1
      if self.num_checks == 4:
        raise logdir_lock.LostError('it is lost')

  saver = _Saver(tmp_path, in_background=in_background, lock=Lock())
  saver.Save(1, {'v': tf.Variable(1.0)}, {})
  saver.Wait()
  before = sorted(tmp_path.rglob('*'))
  with pytest.raises(logdir_lock.LostError, match='^it is lost$'):
    saver.Save(2, {'v': tf.Variable(2.0)}, {})
    saver.Wait()
  after = [path for path in sorted(tmp_path.rglob('*')) if '.json.tmp-' not in path.name]
  assert after == before and _Saved(tmp_path) == (1, 1.0)


def testWithoutAThreadSaveReturnsAfterTheCommit(tmp_path, monkeypatch):
  monkeypatch.setattr(background_saver, '_CopyValues', None)
  saver = _Saver(tmp_path, in_background=False)
  saver.Save(1, {'v': tf.Variable(1.0)}, {})
  assert _Saved(tmp_path) == (1, 1.0)
  assert naming.Names(saver.Report(), '0.00 s of writing')
  monkeypatch.setattr(tensor_bundle, 'Write', lambda *args: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    saver.Save(2, {'v': tf.Variable(1.0)}, {})


@pytest.mark.parametrize('in_background', [True, False])
def testWritingSendsHeartbeatsAtItsBeginAndEnd(tmp_path, monkeypatch, in_background):
  sent = []
  monkeypatch.setattr(heartbeat, '_Send', sent.append)
  saver = _Saver(tmp_path, in_background=in_background)

  def Signs():
    signs = [sign for sign in sent if sign.lower() == heartbeat.WRITE]
    sent.clear()
    return signs

  saver.Save(1, {'v': tf.Variable(1.0)}, {})
  saver.Wait()
  assert not Signs()  # No sign: no worker can hang.
  saver._saver.workers = ['/job:worker/replica:0/task:0/device:CPU:0']
  saver.Save(2, {'v': tf.Variable(1.0)}, {})
  saver.Wait()
  assert Signs() == [b'W', b'w']
  monkeypatch.setattr(tensor_bundle, 'Write', lambda *args: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    saver.Save(3, {'v': tf.Variable(1.0)}, {})
    saver.Wait()
  assert Signs() == [b'W', b'w']


@pytest.mark.parametrize('in_background', [True, False])
def testTheCheckOfWeightsHasTheTimeLimitOfACopy(tmp_path, monkeypatch, in_background):
  """A worker may hang in it: after an outage of the network a call there was never answered."""
  sent = []
  monkeypatch.setattr(heartbeat, '_Send', sent.append)
  find_non_finite = background_saver._FindNonFinite

  def Find(weights):
    sent.append('check')
    return find_non_finite(weights)

  monkeypatch.setattr(background_saver, '_FindNonFinite', Find)
  saver = _Saver(tmp_path, in_background=in_background)
  for value, following in ((1.0, b'c'), (np.nan, heartbeat.LONG)):
    sent.clear()
    saver.Save(1, {'v': tf.Variable(value)}, {}, trained=['v'])
    at = sent.index('check')
    assert sent[at - 1 : at + 2] == [b'C', 'check', following]
    saver.Wait()


def testTooLittleMemoryForTheCopyIsAnError(tmp_path, monkeypatch):
  def Fail(value):
    raise MemoryError()

  monkeypatch.setattr(background_saver, '_Copy', Fail)
  saver = _Saver(tmp_path)
  with pytest.raises(OSError, match=naming.Naming('step 3', 'host memory', 'train.save_async')):
    saver.Save(3, {'v': tf.Variable(1.0)}, {})
  assert saver.Report() is None


@pytest.mark.parametrize('in_background', [False, True])
def testNonFiniteTrainedWeightsAreNotSaved(tmp_path, caplog, in_background):
  saver = _Saver(tmp_path, in_background=in_background)
  weight = tf.Variable([1.0, 2.0], dtype=tf.bfloat16)
  extra = {'mask': tf.Variable(-np.inf), 'array': np.array(np.nan)}
  assert saver.Save(1, {'w': weight, **extra}, {}, trained=['w'])
  for step, bad in ((2, np.nan), (3, np.inf)):
    weight.assign([1.0, bad])
    assert not saver.Save(step, {'w': weight, **extra}, {}, trained=['w'])
    assert naming.Names(caplog.text, f'step {step}', 'w', 'finite')
  weight.assign([1.0, 2.0])
  assert saver.Save(4, {'w': weight, **extra}, {}, trained=['w'])
  saver.Wait()
  assert [info.step for info in checkpointer.Checkpointer(tmp_path).All()] == [1, 4]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
