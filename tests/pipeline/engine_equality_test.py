# SPDX-License-Identifier: Apache-2.0
"""Same result: the engine against the same layers run micro-batch by micro-batch.

The reference is plain eager code on one device: no engine, no tf.function, no recomputation.
"""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map, weight_params
from lingvo_gpipe.layers import dropout, embedding, linear, norm, skip, transformer
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import stage_math
from lingvo_gpipe.runners import train_runner
from tasks.lm import model as lm_model
from tests.toys import faulty_layers, layers, stacks, tokens

pytestmark = pytest.mark.optimized_graphs

_BATCH, _TIME, _DIM, _VOCAB = 8, 5, 8, 11
_SEED, _STEP = 5, 7


def _Sub(num_blocks=1):
  """Everything there is between ids and logits, with dropout wherever there can be dropout."""
  block = transformer.TransformerLayer.Params().Set(
    input_dim=_DIM,
    hidden_dim=12,
    num_heads=2,
    is_causal=True,
    residual_dropout_prob=0.1,
    atten_dropout_prob=0.1,
    relu_dropout_prob=0.1,
  )
  return [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    embedding.LearnablePositionalEmbeddingLayer.Params().Set(embedding_dim=_DIM, max_pos=_TIME),
    dropout.DropoutLayer.Params().Set(keep_prob=0.9),
    *[block] * num_blocks,
    norm.LayerNorm.Params().Set(input_dim=_DIM),
    embedding.SimpleFullSoftmax.Params().Set(input_dim=_DIM, num_classes=_VOCAB),
  ]


def _Stack(
  num_stages, num_micro_batches, *, xla=False, dtype=tf.float64, sub=None, num_blocks=1, **options
):
  if dtype == tf.float32:
    # Weights of the size that real widths have (Xavier at 512: 0.04). The large ones of a tiny
    # width make the rounding of a key bias's gradient, which is zero in theory, as large as the
    # bound, in the reference as well.
    options['params_init'] = weight_params.WeightInit.Gaussian(0.1)
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    xla=xla,
    dtype=dtype,
    random_seed=_SEED,
    sub=sub or _Sub(num_blocks),
    **options,
  )
  return p.Instantiate()


@functools.cache
def _Batch():
  """Ids, labels and token weights that make the micro-batches count differently."""
  rng = np.random.default_rng(0)
  ids, labels = (rng.integers(0, _VOCAB, [_BATCH, _TIME]).astype(np.int32) for _ in range(2))
  weights = rng.uniform(0.0, 2.0, [_BATCH, _TIME]) * (rng.uniform(size=[_BATCH, _TIME]) < 0.6)
  # Two examples that count nothing, and so with M = 4 a whole micro-batch.
  weights[2:4] = 0.0
  paddings = (np.arange(_TIME) >= rng.integers(2, _TIME + 1, [_BATCH, 1])).astype(np.float64)
  return nested_map.NestedMap(
    ids=tf.constant(ids),
    paddings=tf.constant(paddings),
    labels=tf.constant(labels),
    weights=tf.constant(weights),
  )


def _Inputs(dtype):
  batch = _Batch()
  side = nested_map.NestedMap(labels=batch.labels, weights=batch.weights)
  return (batch.ids, tf.cast(batch.paddings, dtype)), side


