# SPDX-License-Identifier: Apache-2.0
"""Embeddings and softmax heads that change what they inherit."""

import tensorflow as tf

from lingvo_gpipe.core import nested_map, weight_params
from lingvo_gpipe.layers import embedding


class ShiftedEmbedding(embedding.EmbeddingLayer):
  """Looks up the next ids."""

  def FProp(self, theta, ids, *extras):
    return super().FProp(theta, (ids + 1) % self.params.vocab_size, *extras)


class NormalisedHead(embedding.SimpleFullSoftmax):
  """Each logit depends on all classes."""

  def FProp(self, theta, inputs, *extras):
    logits = super().FProp(theta, inputs, *extras)
    return logits / tf.norm(logits, axis=-1, keepdims=True)


class DoubledHead(embedding.SimpleFullSoftmax):
  """Declares that no logit depends on other classes."""

  class_axes = embedding.SimpleFullSoftmax.class_axes

  def FProp(self, theta, inputs, *extras):
    return 2 * super().FProp(theta, inputs, *extras)


class TemperedHead(DoubledHead):
  """Has a weight without an axis of classes."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('temperature', weight_params.WeightParams([]))


class _NormalisedLogits:
  """A mixin that overrides how logits are computed."""

  def _Logits(self, theta, inputs):
    return tf.nn.softmax(super()._Logits(theta, inputs))


class MixedHead(_NormalisedLogits, embedding.SimpleFullSoftmax):
  """Inherits the logits of a mixin."""


class NormalisedWeightsHead(embedding.SharedSoftmaxLayer):
  """Each weight that it uses depends on all classes."""

  def ThetaFrom(self, variables):
    theta = super().ThetaFrom(variables)
    return nested_map.NestedMap(theta, emb=theta.emb / tf.norm(theta.emb))
