# SPDX-License-Identifier: Apache-2.0
"""PipeliningLayer under somebody else's tape: the SequentialLayer's outputs and gradients."""

import gc
import os
import sys
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

os.environ.setdefault('KERAS_BACKEND', 'tensorflow')
import keras  # noqa: E402

from lingvo_gpipe.core import fprop_context, nested_map  # noqa: E402
from lingvo_gpipe.layers import dropout, embedding, linear, norm, sequential  # noqa: E402
from lingvo_gpipe.pipeline import pipelining_layer  # noqa: E402
from lingvo_gpipe.pipeline.stages import micro_batch  # noqa: E402
from tests import naming  # noqa: E402
from tests.toys import layers, nested_layers, stacks  # noqa: E402

_DIM = 6
_SEED = 3


def _Params(cls, num_layers=2, **options):
  p = cls.Params().Set(name='stack', dtype=tf.float64, random_seed=_SEED, **options)
  p.sub = [nested_layers.Tangle.Params().Set(dim=_DIM) for _ in range(num_layers)]
  p.sub[1].random_seed = _SEED + 1  # A layer may have a seed of its own.
  return p


def _Pipeline(num_stages, num_micro_batches, **options):
  return _Params(
    pipelining_layer.PipeliningLayer,
    max(num_stages, 2),
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    xla=options.pop('xla', False),
    **options,
  ).Instantiate()


def _Inputs(lead):
  """Arguments of a stack of `Tangle`, all with the leading dimensions `lead`."""
  rng = np.random.default_rng(1)
  ids = tf.constant(rng.integers(0, 3, lead), tf.int32)
  half = tf.constant(rng.normal(size=[*lead, _DIM]))
  flag = tf.constant(rng.integers(0, 2, lead) == 1)
  nest = nested_map.NestedMap(ids=ids, none=None, others=(half, None, (flag,)))
  return tf.constant(rng.normal(size=[*lead, _DIM])), nest


def _Placed(args, *sizes, **options):
  stack = _Pipeline(*sizes, **options)
  stack.Place(stacks.Devices(), *stacks.Specs(args))
  return stack


def _Objective(outputs):
  y, nest = outputs
  return tf.reduce_sum(y * y) + tf.reduce_sum(tf.sin(nest.others[0]))


def _Reference(args, num_micro_batches, batch_dim=0, step=5, do_eval=False, num_layers=2):
  """Outputs and gradients of the SequentialLayer, micro-batch by micro-batch."""
  layer = layers.WithVariables(_Params(sequential.SequentialLayer, num_layers))
  weights = layer.VariablesByPath()
  floats = [args[0], args[1].others[0]]
  with tf.GradientTape() as tape:
    tape.watch(floats)
    pieces = []
    for m, piece in enumerate(micro_batch.Split(args, num_micro_batches, batch_dim)):
      with fprop_context.Scope(do_eval=do_eval, step=step, micro_batch=m):
        pieces.append(layer(*piece))
    outputs = micro_batch.Merge(pieces, batch_dim)
    objective = _Objective(outputs)
  return outputs, tape.gradient(objective, (weights, floats))


def _Run(stack, args, step=5, do_eval=False):
  """Outputs and gradients of the pipeline."""
  weights = stack.VariablesByPath()
  floats = [args[0], args[1].others[0]]
  with tf.GradientTape() as tape:
    tape.watch(floats)
    with fprop_context.Scope(do_eval=do_eval, step=step):
      outputs = stack(*args)
    objective = _Objective(outputs)
  return outputs, tape.gradient(objective, (weights, floats))


def _CheckSame(actual, expected):
  """The same structure, dtypes, Nones and numbers; a missing gradient is as good as zeros."""
  outputs, (weights, floats) = actual
  expected_outputs, (expected_weights, expected_floats) = expected
  tf.nest.assert_same_structure(outputs, expected_outputs)
  for a, b in zip(tf.nest.flatten(outputs), tf.nest.flatten(expected_outputs), strict=True):
    assert (a is None) == (b is None)
    if a is not None:
      assert a.dtype == b.dtype and a.shape == b.shape
      np.testing.assert_allclose(*(x.numpy().astype(float) for x in (a, b)), atol=1e-12)
  assert weights.keys() == expected_weights.keys()
  for path, g in expected_weights.items():
    if path.endswith(('.unused', '.frozen')):
      assert weights[path] is None or not np.any(weights[path])
    else:
      assert np.any(g)
      np.testing.assert_allclose(weights[path], g, atol=1e-11, err_msg=path)
  for a, b in zip(floats, expected_floats, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-11)