@functools.cache
def _Reference(num_micro_batches, dtype, num_blocks=1):
  """(sum of w_m, mean of each metric, {path: gradient of sum of w_m loss_m})."""
  stack = _Stack(1, num_micro_batches, dtype=dtype, num_blocks=num_blocks)
  stack.InstantiateVariables()
  inputs, side = _Inputs(dtype)
  sums = {'loss': [], 'max_xent': []}
  with tf.GradientTape() as tape:
    objective = tf.zeros([], dtype)
    for m, (args, s) in enumerate(
      zip(stack.SplitBatch(inputs), stack.SplitBatch(side), strict=True)
    ):
      with fprop_context.Scope(step=_STEP, micro_batch=m):
        for layer in stack.layers:
          args = layer.FProp(layer.theta, *args)
          args = args if isinstance(args, tuple) else (args,)
      metrics = tokens.Xent(None, args, s)
      objective += metrics['loss'][0] * metrics['loss'][1]
      for name, (value, weight) in metrics.items():
        sums[name].append((float(value * weight), float(weight)))
  variables = stack.VariablesByPath()
  grads = tape.gradient(objective, variables)
  assert all(g is not None for g in grads.values())
  means = {name: np.sum(s, axis=0)[0] / np.sum(s, axis=0)[1] for name, s in sums.items()}
  total = np.sum(sums['loss'], axis=0)[1]
  return total, means, {k: tf.convert_to_tensor(g).numpy() for k, g in grads.items()}


def _Place(stack, dtype):
  stack.Place(
    stacks.Devices(),
    tf.TensorSpec([_BATCH, _TIME], tf.int32),
    tf.TensorSpec([_BATCH, _TIME], dtype),
    loss_fn=tokens.Xent,
  )


def _Train(stack, dtype):
  """Places the stack and trains: the metrics' sums and {path: accumulated gradient}."""
  _Place(stack, dtype)
  return _RunStep(stack, dtype)


def _RunStep(stack, dtype, step=_STEP):
  """One pass of the engine, as _Train."""
  stack.engine.MakeAccumulators()

  @tf.function(autograph=False)
  def Step(inputs, side, step):
    sides = stack.SplitBatch(side)
    weights = [tf.cast(tf.reduce_sum(s.weights), dtype) for s in sides]
    return stacks.RunStep(stack.engine, stack.SplitBatch(inputs), sides, weights, step)

  args = (*_Inputs(dtype), tf.constant(step, tf.int64))
  Step(*args)  # A second run must find clean accumulators.
  sums = {name: value.numpy() for name, value in Step(*args).items()}
  grads = {}
  for s in stack.engine.stages:
    assert len(s.accumulators) == len(s.trained)
    for (path, variable), accumulator in zip(s.trained.items(), s.accumulators, strict=True):
      assert variable.device == accumulator.device
      assert variable.device.endswith(s.device.rsplit('/', 1)[-1])
      grads[path] = accumulator.numpy()
  return sums, grads


def _CheckEqual(sums, grads, num_micro_batches, dtype, num_blocks=1):
  """The bounds of `verify`."""
  total, means, expected = _Reference(num_micro_batches, dtype, num_blocks)
  precise = dtype == tf.float64
  for name, mean in means.items():
    assert sums[name][0] / sums[name][1] == pytest.approx(mean, rel=1e-12 if precise else 1e-5)
  assert sums['loss'][1] == pytest.approx(total, rel=1e-6)
  assert grads.keys() == expected.keys()
  norm_of_all = stacks.GlobalNorm(expected)
  assert norm_of_all > 0
  for path, g0 in expected.items():
    assert np.isfinite(grads[path]).all()
    error = grads[path] - g0
    if precise:
      assert np.abs(error).max() <= 1e-10 * norm_of_all, path
    else:
      # Float32's rounding is bounded for each variable; a gradient may be zero in theory.
      bound = 1e-5 * max(np.linalg.norm(g0), 1e-3 * norm_of_all)
      assert np.linalg.norm(error) <= bound, path


