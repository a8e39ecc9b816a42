# SPDX-License-Identifier: Apache-2.0
"""Properties that every layer in lingvo_gpipe/layers must have; a class without a row here fails.

A row of CATALOGUE is: class, the Params that differ from the defaults, the input specs, and the
number of floating point operations of FProp by formula. A floating spec called 'paddings' gets
zeros and ones, an integer spec gets ids below 5.
"""

import importlib
import inspect
import math
import pkgutil
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import layers
from lingvo_gpipe.core import base_layer, fprop_context, hyperparams, nested_map
from lingvo_gpipe.layers import (
  activation_layer,
  attention,
  batch_norm,
  conv,
  conv_batch_norm,
  drop_path,
  dropout,
  embedding,
  factorized_reduction,
  flatten,
  linear,
  norm,
  pooling,
  sequential,
  skip,
  transformer,
  transformer_decoder,
)
from lingvo_gpipe.layers.keras import keras_cell_layer
from tests import naming

BATCH, TIME, DIM = 3, 6, 8

X = tf.TensorSpec([BATCH, TIME, DIM], tf.float32)
HIDDEN = tf.TensorSpec([BATCH, TIME, 12], tf.float32)
IDS = tf.TensorSpec([BATCH, TIME], tf.int32)
IMAGES = tf.TensorSpec([BATCH, 6, 5, DIM], tf.float32)
PADDINGS = tf.TensorSpec([BATCH, TIME], tf.float32, name='paddings')
MASK = tf.TensorSpec([BATCH, 1, TIME, TIME], tf.bool)
SOURCE = tf.TensorSpec([BATCH, 4, DIM], tf.float32)
SOURCE_PADDINGS = tf.TensorSpec([BATCH, 4], tf.float32, name='paddings')

ATTENTION = {'input_dim': DIM, 'num_heads': 2, 'atten_dropout_prob': 0.1}
ATTENTION_BLOCK = {'input_dim': DIM, 'num_heads': 2, 'residual_dropout_prob': 0.1}
FEED_FORWARD = {'input_dim': DIM, 'hidden_dim': 12, 'residual_dropout_prob': 0.1}
BLOCK = {**ATTENTION_BLOCK, **FEED_FORWARD}
# Vectors and elements of X, and elements of IMAGES.
N, SIZE, IMAGES_SIZE = BATCH * TIME, BATCH * TIME * DIM, BATCH * 6 * 5 * DIM
# Elements of the attention weights of two heads, and of the mask that all heads share.
WEIGHTS, MASK_SIZE = BATCH * 2 * TIME * TIME, BATCH * TIME * TIME
NORM = 7 * SIZE + 2 * N


def _Product(dim_in, dim_out, n=N):
  """Operations of the product of `n` vectors with a matrix; a multiply-add counts as two."""
  return 2 * n * dim_in * dim_out


def _Attention(key_time):
  """Two projections with bias of queries and outputs, and two of keys and values; attention.

  Attention scales the queries and makes two products and a masked softmax of 6 operations.
  """
  keys = BATCH * key_time
  projections = 2 * (_Product(DIM, DIM) + SIZE) + 2 * (_Product(DIM, DIM, keys) + keys * DIM)
  return projections + SIZE + 4 * SIZE * key_time + 6 * (BATCH * 2 * TIME * key_time)


# LayerNorm before a part of a block; dropout and the residual sum after it.
AROUND = NORM + 3 * SIZE + SIZE
HIDDEN_FLOPS = NORM + _Product(DIM, 12) + 2 * N * 12
OUTPUT_FLOPS = _Product(12, DIM) + SIZE + (AROUND - NORM)
FEED_FORWARD_FLOPS = HIDDEN_FLOPS + OUTPUT_FLOPS
# Attention under a causal mask, paddings and segments.
BLOCK_FLOPS = _Attention(TIME) + 3 * MASK_SIZE + AROUND + FEED_FORWARD_FLOPS

