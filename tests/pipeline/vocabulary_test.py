# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose vocabulary is shared out equal those with the softmax in the last stage."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map, text_table
from lingvo_gpipe.layers import embedding, linear
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules, shared_vocabulary
from lingvo_gpipe.pipeline.stages import shared_functions, vocabulary_slices
from lingvo_gpipe.runners import train_runner
from tasks.lm import model as lm_model
from tests import naming
from tests.toys import stacks, tokens

# No number of classes here divides by the number of devices. Micro-batches of one size need half of
# the traces: only the test with _UNEVEN examples has others.
_BATCH, _UNEVEN, _TIME, _DIM, _VOCAB, _NUM_LAYERS = 8, 7, 5, 4, 11, 3
_SIMPLE, _SHARED = embedding.SimpleFullSoftmax, embedding.SharedSoftmaxLayer
_TIES = [[f'layers[{_NUM_LAYERS + 1}].emb', 'layers[0].emb']]


def _Stack(head, **options):
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    *[layer] * _NUM_LAYERS,
    head.Copy().Set(input_dim=_DIM, num_classes=_VOCAB),
  ]
  return stacks.MakeStack(sub, **options)


@functools.cache
def _Batch(size=_BATCH):
  """The second of four micro-batches counts nothing: its mean is NaN."""
  return tokens.Batch(_VOCAB, size, _TIME, empty=slice(2, 4))


def _Loss(theta, outputs, side):
  total = tf.reduce_sum(side.weights)
  smoothed = embedding.XentLossFromLogits(outputs[0], side.labels, label_smoothing=0.1)
  other = embedding.XentLossFromLogits(outputs[0], (side.labels + 1) % _VOCAB)
  hits = embedding.Hits(outputs[0], side.labels)
  with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(smoothed > 0), [total])]):
    hits = tf.identity(hits)
  bias = tf.reduce_sum((theta[-1].b if 'b' in theta[-1] else theta[-1].linear.b) ** 2)
  return {
    'loss': (tf.reduce_sum((smoothed + other) * side.weights) / total + 0.1 * bias, total),
    'accuracy': (tf.reduce_sum(hits * side.weights) / total, total),
  }


def _Run(stack, is_trained=None, num_replicas=1, size=_BATCH):
  inputs, side = _Batch(size)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs(inputs),
    loss_fn=_Loss,
    weights=layer_costs.Weights(is_trained),
    num_replicas=num_replicas,
  )
  step, number = stacks.StepFunction(stack), tf.constant(stacks.STEP, tf.int64)
  step(inputs, side, number)  # The next run must start from cleared accumulators.
  sums = step(inputs, side, number)
  return {name: value.numpy() for name, value in sums.items()}, stacks.Gradients(stack)


@functools.cache
def _Expected(head, is_tied=False, size=_BATCH):
  """Returns the result of one stage and one micro-batch: sums do not depend on their number."""
  ties = _TIES if is_tied else []
  return _Run(_Stack(head.Params(), num_stages=1, num_micro_batches=1, ties=ties), size=size)


