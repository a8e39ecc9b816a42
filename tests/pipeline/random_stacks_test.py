# SPDX-License-Identifier: Apache-2.0
"""Same result for random pipelines: everything that the engine offers, together (design 4.15)."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import fprop_context
from lingvo_gpipe.pipeline import micro_batch, stage
from tests import pipeline_training, random_stacks


def _Stack(made):
  return pipeline_training.MakeStack(made.sub, **made.options)


def CheckTraining(made):
  """Losses, metrics, auxiliary losses and every gradient."""
  options = made.options
  actual = pipeline_training.Train(
    _Stack(made), made.inputs, made.side, made.Loss, step=made.step, is_trained=made.is_trained
  )
  expected = pipeline_training.Reference(
    made.sub,
    options['num_micro_batches'],
    made.inputs,
    made.side,
    made.Loss,
    step=made.step,
    batch_dim=options['batch_dim'],
    ties=options['ties'],
    is_trained=made.is_trained,
  )
  pipeline_training.CheckEqual(actual, expected, bound=_Bound(made), may_be_zero=True)


def _Bound(made):
  return 1e-6 if 'float32' in made.features else 1e-10


def _PlainOutputs(made, layer, theta, inputs, **scope):
  """The whole batch's outputs of the plain layers, micro-batch by micro-batch."""
  m, batch_dim = made.options['num_micro_batches'], made.options['batch_dim']
  pieces = []
  for i, args in enumerate(micro_batch.Split(inputs, m, batch_dim)):
    with fprop_context.Scope(micro_batch=i, **scope):
      pieces.append(stage.AsTuple(layer.FProp(theta, *args)))
  return micro_batch.Merge(pieces, batch_dim)


def _Single(outputs):
  """A tuple of outputs as FProp returns it."""
  return outputs[0] if len(outputs) == 1 else outputs


def _CheckClose(actual, expected, bound):
  tf.nest.assert_same_structure(actual, expected)
  for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
    if b is not None:
      assert a.dtype == b.dtype
      np.testing.assert_allclose(a, b, rtol=10 * bound, atol=bound)


def CheckTape(made):
  """FProp under a user's tape, whose gradients come from the loss of the whole batch."""
  stack = _Stack(made)
  stack.Place(pipeline_training.Devices(), *pipeline_training.Specs(made.inputs))
  layer, theta_fn = pipeline_training.PlainLayers(made.sub, made.options['ties'])
  results = []
  for variables, run in (
    (stack.VariablesByPath(), lambda: stack(*made.inputs)),
    (
      layer.VariablesByPath(),
      lambda: _Single(_PlainOutputs(made, layer, theta_fn(), made.inputs, step=made.step)),
    ),
  ):
    floats = [x for x in tf.nest.flatten(made.inputs) if x is not None and x.dtype.is_floating]
    trained = {p: variables[p] for p in pipeline_training.TrainedVariables(layer, made.options['ties'])}
    with tf.GradientTape() as tape, fprop_context.Scope(step=made.step):
      tape.watch(floats)
      outputs = run()
      loss = made.Loss([{}], outputs, made.side)['loss'][0]
    grads = tape.gradient(loss, [trained, floats], unconnected_gradients='zero')
    results.append((outputs, tf.nest.map_structure(tf.convert_to_tensor, grads)))
  _CheckClose(results[0], results[1], _Bound(made))


def CheckEvaluation(made):
  """Predict and Evaluate."""
  stack = _Stack(made)
  stack.Place(
    pipeline_training.Devices(), *pipeline_training.Specs(made.inputs), loss_fn=made.Loss
  )
  layer, theta_fn = pipeline_training.PlainLayers(made.sub, made.options['ties'])
  theta, bound = theta_fn(), _Bound(made)
  outputs = _PlainOutputs(made, layer, theta, made.inputs, do_eval=True)
  _CheckClose(stack.Predict(*made.inputs), _Single(outputs), bound)
  sums = stack.engine.Evaluate(stack.SplitBatch(made.inputs), stack.SplitBatch(made.side))
  pieces = zip(stack.SplitBatch(outputs), stack.SplitBatch(made.side), strict=True)
  # Auxiliary losses are reported, too; aux_loss_test looks at their values.
  expected = [made.Loss(theta.layers, y, side) for y, side in pieces]
  for name in ('loss', 'greatest'):
    total = sum(float(metrics[name][0] * metrics[name][1]) for metrics in expected)
    np.testing.assert_allclose(sums[name][0], total, rtol=10 * bound)


SEEDS = tuple(range(24))


@pytest.mark.parametrize('seed', SEEDS)
def testTraining(seed):
  made = random_stacks.Make(seed)
  try:
    CheckTraining(made)
  except BaseException as e:
    e.add_note(made.Text())
    raise


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
