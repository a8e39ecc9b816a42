# SPDX-License-Identifier: Apache-2.0
"""The policy `layer`: what it keeps, that layers are computed again one by one, and what it saves.

That the gradients are right under it, engine_schedules_test and its neighbours show; how many
products it takes, recomputation_test.
"""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params
from lingvo_gpipe.layers import dropout, skip
from lingvo_gpipe.pipeline.stages import layer_backward, leaves, stage_functions
from tests import graph_reader
from tests.toys import stacks

_DIM, _N = 8, 6


class _Wide(base_layer.BaseLayer):
  """Two products with a wide, masked layer between."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('a', weight_params.WeightParams([_DIM, 8 * _DIM]))
    self.CreateVariable('b', weight_params.WeightParams([8 * _DIM, _DIM]))
    self.CreateChild('drop', dropout.DropoutLayer.Params().Set(keep_prob=0.5))

  def FProp(self, theta, x):
    h = self.drop.FProp(theta.drop, tf.tanh(tf.matmul(x, theta.a)))
    return tf.tanh(tf.matmul(h, theta.b))


def _Functions(sub, *, trained=None, needs_dx=True, xla=False):
  """(functions, variables, trained variables) of one stage that holds all the layers."""
  stack = stacks.MakeStack(sub, xla=xla)
  stack.Place(stacks.Devices(), tf.TensorSpec([4, _DIM], tf.float64))
  (s,) = stack.engine.stages
  mask = s.trained_mask if trained is None else trained
  functions = stage_functions.StageFunctions(
    s.layers,
    loss_fn=None,
    exports=(),
    trained=mask,
    needs_dx=needs_dx,
    do_eval=False,
    xla=xla,
  )
  return functions, s.variables


def _Arguments(functions, variables, batch=4):
  """((x, side, context), accumulators)."""
  x = tf.constant(np.random.default_rng(0).normal(size=[batch, _DIM]))
  seeds = tf.stack([tf.range(len(functions.layers), dtype=tf.int64)] * 2, axis=1)
  context = stage_functions.Context(seeds, tf.ones([], tf.float64))
  accumulators = [tf.Variable(tf.zeros_like(v)) for v in functions.Trained(variables)]
  return (
    nested_map.NestedMap(args=(x,), skips=nested_map.NestedMap()),
    None,
    context,
  ), accumulators


def _Shapes(kept):
  return [(t.dtype, *t.shape) for t in kept]


# ---- what is kept ------------------------------------------------------------------------


@pytest.mark.parametrize('xla', [False, True])
def testEveryTensorIsKeptOnce(xla):
  """A skip that three layers take, and that is the input of the next one, too."""
  pop = skip.PopLayer.Params().Set(key='s')
  sub = [_Wide.Params(), skip.StashLayer.Params().Set(key='s'), _Wide.Params(), pop, pop, pop]
  functions, variables = _Functions(sub, xla=xla)
  arguments, _ = _Arguments(functions, variables)
  _, _, kept = layer_backward.LayerBackward(functions, xla).ForwardKeep(variables, *arguments)
  # The first layer's output (which is the skip, too), the second one's, and two sums.
  assert _Shapes(kept) == [(tf.float64, 4, _DIM)] * 4


def testNothingIsKeptOfLayersBelowTheFirstTrainedOne():
  sub = [_Wide.Params()] * _N
  for first in (0, 2, _N - 1):
    mask = [i // 2 >= first for i in range(2 * _N)]
    functions, variables = _Functions(sub, trained=mask, needs_dx=False)
    arguments, _ = _Arguments(functions, variables)
    _, _, kept = layer_backward.LayerBackward(functions, False).ForwardKeep(variables, *arguments)
    assert len(kept) == _N - max(first, 1)


# ---- one layer at a time -----------------------------------------------------------------


def _Backward(sub, tmp_path, **options):
  """The executed graphs of B."""
  functions, variables = _Functions(sub, **options)
  arguments, accumulators = _Arguments(functions, variables)
  by_layer = layer_backward.LayerBackward(functions, False)
  y, _, kept = by_layer.ForwardKeep(variables, *arguments)
  dy = [tf.ones_like(t) for t in leaves.Floats(y)]
  graphs = graph_reader.ExecutedGraphs(
    lambda: by_layer.BackwardKept(variables, accumulators, *arguments, kept, dy), tmp_path
  )
  assert graphs
  return graphs


def testALayerWaitsForTheGradientsOfTheOneAbove(tmp_path):
  """Its products, and its random bits, which follow from no gradient."""
  products, draws = graph_reader.NumProductsBefore(_Backward([_Wide.Params()] * _N, tmp_path))
  # Each layer has two again, two for its weights and two for its inputs.
  assert len(products) == 6 * _N
  assert sorted(products)[::6] == [6 * i for i in range(_N)]
  assert sorted(set(draws)) == [6 * i for i in range(_N)]


def testFrozenLayersHaveNoProductsForTheirWeights(tmp_path):
  trained = [False, False, True, False, False, False, True, True]
  graphs = _Backward([_Wide.Params()] * 4, tmp_path, trained=trained, needs_dx=False)
  # Nothing for the first layer. The second one: two again, one towards its first weight, which is
  # trained, and that one's; nothing towards its input.
  assert graph_reader.NumProducts(graphs) == 0 + (2 + 1 + 1) + (2 + 2) + (2 + 2 + 2)


def testBackwardOfALayerAtATimeTakesLessMemory():
  """By the lives of the buffers in what XLA compiled."""
  batch = 64
  inner = batch * 8 * _DIM * 8  # One of the wide tensors of a layer.
  peaks = {}
  for num_layers in (_N // 2, _N):
    functions, variables = _Functions([_Wide.Params()] * num_layers, xla=True)
    arguments, sinks = _Arguments(functions, variables, batch)
    by_layer = layer_backward.LayerBackward(functions, True)
    y, _, kept = by_layer.ForwardKeep(variables, *arguments)
    dy = leaves.Floats(y)
    peaks[num_layers] = tuple(
      graph_reader.PeakBytesOfXla(
        function.experimental_get_compiler_ir(variables, sinks, *args)(stage='optimized_hlo')
      )
      for function, args in (
        (functions.Backward, (*arguments, dy)),
        (by_layer.BackwardKept, (*arguments, kept, dy)),
      )
    )
  by_stage, by_layer = zip(*peaks.values(), strict=True)
  # Each layer more is one or more wide tensors more, or none.
  assert by_stage[1] - by_stage[0] >= _N // 2 * inner
  assert by_layer[1] - by_layer[0] < inner
  assert by_layer[1] < by_stage[1] / 2


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