@pytest.mark.parametrize(
  'head, num_devices, num_replicas, size, options',
  [
    (_SHARED.Params(), 3, 1, _BATCH, {'schedule': 'zb_h1', 'ties': _TIES}),
    (
      _SIMPLE.Params().Set(chunk_size=4),
      *(2, 1, _BATCH),
      {'schedule': 'zb_v', 'remat_policy': 'layer', 'num_stages': 4, 'num_micro_batches': 2},
    ),
    # Replicas of two micro-batches are in vocabulary_shards_test.
    (
      _SHARED.Params(),
      *(2, 2, _UNEVEN),
      {'schedule': '1f1b_fused', 'ties': _TIES, 'remat_policy': 'none', 'num_micro_batches': 1},
    ),
    (_SIMPLE.Params(), 2, 1, _BATCH, {'schedule': '1f1b', 'xla': True, 'num_micro_batches': 2}),
  ],
)
def testLossAndGradientsEqual(head, num_devices, num_replicas, size, options, monkeypatch):
  chosen, original = set(), shared_functions.SharedFunctions.For

  def For(self, s, recompute, **mode):
    if isinstance(s, vocabulary_slices.Slice):
      chosen.add((s.number, recompute))
    return original(self, s, recompute, **mode)

  monkeypatch.setattr(shared_functions.SharedFunctions, 'For', For)
  options = {'num_stages': num_devices, 'num_micro_batches': 4, **options}
  options['stages_per_device'] = options['num_stages'] // num_devices
  stack = _Stack(head, vocabulary='shared', **options)
  actual = _Run(stack, num_replicas=num_replicas, size=size)
  stacks.CheckEqual(actual, _Expected(head.cls, 'ties' in options, size))
  slices = stack.engine.replicas[-1].slices
  assert sum(s.size for s in slices) == _VOCAB
  assert len({s.device for s in slices}) == num_devices
  assert stack.engine.ConnectedPaths() == set(actual[1])
  schedule = stack.engine.TrainingSchedule(options['num_micro_batches'])
  assert len(stack.engine.training_stages) == schedule.num_stages
  # Slices follow the policy of their own stages.
  if options.get('remat_policy') == 'none':
    assert chosen == {(n, rematerialisation.Recompute.NOTHING) for n in range(num_devices)}


# `gpipe` is among the cases of recomputation below.
@pytest.mark.parametrize(
  'trained, num_micro_batches', [('layers[1]', 1), ('layers[4].linear.b', 2)]
)
def testFrozenWeightsGetNoGradient(trained, num_micro_batches):
  """They are before, after or within the slices; one micro-batch is fewer than stages."""

  def IsTrained(path):
    return trained in path

  options = {'num_micro_batches': num_micro_batches, 'schedule': '1f1b'}
  stack = _Stack(_SIMPLE.Params(), num_stages=2, vocabulary='shared', **options)
  sums, gradients = _Run(stack, IsTrained)
  expected_sums, expected = _Expected(_SIMPLE)
  expected = {path: g for path, g in expected.items() if IsTrained(path)}
  assert expected
  stacks.CheckEqual((sums, gradients), (expected_sums, expected))


def testTrainingEqualsAndResumesWithoutSlices():
  """All variables have the names and values of a run that does not share the vocabulary."""

  def Runner(num_stages, vocabulary):
    p = lm_model.TransformerLm.Params().Set(
      name='lm', vocab_size=_VOCAB, model_dim=8, hidden_dim=8, num_heads=1, num_layers=1
    )
    # The plain model needs no micro-batches: sums do not depend on their number.
    p.stack.Set(num_stages=num_stages, num_micro_batches=num_stages, xla=False)
    p.stack.vocabulary = vocabulary
    # Slices have no slots: they copy their weights in each step.
    p.train.learner.Set(optimizer=optimizer.SGD.Params().Set(momentum=0.9), learning_rate=0.1)
    p.train.learner.clip_gradient_norm_to_value = 1.0
    spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
    return train_runner.TrainRunner(p.Instantiate(), stacks.Devices(), spec)

  (ids,), side = _Batch()
  batch = nested_map.NestedMap(
    ids=ids, labels=side.labels, weights=tf.cast(side.weights, tf.float32)
  )
  plain, shared = Runner(1, 'one'), Runner(2, 'shared')
  for _ in range(3):
    loss = shared.TrainStep(batch)['loss']
    assert loss == pytest.approx(plain.TrainStep(batch)['loss'], rel=1e-5)
  # Evaluation and decoding take the whole weights.
  assert shared.Evaluate([batch])['loss'] == pytest.approx(
    plain.Evaluate([batch])['loss'], rel=1e-5
  )
  prompts = ids[:2].numpy()
  np.testing.assert_array_equal(
    shared.task.Generate(prompts, 3, temperature=0.0),
    plain.task.Generate(prompts, 3, temperature=0.0),
  )
  variables = shared.Variables()
  assert {k: v.shape for k, v in variables.items()} == {
    k: v.shape for k, v in plain.Variables().items()
  }
  for name, variable in plain.Variables().items():
    variable.assign(variables[name])
  plain.AfterRestore()
  assert plain.TrainStep(batch)['loss'] == pytest.approx(shared.TrainStep(batch)['loss'], rel=1e-5)


