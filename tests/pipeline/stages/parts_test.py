# SPDX-License-Identifier: Apache-2.0
"""Layers and parts of layers that backward recomputes by choice: same result, fewer residuals."""

import sys

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import transformer
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import layer_backward, retraces, split_backward, stage_math
from tests.toys import keras_fits, stacks

_DIM, _TIME, _BATCH, _HEADS, _M = 4, 6, 4, 2, 2
# Two layers or one: all of it, or parts. (random_stacks_test recomputes nothing of some layers.)
_PARTS = [
  rematerialisation.ByLayer((None, frozenset({'scores'}))),
  rematerialisation.ByLayer((frozenset({'feed_forward', 'scores'}),)),
]


def _Block():
  return transformer.TransformerLayer.Params().Set(
    input_dim=_DIM, hidden_dim=8, num_heads=_HEADS, is_causal=True, residual_dropout_prob=0.5
  )


def _Inputs():
  return (tf.random.stateless_normal([_BATCH, _TIME, _DIM], [1, 2], dtype=tf.float64),)


# The first stage of 1f1b_fused has a whole backward, and the last one with its forward.
@pytest.mark.parametrize('schedule, xla', [('1f1b_fused', True), ('zb_h1', False)])
def testGradientsEqualThePlainModels(schedule, xla):
  sub, side = [_Block()] * 3, stacks.ExampleWeights(_BATCH)
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=_M, splits=[2, 3], xla=xla)
  expected = stacks.Reference(sub, _M, _Inputs(), side)
  stacks.CheckWays(stack, _Inputs(), side, [(schedule, _PARTS)], expected)


@pytest.mark.parametrize('kind', [layer_backward.LayerBackward, split_backward.SplitBackward])
def testRecomputedScoresAreNotKept(kind):
  stack = stacks.MakeStack([_Block()] * 2)
  stack.Place(stacks.Devices(), *stacks.Specs(_Inputs()))
  (s,) = stack.engine.stages
  math = stage_math.StageMath(
    s.layers,
    loss_fn=None,
    exports=(),
    trained=s.trained_mask,
    needs_dx=True,
    do_eval=False,
    seen_shapes=retraces.Retraces(),
    num_weights=[len(tf.nest.flatten(v)) for v in s.variables],
  )
  x = nested_map.NestedMap(args=_Inputs(), skips=nested_map.NestedMap())
  context = stage_math.Context(tf.ones([2, 2], tf.int64), tf.ones([], tf.float64))
  call = stage_math.StageCall(s.variables, x, None, context)

  def Shapes(*parts):
    residuals = kind(math, False, parts).Forward(call)[2]
    return [tuple(t.shape) for t in residuals]

  scores, hidden = (_BATCH, _HEADS, _TIME, _TIME), (_BATCH, _TIME, 8)
  everything = Shapes(frozenset(), frozenset())
  assert everything.count(scores) >= 2
  # One part of each layer: what is kept is the other layer's.
  some = Shapes(frozenset({'feed_forward'}), frozenset({'scores'}))
  for shape in (scores, hidden):
    assert 0 < some.count(shape) < everything.count(shape)
  both = frozenset({'scores', 'feed_forward'})
  # A layer that recomputes both parts keeps neither, and a layer that is recomputed keeps nothing.
  least = Shapes(both, None)
  assert not {scores, hidden} & set(least) and len(least) < len(everything)