@pytest.mark.parametrize(
  'num_stages, num_micro_batches, num_blocks, policy',
  # Once with equal blocks in different stages; engine_schedules_test covers more of the grid.
  [(2, 2, 1, 'layer'), (4, 4, 2, 'stage')],
)
def testGradientsEqual(num_stages, num_micro_batches, num_blocks, policy):
  stack = _Stack(num_stages, num_micro_batches, num_blocks=num_blocks, remat_policy=policy)
  _CheckEqual(*_Train(stack, tf.float64), num_micro_batches, tf.float64, num_blocks)
  if num_stages == 2:
    # Another step has other dropout masks, so that its gradients exceed the bounds.
    _, grads = _RunStep(stack, tf.float64, step=_STEP + 1)
    _, _, expected = _Reference(num_micro_batches, tf.float64, num_blocks)
    error = max(np.abs(grads[path] - g0).max() for path, g0 in expected.items())
    assert error > 1e-3 * stacks.GlobalNorm(expected)


# verify_test compiles a transformer in float64, engine_schedules_test other layers.
@pytest.mark.parametrize('num_stages, xla, policy', [(2, False, 'stage'), (3, True, 'layer')])
def testGradientsEqualInFloat32(num_stages, xla, policy):
  stack = _Stack(num_stages, 2, xla=xla, dtype=tf.float32, remat_policy=policy)
  _CheckEqual(*_Train(stack, tf.float32), 2, tf.float32)


def testEvaluateEqualsAPlainForward():
  stack = _Stack(4, 2, dtype=tf.float32)
  _Place(stack, tf.float32)
  inputs, side = _Inputs(tf.float32)

  @tf.function(autograph=False)
  def Step(inputs, side):
    sides = stack.SplitBatch(side)
    weights = [tf.reduce_sum(s.weights) for s in sides]
    pieces = stacks.MicroBatches(stack.SplitBatch(inputs), sides, weights)
    return stack.engine.Evaluate(pieces)

  sums = Step(inputs, side)
  args = inputs
  for layer in stack.layers:
    args = layer.FProp(layer.theta, *args)
    args = args if isinstance(args, tuple) else (args,)
  loss, total = tokens.Xent(None, args, side)['loss']
  assert float(sums['loss'][0] / sums['loss'][1]) == pytest.approx(float(loss), rel=1e-5)
  assert float(sums['loss'][1]) == pytest.approx(float(total), rel=1e-6)
  assert not any(s.accumulators for s in stack.engine.stages)


# ---- traces ------------------------------------------------------------------------------


