# SPDX-License-Identifier: Apache-2.0
"""A language model without attention, for sentence pairs in buckets."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map
from lingvo_gpipe.experiment import task
from lingvo_gpipe.layers import dropout, embedding
from lingvo_gpipe.pipeline import pipelining_layer

VOCABULARY, DIM = 12, 4


class MeanSoFar(base_layer.BaseLayer):
  """Replaces each position by the mean of the positions up to it, without padding."""

  def FProp(self, theta, inputs, paddings):
    counted = 1 - tf.cast(paddings[:, :, tf.newaxis], inputs.dtype)
    sums = tf.cumsum(inputs * counted, axis=1)
    return tf.math.divide_no_nan(sums, tf.cumsum(counted, axis=1))


class NextToken(task.BaseTask):
  """Predicts each target token from the mean of the tokens before it."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('keep_prob', 1.0, 'Of dropout.')
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    sub = [
      embedding.EmbeddingLayer.Params().Set(vocab_size=VOCABULARY, embedding_dim=DIM),
      MeanSoFar.Params(),
      dropout.DropoutLayer.Params().Set(keep_prob=p.keep_prob),
      embedding.SimpleFullSoftmax.Params().Set(input_dim=DIM, num_classes=VOCABULARY),
    ]
    self.CreateChild('stack', p.stack.Copy().Set(sub=sub))

  def PipelineInputs(self, input_batch):
    return (input_batch.tgt_ids, input_batch.tgt_paddings)

  def LossInputs(self, input_batch):
    return nested_map.NestedMap(labels=input_batch.tgt_labels, weights=input_batch.tgt_weights)

  def LossWeight(self, input_batch):
    return tf.reduce_sum(input_batch.weights)

  def ComputeLoss(self, theta, predictions, input_batch):
    xent = embedding.XentLossFromLogits(predictions, input_batch.labels)
    weights = tf.cast(input_batch.weights, xent.dtype)
    total = tf.reduce_sum(weights)
    return {'loss': (tf.math.divide_no_nan(tf.reduce_sum(xent * weights), total), total)}, {}