CATALOGUE = [
  (linear.LinearLayer, {'input_dim': DIM, 'output_dim': 5}, [X], _Product(DIM, 5)),
  (
    linear.ProjectionLayer,
    {'input_dim': DIM, 'output_dim': 5, 'has_bias': True},
    [X],
    _Product(DIM, 5) + 2 * N * 5,
  ),
  (
    linear.ProjectionLayer,
    {'input_dim': DIM, 'output_dim': 5, 'activation': 'GELU'},
    [X, PADDINGS],
    _Product(DIM, 5) + (5 + 1) * N * 5,
  ),
  (
    linear.FeedForwardNet,
    {'input_dim': DIM, 'hidden_layer_dims': [7, 5]},
    [X, PADDINGS],
    _Product(DIM, 7) + 3 * N * 7 + _Product(7, 5) + 3 * N * 5,
  ),
  (norm.LayerNorm, {'input_dim': DIM}, [X, PADDINGS], NORM),
  (batch_norm.BatchNormLayer, {'dim': DIM}, [X], 7 * SIZE),
  (
    batch_norm.BatchNormLayer,
    {'dim': DIM, 'decay': None, 'center': False},
    [X, PADDINGS],
    (6 + 3) * SIZE + 2 * N,
  ),
  (activation_layer.ActivationLayer, {'activation': 'SWISH'}, [X], 2 * SIZE),
  (
    conv.Conv2DLayerNoPadding,
    {'filter_shape': (3, 2, DIM, 4), 'filter_stride': (2, 1), 'bias': True, 'activation': 'TANH'},
    [IMAGES],
    2 * (3 * 2 * DIM) * (BATCH * 3 * 5 * 4) + 2 * (BATCH * 3 * 5 * 4),
  ),
  (
    conv.DepthwiseConv2DLayerNoPadding,
    {'filter_shape': (3, 3, DIM, 2), 'padding': 'VALID'},
    [IMAGES],
    2 * (3 * 3) * (BATCH * 4 * 3 * 2 * DIM),
  ),
  (
    conv.SeparableConv2DLayerNoPadding,
    {'filter_shape': (3, 3, DIM, 4), 'filter_stride': (2, 2)},
    [IMAGES],
    2 * (BATCH * 3 * 3) * DIM * (3 * 3 + 4),
  ),
  (
    conv_batch_norm.ConvBatchNormLayer,
    {'filter_shape': (3, 3, DIM, 4)},
    [IMAGES],
    IMAGES_SIZE + 2 * (3 * 3 * DIM) * (BATCH * 6 * 5 * 4) + 7 * (BATCH * 6 * 5 * 4),
  ),
  (
    factorized_reduction.FactorizedReductionLayer,
    {'input_dim': DIM, 'output_dim': 6},
    [IMAGES],
    IMAGES_SIZE + 2 * DIM * (BATCH * 3 * 3 * 6 + BATCH * 3 * 3) + 7 * (BATCH * 3 * 3 * 6),
  ),
  (
    pooling.PoolingLayer,
    {'window_shape': (3, 3), 'window_stride': (2, 2)},
    [IMAGES],
    (3 * 3) * (BATCH * 3 * 3 * DIM),
  ),
  (
    pooling.PoolingLayer,
    {'window_shape': (3, 3), 'pooling_type': 'AVG'},
    [IMAGES],
    (3 * 3) * IMAGES_SIZE,
  ),
  (pooling.GlobalPoolingLayer, {}, [IMAGES], IMAGES_SIZE),
  (flatten.FlattenLayer, {}, [IMAGES], 0),
  (drop_path.DropPathLayer, {'keep_prob': 0.6, 'total_steps': 4}, [IMAGES], 2 * IMAGES_SIZE),
  (dropout.DropoutLayer, {'keep_prob': 0.8}, [X], 3 * SIZE),
  (
    dropout.DropoutLayer,
    {'keep_prob': 0.8, 'noise_shape_broadcast_dims': [1]},
    [X, PADDINGS],
    2 * SIZE + BATCH * DIM,
  ),
  (embedding.EmbeddingLayer, {'vocab_size': 5, 'embedding_dim': DIM}, [IDS, PADDINGS], 0),
  (
    embedding.EmbeddingLayer,
    {'vocab_size': 5, 'embedding_dim': DIM, 'scale_sqrt_depth': True},
    [IDS, None, IDS, IDS],
    SIZE,
  ),
  (embedding.PositionalEmbeddingLayer, {'embedding_dim': DIM}, [X, PADDINGS], SIZE),
  (
    embedding.PositionalEmbeddingLayer,
    {'embedding_dim': DIM},
    [X, None, IDS, IDS],
    SIZE + 3 * N * DIM // 2,
  ),
  (
    embedding.LearnablePositionalEmbeddingLayer,
    {'embedding_dim': DIM, 'max_pos': 9},
    [X, None, IDS, IDS],
    SIZE,
  ),
  (
    embedding.SimpleFullSoftmax,
    {'input_dim': DIM, 'num_classes': 5},
    [X, PADDINGS],
    _Product(DIM, 5) + N * 5,
  ),
  (
    embedding.SimpleFullSoftmax,
    {'input_dim': DIM, 'num_classes': 5, 'logits_abs_max': 3.0, 'logits_soft_max': 4.0},
    [X],
    _Product(DIM, 5) + N * 5 + (2 + 3) * N * 5,
  ),
  (
    embedding.SimpleFullSoftmax,
    {'input_dim': DIM, 'num_classes': 6, 'num_shards': 3},
    [X, PADDINGS],
    _Product(DIM, 6) + N * 6,
  ),
  (
    embedding.SharedSoftmaxLayer,
    {'input_dim': DIM, 'num_classes': 5},
    [X, PADDINGS],
    _Product(DIM, 5) + N * 5,
  ),
  (skip.StashLayer, {'key': 'x'}, [X, PADDINGS], 0),
  (
    attention.MultiHeadedAttention,
    ATTENTION,
    [X, X, X, None, MASK],
    _Attention(TIME) + 3 * WEIGHTS,
  ),
  (
    attention.MultiHeadedAttention,
    {**ATTENTION, 'is_causal': True},
    [X, X, X, PADDINGS, MASK],
    _Attention(TIME) + 3 * WEIGHTS + 2 * MASK_SIZE,
  ),
  (
    transformer.TransformerAttentionLayer,
    {**ATTENTION_BLOCK, 'is_causal': True},
    [X, None],
    _Attention(TIME) + AROUND,
  ),
  (transformer.TransformerFeedForwardLayer, FEED_FORWARD, [X, PADDINGS], FEED_FORWARD_FLOPS),
  (transformer.FeedForwardHiddenLayer, FEED_FORWARD, [X, PADDINGS, IDS], HIDDEN_FLOPS),
  (transformer.FeedForwardOutputLayer, FEED_FORWARD, [HIDDEN, X, PADDINGS, IDS], OUTPUT_FLOPS),
  (transformer.TransformerLayer, {**BLOCK, 'is_causal': True}, [X, PADDINGS, IDS], BLOCK_FLOPS),
  (
    transformer_decoder.TransformerCrossAttentionLayer,
    ATTENTION_BLOCK,
    [X, SOURCE, SOURCE_PADDINGS],
    _Attention(4) + AROUND,
  ),
  (
    transformer_decoder.TransformerDecoderLayer,
    BLOCK,
    [SOURCE, SOURCE_PADDINGS, X, PADDINGS],
    _Attention(TIME) + MASK_SIZE + _Attention(4) + 2 * AROUND + FEED_FORWARD_FLOPS,
  ),
  (
    sequential.SequentialLayer,
    {
      'sub': [
        embedding.EmbeddingLayer.Params().Set(vocab_size=5, embedding_dim=DIM),
        sequential.SequentialLayer.Params().Set(
          sub=[transformer.TransformerLayer.Params().Set(**BLOCK, is_causal=True)], repeat=2
        ),
        embedding.SimpleFullSoftmax.Params().Set(input_dim=DIM, num_classes=5),
      ]
    },
    [IDS, PADDINGS, IDS],
    2 * BLOCK_FLOPS + _Product(DIM, 5) + N * 5,
  ),
]

