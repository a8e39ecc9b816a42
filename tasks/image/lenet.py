# SPDX-License-Identifier: Apache-2.0
"""LeNet-5 (LeCun et al. 1998) with batch norm, ReLU and max pools."""

from __future__ import annotations

from lingvo_gpipe import (
  activation_layer,
  batch_norm,
  conv_batch_norm,
  domain,
  dropout,
  flatten,
  hyperparams,
  linear,
  pooling,
)
from tasks.image import classifier


class LeNet5(classifier.ImageClassifier):
  """Two convolutions, each followed by a 2x2 max pool, and two projections."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of the network."""
    p = super().Params()
    p.Delete('image_size')
    # Two pools of 2x2 follow.
    p.Define('image_size', 0, 'Height and width of the images.', domain.Size(4))
    p.Define('filter_size', 5, 'Height and width of the filters.', domain.SIZE)
    p.Define(
      'filters', [20, 50], 'Channels of the two convolutions.', domain.ListOf(domain.SIZE, 2)
    )
    p.Define('hidden_dim', 500, 'Width of the first projection.', domain.SIZE)
    p.Define(
      'dropout_prob', 0.0, 'Dropout probability before the last projection.', domain.PROBABILITY
    )
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'Template of the batch norms.')
    return p

  def _Layers(self) -> list[hyperparams.InstantiableParams]:
    p = self.params
    window = (p.filter_size, p.filter_size)
    pool = pooling.PoolingLayer.Params().Set(
      window_shape=(2, 2), window_stride=(2, 2), padding='VALID'
    )
    first, second = p.filters
    features = (p.image_size // 4) ** 2 * second
    # Each block begins with a ReLU, which commutes with the max pool before it.
    block = conv_batch_norm.ConvBatchNormLayer.Params().Set(batch_norm_tpl=p.batch_norm_tpl)
    return [
      block.Copy().Set(filter_shape=(*window, p.num_channels, first), activation='NONE'),
      pool,
      block.Copy().Set(filter_shape=(*window, first, second)),
      pool,
      activation_layer.ActivationLayer.Params(),
      flatten.FlattenLayer.Params(),
      linear.ProjectionLayer.Params().Set(
        input_dim=features, output_dim=p.hidden_dim, has_bias=True
      ),
      dropout.DropoutLayer.Params().Set(keep_prob=1.0 - p.dropout_prob),
      linear.ProjectionLayer.Params().Set(
        input_dim=p.hidden_dim, output_dim=p.num_classes, has_bias=True, activation='NONE'
      ),
    ]
