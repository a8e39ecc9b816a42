# SPDX-License-Identifier: Apache-2.0
"""Batches of token ids, and losses that weight the cross entropy of the tokens."""

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import embedding


def Batch(vocabulary, size, time, *, seed=3, empty=slice(0)):
  """Returns ((ids,), side) with labels and weights; the `empty` examples count nothing."""
  rng = np.random.default_rng(seed)
  ids, labels = (tf.constant(rng.integers(0, vocabulary, [size, time]), tf.int32) for _ in '12')
  weights = rng.uniform(0.5, 2.0, [size, time])
  weights[empty] = 0.0
  return (ids,), nested_map.NestedMap(labels=labels, weights=tf.constant(weights))


def SmoothedXent(theta, outputs, side):
  """Returns the mean smoothed cross entropy, and the accuracy; NaN if all weights are zero."""
  del theta
  total = tf.reduce_sum(side.weights)
  xent = embedding.XentLossFromLogits(outputs[0], side.labels, label_smoothing=0.1)
  hits = embedding.Hits(outputs[0], side.labels)
  return {
    'loss': (tf.reduce_sum(xent * side.weights) / total, total),
    'accuracy': (tf.reduce_sum(hits * side.weights) / total, total),
  }


def Xent(theta, outputs, side):
  """Returns the mean cross entropy, zero if all weights are, and another metric."""
  del theta
  xent = embedding.XentLossFromLogits(outputs[0], side.labels)
  weights = tf.cast(side.weights, xent.dtype)
  total = tf.reduce_sum(weights)
  loss = tf.math.divide_no_nan(tf.reduce_sum(xent * weights), total)
  return {'loss': (loss, total), 'max_xent': (tf.reduce_max(xent), tf.ones([], xent.dtype))}