# Layers that mix positions, or cannot know that they do not.
CANNOT_DECODE = {
  conv.Conv2DLayerNoPadding,
  conv.DepthwiseConv2DLayerNoPadding,
  conv.SeparableConv2DLayerNoPadding,
  conv_batch_norm.ConvBatchNormLayer,
  factorized_reduction.FactorizedReductionLayer,
  flatten.FlattenLayer,
  pooling.GlobalPoolingLayer,
  pooling.PoolingLayer,
  skip.StashLayer,
}


def _Id(row):
  return f'{row[0].__name__}-{CATALOGUE.index(row)}'


@pytest.fixture(params=CATALOGUE, ids=_Id)
def Row(request):
  cls, values, specs, _ = request.param
  return cls.Params().Set(name='layer', **values), specs


def _Spec(spec, dtype):
  if spec is None or not spec.dtype.is_floating:
    return spec
  return tf.TensorSpec(spec.shape, dtype, spec.name)


def _Input(spec, rng):
  if spec is None:
    return None
  if spec.dtype == tf.bool:
    mask = rng.random(spec.shape) < 0.7
    mask[..., 0] = True
    return tf.constant(mask)
  if spec.dtype.is_integer:
    return tf.constant(rng.integers(0, 5, spec.shape), spec.dtype)
  if spec.name == 'paddings':
    lengths = rng.integers(1, spec.shape[1] + 1, [spec.shape[0], 1])
    return tf.constant(np.arange(spec.shape[1]) >= lengths, tf.float32)
  return tf.cast(tf.constant(rng.standard_normal(spec.shape)), spec.dtype)


