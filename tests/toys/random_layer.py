# SPDX-License-Identifier: Apache-2.0
"""A layer for random pipelines: it mixes arguments of any structure into outputs of any structure.

The outputs are described by a `spec`, the text of a Python literal, so that Params show it: a tuple
for several outputs, which holds lists, dicts (NestedMaps) and letters. The letters: `f` the
floating dtype of the layer, `h` float32, `i` int32, `l` int64, `b` bool, `s` a floating scalar,
`c` an integer scalar, `n` None, `p3` leaf 3 of the arguments, unchanged.
"""

import ast

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, weight_params
from lingvo_gpipe.layers import dropout

DIM, VOCAB = 3, 5
BATCHED = 'fhilb'
_DTYPES = {'h': tf.float32, 'i': tf.int32, 'l': tf.int64, 'b': tf.bool, 'c': tf.int32}


def MapSpec(nest, fn):
  """Returns the nest with `fn` applied to each letter, and NestedMaps for dicts."""
  if isinstance(nest, dict):
    return nested_map.NestedMap({k: MapSpec(v, fn) for k, v in nest.items()})
  if isinstance(nest, (list, tuple)):
    return type(nest)(MapSpec(n, fn) for n in nest)
  return fn(nest)


def _Pack(text, fn):
  return MapSpec(ast.literal_eval(text), fn)


class RandomLayer(base_layer.BaseLayer):
  """Maps nests of any leaves to nests described by `outputs`; mixes all leaves not ignored."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('outputs', "('f',)", 'What it returns; see the module.')
    p.Define(
      'ignore', [], 'Numbers of leaves, of arguments and then skips, that are not looked at.'
    )
    p.Define('weights', [], 'Names of its weights: w [DIM, DIM], v [DIM, DIM], b [DIM].')
    p.Define('table', False, 'Whether integers look up rows of a table [VOCAB, DIM].')
    p.Define('fixed', False, 'Whether there is a matrix that is not trainable.')
    p.Define('takes', [], 'Names of the skips that end here.')
    p.Define('makes', {}, 'For each skip that begins here what it is, as `outputs`.')
    p.Define('aux', {}, 'Coefficient of each auxiliary loss.')
    p.Define('keep_prob', 1.0, 'Of the dropout in it.')
    p.Define('stop', False, 'Whether gradients stop here.')
    p.Define('batch_dim', 0, 'Batch dimension of all leaves of rank 2.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    for name in p.weights:
      shape = [DIM] if name == 'b' else [DIM, DIM]
      init = weight_params.WeightInit.Gaussian(0.7)
      self.CreateVariable(name, weight_params.WeightParams(shape, init))
    if p.table:
      init = weight_params.WeightInit.Gaussian(1.0)
      self.CreateVariable('table', weight_params.WeightParams([VOCAB, DIM], init))
    if p.fixed:
      self.CreateVariable('fixed', weight_params.WeightParams([DIM, DIM]), trainable=False)
    self.CreateChild('drop', dropout.DropoutLayer.Params().Set(keep_prob=p.keep_prob))

  @property
  def skips_in(self):
    return tuple(self.params.takes)

  @property
  def skips_out(self):
    return tuple(self.params.makes)

  def FProp(self, theta, *args):
    return self.FPropSkips(theta, nested_map.NestedMap(), *args)[0]

  def FPropSkips(self, theta, skips, *args):
    p = self.params
    arguments = [x for x in tf.nest.flatten(args) if x is not None]
    leaves = arguments + [x for x in tf.nest.flatten([skips[n] for n in p.takes]) if x is not None]
    size = next(x.shape[p.batch_dim] for x in leaves if x.shape.rank == 2)
    h = tf.fill([size, DIM], tf.constant(0.1, p.fprop_dtype))
    for i, leaf in enumerate(leaves):
      if i not in p.ignore:
        h += (1.0 - 0.1 * i) * self._Signal(theta, leaf)
    h = tf.sin(h)
    if 'w' in p.weights:
      h = tf.tanh(tf.matmul(h, theta.w)) + 0.5 * h
    if 'v' in p.weights:
      h += tf.sin(tf.matmul(h, theta.v))
    if 'b' in p.weights:
      h += theta.b
    if p.fixed:
      h = tf.matmul(h, theta.fixed)
    h = self.drop.FProp(theta.drop, h)
    for i, (name, coefficient) in enumerate(p.aux.items()):
      value = tf.reduce_mean((h - 0.2 * i) ** 2)
      fprop_context.Current().AddAuxLoss(self, value, coefficient, name)
    if p.stop:
      h = tf.stop_gradient(h)
    count = [0]

    def Leaf(letter):
      count[0] += 1
      return self._Leaf(letter, h, count[0], arguments)

    outputs = _Pack(p.outputs, Leaf)
    new_skips = nested_map.NestedMap({name: _Pack(text, Leaf)[0] for name, text in p.makes.items()})
    return outputs, new_skips

  def _Signal(self, theta, leaf):
    """Returns a leaf as floats [batch or 1, DIM]."""
    dtype = self.params.fprop_dtype
    if leaf.shape.rank == 0:
      return 0.3 * tf.sin(tf.cast(leaf, dtype))[None, None]
    if self.params.batch_dim:
      leaf = tf.transpose(leaf)
    if leaf.dtype == tf.bool:
      return tf.where(leaf, tf.constant(0.7, dtype), tf.constant(-0.4, dtype))
    if leaf.dtype.is_integer:
      if self.params.table:
        return tf.gather(theta.table, tf.math.floormod(leaf[:, 0], VOCAB))
      return tf.cos(tf.cast(leaf, dtype))
    return tf.cast(leaf, dtype)

  def _Leaf(self, letter, h, number, arguments):
    if letter == 'n':
      return None
    if letter.startswith('p'):
      return arguments[int(letter[1:])]
    if letter == 's':
      return tf.reduce_mean(h * number)
    if letter == 'c':
      return tf.constant(number)
    if letter in 'il':
      value = tf.cast(tf.argmax(h * (1.0 + number % 2), -1)[:, None], _DTYPES[letter])
    elif letter == 'b':
      value = h[:, :1] > 0
    else:
      value = tf.sin(number * h)
      value = tf.cast(value, _DTYPES.get(letter, value.dtype))
    return tf.transpose(value) if self.params.batch_dim else value

  @classmethod
  def FPropMetaSkips(cls, params, skip_specs, *input_specs):
    arguments = [x for x in tf.nest.flatten(input_specs) if x is not None]
    every = arguments + [x for x in tf.nest.flatten(dict(skip_specs)) if x is not None]
    size = next(x.shape[params.batch_dim] for x in every if x.shape.rank == 2)
    floating = tf.as_dtype(params.fprop_dtype or params.dtype)

    def Leaf(letter):
      if letter == 'n':
        return None
      if letter.startswith('p'):
        return arguments[int(letter[1:])]
      dtype = _DTYPES.get(letter, floating)
      if letter in 'sc':
        return tf.TensorSpec([], dtype)
      shape = [size, DIM if letter in 'fh' else 1]
      return tf.TensorSpec(shape[::-1] if params.batch_dim else shape, dtype)

    meta = nested_map.NestedMap(flops=size * 100, out_specs=_Pack(params.outputs, Leaf))
    new_skips = {name: _Pack(text, Leaf)[0] for name, text in params.makes.items()}
    return meta, nested_map.NestedMap(new_skips)

  @classmethod
  def FPropMeta(cls, params, *input_specs):
    return cls.FPropMetaSkips(params, nested_map.NestedMap(), *input_specs)[0]