# One stage and several, one micro-batch and several, eagerly and in a function: each pair of them.
@pytest.mark.parametrize('num_stages, num_micro_batches', [(1, 1), (3, 3)])
def testGradientsUnderAnEagerTapeAreEqual(num_stages, num_micro_batches):
  args = _Inputs([6])
  stack = _Placed(args, num_stages, num_micro_batches)
  expected = _Reference(args, num_micro_batches, num_layers=len(stack.layers))
  _CheckSame(_Run(stack, args), expected)


@pytest.mark.parametrize('num_stages, num_micro_batches', [(1, 3), (2, 1)])
def testGradientsInATfFunctionAreEqual(num_stages, num_micro_batches):
  args = _Inputs([6])
  stack = _Placed(args, num_stages, num_micro_batches)
  run = tf.function(lambda *args: _Run(stack, args), autograph=False)
  outputs, (weights, floats) = run(*args)
  _CheckSame((outputs, (weights, floats)), _Reference(args, num_micro_batches))


def testGradientsOfATapeAroundATfFunctionAreEqual():
  args = _Inputs([4])
  stack = _Placed(args, 2, 2)

  @tf.function(autograph=False)
  def Forward(*args):
    with fprop_context.Scope(step=5):
      return stack(*args)

  weights, floats = stack.VariablesByPath(), [args[0], args[1].others[0]]
  with tf.GradientTape() as tape:
    tape.watch(floats)
    outputs = Forward(*args)
    objective = _Objective(outputs)
  grads = tape.gradient(objective, (weights, floats))
  _CheckSame((outputs, grads), _Reference(args, 2))


@pytest.mark.parametrize('in_function', [False, True])
def testSecondGradientsAreEqual(in_function):
  """The gradient of a gradient penalty: the inputs of stages depend on weights and inputs."""
  args = _Inputs([4])
  stack, plain = _Placed(args, 2, 2), _Params(sequential.SequentialLayer).Instantiate()
  plain.InstantiateVariables()

  def Run(layer):
    weights = layer.VariablesByPath()
    with tf.GradientTape() as outer:
      with tf.GradientTape() as inner:
        inner.watch(args[0])
        objective = _Objective(layer(*args))
      penalty = tf.reduce_sum(inner.gradient(objective, args[0]) ** 2)
    return outer.gradient(penalty, weights, unconnected_gradients='zero')

  run = tf.function(Run, autograph=False) if in_function else Run
  actual, expected = run(stack), Run(plain)
  assert actual.keys() == expected.keys()
  for path, g in expected.items():
    np.testing.assert_allclose(actual[path], g, atol=1e-11, err_msg=path)


def testBatchesMayHaveOtherSizesThanTheSpecsOfPlace():
  stack = _Placed(_Inputs([2]), 2, 4)
  for batch, sizes in ((2, [1, 1]), (7, [2, 2, 2, 1])):
    args = _Inputs([batch])
    assert [len(piece) for piece in stack.SplitBatch(args[0])] == sizes
    _CheckSame(_Run(stack, args), _Reference(args, 4))


def testTheBatchMayBeAtDimensionOne():
  args = _Inputs([3, 5])
  stack = _Placed(args, 2, 2, batch_dim=1)
  assert [piece.shape[:2].as_list() for piece in stack.SplitBatch(args[0])] == [[3, 3], [3, 2]]
  _CheckSame(_Run(stack, args), _Reference(args, 2, batch_dim=1))


def testEvaluationModeDisablesDropout():
  args = _Inputs([6])
  stack = _Placed(args, 2, 2)
  expected = _Reference(args, 1, do_eval=True)
  _CheckSame(_Run(stack, args, step=None, do_eval=True), expected)
  # Outside of any scope too, and Predict.
  for outputs in (stack(*args), stack.Predict(*args)):
    tf.nest.assert_same_structure(outputs, expected[0])
    np.testing.assert_allclose(outputs[0], expected[0][0], atol=1e-12)
  # Back in training the masks are there again.
  assert np.any(_Run(stack, args)[0][0] != expected[0][0])


