# SPDX-License-Identifier: Apache-2.0
"""Training on batches of several shapes: as on padded ones, exactly restarted, without warnings."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import cluster, inspection, model, nested_map, optimizer, programs, runner
from lingvo_gpipe.input import parallel_text
from tasks.lm import model as lm_model

_BOUNDS, _LIMITS = [4, 7], [5, 2]


class _TargetLm(lm_model.TransformerLm):
  """A language model of the target side, so that a task of this size has padding and two shapes."""

  def CheckBatch(self, input_batch):
    """Nothing to check."""

  def PipelineInputs(self, input_batch):
    return (input_batch.tgt_ids,)

  def LossInputs(self, input_batch):
    return nested_map.NestedMap(labels=input_batch.tgt_labels, weights=input_batch.tgt_weights)


def _Params(num_accumulated=1, dropout=0.0, xla=False, max_steps=6):
  task = _TargetLm.Params().Set(
    name='lm', vocab_size=12, model_dim=4, hidden_dim=8, num_heads=2, num_layers=1, random_seed=5,
    residual_dropout_prob=dropout, dtype=tf.float64,
  )  # fmt: skip
  task.stack.Set(num_stages=2, num_micro_batches=3, xla=xla)
  task.train.Set(max_steps=max_steps, save_interval_steps=0, save_interval_seconds=0.0)
  task.train.learner.Set(
    num_accumulated_mini_batches=num_accumulated,
    learning_rate=0.01,
    optimizer=optimizer.Adam.Params(),
  )
  data = parallel_text.ParallelText.Params().Set(
    name='Train', num_fake_examples=30, vocab_size=12, bucket_upper_bound=_BOUNDS,
    bucket_batch_limit=_LIMITS, sampling_temperature=2.0,
  )  # fmt: skip
  return model.SingleTaskModel.Params().Set(name='buckets', task=task, input=data)


def _Runner(p, specs):
  made = p.Instantiate()
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  run = runner.TaskRunner(made.task, devices, made.input.BatchSpec())
  run.ExpectBatches(specs)
  return run, made.input


def _Arrays(run):
  return {name: variable.numpy() for name, variable in run.Variables().items()}


def _Padded(batch, rows, length):
  """The batch in the largest of all shapes; what is added counts nothing."""

  def Pad(name, x):
    sizes = [rows, length][: x.shape.rank]
    value = 1 if name.endswith('paddings') else 0
    widths = [(0, size - dim) for size, dim in zip(sizes, x.shape, strict=True)]
    return tf.constant(np.pad(x, widths, constant_values=value))

  return batch.TransformWithKey(Pad)


@pytest.mark.parametrize('num_accumulated', [1, 2])
def testBucketsAreAsBatchesPaddedToTheLargestShape(num_accumulated, caplog):
  p = _Params(num_accumulated)
  run, data = _Runner(p, p.input.Instantiate().BatchSpecs())
  padded, _ = _Runner(p, [])
  seen = set()
  with caplog.at_level('WARNING'):
    for batch in data.Dataset().take(6):
      seen.add(tuple(batch.tgt_ids.shape))
      got = run.TrainStep(batch)
      expected = padded.TrainStep(_Padded(batch, max(_LIMITS), max(_BOUNDS)))
      assert (got is None) == (expected is None)
      if got is not None:
        for name, value in expected.items():
          assert got[name] == pytest.approx(value, rel=1e-6), name
  assert seen == set(zip(_LIMITS, _BOUNDS, strict=True))
  expected = _Arrays(padded)
  for name, value in _Arrays(run).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-7, atol=1e-9, err_msg=name)
  # The padded batches' micro-batches are of one shape, the others' of at most two a bucket.
  assert [r.getMessage() for r in caplog.records] == []
  losses = run.Evaluate(data.params.Copy().Set(shuffle=False, num_epochs=1).Instantiate().Dataset())
  assert losses['loss'][1] == sum(
    float(tf.reduce_sum(batch.tgt_weights))
    for batch in data.params.Copy().Set(num_epochs=1, sampling_temperature=1.0).Instantiate().Dataset()
  )


def testMasksOfAnUpdateDifferWhereBatchesAreOfDifferentNumbersOfMicroBatches():
  """A batch of 2 has 2 micro-batches: the next one's must not count on from 1 * 3, nor from 1 * 2."""
  p = _Params(2)
  run, data = _Runner(p, p.input.Instantiate().BatchSpecs())
  firsts = []
  accumulate = run._accumulate

  def Accumulate(batch, position):
    firsts.append((int(position), batch.tgt_ids.shape[0]))
    return accumulate(batch, position)

  Accumulate.get_concrete_function = accumulate.get_concrete_function
  run._accumulate = Accumulate
  for batch in data.Dataset().take(8):
    run.TrainStep(batch)
  for (first, rows), (second, _) in zip(firsts[::2], firsts[1::2], strict=True):
    assert first == 0 and second == min(rows, 3)
  assert {rows for _, rows in firsts[::2]} == {2, 5}


def _Program(p, logdir):
  return programs.TrainProgram(
    p, str(logdir), cluster.Cluster.Create(2, platform='cpu'), None, programs.StopRequest()
  )


def testRestartInTheMiddleIsExact(tmp_path, capsys, caplog):
  """Dropout, accumulation and Adam's slots included; 10 batches end within an epoch."""
  options = {'num_accumulated': 2, 'dropout': 0.2}
  whole = _Program(_Params(max_steps=5, **options), tmp_path / 'whole')
  with caplog.at_level('WARNING', logger='absl'):
    assert whole.Run() == 0
    assert _Program(_Params(max_steps=2, **options), tmp_path / 'parts').Run() == 0
    p = _Params(max_steps=5, **options)
    p.input.num_prefetch = 0
    parts = _Program(p, tmp_path / 'parts')
    assert parts.Run() == 0
  expected = _Arrays(whole._runner)
  for name, value in _Arrays(parts._runner).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)
  rows = [len(b.example_weights) for b in _Params().input.Instantiate().Dataset().take(10)]
  assert set(rows) == set(_LIMITS)
  out = capsys.readouterr().out
  assert 'the first step of each of 2 shapes compiles the stages' in out
  assert f'going on from step 2 ({sum(rows[:4])} examples consumed)' in out
  assert [r.getMessage() for r in caplog.records if 'shape' in r.getMessage()] == []
  found = programs.checkpointer.Checkpointer(str(tmp_path / 'parts' / 'train'))
  assert found.ReadMetadata(found.Latest())['examples_consumed'] == sum(rows)


def testPartitionIsOfTheLargestShape():
  text = inspection.PartitionText(_Params())
  assert 'for the largest of 2 shapes of batches: {' in text
  assert f'tgt_ids: int32[{_LIMITS[0]}, {_BOUNDS[0]}]' in text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