def _EqualLayers(num_stages, **options):
  layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4, activation='TANH')
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  sub = [layer, drop] * 4
  stack = _Stack(num_stages, 2, sub=sub, dtype=tf.float32, splits=[], **options)
  cut = stack.params.Copy()
  cut.splits = [8 // num_stages * (k + 1) for k in range(num_stages)]
  return cut.Instantiate()


def testEqualStagesShareOneTrace():
  def SquareLoss(theta, outputs, side):
    del theta, side
    return {'loss': (tf.reduce_sum(outputs[0] ** 2), tf.constant(1.0))}

  train, forward, grads = {}, {}, {}
  for num_stages in (1, 4):
    stack = _EqualLayers(num_stages)
    stack.Place(stacks.Devices(), tf.TensorSpec([8, 4]), loss_fn=SquareLoss)

    @tf.function(autograph=False)
    def Step(x, step, stack=stack):
      pieces = stack.SplitBatch((x,))
      ones = [tf.constant(1.0)] * len(pieces)
      return stacks.RunStep(stack.engine, pieces, [None] * len(pieces), ones, step)

    x = tf.reshape(tf.range(32.0), [8, 4]) / 32
    Step(x, tf.constant(1, tf.int64))
    train[num_stages] = stack.engine.functions.num_traces
    stack.Predict(x)
    forward[num_stages] = stack.engine.functions.num_traces - train[num_stages]
    grads[num_stages] = [a.numpy() for s in stack.engine.stages for a in s.accumulators]
  # The first stage, whose input needs no gradient, the last, which has the loss, and all others: F
  # and B of each.
  assert train == {1: 2, 4: 6}
  assert forward == {1: 1, 4: 1}
  for a, b in zip(grads[1], grads[4], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def testLayersWithEqualAttributesHaveOneStructure():
  p = faulty_layers.EqualAttributes.Params().Set(input_dim=4, hidden_dim=4, num_heads=2)
  first, second = stacks.MakeStack([p, p]).layers
  assert stage_math.StructureKey(first) == stage_math.StructureKey(second)
  for value in (3, tf.Variable(1.0)):
    second._more = value
    first._more = tf.Variable(1.0)
    assert stage_math.StructureKey(first) != stage_math.StructureKey(second)


def testLayersWithOtherAttributesShareNoTrace():
  sub = [faulty_layers.FactorLayer.Params().Set(dim=4) for _ in range(4)]
  side, x = stacks.ExampleWeights(4), tf.ones([4, 4], tf.float64)
  results = []
  for num_stages in (1, 4):
    stack = stacks.MakeStack(sub, num_stages=num_stages, num_micro_batches=2)
    for i, layer in enumerate(stack.layers):
      layer.number = 1.0 + i % 3
    results.append(stacks.Train(stack, (x,), side))
  stacks.CheckEqual(*results)


@pytest.mark.parametrize(
  'cls',
  [
    faulty_layers.NamedLikeAChild,
    faulty_layers.SetBeforeInit,
    faulty_layers.ArrayOfOnes,
    faulty_layers.OrderOfAMap,
  ],
)
def testAttributesThatLookAlikeShareNoTrace(cls):
  """With one trace, both stages would use the first layer's scale."""
  x, sub = tf.ones([4, layers.DIM], tf.float64), [cls.Params(), cls.Params()]
  faulty_layers.NumberedLayer.numbers = iter((1, 2))
  stack = stacks.MakeStack(sub, num_stages=2)
  stack.Place(stacks.Devices(), *stacks.Specs((x,)))
  faulty_layers.NumberedLayer.numbers = iter((1, 2))
  layer, theta = stacks.PlainLayers(sub)
  np.testing.assert_allclose(stack.Predict(x), layer.FProp(theta(), x))


def testMoreMicroBatchesTakeNoMoreTraces():
  """Neither do more than three stages: the first, the last and all others have F and B."""
  layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4)
  traces = []
  for num_micro_batches in (2, 8):
    splits = [2 * (k + 1) for k in range(8)]
    stack = _Stack(8, num_micro_batches, sub=[layer] * 16, dtype=tf.float32, splits=splits)
    x = tf.TensorSpec([8, 4])
    stack.Place(stacks.Devices() * 2, x, loss_fn=stacks.SquareLoss)
    step = stacks.StepFunction(stack)
    step.get_concrete_function((x,), tf.TensorSpec([8]), tf.TensorSpec([], tf.int64))
    traces.append(stack.engine.functions.num_traces)
  assert traces == [6, 6]


@pytest.mark.parametrize(
  'schedule, policy, batch_size, num_compilations',
  [('gpipe', 'stage', 7, 2), ('zb_h1', 'none', 7, 2), ('zb_h1', 'none', 8, 1)],
)
def testAStageIsCompiledAtMostTwice(schedule, policy, batch_size, num_compilations):
  """7 into 4 is 2, 2, 2, 1; XLA compiles each trace of a function once on its stage's device."""
  square = linear.ProjectionLayer.Params().Set(input_dim=2, output_dim=2, activation='TANH')
  options = {'splits': [1, 2], 'schedule': schedule, 'remat_policy': policy}
  stack = stacks.MakeStack([square, square], num_stages=2, num_micro_batches=4, xla=True, **options)
  side = stacks.ExampleWeights(batch_size)
  stacks.Train(stack, (tf.ones([batch_size, 2], tf.float64),), side)
  counts = set()
  for s in stack.engine.stages:
    for recompute in (rematerialisation.Recompute.STAGE, rematerialisation.Recompute.NOTHING):
      functions = stacks.StageFunctions(stack, s, recompute)
      for name, function in vars(functions).items():
        if not name.startswith('_') and hasattr(function, 'experimental_get_tracing_count'):
          counts.add(function.experimental_get_tracing_count())
  assert counts == {0, num_compilations}  # Some are of other policies.


def testStagesOfDifferentFunctionsDoNotShareATrace():
  def Adder(number):
    return lambda x: x + number

  sub = [layers.Without(fn) for fn in (Adder(1.0), Adder(2.0), lambda x: x * 10)]
  stack = _Stack(3, 1, sub=sub, splits=[1, 2, 3])
  stack.Place(stacks.Devices(), tf.TensorSpec([2]))
  np.testing.assert_allclose(stack.Predict(tf.ones([2])), [40.0, 40.0])


# ---- dropout masks -----------------------------------------------------------------------


@functools.cache
def _Masks(num_stages, num_micro_batches, xla, step=3, dtype=tf.float32):
  """Returns the product of the masks of four dropout layers, [batch, 32]."""
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.9)
  ends = [4 // num_stages * (k + 1) for k in range(num_stages)]
  stack = _Stack(num_stages, num_micro_batches, sub=[drop] * 4, splits=ends, xla=xla, dtype=dtype)
  stack.Place(stacks.Devices(), tf.TensorSpec([8, 32], dtype))
  with fprop_context.Scope(step=step):
    return stack(tf.ones([8, 32], dtype)).numpy() > 0


_LATE = 10**7


@pytest.mark.parametrize(
  'num_stages, xla, step, dtype',
  [
    (1, True, _LATE, tf.bfloat16),
    (2, False, _LATE, tf.bfloat16),
    (2, True, 3, tf.float32),
    (4, False, 3, tf.float32),
  ],
)
def testMasksDoNotDependOnTheCut(num_stages, xla, step, dtype):
  # Nor on the dtype, whose rounding the seeds never see.
  np.testing.assert_array_equal(_Masks(num_stages, 4, xla, step, dtype), _Masks(1, 4, False, step))


@pytest.mark.parametrize('step, dtype', [(3, tf.float32), (_LATE, tf.bfloat16)])
def testMasksDifferByLayerMicroBatchAndStep(step, dtype):
  masks = _Masks(1, 4, False, step, dtype)
  micro_batches = [masks[i : i + 2] for i in range(0, 8, 2)]
  # Nor do micro-batches of different steps share a mask.
  micro_batches += [_Masks(1, 4, False, step + 1, dtype)[i : i + 2] for i in range(0, 8, 2)]
  for i, a in enumerate(micro_batches):
    for b in micro_batches[i + 1 :]:
      assert (a != b).any()
  # Four independent masks: 0.9^4 = 0.66 survive, not 0.9; the deviation of the mean is 0.03.
  assert 0.5 < masks.mean() < 0.8


# ---- training ----------------------------------------------------------------------------


def _LossesOfTraining(num_stages):
  stack = pipelining_layer.PipeliningLayer.Params().Set(
    num_stages=num_stages, num_micro_batches=2, xla=False
  )
  p = lm_model.TransformerLm.Params().Set(
    name='lm',
    vocab_size=_VOCAB,
    model_dim=_DIM,
    hidden_dim=16,
    num_heads=2,
    num_layers=1,
    input_dropout_prob=0.1,
    residual_dropout_prob=0.1,
    atten_dropout_prob=0.1,
    stack=stack,
    random_seed=_SEED,
  )
  p.train.learner.learning_rate = 1e-2
  p.train.learner.clip_gradient_norm_to_value = 1.0
  batch = _Batch()
  batch = nested_map.NestedMap(
    ids=batch.ids, labels=batch.labels, weights=tf.cast(batch.weights, tf.float32)
  )
  spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
  trained = train_runner.TrainRunner(p.Instantiate(), stacks.Devices(), spec)
  assert trained.engine.num_stages == num_stages
  return [trained.TrainStep(batch)['loss'] for _ in range(20)]


def testTheFirstTwentyLossesAgree():
  reference = _LossesOfTraining(1)
  assert reference[-1] < 0.9 * reference[0]
  np.testing.assert_allclose(_LossesOfTraining(2), reference, rtol=1e-4)


def _GradientWithin(w, x):
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.sin(x * w)
  return x + tape.gradient(y, x)


def testALayerMayTakeAGradient():
  sub = [layers.FnLayer.Params().Set(fn=_GradientWithin) for _ in range(4)]
  side = stacks.ExampleWeights(4)
  x = tf.constant(np.random.default_rng(0).normal(size=[4, layers.DIM]))
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=2)
  # `except_last` covers both `stage` and `none`.
  ways = [('gpipe', 'except_last'), ('1f1b', 'layer'), ('zb_h1', 'stage')]
  stacks.CheckWays(stack, (x,), side, ways, stacks.Reference(sub, 2, (x,), side))


