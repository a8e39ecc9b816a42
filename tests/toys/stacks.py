# SPDX-License-Identifier: Apache-2.0
"""Stacks of layers: one training pass of the engine, and its reference.

The reference runs the layers one after the other, in eager code on one device, micro-batch by
micro-batch: no engine, no tf.function, no recomputation. Both return ({metric: [sum of
value * weight, sum of weight]}, {path: gradient of the sum over micro-batches of
w_m (loss_m + sum of c_j aux_jm)}).
"""

import collections
import itertools

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import sequential
from lingvo_gpipe.pipeline import layer_statistics, pipelining_layer, replicas
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import micro_batch

SEED, STEP = 5, 7

# The last references: [(arguments, tensors, result)].
_REFERENCES = collections.deque(maxlen=20)


def Devices():
  return [d.name for d in tf.config.list_logical_devices('CPU')]


def Specs(nest):
  return tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest
  )


def MakeStack(sub, **options):
  """Returns a PipeliningLayer; by default in float64 and without XLA."""
  options = {'xla': False, 'dtype': tf.float64, 'random_seed': SEED, **options}
  return (
    pipelining_layer.PipeliningLayer.Params().Set(name='stack', sub=sub, **options).Instantiate()
  )


def SquareLoss(theta, outputs, side):
  """Returns the mean square of the first output; `side` has the weight of each example."""
  del theta
  y = tf.reduce_mean(tf.reshape(outputs[0], [outputs[0].shape[0], -1]) ** 2, axis=1)
  total = tf.reduce_sum(side)
  loss = tf.math.divide_no_nan(tf.reduce_sum(y * tf.cast(side, y.dtype)), tf.cast(total, y.dtype))
  return {'loss': (loss, total)}


def ExampleWeights(batch_size, dtype=tf.float64):
  """Returns side inputs for SquareLoss: example weights, so that micro-batches differ in weight."""
  return tf.constant(np.random.default_rng(9).uniform(0.5, 2.0, [batch_size]), dtype)


def LossWeight(side):
  """Returns w_m, which is known from the labels before the first forward."""
  return tf.reduce_sum(getattr(side, 'weights', side))


def PlaceReplicas(stack, inputs, num_replicas):
  """Places the stack in `num_replicas` replicas, for inputs of these shapes; returns it."""
  stack.Place(
    Devices()[: num_replicas * stack.num_devices],
    *Specs(inputs),
    loss_fn=SquareLoss,
    num_replicas=num_replicas,
  )
  return stack


def Gradients(stack):
  """Returns {path: accumulated gradient}; checks that each is on the device of its variable."""
  grads = {}
  for s in stack.engine.holders:
    for (path, variable), accumulator in zip(s.trained.items(), s.accumulators, strict=True):
      assert variable.device == accumulator.device
      grads[path] = accumulator.numpy()
  return grads


def MicroBatches(inputs, sides, weights):
  """Returns the engine's micro-batches, of lists with one entry for each."""
  return list(itertools.starmap(micro_batch.MicroBatch, zip(inputs, sides, weights, strict=True)))


def RunStep(engine, inputs, sides, weights, step):
  """Runs a training step without the update of the weights; returns the sums of the metrics.

  The gradients of all replicas end in the accumulators, and layers' state follows the mini-batch.
  """
  sums, layer_sums, _ = engine.Accumulate(MicroBatches(inputs, sides, weights), step)
  replicas.GradientSum(engine.replicas).Add()
  layer_statistics.Assign(engine, layer_statistics.Next(engine, layer_sums))
  return sums


def StageFunctions(stack, s, recompute=rematerialisation.Recompute.STAGE):
  """Returns the functions with which a stage of a placed stack trains."""
  return stack.engine.functions.For(s, recompute, do_eval=False, with_loss=True)


def StepFunction(stack, num_micro_batches=None):
  """Returns a tf.function (inputs, side, step) -> sums that takes one training step.

  `num_micro_batches` overrides the number in the Params of the stack.
  """
  stack.engine.MakeAccumulators()  # Created during tracing, they would cause a second trace.

  @tf.function(autograph=False)
  def Step(inputs, side, step):
    count, batch_dim = num_micro_batches or stack.num_micro_batches, stack.params.batch_dim
    pieces, sides = (micro_batch.Split(nest, count, batch_dim) for nest in (inputs, side))
    return RunStep(stack.engine, pieces, sides, [LossWeight(s) for s in sides], step)

  return Step


