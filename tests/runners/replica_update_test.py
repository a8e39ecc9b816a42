# SPDX-License-Identifier: Apache-2.0
"""Training in replicas: weights equal the weights of one pipeline; the replicas of the slots."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import nested_map, text_table
from lingvo_gpipe.experiment import task
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.runners import train_runner
from tests import graph_reader, naming
from tests.toys import tasks

pytestmark = pytest.mark.optimized_graphs

_BATCH = 8
# Settings of task.train for the sum of the gradients.
_WAYS = [{'all_reduce': 'send'}, {'all_reduce': 'collective'}, {'shard_optimizer_slots': True}]


def _Batches(num, seed=0):
  rng = np.random.default_rng(seed)
  for _ in range(num):
    yield tasks.Batch(rng, _BATCH)


def _Runner(num_replicas, **train):
  """Makes a runner with 4 micro-batches over all replicas."""
  p = tasks.TiedNet.Params().Set(name='net', random_seed=3, dtype=tf.float64)
  p.Set(keep_prob=0.8, num_micro_batches=4 // num_replicas)
  p.train.Set(ema_decay=0.5)
  p.train.learner.Set(
    learning_rate=0.02, optimizer=optimizer.Adam.Params(), clip_gradient_norm_to_value=0.1
  )
  for name, value in train.items():
    p.Set(**{f'train.{name}': value})
  devices = [d.name for d in tf.config.list_logical_devices('CPU')][: 2 * num_replicas]
  spec = tasks.BatchSpec(_BATCH)
  return train_runner.TrainRunner(p.Instantiate(), devices, spec, num_replicas=num_replicas)


def _Values(run):
  return {name: v.numpy() for name, v in run.Variables().items()}


def _Train(run, num=3, seed=0):
  values = [run.TrainStep(batch) for batch in _Batches(num, seed)]
  return [v['loss'] for v in values if v is not None]


@functools.cache
def _OneReplica():
  run = _Runner(1)
  losses = _Train(run)
  return run, losses, _Values(run), run.Evaluate(_Batches(2, 1))


def _CheckClose(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-7, atol=1e-10, err_msg=name)


def _CheckReplicasAgree(run):
  first, *later_replicas = run.engine.replicas
  assert later_replicas
  for other in later_replicas:
    for path, v in first.variables.items():
      np.testing.assert_array_equal(other.variables[path], v, err_msg=path)


@pytest.fixture(scope='module', params=_WAYS)
def two_replicas(request, tmp_path_factory):
  """(runner after the steps of `_OneReplica`, its losses, the graphs of the first step).

  The last tests train the runner further, since each other runner would be traced again.
  """
  run, losses = _Runner(2, **request.param), []
  first, *later_batches = _Batches(3)
  graphs = graph_reader.ExecutedGraphs(
    lambda: losses.append(run.TrainStep(first)['loss']), tmp_path_factory.mktemp('graphs')
  )
  losses += [run.TrainStep(batch)['loss'] for batch in later_batches]
  return run, losses, graphs


def testTrainsAsOnePipeline(two_replicas, request):
  _, losses, values, evaluated = _OneReplica()
  run, actual, _ = two_replicas
  np.testing.assert_allclose(actual, losses, rtol=1e-9)
  _CheckClose(_Values(run), values)
  _CheckReplicasAgree(run)
  if request.node.callspec.params['two_replicas'] == {'all_reduce': 'collective'}:
    return  # It only sums gradients in another way, which evaluations do not.
  metrics = run.Evaluate(_Batches(2, 1))
  np.testing.assert_allclose(metrics['loss'], evaluated['loss'], rtol=1e-9)
  _CheckReplicasAgree(run)  # The averages replaced the weights for a while.


def testSumsOverlapTheRemainingBackward(two_replicas):
  """In the executed graph a stage's sum does not wait for backwards of earlier stages."""
  _, _, graphs = two_replicas
  before = graph_reader.ActionsBefore(graphs, r'gradient_sum_(\d+)')
  # The last backward of stage 1, on micro-batch 0, needs these, and no backward of stage 0.
  of_last = {'0F0', '0F1', '1F0', '1F1', '1B1', '1B0'}
  expected = {'1': of_last, '0': of_last | {'0B1', '0B0'}}
  assert before == {
    stage: {(r, action) for r in range(2) for action in actions}
    for stage, actions in expected.items()
  }


def testAnUpdateOfSeveralMiniBatchesAddsOnce():
  runs = [_Runner(r, **{'learner.num_accumulated_mini_batches': 2}) for r in (1, 2)]
  losses = [_Train(run, 4) for run in runs]
  assert len(losses[0]) == 2
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
  _CheckClose(_Values(runs[1]), _Values(runs[0]))