def _Begin(w, x):
  return nested_map.NestedMap(h=tf.tanh(x * w), n=x)


def _Change(w, m):
  m.h = tf.sin(m.h * w) + m.n
  return m


def _End(w, m):
  return m.pop('h') * w + m.n


@pytest.mark.parametrize('splits', [[1, 6], [5, 6]])
def testALayerMayChangeTheMapsThatItGets(splits):
  """Neither backward nor a skip connection gets the changed map."""
  stash = skip.StashLayer.Params().Set(key='s')
  pop = skip.PopLayer.Params().Set(key='s', combine='append')
  make = layers.FnLayer.Params
  end = make().Set(fn=lambda w, h, m: h * w + m.h)
  sub = [
    *(make().Set(fn=_Begin), stash, make().Set(fn=_Change)),
    *(make().Set(fn=_End), pop, end),
  ]
  x = tf.constant(np.random.default_rng(0).normal(size=[4, layers.DIM]))
  side = stacks.ExampleWeights(4)
  stack = stacks.MakeStack(sub, num_stages=2, splits=splits, num_micro_batches=2)
  ways = [('gpipe', policy) for policy in ('except_last', 'layer')]
  stacks.CheckWays(stack, (x,), side, ways, stacks.Reference(sub, 2, (x,), side))


