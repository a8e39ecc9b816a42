# SPDX-License-Identifier: Apache-2.0
"""The policy `layer`: its residuals, one layer recomputed at a time, and the saved memory.

That the gradients are right under it, engine_schedules_test and its neighbours show; how many
products it takes, executed_products_test.
"""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import skip
from lingvo_gpipe.pipeline.stages import (
  layer_backward,
  leaves,
  retraces,
  stage_functions,
  stage_math,
)
from tests import graph_reader
from tests.toys import layers, nested_layers, stacks

pytestmark = pytest.mark.optimized_graphs

_DIM, _N = 8, 6


def _Wide():
  return nested_layers.WideLayer.Params().Set(dim=_DIM)


def _Math(sub, *, trained=None, needs_dx=True, xla=False):
  """(computations, variables) of one stage that holds all the layers."""
  stack = stacks.MakeStack(sub, xla=xla)
  stack.Place(stacks.Devices(), tf.TensorSpec([4, _DIM], tf.float64))
  (s,) = stack.engine.stages
  math = stage_math.StageMath(
    s.layers,
    loss_fn=None,
    exports=(),
    trained=s.trained_mask if trained is None else trained,
    needs_dx=needs_dx,
    do_eval=False,
    seen_shapes=retraces.Retraces(),
    num_weights=[len(tf.nest.flatten(v)) for v in s.variables],
  )
  return math, s.variables


def _Call(math, variables, batch=4):
  """(arguments of a stage function, accumulators)."""
  x = tf.constant(np.random.default_rng(0).normal(size=[batch, _DIM]))
  seeds = tf.stack([tf.range(len(math.layers), dtype=tf.int64)] * 2, axis=1)
  accumulators = [tf.Variable(tf.zeros_like(v)) for v in math.Trained(variables)]
  call = stage_math.StageCall(
    variables,
    nested_map.NestedMap(args=(x,), skips=nested_map.NestedMap()),
    None,
    stage_math.Context(seeds, tf.ones([], tf.float64)),
  )
  return call, accumulators


def _Shapes(residuals):
  return [(t.dtype, *t.shape) for t in residuals]


# ---- what is kept ------------------------------------------------------------------------


@pytest.mark.parametrize('xla', [False, True])
def testEveryTensorIsKeptOnce(xla):
  """A skip that three layers take, and that is the input of the next one, too."""
  pop = skip.PopLayer.Params().Set(key='s')
  sub = [_Wide(), skip.StashLayer.Params().Set(key='s'), _Wide(), pop, pop, pop]
  math, variables = _Math(sub, xla=xla)
  call, _ = _Call(math, variables)
  _, _, residuals = layer_backward.LayerBackward(math, xla).Forward(call)
  # The first layer's output (which is the skip, too), the second one's, and two sums.
  assert _Shapes(residuals) == [(tf.float64, 4, _DIM)] * 4


def testNothingIsKeptOfLayersBelowTheFirstTrainedOne():
  sub = [_Wide()] * _N
  for first in (0, 2, _N - 1):
    mask = [i // 2 >= first for i in range(2 * _N)]
    math, variables = _Math(sub, trained=mask, needs_dx=False)
    call, _ = _Call(math, variables)
    _, _, residuals = layer_backward.LayerBackward(math, False).Forward(call)
    assert len(residuals) == _N - max(first, 1)


# ---- one layer at a time -----------------------------------------------------------------


def _Backward(sub, tmp_path, **options):
  """The executed graphs of B."""
  math, variables = _Math(sub, **options)
  call, accumulators = _Call(math, variables)
  by_layer = layer_backward.LayerBackward(math, False)
  y, _, residuals = by_layer.Forward(call)
  dy = [tf.ones_like(t) for t in leaves.Floats(y)]
  graphs = graph_reader.ExecutedGraphs(
    lambda: by_layer.Backward(call, accumulators, residuals, dy), tmp_path
  )
  assert graphs
  return graphs


def testALayerWaitsForTheGradientsOfTheOneAbove(tmp_path):
  """Its products wait, and so do its random bits, which depend on no gradient."""
  products, draws = graph_reader.NumProductsBefore(_Backward([_Wide()] * _N, tmp_path))
  # Each layer has two again, two for its weights and two for its inputs.
  assert len(products) == 6 * _N
  assert sorted(products)[::6] == [6 * i for i in range(_N)]
  assert sorted(set(draws)) == [6 * i for i in range(_N)]


def testALayerThatWaitsKeepsTheSignOfZero():
  """The angle of (-1, -0) is -pi, and of (-1, 0) pi."""

  fns = [
    lambda w, x: w * x,
    lambda w, x: -tf.nn.relu(-tf.abs(x)) * w,  # -0.0.
    lambda w, x: tf.atan2(x, -tf.ones_like(x)) * w,
    lambda w, x: w * x,
  ]
  sub = [layers.FnLayer.Params().Set(fn=fn) for fn in fns]
  x, side = tf.ones([4, layers.DIM], tf.float64), tf.ones([4], tf.float64)
  results = [
    stacks.Train(stacks.MakeStack(sub, remat_policy=policy, xla=True), (x,), side)
    for policy in ('stage', 'layer')
  ]
  stacks.CheckEqual(*results)


def testFrozenLayersHaveNoProductsForTheirWeights(tmp_path):
  trained = [False, False, True, False, False, False, True, True]
  graphs = _Backward([_Wide()] * 4, tmp_path, trained=trained, needs_dx=False)
  # Nothing for the first layer. The second one: two again, one towards its first weight, which is
  # trained, and that one's; nothing towards its input.
  assert graph_reader.NumProducts(graphs) == 0 + (2 + 1 + 1) + (2 + 2) + (2 + 2 + 2)


def testBackwardOfALayerAtATimeTakesLessMemory():
  """Measured by the lives of the buffers in the compiled program."""
  batch = 64
  inner = batch * 8 * _DIM * 8  # One of the wide tensors of a layer.
  peaks = {}
  for num_layers in (_N // 2, _N):
    math, variables = _Math([_Wide()] * num_layers, xla=True)
    call, sinks = _Call(math, variables, batch)
    by_layer = layer_backward.LayerBackward(math, True)
    y, _, residuals = by_layer.Forward(call)
    dy = leaves.Floats(y)
    peaks[num_layers] = tuple(
      graph_reader.PeakBytesOfXla(
        function.experimental_get_compiler_ir(call, sinks, *args)(stage='optimized_hlo')
      )
      for function, args in (
        (stage_functions.StageFunctions(math, True).Backward, (None, dy)),
        (by_layer.Backward, (residuals, dy)),
      )
    )
  by_stage, by_layer = zip(*peaks.values(), strict=True)
  # Each layer more is one or more wide tensors more, or none.
  assert by_stage[1] - by_stage[0] >= _N // 2 * inner
  assert by_layer[1] - by_layer[0] < inner
  assert by_layer[1] < by_stage[1] / 2


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