def _Setup(row, dtype, fprop_dtype=None):
  """The layer, its variables and inputs of the activations' dtype."""
  params, specs = row
  layer = params.Copy().Set(dtype=dtype, fprop_dtype=fprop_dtype).Instantiate()
  layer.InstantiateVariables()
  rng = np.random.default_rng(1)
  inputs = [_Input(_Spec(s, fprop_dtype or dtype), rng) for s in specs]
  return layer, inputs


def _Run(layer, variables, inputs, step=3):
  with fprop_context.Scope(step=step):
    return layer.FProp(layer.ThetaFrom(variables), *inputs)


def _SumOfSines(outputs):
  """Depends on every floating output, because some layers pass their first argument through."""
  floats = [x for x in tf.nest.flatten(outputs) if x is not None and x.dtype.is_floating]
  return tf.add_n([tf.cast(tf.reduce_sum(tf.sin(x + 0.1)), tf.float64) for x in floats])


def testEveryLayerHasARow():
  classes = set()
  for module in pkgutil.walk_packages(layers.__path__, layers.__name__ + '.'):
    for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
      is_public = cls.__module__ == module.name and not cls.__name__.startswith('_')
      if is_public and issubclass(cls, base_layer.BaseLayer):
        classes.add(cls)
  # skip_test.py has the PopLayer, which takes the output of a StashLayer. The Params of the
  # KerasCellLayer hold a live model, so it has tests of its own in layers/keras.
  elsewhere = {skip.PopLayer, keras_cell_layer.KerasCellLayer}
  missing = classes - {row[0] for row in CATALOGUE} - elsewhere
  assert not missing, f'add a row to CATALOGUE for {sorted(c.__name__ for c in missing)}'