def testEachShardedSlotExistsOnce(caplog):
  """The slots of each weight are in one replica; all devices together hold no others."""
  caplog.set_level('INFO', logger='absl')
  bytes_by_device = {}
  for sharded in (False, True):
    run = _Runner(2, shard_optimizer_slots=sharded)
    of_slots = {}
    for each in _AllLearners(run):
      for v in each.Variables().values():
        if v.shape.rank:
          size = v.shape.num_elements() * v.dtype.size
          of_slots[v.device] = of_slots.get(v.device, 0) + size
    bytes_by_device[sharded] = of_slots
  whole, shards = bytes_by_device[False], bytes_by_device[True]
  assert len(whole) == len(shards) == 4  # Devices.
  assert sum(whole.values()) == 2 * sum(shards.values())
  assert max(shards.values()) < max(whole.values())
  messages = [r.getMessage() for r in caplog.records]
  (message,) = [message for message in messages if naming.Names(message, 'slots')]
  of_replicas = [
    sum(size for device, size in shards.items() if any(s.device in device for s in replica.stages))
    for replica in run.engine.replicas
  ]
  of_replicas[0] += 8  # The count of updates.
  texts = ', '.join(map(text_table.FormatBytes, of_replicas))
  assert naming.Names(message, '2 replicas', f'{texts}.')


def testTheOwnerOfAStagesLargestWeightIsPredicted():
  run = _Runner(2, shard_optimizer_slots=True)
  of_slots = {}
  for v in run.learner.Variables().values():
    of_slots[v.device] = of_slots.get(v.device, 0) + v.shape.num_elements() * v.dtype.size
  for replica in run.engine.replicas:
    for s, predicted in zip(replica.stages, run.cut.memory, strict=True):
      (slots,) = [n for device, n in of_slots.items() if device.endswith(s.device)]
      weights = sum(v.shape.num_elements() * 8 for v in tf.nest.flatten(s.variables))
      sums = [*s.accumulators, *s.mirror_accumulators]
      gradients = sum(a.shape.num_elements() * 8 for a in sums)
      averages = sum(v.shape.num_elements() * 8 for v in s.trained.values())
      assert weights + gradients + averages + slots <= predicted.state


def _AllLearners(run):
  return [run.learner, *run._replicas._others]


def testACheckpointFitsAnyNumberOfReplicas(two_replicas, tmp_path, request):
  """From one replica to two and back; also into a runner that has not trained."""
  single, double = _OneReplica()[0], two_replicas[0]
  way = request.node.callspec.params['two_replicas']
  for run, other, fresh in (
    (single, double, _Runner(2, **way)),
    (double, single, _Runner(1)),
  ):
    saved = checkpointer.Checkpointer(str(tmp_path / str(len(run.engine.replicas))))
    step = int(run.Variables()['global_step'])
    saved.Save(step, run.Variables(), {})
    expected = _Values(run)
    losses = _Train(run, 2, seed=5)
    # After these steps, which one of the runners has not made, all of their values differ.
    _Train(other, 1, seed=7)
    for target in (other, fresh):
      assert saved.RestoreLatest(target.Variables()) is not None
      target.AfterRestore()
      for name, value in _Values(target).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
      if target.engine.replicas[1:]:
        _CheckReplicasAgree(target)
    np.testing.assert_allclose(_Train(other, 2, seed=5), losses, rtol=1e-9)
    _CheckClose(_Values(other), _Values(run))
    if other is double:
      _CheckReplicasAgree(double)


def testAStepThatIsNotFiniteChangesNoReplica(two_replicas):
  run = two_replicas[0]
  num_skipped, before = run.NumSkippedSteps(), _Values(run)
  (batch,) = _Batches(1)
  bad = np.array(batch.x)
  bad[-1] = np.inf  # In the second replica's share.
  values = run.TrainStep(nested_map.NestedMap(batch, x=tf.constant(bad)))
  assert not values['is_finite']
  assert run.NumSkippedSteps() == num_skipped + 1
  after = _Values(run)
  del before['global_step'], after['global_step']
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)
  _CheckReplicasAgree(run)


def testReplicasNeedAPipeline():
  p = task.BaseTask.Params().Set(name='plain')
  spec = nested_map.NestedMap(x=tf.TensorSpec([2, 2]))
  with pytest.raises(ValueError, match=naming.Naming('BaseTask', '2 replicas', 'PipeliningLayer')):
    train_runner.TrainRunner(p.Instantiate(), ['/cpu:0', '/cpu:1'], spec, num_replicas=2)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
