# SPDX-License-Identifier: Apache-2.0
"""Training on batches of several shapes: equal to padded batches, exact restarts, no warnings."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.experiment import model
from lingvo_gpipe.input.text import parallel_text
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.runners import train_runner
from lingvo_gpipe.training import inspection, train_program
from tests import naming, processes
from tests.toys import next_token

_BOUNDS, _LIMITS = [5, 7], [5, 2]
_VOCAB = next_token.VOCABULARY


def _Params(num_accumulated=1, keep_prob=1.0, xla=False, max_steps=6, save_interval_steps=0):
  p = next_token.NextToken.Params().Set(
    name='net', random_seed=5, keep_prob=keep_prob, dtype=tf.float64
  )
  p.stack.Set(num_stages=2, num_micro_batches=3, xla=xla, splits=[2, 4])
  p.train.Set(max_steps=max_steps, save_interval_steps=save_interval_steps)
  p.train.save_interval_seconds = 0.0
  p.train.learner.Set(
    num_accumulated_mini_batches=num_accumulated,
    learning_rate=0.01,
    optimizer=optimizer.Adam.Params(),
  )
  data = parallel_text.ParallelText.Params().Set(
    name='Train', num_fake_examples=30, vocab_size=_VOCAB, bucket_upper_bound=_BOUNDS,
    bucket_batch_limit=_LIMITS, sampling_temperature=2.0,
  )  # fmt: skip
  return model.SingleTaskModel.Params().Set(name='buckets', task=p, input=data)


def _Runner(p, specs):
  instance = p.Instantiate()
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  run = train_runner.TrainRunner(instance.task, devices, instance.input.BatchSpec())
  run.ExpectBatches(specs)
  return run, instance.input


def _Arrays(run):
  return {name: variable.numpy() for name, variable in run.Variables().items()}


def _Padded(batch, rows, length):
  """Returns the batch padded to the largest shape, with rows and tokens of weight 0."""

  def Pad(name, x):
    sizes = [rows, length][: x.shape.rank]
    value = 1 if name.endswith('paddings') else 0
    widths = [(0, size - dim) for size, dim in zip(sizes, x.shape, strict=True)]
    return tf.constant(np.pad(x, widths, constant_values=value))

  return batch.TransformWithKey(Pad)


def testBucketedBatchesTrainLikePaddedOnes(caplog):
  p = _Params()
  run, data = _Runner(p, p.input.Instantiate().BatchSpecs())
  padded, _ = _Runner(p, [])
  seen = set()
  with caplog.at_level('WARNING'):
    for batch in data.Dataset().take(6):
      seen.add(tuple(batch.tgt_ids.shape))
      actual = run.TrainStep(batch)
      expected = padded.TrainStep(_Padded(batch, max(_LIMITS), max(_BOUNDS)))
      for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-6), name
  assert seen == set(zip(_LIMITS, _BOUNDS, strict=True))
  expected = _Arrays(padded)
  for name, value in _Arrays(run).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-7, atol=1e-9, err_msg=name)
  # Micro-batches of 2, 2 and 1 rows in one bucket and of 1 in the other: all three are expected.
  assert [r.getMessage() for r in caplog.records] == []

  once = data.params.Copy().Set(shuffle=False, num_epochs=1).Instantiate()
  values = run.Evaluate(once.Dataset())
  assert values['loss'][1] == sum(float(tf.reduce_sum(b.tgt_weights)) for b in once.Dataset())


def testBucketsUnderXla(caplog):
  """Each shape is compiled at its first batch, and gives the same values as without XLA."""
  runs = []
  for xla in (True, False):
    p = _Params(xla=xla, keep_prob=0.8)
    p.task.stack.num_micro_batches = 2
    p.input.bucket_batch_limit = [4, 2]
    runs.append(_Runner(p, p.input.Instantiate().BatchSpecs()))
  (run, data), (plain, _) = runs
  shapes = set()
  with caplog.at_level('WARNING'):
    for batch in data.Dataset().take(5):
      shapes.add(tuple(batch.tgt_ids.shape))
      expected = plain.TrainStep(batch)
      for name, value in run.TrainStep(batch).items():
        assert value == pytest.approx(expected[name], rel=1e-6), name
  assert shapes == {(4, 5), (2, 7)}
  assert [r.getMessage() for r in caplog.records] == []


def testMicroBatchesOfAnUpdateAreCountedInBatchesOfAnySize(monkeypatch):
  """No two of them may have the same random seeds."""
  p = _Params(num_accumulated=2)
  run, data = _Runner(p, p.input.Instantiate().BatchSpecs())
  firsts = []

  def Accumulate(batch, first):
    firsts.append((int(first), batch.tgt_ids.shape[0]))
    return {'loss': tf.constant([1.0, 1.0])}, tf.constant(1.0), {}

  monkeypatch.setattr(run, '_NoteShape', lambda *args: False)
  monkeypatch.setattr(run, '_accumulate', Accumulate)
  monkeypatch.setattr(run, '_update', lambda *args: {'loss_weight': 2.0})
  for batch in data.Dataset().take(24):
    run.TrainStep(batch)
  for (first, rows), (second, _) in zip(firsts[::2], firsts[1::2], strict=True):
    assert first == 0 and second == min(rows, 3)
  assert {rows for _, rows in firsts[::2]} == {2, 5}


def _Program(p, logdir):
  return train_program.TrainProgram(
    p, str(logdir), cluster.Cluster.Create(2, platform='cpu'), None, stop_request.StopRequest()
  )


def testRestartInTheMiddleIsExact(tmp_path, capsys, caplog):
  """With dropout, accumulation and Adam's slots; 10 batches end within an epoch."""
  p = _Params(num_accumulated=2, keep_prob=0.8, max_steps=5, save_interval_steps=2)
  whole = _Program(p, tmp_path / 'whole')
  with caplog.at_level('WARNING', logger='absl'):
    assert whole.Run() == 0
    p.input.num_prefetch = 0
    parts = _Program(p, processes.CopyAsKilled(tmp_path / 'whole', tmp_path / 'parts', 2))
    assert parts.Run() == 0
  expected = _Arrays(whole._runner)
  for name, value in _Arrays(parts._runner).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)
  rows = [len(b.example_weights) for b in _Params().input.Instantiate().Dataset().take(10)]
  assert set(rows) == set(_LIMITS)
  out = capsys.readouterr().out
  assert naming.Names(out, '2 shapes')
  assert naming.AnyLineNames(out, 'resuming', 'step 2', f'{sum(rows[:4])} examples')
  assert [message for message in caplog.messages if 'shape' in message] == []
  store = checkpointer.Checkpointer(str(tmp_path / 'parts' / 'train'))
  assert store.ReadMetadata(store.Latest())['examples_consumed'] == sum(rows)


def testThePartitionIsForTheLargestShape():
  text = inspection.PartitionText(_Params())
  assert naming.AnyLineNames(text, 'largest', '2 shapes')
  assert f'tgt_ids: int32[{_LIMITS[0]}, {_BOUNDS[0]}]' in text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