def testLossWeightsMayBeNegative():
  """The metrics include a micro-batch whose weights add up to less than 0."""
  sub = [layers.FnLayer.Params().Set(fn=lambda w, x: tf.tanh(x * w))]
  x = tf.constant(np.random.default_rng(0).normal(size=[4, layers.DIM]))
  side = tf.constant([1.0, 0.5, -2.0, 0.3], tf.float64)
  actual = stacks.Train(stacks.MakeStack(sub, num_micro_batches=2), (x,), side)
  stacks.CheckEqual(actual, stacks.Reference(sub, 2, (x,), side))


def testManyGradientsOfNarrowWeights():
  """A sum of 256 equal numbers in bfloat16 is too small by a tenth."""

  def Loss(theta, outputs, side):
    del theta
    mean = tf.cast(tf.reduce_mean(outputs[0]), tf.float32)
    return {'loss': (mean, tf.reduce_sum(side))}

  stack = stacks.MakeStack([layers.FnLayer.Params()], num_micro_batches=256, dtype=tf.bfloat16)
  x, side = tf.ones([256, layers.DIM], tf.bfloat16), tf.ones([256])
  stack.Place(stacks.Devices(), *stacks.Specs((x,)), loss_fn=Loss)
  sides = stack.SplitBatch(side)
  weights = [stacks.LossWeight(s) for s in sides]
  # Eagerly: tracing 256 calls would take long.
  stacks.RunStep(stack.engine, stack.SplitBatch((x,)), sides, weights, tf.constant(1, tf.int64))
  gradient = stacks.Gradients(stack)['stack.layers[0].w']
  np.testing.assert_allclose(gradient / 256, 1 / layers.DIM, rtol=1e-2)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
