# SPDX-License-Identifier: Apache-2.0
"""Base class of image classification tasks: loss, metrics and checks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import (
  batches,
  domain,
  embedding,
  hyperparams,
  nested_map,
  pipelining_layer,
  shapes,
  task,
)

_TOP_K = 5


class ImageClassifier(task.BaseTask):
  """Predicts the class of an image; subclasses define the layers.

  Batches have `images`, float32 [batch, image_size, image_size, num_channels], and `labels`, int32
  [batch]. The layers return logits [batch, num_classes]; with an auxiliary head they return in
  training the tuple (logits, logits of the auxiliary head).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: sizes of the data, the loss, and `stack`, the pipeline."""
    p = super().Params()
    p.Define('image_size', 0, 'Height and width of the images.', domain.SIZE)
    p.Define('num_channels', 3, 'Channels of the images.', domain.SIZE)
    p.Define('num_classes', 0, 'Number of classes.', domain.SIZE)
    p.Define(
      'label_smoothing',
      0.0,
      'In training, total target probability of the wrong classes.',
      domain.PROBABILITY,
    )
    p.Define(
      'aux_loss_weight',
      0.0,
      "Weight of the auxiliary head's loss; 0: no auxiliary head.",
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline; the task sets `sub`.'
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self.CreateChild('stack', p.stack.Copy().Set(sub=self._Layers()))

  def _Layers(self) -> list[hyperparams.InstantiableParams]:
    """Returns the Params of the layers, from images to logits."""
    raise NotImplementedError(f'_Layers of {type(self).__name__}')

  def CheckBatch(self, input_batch: nested_map.NestedMap) -> None:
    """Raises ValueError for labels outside [0, num_classes), which XLA would accept silently."""
    p = self.params
    labels = input_batch.labels
    low, high = batches.Range(labels)
    if low < 0 or high >= p.num_classes:
      raise ValueError(
        f'{self.path}: labels must lie in [0, {p.num_classes}), got {low} ... {high}; check the '
        'input generator, or set num_classes'
      )
    expected = [None, p.image_size, p.image_size, p.num_channels]
    shapes.CheckShape(self.path, input_batch.images, expected, 'images')

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns the images."""
    return (input_batch.images,)

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns labels and weights of the examples, each [batch]."""
    return nested_map.NestedMap(
      labels=input_batch.labels, example_weights=input_batch.example_weights
    )

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: Any, input_batch: nested_map.NestedMap
  ) -> tuple[task.Metrics, dict[str, tf.Tensor]]:
    """Computes the cross entropy in nats and the top-1 and top-5 accuracy.

    In training, targets are smoothed, and `loss` includes the weighted loss of the auxiliary head;
    `aux_loss` reports that loss without the weight. In evaluation, `loss` is the plain cross
    entropy.
    """
    del theta
    p = self.params
    logits, *aux_logits = predictions if isinstance(predictions, tuple) else (predictions,)
    labels = input_batch.labels
    smoothing = 0.0 if self.do_eval else p.label_smoothing
    xent = embedding.XentLossFromLogits(logits, labels, smoothing)
    weights = tf.cast(input_batch.example_weights, xent.dtype)
    total = tf.reduce_sum(weights)

    def Mean(values: tf.Tensor) -> tf.Tensor:
      return tf.math.divide_no_nan(tf.reduce_sum(tf.cast(values, xent.dtype) * weights), total)

    metrics = {'loss': (Mean(xent), total)}
    if aux_logits:
      aux_loss = Mean(embedding.XentLossFromLogits(aux_logits[0], labels, smoothing))
      metrics['loss'] = (metrics['loss'][0] + p.aux_loss_weight * aux_loss, total)
      metrics['aux_loss'] = (aux_loss, total)
    ranks = Ranks(logits, labels)
    metrics['accuracy'] = (Mean(ranks < 1), total)
    if p.num_classes > _TOP_K:
      metrics['acc5'] = (Mean(ranks < _TOP_K), total)
    return metrics, {'xent': xent}

  def InferenceOutputs(self, predictions: Any) -> dict[str, tf.Tensor]:
    """Returns logits and probabilities (float32), each [batch, num_classes]."""
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    return {'logits': logits, 'probabilities': tf.nn.softmax(tf.cast(logits, tf.float32))}


def Ranks(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  """Returns the number of classes ranked before the right class; 0 for a correct prediction.

  Among equal logits the class with the lower index ranks first, and NaN ranks before everything, so
  that a constant or broken model does not score better than chance.

  Args:
    logits: [batch, num_classes].
    labels: integers [batch].

  Returns:
    int32 [batch].
  """
  classes = tf.range(logits.shape[-1], dtype=labels.dtype)[tf.newaxis]
  label = labels[:, tf.newaxis]
  right = tf.reduce_sum(
    tf.where(classes == label, logits, tf.zeros_like(logits)), -1, keepdims=True
  )
  before = tf.where(classes < label, logits >= right, logits > right)
  before |= tf.math.is_nan(logits) | tf.math.is_nan(right)
  return tf.math.count_nonzero(before & (classes != label), axis=-1, dtype=tf.int32)