def testTheCutShowsTheSlices():
  stack = _Stack(_SIMPLE.Params(), num_stages=2, num_micro_batches=4, vocabulary='shared')
  inputs = stacks.Specs(_Batch()[0])
  cut = stack.MakeCut(*inputs)
  text = cut.Table()
  assert sum(cut.vocabulary) == _VOCAB
  assert f'layers[4][0:{cut.vocabulary[0]}]' in text
  assert naming.AnyLineNames(text, '2 slices', 'vocabulary')
  bytes_of_device = text_table.FormatBytes(max(cut.device_bytes))
  assert naming.AnyLineNames(text, f'{bytes_of_device} on the fullest')
  assert naming.AnyLineNames(text, 'slices', 'copy', 'step', 'stage 1')
  assert sum(s.share for s in cut.stages) == pytest.approx(1)
  # The slices are copies with gradients; the slice beside the last stage has the softmax itself.
  plain = _Stack(_SIMPLE.Params(), num_stages=2, num_micro_batches=4)
  softmax, plain_cut = 8 * (_DIM + 1) * _VOCAB, plain.MakeCut(*inputs)
  state, plain_state = (sum(s.state for s in c.memory) for c in (cut, plain_cut))
  assert state - plain_state == 2 * softmax
  assert cut.memory[-1].state > 4 * softmax > cut.memory[-2].state
  assert sum(s.num_params for s in cut.stages) == plain.NumParams()


@pytest.mark.parametrize('schedule, stages_per_device', [('gpipe', 1), ('interleaved_1f1b', 2)])
def testAutoRecomputesTheLeastWithinTheLimit(schedule, stages_per_device):
  options = {
    **{'num_stages': 2 * stages_per_device, 'stages_per_device': stages_per_device},
    **{'num_micro_batches': 2, 'schedule': schedule, 'vocabulary': 'shared'},
  }
  if stages_per_device > 1:
    options['splits'] = [1, 2, 3, 5]
  inputs = stacks.Specs(_Batch()[0])

  def Cut(**more):
    return _Stack(_SIMPLE.Params(), **options, **more).MakeCut(*inputs)

  least, most = (max(Cut(remat_policy=p).device_bytes) for p in ('stage', 'none'))
  assert least < most
  limit = (least + most) // 2
  cut = Cut(remat_policy='auto', memory_limit=limit)
  assert max(cut.device_bytes) <= limit
  assert any(choice.again for choice in cut.choices)
  assert not any(choice.again for choice in Cut(remat_policy='auto', memory_limit=most).choices)
  if stages_per_device == 1:
    stack = _Stack(_SIMPLE.Params(), remat_policy='auto', memory_limit=limit, **options)
    stacks.CheckEqual(_Run(stack), _Expected(_SIMPLE))


