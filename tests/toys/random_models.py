# SPDX-License-Identifier: Apache-2.0
"""Random Functional models of Keras from a seed: graphs of many layers, which may share one."""

import random

import keras
import numpy as np
from keras import layers, ops

_TIME, _DIM, _VOCAB = 4, 6, 11

# Maps of [batch, dim] and of [batch, time, dim]. No result is random, or depends on other examples.
_VECTORS = [
  lambda choose, x: layers.Dense(choose.choice([4, _DIM]), choose.choice(['relu', None]))(x),
  lambda choose, x: layers.LayerNormalization()(x),
  lambda choose, x: layers.Add()([x, layers.Dense(x.shape[-1])(x)]),
  lambda choose, x: layers.PReLU()(x),
  lambda choose, x: x * choose.choice([0.5, 2.0]) + ops.tanh(x),
  lambda choose, x: ops.concatenate([x[:, 1:], x[:, :1]], axis=1),
  lambda choose, x: ops.where(x > 0, x, 0.1 * x),
  lambda choose, x: ops.cumsum(x, axis=1),
  lambda choose, x: ops.multiply(*ops.split(ops.concatenate([x, ops.sigmoid(x)], 1), 2, axis=1)),
  lambda choose, x: ops.einsum('bi,bj->bij', x[:, :_TIME], ops.tanh(x)),
  lambda choose, x: layers.RepeatVector(_TIME)(x),
  lambda choose, x: keras.Sequential([layers.Dense(5, 'relu'), layers.Dense(x.shape[-1])])(x),
]
_SEQUENCES = [
  lambda choose, x: layers.Dense(_DIM, 'relu')(x),
  lambda choose, x: layers.LSTM(5, return_sequences=choose.random() < 0.5)(x),
  lambda choose, x: layers.Bidirectional(layers.GRU(3, return_sequences=True))(x),
  lambda choose, x: layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=choose.random() < 0.5),
  lambda choose, x: layers.Conv1D(_DIM, 2, padding='same')(x),
  lambda choose, x: layers.TimeDistributed(layers.Dense(_DIM, 'tanh'))(x),
  lambda choose, x: layers.GlobalMaxPooling1D()(x),
  lambda choose, x: layers.Permute((2, 1))(x),
  lambda choose, x: x + ops.mean(x, axis=1, keepdims=True),
  lambda choose, x: x[:, -1],
]


def Make(seed):
  """Returns a model of inputs [batch, dim] and ids [batch, time], with one or two outputs."""
  choose = random.Random(seed)
  vectors = [keras.Input([_DIM], name=f'vector{i}') for i in range(choose.randint(1, 2))]
  ids = keras.Input([_TIME], dtype='int32', name='ids')
  embedding = layers.Embedding(_VOCAB, _DIM, mask_zero=choose.random() < 0.5)
  shared = layers.Dense(_DIM, 'tanh')
  tensors = [*vectors, embedding(ids)]
  for _ in range(choose.randint(8, 16)):
    i = choose.randrange(len(tensors))
    x = tensors[i]
    if x.shape[-1] == _DIM and choose.random() < 0.2:
      y = shared(x)
    else:
      y = choose.choice(_VECTORS if len(x.shape) == 2 else _SEQUENCES)(choose, x)
    equal = [t for t in tensors if t.shape == y.shape]
    if equal and choose.random() < 0.3:
      y = y - choose.choice(equal)
    # Tensors that stay are read again later, from far away.
    tensors[i : i + (choose.random() < 0.6)] = [y]
  ends = [x if len(x.shape) == 2 else ops.mean(x, axis=1) for x in tensors]
  choose.shuffle(ends)
  # With these layers and the embedding, there are enough cells for three stages.
  outputs = [layers.Dense(2)(layers.Dense(_DIM, 'tanh')(layers.Concatenate()(ends)))]
  outputs += [layers.Dense(1)(x) for x in ends[: choose.randint(0, 1)]]
  return keras.Model([*vectors, ids], outputs)


def Batch(model, size, seed=0):
  """Returns (x, y) of random examples, as `fit` takes them."""
  rng = np.random.default_rng(seed)
  x = [
    rng.integers(0, _VOCAB, [size, _TIME]).astype('int32')
    if t.name == 'ids'
    else rng.standard_normal([size, _DIM]).astype('float32')
    for t in model.inputs
  ]
  return x, [rng.standard_normal([size, t.shape[-1]]).astype('float32') for t in model.outputs]
