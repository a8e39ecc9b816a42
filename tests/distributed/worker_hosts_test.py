# SPDX-License-Identifier: Apache-2.0
"""Hosts of values and calls on hosts, tested on this process as if it were a worker.

worker_test.py tests real workers.
"""

import os
import pathlib
import re
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer, tensor_bundle
from lingvo_gpipe.distributed import worker_hosts
from tests import naming

_OWN = '/job:localhost/replica:0/task:0/device:CPU:0'


def _Worker(task, device='CPU:0'):
  return f'/job:worker/replica:0/task:{task}/device:{device}'


def testListHostsKeepsTheOrderOfDevices():
  devices = [_Worker(10, 'GPU:1'), _Worker(10, 'GPU:0'), _Worker(9), _Worker(10), _OWN]
  assert worker_hosts.ListHosts(devices) == [_Worker(10), _Worker(9)]
  assert worker_hosts.ListHosts([_OWN]) == []


def testSplitGroupsValuesByHost():
  with tf.device('/device:CPU:2'):
    values = {'b': tf.Variable(1.0), 'a': tf.constant(2.0), 'array': np.ones(3)}
  assert worker_hosts.Split(values, []) == {worker_hosts.HERE: ['b', 'a', 'array']}
  assert worker_hosts.Split(values, [_Worker(0)]) == {worker_hosts.HERE: ['b', 'a', 'array']}
  placed = worker_hosts.Split(values, [_Worker(0), _OWN])
  assert placed == {worker_hosts.HERE: ['array'], _OWN: ['b', 'a']}
  assert worker_hosts.Split({}, [_OWN]) == {}


def testRotateGivesEachWorkerTheNamesOfAnother():
  local, a, b, c = worker_hosts.HERE, *map(_Worker, range(3))
  assert worker_hosts.Rotate({local: ['s']}) == {local: ['s']}
  assert worker_hosts.Rotate({local: ['s'], a: ['x']}) == {local: ['s'], a: ['x']}
  placed = worker_hosts.Rotate({local: ['s'], a: ['x'], b: ['y', 'z'], c: ['w']})
  assert placed == {local: ['s'], b: ['x'], c: ['y', 'z'], a: ['w']}


def testForEachRunsConcurrentlyAndRaisesTheFirstError():
  worker_hosts.ForEach(None, [])
  both, ended = threading.Barrier(2), []

  def Function(host):
    both.wait(60)
    if host == 'a':
      raise ValueError('of a')
    ended.append(host)

  with pytest.raises(ValueError, match='of a'):
    worker_hosts.ForEach(Function, ['a', 'b'])
  assert ended == ['b']


def _Elsewhere(source, target):
  path = tf.strings.join([target, '.elsewhere'])
  return worker_hosts.ReturnAfter(tf.io.write_file(path, tf.io.read_file(source)), target)


def _Other(source, target):
  return worker_hosts.ReturnAfter(tf.io.write_file(target, 'other'), target)


@pytest.mark.parametrize(
  'function, message',
  [
    (_Elsewhere, r'\bworker 0\b.*/answer-0\b.* No such file'),
    (_Other, r"\bworker 0\b.* 'other' .*'[0-9a-f]{32}'.*/answer-0$"),
  ],
)
def testADirectoryIsSharedIfBothSidesSeeTheOthersFiles(tmp_path, monkeypatch, function, message):
  assert worker_hosts.WhyNotShared(str(tmp_path), [_OWN]) is None
  monkeypatch.setattr(worker_hosts, '_Copy', function)
  assert re.search(message, worker_hosts.WhyNotShared(str(tmp_path), [_OWN]))
  assert os.listdir(tmp_path) == []
  missing = str(tmp_path / 'none')
  assert naming.Names(worker_hosts.WhyNotShared(missing, [_OWN]), missing, 'tested')