def testTrainingNeedsAStep():
  args = _Inputs([4])
  stack = _Placed(args, 2, 2)
  with (
    fprop_context.Scope(do_eval=False),
    pytest.raises(ValueError, match=naming.Naming('stack', 'do_eval=False', 'step')),
  ):
    stack(*args)


def testAnotherStepChangesTheMasksWithoutARetrace():
  args = _Inputs([4])
  stack = _Placed(args, 2, 2)
  outputs, traces = [], set()
  for step in (1, 2, 1):
    with fprop_context.Scope(step=tf.constant(step, tf.int64)):
      outputs.append(stack(*args)[0].numpy())
    traces.add(stack.engine.functions.num_traces)
  assert np.any(outputs[0] != outputs[1])
  np.testing.assert_array_equal(outputs[0], outputs[2])
  assert len(traces) == 1


def testCompiledByXla():
  args = _Inputs([4])
  stack = _Placed(args, 2, 2, xla=True)
  _CheckSame(_Run(stack, args), _Reference(args, 2))


def testGradientsUnderPolicyLayerAreEqual():
  """The stages have several layers."""
  args = _Inputs([4])
  stack = _Placed(args, 1, 2, remat_policy='layer')
  _CheckSame(_Run(stack, args), _Reference(args, 2))


def _Stack(sub, *specs, num_stages=None, **options):
  options = {'num_micro_batches': 2, 'xla': False, **options}
  sub = [q if hasattr(q, 'cls') else layers.Without(q) for q in sub]
  num_stages = num_stages or len(sub)
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack', num_stages=num_stages, sub=sub, random_seed=_SEED, **options
  )
  if num_stages == len(sub):
    p.splits = list(range(1, num_stages + 1))
  stack = p.Instantiate()
  stack.Place(stacks.Devices(), *specs)
  return stack


def testAStageMayHaveIntegersOnly():
  """Its input and output have no gradient; the weights after it do."""
  sub = [
    lambda ids: (ids + 1) % 5,
    embedding.EmbeddingLayer.Params().Set(vocab_size=5, embedding_dim=4),
    lambda x, paddings: x,
  ]
  stack = _Stack(sub, tf.TensorSpec([4, 3], tf.int32))
  ids = tf.constant(np.arange(12).reshape(4, 3) % 4, tf.int32)
  (table,) = stack.trainable_variables
  with tf.GradientTape() as tape:
    y = stack(ids)
    loss = tf.reduce_sum(y)
  grad = tape.gradient(loss, table)
  counts = np.bincount((ids.numpy() + 1).reshape(-1), minlength=5)
  np.testing.assert_allclose(grad, np.repeat(counts[:, None], 4, axis=1))


def testTheLossMayIgnoreOutputs():
  double = [lambda x: (x * 2.0, x * 3.0), lambda a, b: (a * b, b, None)]
  stack = _Stack(double, tf.TensorSpec([4]))
  x = tf.constant([1.0, 2.0, 3.0, 4.0])
  with tf.GradientTape() as tape:
    tape.watch(x)
    _, second, none = stack(x)
    loss = tf.reduce_sum(second)
  assert none is None
  np.testing.assert_allclose(tape.gradient(loss, x), [3.0] * 4)


def testAStageMayStopTheGradient():
  square = linear.LinearLayer.Params().Set(input_dim=4, output_dim=4)
  stack = _Stack([square, tf.stop_gradient, square], tf.TensorSpec([4, 4]))
  before, behind = stack.trainable_variables
  x = tf.constant(np.arange(16.0).reshape(4, 4), tf.float32)
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(stack(x))
  nothing, grad = tape.gradient(loss, [before, behind])
  assert nothing is None or not np.any(nothing)
  expected = tf.matmul(tf.matmul(x, before), tf.ones([4, 4]), transpose_a=True)
  np.testing.assert_allclose(grad, expected, rtol=1e-5)


def testIntegerOutputsHaveNoGradient():
  stack = _Stack([lambda x: tf.cast(x, tf.int32)] * 2, tf.TensorSpec([4]))
  x = tf.constant([1.5, 2.5, 3.5, 4.5])
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = stack(x)
  assert y.dtype == tf.int32
  assert y.numpy().tolist() == [1, 2, 3, 4]
  assert tape.gradient(y, x) is None