def testParamsAreEqualAfterToTextAndFromText(Row):
  params, _ = Row
  # FromText sets values inside a list of Params, but does not make the list.
  copy = params.cls.Params()
  for name, value in params.IterParams():
    if isinstance(value, list) and any(isinstance(v, hyperparams.Params) for v in value):
      copy.Set(**{name: value})
  copy.FromText(params.ToText())
  assert copy == params
  assert copy.ToText() == params.ToText()


def testParamsAreFrozen(Row):
  layer, _ = _Setup(Row, tf.float32)
  with pytest.raises(TypeError, match=naming.Naming('name', 'frozen')):
    layer.params.name = 'other'


@pytest.mark.parametrize('dtypes', [(tf.float32, None), (tf.float32, tf.bfloat16)], ids=str)
def testMetaHasTheSpecsOfTheOutputs(Row, dtypes):
  layer, inputs = _Setup(Row, *dtypes)
  outputs = _Run(layer, layer.vars, inputs)
  outputs = outputs if isinstance(outputs, tuple) else (outputs,)
  specs = [_Spec(s, dtypes[1] or dtypes[0]) for s in Row[1]]
  # Paddings keep their dtype.
  specs = [
    spec if spec is None or spec.name != 'paddings' else unchanged
    for spec, unchanged in zip(specs, Row[1], strict=True)
  ]
  meta = type(layer).FPropMeta(layer.params, *specs)
  assert len(meta.out_specs) == len(outputs)
  for spec, output in zip(meta.out_specs, outputs, strict=True):
    if spec is None:
      assert output is None
    else:
      assert (spec.shape, spec.dtype) == (output.shape, output.dtype)
      assert np.all(np.isfinite(tf.cast(output, tf.float32)))
  for v in layer.VariablesByPath().values():
    assert v.dtype == tf.float32 or not v.dtype.is_floating


@pytest.mark.parametrize('row', CATALOGUE, ids=_Id)
def testCountedFlopsEqualTheFormula(row):
  cls, values, specs, flops = row
  layer = cls.Params().Set(name='layer', **values).Instantiate()
  meta = cls.FPropMeta(layer.params, *specs)
  if flops is None:
    assert meta.flops > 0
  else:
    # At these sizes small operations weigh far more than in a real model.
    assert abs(flops - meta.flops) <= 0.05 * meta.flops + 50


def testNumParamsIsTheSizeOfTheVariables(Row):
  layer, _ = _Setup(Row, tf.float32)
  variables = layer.VariablesByPath()
  assert layer.NumParams() == sum(math.prod(v.shape) for v in layer.trainable_variables)
  assert list(variables) == list(layer.WeightSpecs())


def testEveryVariableHasAFiniteGradient(Row):
  layer, inputs = _Setup(Row, tf.float64)
  variables = {path: v for path, v in layer.VariablesByPath().items() if v.trainable}
  with tf.GradientTape() as tape:
    loss = _SumOfSines(_Run(layer, layer.vars, inputs))
  for path, grad in tape.gradient(loss, variables).items():
    assert grad is not None, path
    assert np.all(np.isfinite(tf.convert_to_tensor(grad))), path