def TakeStep(stack, inputs, side, step=STEP):
  """Takes one training step of a placed stack; returns (sums, gradients) of the engine."""
  sums = StepFunction(stack)(inputs, side, tf.constant(step, tf.int64))
  return {name: value.numpy() for name, value in sums.items()}, Gradients(stack)


def Train(stack, inputs, side, loss_fn=SquareLoss, *, step=STEP, is_trained=None, policy=None):
  """Places the stack and trains; returns (sums, gradients) of the engine.

  `policy` takes the place of `remat_policy`.
  """
  weights = layer_costs.Weights(is_trained)
  stack.Place(Devices(), *Specs(inputs), loss_fn=loss_fn, weights=weights)
  stack.engine.remat_policy = policy or stack.engine.remat_policy
  run = StepFunction(stack)
  run(
    inputs, side, tf.constant(step, tf.int64)
  )  # The next run must start from cleared accumulators.
  sums = run(inputs, side, tf.constant(step, tf.int64))
  return {name: value.numpy() for name, value in sums.items()}, Gradients(stack)


def Retrain(stack, inputs, side, schedule, policy, *, step=STEP, num_micro_batches=None):
  """Trains a placed stack by another schedule and policy; returns (sums, gradients).

  The stages' functions, whose traces take most of the time, are traced for the first of them. The
  accumulators hold something else before.
  """
  engine = stack.engine
  # There is no other way to run several schedules with the same traces.
  engine._schedule, engine.remat_policy = schedule, policy
  run = StepFunction(stack, num_micro_batches)
  for replica in engine.replicas:
    for accumulator in (a for s in replica.holders for a in s.AllAccumulators()):
      accumulator.assign(tf.ones_like(accumulator))
  sums = run(inputs, side, tf.constant(step, tf.int64))
  return {name: value.numpy() for name, value in sums.items()}, Gradients(stack)


def CheckWays(stack, inputs, side, ways, expected, *, loss_fn=SquareLoss, step=STEP):
  """Places the stack, and checks its result under each of some (schedule, policy)."""
  stack.Place(Devices(), *Specs(inputs), loss_fn=loss_fn)
  for schedule, policy in ways:
    try:
      CheckEqual(Retrain(stack, inputs, side, schedule, policy, step=step), expected)
    except Exception as error:
      error.add_note(f'schedule {schedule}, policy {policy}')
      raise


def Evaluate(stack, inputs, side):
  """Returns the sums of the metrics in evaluation mode; the stack was placed with a loss."""
  sides = stack.SplitBatch(side)
  weights = [LossWeight(s) for s in sides]
  return stack.engine.Evaluate(MicroBatches(stack.SplitBatch(inputs), sides, weights))


def State(layer):
  """Returns {path: value} of the variables that are not trainable."""
  return {path: v.numpy() for path, v in layer.VariablesByPath().items() if not v.trainable}


def PlainLayers(sub, ties=(), **options):
  """Returns a SequentialLayer of the same layers, and a function that returns its theta.

  Tied weights are one tensor in theta.
  """
  options = {'dtype': tf.float64, 'random_seed': SEED, **options}
  layer = sequential.SequentialLayer.Params().Set(name='stack', sub=sub, **options).Instantiate()
  layer.InstantiateVariables()
  variables = layer.vars
  for tied, owner in ties:
    variables.Set(tied, variables.GetItem(owner))
  return layer, lambda: layer.ThetaFrom(variables)


def TrainedVariables(layer, ties=(), is_trained=None):
  """Returns {path: variable} of the trained variables of a SequentialLayer; of ties, the owners."""
  tied = {f'{layer.path}.{path}' for path, _ in ties}
  return {
    path: v
    for path, v in layer.VariablesByPath().items()
    if v.trainable and path not in tied and (is_trained is None or is_trained(path))
  }