def testSlicesBalanceMeasuredTimes(monkeypatch):
  def Measure(calls, *_, **__):
    return [(1.0, 2.0)] * (len(calls) - 1) + [(4.0, 8.0)]

  monkeypatch.setattr(layer_profile, 'Measure', Measure)
  options = {'num_stages': 2, 'num_micro_batches': 4, 'vocabulary': 'shared'}
  inputs = stacks.Specs(_Batch()[0])
  cut = _Stack(_SIMPLE.Params(), partition_by='time', **options).MakeCut(*inputs)
  assert cut.vocabulary != _Stack(_SIMPLE.Params(), **options).MakeCut(*inputs).vocabulary
  assert cut.balance > 0.95  # There are 11 classes.
  # Its splits make the same cut without a measurement.
  again = _Stack(_SIMPLE.Params(), splits=list(cut.splits), **options).MakeCut(*inputs)
  assert (again.ends, again.vocabulary) == (cut.ends, cut.vocabulary)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'options, names',
  [
    ({'memory_limit': 1000}, ['memory_limit 1000B']),
    ({'memory_limit': 1000, 'remat_policy': 'auto'}, ['memory_limit 1000B']),
    ({'splits': [4, 5]}, ['splits [4, 5]', 'stack.layers[4]']),
    ({'splits': [3, 5, 11]}, ['slices of [11]', 'share 11']),
    ({'splits': [3, 5, 8, 2]}, ['slices of [8, 2]', 'share 11']),
    ({'splits': [3, 5, 11, 0]}, ['slices of [11, 0]', 'share 11']),
    ({'num_stages': 5}, ['5 stages', '4 layers', 'stack.layers[4]']),
  ],
)
def testCutsThatAreRefused(options, names):
  options = {'num_stages': 2, **options}
  stack = _Stack(_SIMPLE.Params(), num_micro_batches=2, vocabulary='shared', **options)
  with pytest.raises(ValueError, match=naming.Naming('stack', *names)):
    stack.MakeCut(*stacks.Specs(_Batch()[0]))


def testOtherLastLayersAreRefused():
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  stack = stacks.MakeStack([layer] * 3, num_stages=2, num_micro_batches=2, vocabulary='shared')
  with pytest.raises(ValueError, match='ProjectionLayer'):
    stack.MakeCut(tf.TensorSpec([2, _DIM], tf.float64))


def testSchedulesWithSlicesAreRefused():
  schedule = shared_vocabulary.Share(schedules.Get('gpipe', 2, 2))
  with pytest.raises(ValueError, match='slices'):
    _Stack(_SIMPLE.Params(), num_stages=4, num_micro_batches=2, schedule=schedule)


def testFewerClassesThanDevicesAreRefused():
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  sub = [*[layer] * 3, _SIMPLE.Params().Set(input_dim=_DIM, num_classes=2)]
  stack = stacks.MakeStack(sub, num_stages=3, num_micro_batches=2, vocabulary='shared')
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[3]', '2 classes', '3 devices')):
    stack.MakeCut(tf.TensorSpec([2, _DIM], tf.float64))


def _OfWholeLogits(logits, labels):
  del labels
  return tf.nn.softmax(logits)


def _OfNoLogits(logits, labels):
  del logits
  return tf.cast(labels, tf.float64)


def _OfPredictedClasses(logits, labels):
  """A second request that depends on the answer to the first."""
  return embedding.XentLossFromLogits(logits, tf.cast(embedding.Hits(logits, labels), tf.int32))


def _OfInputs(logits, labels):
  """Its gradient does not go through the statistics of the slices alone."""
  xent = embedding.XentLossFromLogits(logits, labels)
  return xent + tf.reduce_sum(logits.inputs**2) if hasattr(logits, 'inputs') else xent


@pytest.mark.parametrize('loss', [_OfWholeLogits, _OfNoLogits, _OfPredictedClasses, _OfInputs])
def testLossesThatSlicesCannotServeAreRefused(loss):
  def Loss(theta, outputs, side):
    del theta
    return {'loss': (tf.reduce_sum(loss(outputs[0], side.labels)), 1.0)}

  stack = _Stack(_SIMPLE.Params(), num_stages=2, num_micro_batches=2, vocabulary='shared')
  inputs, side = _Batch()
  stack.Place(stacks.Devices(), *stacks.Specs(inputs), loss_fn=Loss)
  with pytest.raises(ValueError, match='vocabulary'):
    stacks.StepFunction(stack)(inputs, side, tf.constant(1, tf.int64))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