def testXlaComputesTheSameValues(Row):
  layer, inputs = _Setup(Row, tf.float32)
  flat = [x for x in inputs if x is not None]

  def Run(variables, flat, step):
    tensors = list(flat)
    args = [None if x is None else tensors.pop(0) for x in inputs]
    with tf.GradientTape() as tape:
      outputs = _Run(layer, variables, args, step)
      loss = _SumOfSines(outputs)
    grads = tape.gradient(loss, [v for v in tf.nest.flatten(variables) if v.trainable])
    values = [x for x in tf.nest.flatten(outputs) if x is not None]
    return [*values, *[tf.convert_to_tensor(g) for g in grads]]

  step = tf.constant(3, tf.int64)
  plain = Run(layer.vars, flat, step)  # Once, so tracing would take longer.
  xla = tf.function(Run, autograph=False, jit_compile=True)(layer.vars, flat, step)
  for a, b in zip(plain, xla, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


# transformer_decoder_test.py has the layers that also take a source, of another length.
@pytest.mark.parametrize(
  'Row',
  [row for row in CATALOGUE if row[0].__module__ != transformer_decoder.__name__],
  ids=_Id,
  indirect=True,
)
def testDecodingIsFPropPositionByPosition(Row):
  """From a prompt of one position and of all but one; other layers raise and name themselves."""
  layer, inputs = _Setup(Row, tf.float64)
  # Masks and segments are for whole sequences.
  kinds = (tf.bool, tf.int32)
  inputs = inputs[:1] + [None if x is None or x.dtype in kinds else x for x in inputs[1:]]
  while inputs[-1] is None:
    inputs.pop()
  is_causal = dict(layer.params.IterParams()).get('is_causal', True)
  if type(layer) in CANNOT_DECODE or not is_causal:
    with pytest.raises(NotImplementedError, match=r'^layer\b.*\bdecode\b'):
      layer.Prefill(layer.theta, *inputs, max_length=TIME)
    if is_causal:
      with pytest.raises(NotImplementedError, match=r'^layer\b.*\bdecode\b'):
        layer.ExtendStep(layer.theta, nested_map.NestedMap(), *inputs, time_step=1)
    return

  def Span(a, b):
    return [None if x is None else x[:, a:b] for x in inputs]

  def Leaves(outputs):
    return list(outputs) if isinstance(outputs, tuple) else [outputs]

  whole = Leaves(layer(*inputs))
  for prompt in (1, TIME - 1):
    outputs, states = layer.Prefill(layer.theta, *Span(0, prompt), max_length=TIME + 2)
    pieces = [Leaves(outputs)]
    for t in range(prompt, TIME):
      previous = states
      outputs, states = layer.ExtendStep(
        layer.theta, previous, *Span(t, t + 1), time_step=tf.constant(t, tf.int32)
      )
      tf.nest.assert_same_structure(states, previous)
      pieces.append(Leaves(outputs))
    for expected, *parts in zip(whole, *pieces, strict=True):
      if expected is None:
        assert parts == [None] * len(parts)
      else:
        np.testing.assert_allclose(tf.concat(parts, axis=1), expected, rtol=0, atol=1e-12)


# The outer sequence would flatten an inner sequence, whose layers have rows of their own.
@pytest.mark.parametrize(
  'Row',
  [row for row in CATALOGUE if row[0] is not sequential.SequentialLayer],
  ids=_Id,
  indirect=True,
)
def testEqualLayersMakeEqualGraphs(Row):
  """Stages of equal structure share one trace, so it must not hold path, name or index."""
  params, specs = Row
  named = params.Copy().Set(name='other')
  stack = sequential.SequentialLayer.Params().Set(name='stack', sub=[params, named])
  rng = np.random.default_rng(1)
  inputs = [_Input(s, rng) for s in specs]
  graphs = []
  stack = stack.Instantiate()
  stack.InstantiateVariables()
  assert len(stack.layers) == 2
  for layer in stack.layers:

    def Run(variables, seeds, *flat, layer=layer):
      tensors = list(flat)
      args = [None if x is None else tensors.pop(0) for x in inputs]
      with fprop_context.Enter(fprop_context.FPropContext(False, seed_rows={id(layer): seeds})):
        return layer.FProp(layer.ThetaFrom(variables), *args)

    seeds = tf.TensorSpec([2], tf.int64)
    flat = [x for x in inputs if x is not None]
    traced = tf.function(Run, autograph=False).get_concrete_function(layer.vars, seeds, *flat)
    graphs.append(traced.graph.as_graph_def())
  assert [n for n in graphs[0].node] == [n for n in graphs[1].node]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