def Reference(
  sub,
  num_micro_batches,
  inputs,
  side,
  loss_fn=SquareLoss,
  *,
  step=STEP,
  state=None,
  batch_dim=0,
  ties=(),
  is_trained=None,
  **options,
):
  """Returns (sums, gradients) of a SequentialLayer of the same layers.

  Results are remembered: tests ask for one reference for many schedules and policies.

  Args:
    sub: Params of the layers.
    num_micro_batches: number of micro-batches.
    inputs: a nest of tensors for each argument of the first layer.
    side: the side inputs of the loss.
    loss_fn: the loss.
    step: the training step.
    state: a dict that receives the State after one mini-batch.
    batch_dim: the batch dimension of all tensors.
    ties: pairs of paths (tied weight, owner).
    is_trained: predicate over paths; None if all trainable weights are trained.
    **options: Params of the SequentialLayer.
  """
  batch = tf.nest.flatten((inputs, side))
  arguments = [sub, num_micro_batches, loss_fn, step, batch_dim, ties, is_trained, options]
  for known_arguments, known_batch, result in _REFERENCES:
    if state is None and known_arguments == arguments and _AreEqual(known_batch, batch):
      return result
  result = _ComputeReference(
    sub, num_micro_batches, inputs, side, loss_fn, step, state, batch_dim, ties, is_trained, options
  )
  if state is None:
    _REFERENCES.append((arguments, batch, result))
  return result


def _AreEqual(tensors, other_tensors):
  """Whether two lists of tensors, or None, are equal in dtype, shape and value."""
  return len(tensors) == len(other_tensors) and all(
    (a is None and b is None)
    or (
      a is not None
      and b is not None
      and a.dtype == b.dtype
      and np.array_equal(a.numpy(), b.numpy())
    )
    for a, b in zip(tensors, other_tensors, strict=True)
  )


def _ComputeReference(
  sub, num_micro_batches, inputs, side, loss_fn, step, state, batch_dim, ties, is_trained, options
):
  layer, theta_fn = PlainLayers(sub, ties, **options)
  sums, contexts = {}, []
  with tf.GradientTape() as tape:
    objective = tf.zeros([], layer.params.dtype)
    theta = theta_fn()
    pieces = zip(
      micro_batch.Split(inputs, num_micro_batches, batch_dim),
      micro_batch.Split(side, num_micro_batches, batch_dim),
      strict=True,
    )
    for m, (args, s) in enumerate(pieces):
      with fprop_context.Scope(step=step, micro_batch=m) as context:
        outputs = layer.FProp(theta, *args)
      contexts.append(context)
      outputs = outputs if isinstance(outputs, tuple) else (outputs,)
      metrics = dict(loss_fn(theta.layers, outputs, s))
      weight = LossWeight(s)
      total = tf.cast(metrics['loss'][0], objective.dtype)
      for owner, name, value, coefficient in context.aux_losses:
        total += coefficient * tf.cast(value, objective.dtype)
        metrics[f'{owner.path}.{name}'] = (value, weight)
      objective += tf.cast(weight, objective.dtype) * total
      for name, pair in metrics.items():
        sums.setdefault(name, []).append([float(pair[0]) * float(pair[1]), float(pair[1])])
  variables = TrainedVariables(layer, ties, is_trained)
  grads = tape.gradient(objective, variables, unconnected_gradients='zero')
  if state is not None:
    fprop_context.UpdateLayers(*contexts)
    state.update(State(layer))
  return (
    {name: np.sum(s, axis=0) for name, s in sums.items()},
    {path: tf.convert_to_tensor(g).numpy() for path, g in grads.items()},
  )


def GlobalNorm(grads):
  return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))


def CheckEqual(actual, expected, bound=1e-10, may_be_zero=False):
  """Checks every gradient and the sums of every metric in float64.

  An error in a gradient may be at most `bound` times the global norm of the gradients. With
  `may_be_zero` all gradients may be zero, and then must be.
  """
  sums, grads = actual
  expected_sums, expected_grads = expected
  assert sums.keys() == expected_sums.keys()
  for name, pair in expected_sums.items():
    np.testing.assert_allclose(sums[name], pair, rtol=max(bound, 1e-9), atol=1e-12, err_msg=name)
  assert grads.keys() == expected_grads.keys()
  norm = GlobalNorm(expected_grads)
  assert norm > 0 or may_be_zero
  for path, g0 in expected_grads.items():
    assert grads[path].shape == g0.shape
    error = np.abs(grads[path] - g0).max()
    assert error <= bound * norm, f'{path}: {error} of {norm}'


def CheckAnyDiffers(grads, other_grads):
  """Checks that some gradient differs clearly: the opposite, for tests of the tests."""
  error = max(np.abs(grads[path] - g).max() for path, g in other_grads.items())
  assert error > 1e-3 * GlobalNorm(other_grads)