def testOptionsOfALayerNameItsParts():
  stack = stacks.MakeStack([_Block()] * 2, num_micro_batches=_M)
  costs = layer_costs.LayerCosts(stack.layers, stacks.Specs(_Inputs()))
  first, second = costs.Bytes(layer_costs.Weights(), xla=False, with_options=True)
  options = {x.recomputed: x for x in first.options}
  parts = [frozenset(), {'scores'}, {'feed_forward'}, {'scores', 'feed_forward'}]
  assert options.keys() == {None, *map(frozenset, parts)}
  everything = options[frozenset()]
  # Softmax in float64.
  scores = _BATCH * _HEADS * _TIME * _TIME * 8
  assert everything.kept_bytes - options[frozenset({'scores'})].kept_bytes >= scores
  assert everything.again == 0 < options[frozenset({'scores'})].again < 1 == options[None].again
  assert options[None].kept_bytes == 0
  # The loss keeps the outputs of the last layer, unless that is recomputed.
  last = {x.recomputed: x.kept_bytes for x in second.options}
  outputs = _BATCH * _TIME * _DIM * 8
  assert last[frozenset()] >= everything.kept_bytes + outputs and last[None] == 0


class _KerasBlock(keras.layers.Layer):
  """A pre-norm block with an attention and a feed-forward part, gated or not."""

  def __init__(self, is_gated, **kwargs):
    super().__init__(**kwargs)
    self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
    self.attention = keras.layers.MultiHeadAttention(_HEADS, 2)
    shape = {'equation': 'btd,df->btf', 'output_shape': (None, 4 * _DIM), 'bias_axes': 'f'}
    self.wide = [keras.layers.EinsumDense(**shape) for _ in range(1 + is_gated)]
    self.narrow = keras.layers.Dense(_DIM)

  def build(self, shape):
    for layer in (*self.norms, *self.wide):
      layer.build(shape)
    self.attention.build(shape, shape)
    self.narrow.build((*shape[:-1], 4 * _DIM))

  def call(self, x):
    y = self.norms[0](x)
    x = x + self.attention(y, y)
    y = self.norms[1](x)
    first, *gate = (layer(y) for layer in self.wide)
    y = keras.ops.gelu(first)
    return x + self.narrow(y * gate[0] if gate else y)


def testPartsOfKerasLayers():
  """An attention, and blocks without a gate and with one."""
  x, y = keras_fits.Floats(4, _TIME, _DIM), keras_fits.Floats(4, _TIME, _DIM, seed=1)
  losses = []
  scores, parts = frozenset({'scores'}), frozenset({'scores', 'feed_forward'})

  def Model():
    inputs = keras.Input([_TIME, _DIM])
    # Backward must draw the same mask again.
    x = keras.layers.MultiHeadAttention(_HEADS, 2, dropout=0.1)(inputs, inputs)
    for is_gated in (False, True):
      x = _KerasBlock(is_gated, name=f'block_{is_gated:d}')(x)
    return keras.Model(inputs, x)

  nothing = frozenset()
  for of_layers in ((nothing,) * 3, (scores, frozenset({'feed_forward'}), parts)):
    pipe = keras_fits.Pipe(
      keras_fits.Seeded(Model), num_micro_batches=1, schedule='1f1b', splits=[2, 3]
    )
    pipe.compile(optimizer=keras_fits.Sgd(), loss='mse')
    pipe._Place(tf.constant(x))  # As `predict` does before it traces the model.
    pipe.stack.engine.remat_policy = [
      rematerialisation.ByLayer(of_layers[:2]),
      rematerialisation.ByLayer(of_layers[2:]),
    ]
    losses.append([pipe.train_on_batch(x, y) for _ in range(2)])
  assert losses[1] == pytest.approx(losses[0], rel=1e-6)
  costs = layer_costs.LayerCosts(pipe.stack.layers, [tf.TensorSpec([2, _TIME, _DIM])])
  attention, *blocks = costs.Bytes(layer_costs.Weights(), xla=False, with_options=True)
  assert scores in {option.recomputed for option in attention.options}
  for num_wide, layer in enumerate(blocks, 1):
    by_part = {option.recomputed: option for option in layer.options}
    # Without the part, backward repeats the wide layers.
    wide = num_wide * 2 * _TIME * 4 * _DIM * 4
    everything, without = by_part[frozenset()], by_part[frozenset({'feed_forward'})]
    assert everything.kept_bytes - without.kept_bytes >= wide
    assert 0 < without.again < 0.6
    assert by_part.keys() >= {scores, parts}


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