def testAOneElementTupleStaysATuple():
  """As a SequentialLayer returns it; between layers it is one argument."""
  spec, x = tf.TensorSpec([4]), tf.constant([1.0, 2.0, 3.0, 4.0])
  for last, is_tuple in ((lambda x: (3.0 * x,), True), (lambda x: 3.0 * x, False)):
    stack = _Stack([lambda x: (2.0 * x,), last], spec)
    with tf.GradientTape() as tape:
      tape.watch(x)
      outputs = stack(x)
      loss = tf.reduce_sum(outputs[0] if is_tuple else outputs)
    np.testing.assert_allclose(tape.gradient(loss, x), [6.0] * 4)
    for y in (outputs, stack.Predict(x)):
      assert isinstance(y, tuple) == is_tuple
      np.testing.assert_allclose(y[0] if is_tuple else y, 6.0 * x)


def testThePipelineMayBePartOfAUsersModel():
  sub = [nested_layers.ResidualSequence.Params().Set(dim=_DIM) for _ in range(4)]
  x = tf.constant(np.random.default_rng(2).normal(size=[6, _DIM]))
  results = []
  for body in (
    sequential.SequentialLayer.Params().Set(sub=sub),
    pipelining_layer.PipeliningLayer.Params().Set(sub=sub, xla=False),
    pipelining_layer.PipeliningLayer.Params().Set(sub=sub, xla=False, num_stages=4),
  ):
    p = nested_layers.UserModel.Params().Set(name='model', dim=_DIM, body=body)
    p.Set(dtype=tf.float64, random_seed=_SEED)
    model = p.Instantiate()
    if isinstance(model.body, pipelining_layer.PipeliningLayer):
      model.body.Place(stacks.Devices(), tf.TensorSpec(x.shape, x.dtype))
    model.InstantiateVariables()
    variables = model.VariablesByPath()
    with tf.GradientTape() as tape, fprop_context.Scope(step=1):
      y = model(x)
      loss = tf.reduce_sum(y**2)
    results.append((y, tape.gradient(loss, variables)))
  for y, grads in results[1:]:
    np.testing.assert_allclose(y, results[0][0], atol=1e-12)
    assert grads.keys() == results[0][1].keys()
    for path, g in results[0][1].items():
      np.testing.assert_allclose(grads[path], g, atol=1e-11, err_msg=path)


def testGradientsWaitForTheSlowestTensor():
  """Every tensor of a tuple arrives before it is used."""

  @tf.custom_gradient
  def Slow(x):
    def Wait(dy):
      time.sleep(0.1)
      return dy

    return tf.identity(x), lambda dy: tf.ensure_shape(tf.py_function(Wait, [dy], dy.dtype), x.shape)

  sub = [layers.Without(fn) for fn in (lambda x: (x, Slow(x)), lambda a, b: 3 * a + 4 * b)]
  stack = _Stack(sub, tf.TensorSpec([4]))
  x = tf.ones([4])
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(stack(x))
  np.testing.assert_array_equal(tape.gradient(y, x), [7.0] * 4)


def testBackwardRepeatsTheMasksOfManyDropouts():
  """If an output is zero, so is the gradient of its input: both have the same mask."""
  sub = [dropout.DropoutLayer.Params().Set(keep_prob=0.9)] * 8
  stack = _Stack(sub, tf.TensorSpec([20, 50]), num_stages=2, splits=[4, 8], num_micro_batches=10)
  x = tf.ones([20, 50])
  with tf.GradientTape() as tape, fprop_context.Scope(step=3):
    tape.watch(x)
    y = stack(x)
  zeros = y.numpy() == 0.0
  assert 0.4 < np.mean(zeros) < 0.75
  np.testing.assert_array_equal(tape.gradient(y, x).numpy() == 0.0, zeros)


def testWithoutATapeNothingRunsBackward():
  stack = _Stack([lambda x: 2.0 * x] * 2, tf.TensorSpec([4]))
  x = tf.ones([4])
  stack(x)
  forward = stack.engine.functions.num_traces
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = stack(x)
  assert stack.engine.functions.num_traces == forward
  tape.gradient(y, x)
  assert stack.engine.functions.num_traces > forward