def testTheNextSaveRemovesLeftoversOfAKilledTestOfSharing(tmp_path, monkeypatch):
  monkeypatch.setattr(tf.io.gfile, 'rmtree', lambda path: None)
  assert worker_hosts.WhyNotShared(str(tmp_path), [_OWN]) is None
  monkeypatch.undo()
  assert len(os.listdir(tmp_path)) == 1
  checkpointer.Checkpointer(tmp_path).Save(3, {'v': tf.Variable(1.0)}, {})
  assert len(os.listdir(tmp_path)) == 2  # The commit file and its folder.


def _Variables(value):
  with tf.device('/device:CPU:1'):
    return {name: tf.Variable(tf.fill([4, 5], value)) for name in ('a', 'b', 'c')}


def testAWorkerWritesAndReadsItsOwnTensors(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(tensor_bundle, 'GROUP_BYTES', 160)  # The size of two variables.
  calls = []
  call = worker_hosts.Call
  monkeypatch.setattr(
    worker_hosts, 'Call', lambda *args: calls.append((args[0], args[1].__name__)) or call(*args)
  )
  saver = checkpointer.Checkpointer(tmp_path)
  saver.workers = [_OWN]
  for step in (1, 2):
    array = np.array(['x', 'yz'])
    saver.Save(step, {'here': array, **_Variables(float(step))}, {})
  local = worker_hosts.HERE
  of_save = [
    *[(_OWN, '_Save')] * 2,
    (local, '_Save'),
    *[(_OWN, '_Restore')] * 2,
    (local, '_Restore'),
  ]
  assert sorted(calls) == sorted(of_save * 2)
  assert len(list(pathlib.Path(saver.Latest().prefix).parent.glob('*.data-*'))) == 3

  def Restored():
    fresh = _Variables(0.0)
    fresh['here'] = tf.Variable(['', ''])
    info, _ = saver.RestoreLatest(fresh)
    assert fresh.pop('here').numpy().tolist() == [b'x', b'yz']
    (value,) = {float(x) for v in fresh.values() for x in v.numpy().ravel()}
    return info.step, value

  assert Restored() == (2, 2.0)
  assert not caplog.records
  # This process reads the tensors that the worker cannot read.
  restore = tensor_bundle._Restore

  def Fail(prefix, names, dtypes):
    return restore(prefix if tf.executing_eagerly() else '/none', names, dtypes)

  with monkeypatch.context() as m:
    m.setattr(tensor_bundle, '_Restore', Fail)
    assert Restored() == (2, 2.0)
    assert naming.AnyLineNames(caplog.text, _OWN, saver.Latest().prefix)
    assert '/none' in caplog.text and 'Graph execution error' not in caplog.text
  # A checkpoint that neither can read is damaged.
  path = pathlib.Path(f'{saver.Latest().prefix}.data-00001-of-00003')
  data = bytearray(path.read_bytes())
  data[7] ^= 4
  path.write_bytes(data)
  assert Restored() == (1, 1.0)
  assert naming.AnyLineNames(caplog.text, 'damaged', 'ckpt-00000002')


def testTheFirstCallOfAFunctionRunsAlone():
  gate, inside, most = worker_hosts._Gate(), [], {}

  def Enter(name):
    with gate.Enter(name):
      inside.append(name)
      most[name] = max(most.get(name, 0), len(inside))
      time.sleep(0.05)
      inside.remove(name)

  def EnterAtOnce(names):
    with futures.ThreadPoolExecutor(len(names)) as pool:
      list(pool.map(Enter, names))

  EnterAtOnce(['a', 'b', 'c'])
  assert most == {'a': 1, 'b': 1, 'c': 1}
  EnterAtOnce(['a', 'a', 'b', 'd'])
  assert most['a'] > 1
  assert most['d'] == 1
  with pytest.raises(ValueError), gate.Enter('e'):
    raise ValueError
  EnterAtOnce(['a', 'e'])  # The failed call has left the gate.


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
