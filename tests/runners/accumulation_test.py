# SPDX-License-Identifier: Apache-2.0
"""Updates from several mini-batches equal an update from one mini-batch of their joint size."""

import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import nested_map, params_text
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.runners import train_runner
from lingvo_gpipe.training import train_program
from tests import naming, processes
from tests.toys import stacks, tasks

_DIM, _BATCH, _M = tasks.DIM, 4, 2
_SGD = optimizer.SGD.Params()
_COUNT = 'net.stack.layers[1].num_updates'


def _Spec(batch_size):
  return nested_map.NestedMap(
    x=tf.TensorSpec([batch_size, _DIM], tf.float64),
    y=tf.TensorSpec([batch_size, _DIM], tf.float64),
    example_weights=tf.TensorSpec([batch_size], tf.float64),
  )


def _Runner(num, batch_size=_BATCH, middle='dropout', num_micro_batches=_M, **learner):
  p = tasks.TiedAroundNet.Params().Set(name='net', random_seed=4, dtype=tf.float64, middle=middle)
  p.num_micro_batches = num_micro_batches
  p.train.learner.Set(num_accumulated_mini_batches=num, learning_rate=0.1, **learner)
  return train_runner.TrainRunner(p.Instantiate(), stacks.Devices(), _Spec(batch_size))


def _Batches(num, seed=0):
  """Returns mini-batches of very different loss weights; the second has weight 0."""
  rng = np.random.default_rng(seed)
  batches = []
  for i in range(num):
    weights = rng.uniform(0.5, 2.0, [_BATCH]) * [1.0, 0.0, 7.0][i % 3]
    x, y = rng.normal(size=[2, _BATCH, _DIM])
    batches.append(nested_map.NestedMap(x=x, y=y, example_weights=weights).Transform(tf.constant))
  return batches


def _Joined(batches):
  return nested_map.NestedMap(
    {name: tf.concat([b[name] for b in batches], 0) for name in ('x', 'y', 'example_weights')}
  )


def _CheckSame(run, expected):
  for name, value in _Arrays(run).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def _Arrays(run):
  return {name: v.numpy() for name, v in run.Variables().items()}


@pytest.mark.parametrize('clip', [0.0, 0.01])
def testEqualsOneMiniBatchOfTheJointSize(clip):
  """With dropout masks, tied weights, slots and metrics."""
  settings = {'optimizer': optimizer.Adam.Params(), 'clip_gradient_norm_to_value': clip}
  parts = _Runner(3, num_micro_batches=_BATCH, **settings)
  whole = _Runner(1, 3 * _BATCH, num_micro_batches=3 * _BATCH, **settings)
  for seed in range(2):
    batches, before = _Batches(3, seed), _Arrays(parts)
    assert parts.TrainStep(batches[0]) is None
    assert parts.TrainStep(batches[1]) is None
    for name, value in _Arrays(parts).items():
      np.testing.assert_array_equal(value, before[name])
    actual, expected = parts.TrainStep(batches[2]), whole.TrainStep(_Joined(batches))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
      assert actual[name] == pytest.approx(value, rel=1e-6), name
  expected = _Arrays(whole)
  for name, value in _Arrays(parts).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-7, atol=1e-9, err_msg=name)
  assert int(parts.global_step) == 2
  # One trace for any number of mini-batches; a single mini-batch is a single function.
  for run, counts in ((parts, [1, 0]), (whole, [0, 1])):
    traced = [f.experimental_get_tracing_count() for f in (run._accumulate, run._train_step)]
    assert traced == counts


def testAuxiliaryLossesOfSeveralMiniBatchesAreSummed():
  """The update equals one of the total objective of the layers without a pipeline."""
  run, batches = _Runner(3, middle='losses', num_micro_batches=_BATCH, optimizer=_SGD), _Batches(3)
  p, variables = run.task.stack.params, run.Variables()
  plain, _ = stacks.PlainLayers(p.sub, p.ties)
  for path, variable in plain.VariablesByPath().items():
    if f'net.{path}' in variables:  # All but the tied weight.
      variables[f'net.{path}'].assign(variable)
  run.AfterRestore()
  before, joined = _Arrays(run), _Joined(batches)

  def Loss(theta, outputs, side):
    return run.task.ComputeLoss(theta, outputs[0], side.batch)[0]

  side = nested_map.NestedMap(batch=joined, weights=joined.example_weights)
  sums, grads = stacks.Reference(p.sub, 3 * _BATCH, (joined.x,), side, Loss, ties=p.ties)
  values = [run.TrainStep(batch) for batch in batches][-1]
  for path, gradient in grads.items():
    expected = before[f'net.{path}'] - 0.1 * gradient / np.sum(joined.example_weights)
    np.testing.assert_allclose(variables[f'net.{path}'], expected, rtol=1e-7, atol=1e-9)
  for name in ('outputs', 'weights'):
    total, weight = sums[f'stack.layers[1].{name}']
    assert values[f'net.stack.layers[1].{name}'] == pytest.approx(total / weight, rel=1e-6)