@pytest.mark.parametrize('in_function', [False, True])
def testACustomTrainingLoopTrains(in_function):
  """The documented loop: a user's tape and a Keras optimizer around the layer."""
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.95)
  square = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, activation='TANH', has_bias=True
  )
  head = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=1, activation='NONE')
  sub = [square, drop, square, norm.LayerNorm.Params().Set(input_dim=_DIM), head]
  rng = np.random.default_rng(4)
  x = tf.constant(rng.normal(size=[16, _DIM]), tf.float32)
  labels = tf.sin(tf.reduce_sum(x, axis=-1, keepdims=True))

  def Losses(num_stages):
    p = pipelining_layer.PipeliningLayer.Params().Set(
      name='stack', num_stages=num_stages, num_micro_batches=2, xla=False, sub=sub
    )
    layer = p.Instantiate()
    layer.Place(stacks.Devices(), tf.TensorSpec(x.shape))
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(list(layer.trainable_variables))

    def Step(step):
      with tf.GradientTape() as tape, fprop_context.Scope(step=step):
        loss = tf.reduce_mean((layer(x) - labels) ** 2)
      grads = tape.gradient(loss, layer.trainable_variables)
      optimizer.apply_gradients(zip(grads, layer.trainable_variables, strict=True))
      return loss

    run = tf.function(Step, autograph=False) if in_function else Step
    num_steps = 40 if in_function else 5  # Eager steps take much longer.
    return [float(run(tf.constant(step, tf.int64))) for step in range(num_steps)]

  one_stage, three_stages = Losses(1), Losses(3)
  assert one_stage[-1] < one_stage[0]
  if in_function:
    assert np.mean(one_stage[-5:]) < 0.3 * np.mean(one_stage[:5])
  np.testing.assert_allclose(three_stages, one_stage, rtol=1e-3)


def testMiniBatchesOfOneStepDrawTheirOwnMasks():
  """A user accumulates over mini-batches: the count of micro-batches continues."""
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    num_micro_batches=2,
    xla=False,
    sub=[dropout.DropoutLayer.Params().Set(keep_prob=0.5)],
  )
  layer = p.Instantiate()
  layer.Place(stacks.Devices(), tf.TensorSpec([4, 32]))
  masks = []
  for j in range(3):
    with fprop_context.Scope(step=5, micro_batch=j):
      masks.extend(layer.SplitBatch(layer(tf.ones([4, 32]))))
  alone = []
  for m in range(6):
    with fprop_context.Scope(step=5, micro_batch=m):
      alone.append(layer.layers[0].FProp(layer.layers[0].theta, tf.ones([2, 32])))
  for a, b in zip(masks, alone, strict=True):
    np.testing.assert_array_equal(a, b)
  assert len({m.numpy().tobytes() for m in masks}) == 6


def testWeightsAreReleasedWithTheStack():
  """Also after a traced step: TensorFlow keeps the gradient functions of a trace for good."""

  def Train():
    stack = _Pipeline(2, 2)
    inputs = _Inputs([4, 3])
    stack.Place(stacks.Devices()[:2], *stacks.Specs(inputs))

    @tf.function(autograph=False)
    def Step():
      with tf.GradientTape() as tape, fprop_context.Scope(step=0):
        loss = tf.reduce_sum(stack(*inputs)[0] ** 2)
      return tape.gradient(loss, stack.trainable_variables)

    assert any(g is not None for g in Step())
    return {v.name: weakref.ref(v) for v in stack.trainable_variables}

  references = Train()
  gc.collect()
  assert not [name for name, reference in references.items() if reference() is not None]


def testManyGradientsOfNarrowActivations():
  """A sum of 96 equal numbers of this size in bfloat16 is too large by 7 %."""
  stack = stacks.MakeStack(
    [layers.FnLayer.Params()], num_micro_batches=96, dtype=tf.float32, fprop_dtype=tf.bfloat16
  )
  x = tf.ones([96, layers.DIM], tf.bfloat16)
  stack.Place(stacks.Devices(), tf.TensorSpec(x.shape, x.dtype))
  with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.cast(stack(x), tf.float32))
  (gradient,) = tape.gradient(loss, stack.trainable_variables)
  np.testing.assert_allclose(gradient, 1 / layers.DIM, rtol=1e-2)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
