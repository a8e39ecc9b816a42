# SPDX-License-Identifier: Apache-2.0
"""Replicas and stages of a model on fewer devices; worker_faults_test has whole runs."""

import sys

import pytest

from lingvo_gpipe.distributed import cluster_spec, worker_connection
from lingvo_gpipe.experiment import model
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.training import elastic
from tests import naming
from tests.toys import tasks, training


def _Params(**stack):
  p = model.SingleTaskModel.Params().Set(task=tasks.Stacked.Params().Set(name='toy'))
  p.task.stack = tasks.Stack(8, **{'num_stages': 4, 'num_micro_batches': 3, **stack})
  return p


@pytest.mark.parametrize(
  'num_replicas, num_devices, expected',
  [
    (1, 4, (1, 4, 3)),
    (1, 5, (1, 4, 3)),
    (1, 3, (1, 3, 3)),
    (1, 1, (1, 1, 3)),
    # Four replicas of three micro-batches: a mini-batch keeps its twelve micro-batches.
    (4, 15, (3, 4, 4)),
    (4, 11, (2, 4, 6)),
    (4, 7, (1, 4, 12)),
    (4, 2, (1, 2, 12)),
    # Fifteen cannot be shared evenly by four replicas.
    (5, 16, (3, 4, 5)),
  ],
)
def testReplicasAreReducedBeforeStages(num_replicas, num_devices, expected):
  before = _Params()
  text = before.ToText()
  shrunk, replicas = elastic.Shrink(before, num_replicas, num_devices)
  stack = shrunk.task.stack
  assert (replicas, stack.num_stages, stack.num_micro_batches) == expected
  assert before.ToText() == text


def testReplicasShareTheMicroBatchesEvenly():
  shrunk, replicas = elastic.Shrink(_Params(num_micro_batches=2), 5, 16)
  assert (replicas, shrunk.task.stack.num_micro_batches) == (2, 5)


def testADeviceKeepsItsNumberOfStages():
  p = _Params(num_stages=8, stages_per_device=2, schedule='looped_bfs')
  shrunk, replicas = elastic.Shrink(p, 1, 3)
  assert (replicas, shrunk.task.stack.num_stages) == (1, 6)


@pytest.mark.parametrize(
  'stack, num_devices, names',
  [
    ({}, 0, ('no device', 'platform')),
    ({'splits': [2, 4, 6, 8]}, 3, ('splits', 'devices')),
    ({'memory_limit': 10**9}, 3, ('memory_limit', 'devices')),
    ({'schedule': schedules.Get('gpipe', 4, 3)}, 3, ("'gpipe'", 'num_stages 4', 'num_stages 3')),
    (
      {'num_stages': 8, 'stages_per_device': 2, 'schedule': 'interleaved_1f1b',
       'num_micro_batches': 4}, 3, ("'interleaved_1f1b'", 'multiple of 3', 4),
    ),
  ],
)  # fmt: skip
def testAModelWithAFixedCutIsRefused(stack, num_devices, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    elastic.Shrink(_Params(**stack), 1, num_devices)


def testSplitsByHandStayInFewerReplicas():
  shrunk, replicas = elastic.Shrink(_Params(splits=[2, 4, 6, 8]), 2, 7)
  assert (replicas, shrunk.task.stack.splits) == (1, [2, 4, 6, 8])


def testATaskWithoutAStackIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('several tasks', 'stack')):
    elastic.Shrink(training.Params(), 2, 1)


# ---- waiting -------------------------------------------------------------------------------------


def _Await(monkeypatch, answers, min_workers, **stack):
  """Returns the result of Await if worker i answers its n-th request only if answers[i][n]."""
  asked = [iter(of_worker) for of_worker in answers]

  def Ask(address):
    index = int(address)
    is_there = next(asked[index])
    device = f'/job:worker/replica:0/task:{index}/device:CPU:0'.encode()
    return (device, None) if is_there else (b'', 'gone')

  monkeypatch.setattr(worker_connection, 'Ask', Ask)
  return elastic.Await(
    cluster_spec.ClusterSpec(tuple(map(str, range(len(answers))))),
    _Params(num_stages=len(answers), **stack),
    num_replicas=1,
    min_workers=min_workers,
    patience_seconds=0.1,
    timeout_seconds=1.0,
  )


def testContinuesWithFewerWorkersAfterWaitingForAll(monkeypatch, caplog):
  answers, params, replicas = _Await(monkeypatch, [[1] * 9, [0] * 9, [1] * 9], 2)
  assert (list(answers), params.task.stack.num_stages, replicas) == (['0', '2'], 2, 1)
  assert ': worker 1 at 1 (gone)' in caplog.text
  assert naming.AnyLineNames(caplog.text, '1 x 2 devices', '1 x 3')


def testTakesAllWorkersIfTheyAnswerInTime(monkeypatch, caplog):
  answers, params, _ = _Await(monkeypatch, [[1] * 9, [0, 1]], 1)
  assert len(answers) == params.task.stack.num_stages == 2
  assert not caplog.text


def testAWorkerThatDisappearsDoesNotCount(monkeypatch):
  answers, _, _ = _Await(monkeypatch, [[1, 0, 0, 0], [0, 1, 1, 1], [1] * 9], 2)
  assert sorted(answers) == ['1', '2']


def testFewerWorkersThanTheMinimumAreNotEnough(monkeypatch):
  with pytest.raises(
    TimeoutError, match=naming.Naming('2 of 3 workers', '1 s', 'worker 1', 'worker 2')
  ):
    _Await(monkeypatch, [[1] * 9, [0] * 9, [0] * 9], 2)


def testKeepsWaitingIfTheModelHasAFixedCut(monkeypatch, caplog):
  answers, params, _ = _Await(monkeypatch, [[1] * 9, [0, 0, 0, 1]], 1, splits=[4, 8])
  assert len(answers) == params.task.stack.num_stages == 2
  (message,) = [r.getMessage() for r in caplog.records]
  assert naming.Names(message, '1 of 2 workers', 'splits')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