def testOneBadMiniBatchSkipsTheUpdate():
  run, batches = _Runner(2), _Batches(3)
  before = _Arrays(run)
  bad = batches[0].copy()
  bad.x = bad.x * np.nan
  assert run.TrainStep(bad) is None
  assert run.TrainStep(batches[2])['is_finite'] == 0.0
  assert 'micro-batch 0' in run.WhyNotFinite(bad, batches[2])
  assert f'micro-batch {_M}' in run.WhyNotFinite(batches[2], bad)
  for path, value in _Arrays(run).items():
    if path != 'global_step':
      np.testing.assert_array_equal(value, before[path])
  run.TrainStep(batches[0])
  assert run.TrainStep(batches[2])['is_finite'] == 1.0


@pytest.mark.parametrize('num', [1, 3])
def testASkippedUpdateMovesNoStatistics(num):
  """The sums are finite; only the loss of the last mini-batch is not."""
  run, batches = _Runner(num, middle='norm'), _Batches(3)[-num:]
  for batch in batches:
    run.TrainStep(batch)
  before = _Arrays(run)
  assert before[_COUNT] == num
  bad = batches[-1].copy()
  bad.y = bad.y * np.nan
  for batch in (*batches[:-1], bad):
    values = run.TrainStep(batch)
  assert values['is_finite'] == 0.0
  _CheckSame(run, {**before, 'global_step': 2})
  for batch in batches:
    run.TrainStep(batch)
  assert run.Variables()[_COUNT].numpy() == 2 * num


def testStatisticsMoveWithTheWeights():
  """They do not move earlier, nor would they in a checkpoint between two updates."""
  run, batches = _Runner(3, middle='norm'), _Batches(3)
  before = _Arrays(run)
  run.TrainStep(batches[0])
  run.TrainStep(batches[2])
  _CheckSame(run, before)


def testAnErrorRestartsTheUpdate(monkeypatch):
  run, batches = _Runner(2, middle='norm'), _Batches(3)
  before, accumulate = _Arrays(run), run._accumulate

  def Fail(*args):
    accumulate(*args)
    raise RuntimeError('device lost')

  Fail.get_concrete_function = accumulate.get_concrete_function

  def Update():
    assert run.TrainStep(batches[0]) is None
    run.TrainStep(batches[2])
    return _Arrays(run)

  expected = Update()
  for name, variable in run.Variables().items():
    variable.assign(before[name])
  run.AfterRestore()
  run.TrainStep(batches[2])
  monkeypatch.setattr(run, '_accumulate', Fail)
  with pytest.raises(RuntimeError):
    run.TrainStep(batches[2])
  monkeypatch.setattr(run, '_accumulate', accumulate)
  for name, value in Update().items():
    np.testing.assert_array_equal(value, expected[name])


def testBatchNormAndARestart(tmp_path):
  """Moving averages follow each mini-batch; resuming from a checkpoint is exact."""
  batches = _Batches(6)
  straight, store = _Runner(2, middle='norm'), checkpointer.Checkpointer(str(tmp_path))
  for i, batch in enumerate(batches):
    straight.TrainStep(batch)
    if i == 3:
      store.Save(2, straight.Variables(), {})
  assert straight.Variables()[_COUNT].numpy() == 6
  second = _Runner(2, middle='norm')
  second.TrainStep(batches[5])  # Half an update before the restart: it must not count.
  store.RestoreLatest(second.Variables())
  second.AfterRestore()
  for batch in batches[4:]:
    second.TrainStep(batch)
  expected = _Arrays(straight)
  for name, value in _Arrays(second).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def testTooManyMicroBatchesAreRefused():
  with pytest.raises(
    ValueError, match=naming.Naming('600000 mini-batches', '2 micro-batches', 1048576)
  ):
    _Runner(600_000)


def testTheProgramCountsTheDataOfWholeUpdates(tmp_path, capsys):
  """8 batches of 4 in updates of 3: two updates, of which the checkpoint knows 24 examples."""
  params = registry.GetParams(processes.MODEL, 'Train')
  more = 'input.num_epochs:1;input.max_bytes:500;task.train.learner.num_accumulated_mini_batches:3'
  more += ';task.stack.num_micro_batches:1'
  params.ApplyOverrides(params_text.ParseOverrides(f'{processes.TINY};{more}'))
  params.task.train.eval_datasets = []
  params.task.train.learner.optimizer = _SGD
  program = train_program.TrainProgram(
    params,
    str(tmp_path),
    cluster.Cluster.Create(2, platform='cpu'),
    lambda name: params.input,
    stop_request.StopRequest(),
  )
  assert program.Run() == 0
  out = capsys.readouterr().out
  assert re.search(r'3 mini-batches\b.* first 2 .*\nstopped .*\bdata\b.* step 2\b', out)
  assert processes.Steps(tmp_path) == [2]
  metadata = checkpointer.Checkpointer(str(tmp_path / 'train')).Latest().metadata
  assert metadata['examples_consumed'] == 24
  assert metadata['num_accumulated_mini_batches'] == 3


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
