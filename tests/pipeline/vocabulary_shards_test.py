# SPDX-License-Identifier: Apache-2.0
"""Softmax and embedding of several shards that are shared out: no device has all their weights."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.fit import keras_step
from lingvo_gpipe.layers import dropout, embedding, linear
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.runners import train_runner
from tasks.lm import model as lm_model
from tests import naming
from tests.toys import stacks, tokens, vocabulary_layers

# Slices of three shards differ in size on two devices, and of five on any number. Micro-batches
# of one size need half of the traces: only the test with _UNEVEN examples has others.
_BATCH, _UNEVEN, _TIME, _DIM, _VOCAB, _NUM_SHARDS, _NUM_LAYERS = 8, 7, 3, 4, 15, 3, 2
_HEAD = _NUM_LAYERS + 2
_SIMPLE, _SHARED = embedding.SimpleFullSoftmax.Params(), embedding.SharedSoftmaxLayer.Params()


def _Ties(num_shards=_NUM_SHARDS, is_reversed=False):
  """The owner is the shard of the softmax, or of the embedding."""
  names = [f'layers[{i}].shards' for i in ((_HEAD, 0) if is_reversed else (0, _HEAD))]
  return [[f'{name}[{i}].emb' for name in names] for i in range(num_shards)]


def _Sub(head, num_shards=_NUM_SHARDS):
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  return [
    embedding.EmbeddingLayer.Params().Set(
      vocab_size=_VOCAB, embedding_dim=_DIM, num_shards=num_shards
    ),
    dropout.DropoutLayer.Params().Set(keep_prob=0.7),
    *[layer] * _NUM_LAYERS,
    head.Copy().Set(input_dim=_DIM, num_classes=_VOCAB, num_shards=num_shards),
  ]


def _Batch(seed=3, size=_BATCH, vocab_size=_VOCAB):
  return tokens.Batch(vocab_size, size, _TIME, seed=seed)


def _Place(sub, num_replicas=1, is_trained=None, size=_BATCH, **options):
  stack = stacks.MakeStack(sub, vocabulary='shared', **options)
  stack.Place(
    stacks.Devices()[: stack.num_devices * num_replicas],
    *stacks.Specs(_Batch(size=size)[0]),
    loss_fn=tokens.SmoothedXent,
    weights=layer_costs.Weights(is_trained),
    num_replicas=num_replicas,
  )
  return stack


@pytest.mark.parametrize(
  'head, num_devices, num_replicas, size, options',
  [
    # Two micro-batches of different sizes, of which one is recomputed.
    (_SIMPLE, 2, 1, _UNEVEN, {'schedule': 'gpipe', 'remat_policy': 'except_last'}),
    (_SIMPLE, 2, 1, _BATCH, {'schedule': 'interleaved_1f1b', 'num_stages': 4}),
    (_SHARED, 3, 1, _BATCH, {'schedule': 'zb_h1', 'remat_policy': 'layer', 'ties': _Ties(5)}),
    (
      _SHARED.Copy().Set(chunk_size=5),
      *(2, 2, _BATCH),
      {'schedule': '1f1b_fused', 'remat_policy': 'none', 'ties': _Ties(is_reversed=True)},
    ),
    (
      _SHARED,
      *(2, 1, _BATCH),
      {'offload': 1.0, 'num_micro_batches': 4, 'remat_policy': 'none', 'ties': _Ties()},
    ),
    (
      _SIMPLE.Copy().Set(chunk_size=4, use_bias=False, logits_soft_max=2.0),
      *(2, 1, _BATCH),
      {'schedule': 'zb_v', 'num_stages': 4},
    ),
    (_SIMPLE, 2, 1, _BATCH, {'schedule': '1f1b', 'xla': True}),
  ],
)
def testEqualsTheLayersOneAfterTheOther(head, num_devices, num_replicas, size, options):
  options = {'num_stages': num_devices, 'num_micro_batches': 2, **options}
  options['stages_per_device'] = options['num_stages'] // num_devices
  sub = _Sub(head, 5 if num_devices == 3 else _NUM_SHARDS)
  stack = _Place(sub, num_replicas, size=size, **options)
  inputs, side = _Batch(size=size)
  sums = stacks.StepFunction(stack)(inputs, side, tf.constant(stacks.STEP, tf.int64))
  actual = {name: value.numpy() for name, value in sums.items()}, stacks.Gradients(stack)
  ties = options.get('ties', ())
  num_micro_batches = options['num_micro_batches'] * num_replicas
  expected = stacks.Reference(sub, num_micro_batches, inputs, side, tokens.SmoothedXent, ties=ties)
  stacks.CheckEqual(actual, expected)
  if 'offload' in options:
    offloaded = stack.engine.TrainingSchedule(num_micro_batches).offloaded
    assert offloaded and all(stage < options['num_stages'] for stage, _ in offloaded)
  assert stack.engine.ConnectedPaths() == set(expected[1])
  # Each weight of the softmax is on the device of its slice, and nowhere else.
  for replica in stack.engine.replicas:
    first, *_, last = replica.stages
    assert not tf.nest.flatten([first.variables[0], last.variables, last.AllAccumulators()])
    holders = [*replica.slices, *replica.tables]
    assert {id(v) for s in holders for v in tf.nest.flatten(s.variables)} == {
      id(v) for path, v in replica.variables.items() if 'shards[' in path
    }
    for s in holders:
      held = tf.nest.flatten([s.variables, s.AllAccumulators()])
      assert all(v.device.endswith(s.device) for v in held)
    of_slices = [(s.device, s.first) for s in replica.slices]
    assert of_slices == [(s.device, s.first) for s in replica.tables]
    assert len({device for device, _ in of_slices}) == num_devices
  if 'offload' in options or options['schedule'] == 'interleaved_1f1b':
    return
  # So are logits and losses of everything else, which know no policy and no offload. The V
  # stands for all schedules with several stages on a device.
  plain, theta = stacks.PlainLayers(sub, ties)
  for path, variable in stack.VariablesByPath().items():
    np.testing.assert_array_equal(variable, plain.VariablesByPath()[path])
  logits = plain.FProp(theta(), *inputs)
  np.testing.assert_allclose(stack.Predict(*inputs), logits, rtol=1e-9)
  np.testing.assert_allclose(stack(*inputs), logits, rtol=1e-9)
  evaluated = stacks.Evaluate(stack, inputs, side)
  expected_sums = tokens.SmoothedXent(None, (logits,), side)
  for name, (value, weight) in expected_sums.items():
    np.testing.assert_allclose(evaluated[name], [value * weight, weight], rtol=1e-9)


@pytest.mark.parametrize('trained', ['layers[2]', 'shards[1].linear.b', 'layers[0].shards[2]'])
def testFrozenWeightsGetNoGradient(trained):
  """They are before, after or within the slices; vocabulary_test has several micro-batches."""

  def IsTrained(path):
    return trained in path

  stack = _Place(
    _Sub(_SIMPLE), is_trained=IsTrained, num_stages=2, num_micro_batches=1, schedule='1f1b'
  )
  inputs, side = _Batch()
  sums = stacks.StepFunction(stack)(inputs, side, tf.constant(stacks.STEP, tf.int64))
  actual = {name: value.numpy() for name, value in sums.items()}, stacks.Gradients(stack)
  expected = stacks.Reference(
    _Sub(_SIMPLE), 1, inputs, side, tokens.SmoothedXent, is_trained=IsTrained
  )
  assert expected[1]
  stacks.CheckEqual(actual, expected)


def testGradientsOfATape():
  """`FProp` brings the shards together."""
  stack = _Place(_Sub(_SIMPLE), num_stages=2, num_micro_batches=4)
  (ids,), side = _Batch()
  weights = stack.trainable_variables
  with tf.GradientTape() as tape:
    loss = tokens.SmoothedXent(None, (stack(ids),), side)['loss'][0]
  plain, theta = stacks.PlainLayers(_Sub(_SIMPLE))
  with tf.GradientTape() as plain_tape:
    expected = tokens.SmoothedXent(None, (plain.FProp(theta(), ids),), side)['loss'][0]
  grads = zip(
    tape.gradient(loss, weights), plain_tape.gradient(expected, plain.variables), strict=True
  )
  for actual, g in grads:
    np.testing.assert_allclose(tf.convert_to_tensor(actual), tf.convert_to_tensor(g), atol=1e-12)


_LM_VOCAB, _LM_SHARDS = 9, 3


def _Runner(num_stages, vocabulary, num_replicas=1, **train):
  p = lm_model.TransformerLm.Params().Set(
    name='lm', vocab_size=_LM_VOCAB, model_dim=8, hidden_dim=8, num_heads=1, num_layers=1
  )
  p.softmax_tpl.num_shards = _LM_SHARDS
  # The plain model needs no micro-batches: sums do not depend on their number.
  num_micro_batches = 2 // num_replicas if num_stages > 1 else 1
  p.stack.Set(num_stages=num_stages, num_micro_batches=num_micro_batches, xla=False)
  p.stack.vocabulary = vocabulary
  p.train.learner.learning_rate = 1e-2
  p.train.learner.clip_gradient_norm_to_value = 1.0
  p.train.Set(ema_decay=0.9, **train)
  spec = _LmBatch(0).Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
  return train_runner.TrainRunner(
    p.Instantiate(), stacks.Devices()[: num_stages * num_replicas], spec, num_replicas=num_replicas
  )


def _LmBatch(seed):
  (ids,), side = _Batch(seed, vocab_size=_LM_VOCAB)
  return nested_map.NestedMap(
    ids=ids, labels=side.labels, weights=tf.cast(side.weights, tf.float32)
  )


def _Restore(runner, variables):
  """Gives a runner the values {name: array} of a checkpoint."""
  assert set(runner.Variables()) == set(variables)
  for name, variable in runner.Variables().items():
    variable.assign(variables[name])
  runner.AfterRestore()


@functools.cache
def _PlainRunner():
  """Returns a runner on one device, traced once for all tests, and its initial variables."""
  runner = _Runner(1, 'one')
  return runner, {name: v.numpy() for name, v in runner.Variables().items()}


@pytest.mark.parametrize(
  'num_stages, num_replicas, train', [(2, 1, {}), (2, 2, {'shard_optimizer_slots': True})]
)
def testTrainingResumesWithAnyNumberOfDevices(num_stages, num_replicas, train):
  plain, initial = _PlainRunner()
  _Restore(plain, initial)
  shared = _Runner(num_stages, 'shared', num_replicas, **train)
  for seed in range(2):
    loss = shared.TrainStep(_LmBatch(seed))['loss']
    assert loss == pytest.approx(plain.TrainStep(_LmBatch(seed))['loss'], rel=1e-5)
  variables = shared.Variables()
  for name, expected in plain.Variables().items():
    np.testing.assert_allclose(variables[name], expected, atol=2e-5, err_msg=name)
  for s in shared.engine.holders[-2 * num_stages :]:
    assert '.shards[' in next(iter(s.trained))
    for path, v in s.trained.items():
      names = [name for name in variables if path in name]
      assert len(names) == 4  # The weight, two slots and the average.
      if num_replicas == 1:
        assert {variables[name].device for name in names} == {v.device}

  batch = _LmBatch(9)
  _Restore(plain, variables)
  if num_replicas == 1:
    # The same step from the restored variables: nothing beside them decides it.
    saved = {name: v.numpy() for name, v in variables.items()}
    loss = shared.TrainStep(batch)['loss']
    after = {name: v.numpy() for name, v in variables.items()}
    _Restore(shared, saved)
    assert shared.TrainStep(batch)['loss'] == loss
    assert loss == pytest.approx(plain.TrainStep(batch)['loss'])
    for name, variable in variables.items():
      np.testing.assert_array_equal(variable, after[name], err_msg=name)
  # Slices evaluate and decode.
  with shared.AveragedWeights(), plain.AveragedWeights():
    actual, expected = (runner.Evaluate([batch]) for runner in (shared, plain))
    for name, pair in expected.items():
      assert actual[name] == pytest.approx(pair, rel=1e-5)
  if num_replicas == 1:  # Only the first replica decodes.
    prompts = batch.ids[:2].numpy()
    np.testing.assert_array_equal(
      *(runner.task.Generate(prompts, 3, temperature=0.0) for runner in (shared, plain))
    )


def testTheCutCountsEachShardOnce():
  inputs = stacks.Specs(_Batch()[0])
  options = {'num_stages': 4, 'num_micro_batches': 4}
  shared, whole = (
    stacks.MakeStack(_Sub(_SIMPLE, 5), vocabulary=v, **options).MakeCut(*inputs)
    for v in ('shared', 'one')
  )
  assert sum(shared.vocabulary) == _VOCAB
  assert all(size % (_VOCAB // 5) == 0 for size in shared.vocabulary)
  assert sum(s.state for s in shared.memory) == sum(s.state for s in whole.memory)
  assert shared.memory[0].state < whole.memory[0].state / 2
  assert shared.memory[-1].state < whole.memory[-1].state
  assert naming.AnyLineNames(shared.Table(), 'stack.layers[0]', 'stack.layers[4]', 'slices')
  assert sum(s.num_params for s in shared.stages) == sum(s.num_params for s in whole.stages)


def testLossesThatUseWeightsOfTheSoftmaxAreRefused():
  def Loss(theta, outputs, side):
    return {
      'loss': (
        tokens.SmoothedXent(None, outputs, side)['loss'][0] + theta[-1].shards[0].linear.b[0],
        1.0,
      )
    }

  stack = stacks.MakeStack(_Sub(_SIMPLE), num_stages=2, num_micro_batches=2, vocabulary='shared')
  inputs, side = _Batch()
  stack.Place(stacks.Devices(), *stacks.Specs(inputs), loss_fn=Loss)
  with pytest.raises(
    ValueError,
    match=naming.Naming('stack.layers[4]', "vocabulary='shared'", 'shards', 'num_shards=1'),
  ):
    stacks.StepFunction(stack)(inputs, side, tf.constant(1, tf.int64))


def testFewerShardsThanDevicesAreRefused():
  head = _SIMPLE.Copy().Set(input_dim=_DIM, num_classes=16, num_shards=2)
  sub = [*_Sub(_SIMPLE)[:-1], head]
  stack = stacks.MakeStack(sub, num_stages=3, num_micro_batches=2, vocabulary='shared')
  with pytest.raises(
    ValueError, match=naming.Naming('stack.layers[4]', '2 shards', '8 classes', '3 devices')
  ):
    stack.MakeCut(*stacks.Specs(_Batch()[0]))


def testAStepWithoutATaskUpdatesTheShards():
  """A global clip norm counts all of them: the update of every weight together has that norm."""
  stack = _Place(_Sub(_SIMPLE), num_stages=2, num_micro_batches=2, schedule='1f1b')
  weights = stack.VariablesByPath()
  before = {path: v.numpy() for path, v in weights.items()}
  optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1e-3)
  step = keras_step.KerasStep(stack, optimizer)
  step(*_Batch())
  changes = {path: v.numpy() - before[path] for path, v in weights.items()}
  assert all(np.any(change) for change in changes.values())
  squares = sum(np.sum(np.square(change, dtype='float64')) for change in changes.values())
  np.testing.assert_allclose(np.sqrt(squares), 1e-3, rtol=1e-3)


def testACustomEmbeddingIsNotSharedOut():
  """It would get rows in place of ids."""
  inputs, side = _Batch()
  sizes = {'vocab_size': _VOCAB, 'embedding_dim': _DIM, 'num_shards': _NUM_SHARDS}
  sub = [vocabulary_layers.ShiftedEmbedding.Params().Set(**sizes), *_Sub(_SIMPLE)[1:]]
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=2, vocabulary='shared')
  actual = stacks.Train(stack, inputs, side, tokens.SmoothedXent)
  stacks.CheckEqual(actual, stacks.Reference(sub, 2, inputs, side, tokens.SmoothedXent))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
