# SPDX-License-Identifier: Apache-2.0
"""The operations of AmoebaNet's cells, as Params of layers.

Every convolution follows a ReLU, precedes a batch norm and has no bias. All windows are SAME.
"""

from __future__ import annotations

import dataclasses

from lingvo_gpipe import (
  batch_norm,
  conv,
  conv_batch_norm,
  drop_path,
  hyperparams,
  pooling,
  sequential,
)

IDENTITY = 'identity'
# The inner convolutions of a bottleneck have a quarter of the channels.
_BOTTLENECK = 4


@dataclasses.dataclass(frozen=True)
class OpBuilder:
  """Builds the operations of one cell.

  Attributes:
    filters: number of output channels of every operation.
    batch_norm_tpl: template of the batch norms.
    drop_path_tpl: template of the drop-path at the end of each operation.
  """

  filters: int
  batch_norm_tpl: hyperparams.InstantiableParams = dataclasses.field(
    default_factory=batch_norm.BatchNormLayer.Params
  )
  drop_path_tpl: hyperparams.InstantiableParams = dataclasses.field(
    default_factory=drop_path.DropPathLayer.Params
  )

  def Op(self, name: str, input_dim: int, stride: int) -> hyperparams.InstantiableParams | None:
    """Returns the operation `name` for inputs of `input_dim` channels; None for the identity."""
    is_identity = name == IDENTITY
    layers = self._Layers(name, input_dim, stride)
    if not is_identity and self.drop_path_tpl.keep_prob < 1:
      layers.append(self.drop_path_tpl)
    return sequential.SequentialLayer.Params().Set(sub=layers) if layers else None

  def Conv(
    self,
    size: tuple[int, int],
    input_dim: int,
    output_dim: int,
    stride: tuple[int, int] = (1, 1),
    activation: str = 'RELU',
    separable: bool = False,
  ) -> hyperparams.InstantiableParams:
    """Returns ReLU, convolution and batch norm.

    A separable convolution has as many depthwise filters as the cell has channels, even if its
    inputs have fewer, as the inputs of the first cell do.
    """
    p = conv_batch_norm.ConvBatchNormLayer.Params().Set(
      filter_shape=(*size, input_dim, output_dim),
      filter_stride=stride,
      activation=activation,
      batch_norm_tpl=self.batch_norm_tpl,
    )
    if separable:
      p.conv_tpl = conv.SeparableConv2DLayerNoPadding.Params().Set(
        depth_multiplier=max(1, self.filters // input_dim)
      )
    return p

  def _Layers(self, name: str, input_dim: int, stride: int) -> list[hyperparams.InstantiableParams]:
    both = (stride, stride)
    if name == IDENTITY:
      unchanged = stride == 1 and input_dim == self.filters
      return [] if unchanged else [self.Conv((1, 1), input_dim, self.filters, both)]
    if name == 'conv_1x1':
      return [self.Conv((1, 1), input_dim, self.filters, both)]
    if name in _POOLS:
      pooling_type, width = _POOLS[name]
      pool = pooling.PoolingLayer.Params().Set(
        window_shape=(width, width), window_stride=both, pooling_type=pooling_type
      )
      if input_dim == self.filters:
        return [pool]
      return [pool, self.Conv((1, 1), input_dim, self.filters, activation='NONE')]
    if name in _SEPARABLE:
      size = (_SEPARABLE[name], _SEPARABLE[name])
      return [
        self.Conv(size, input_dim, self.filters, both, separable=True),
        self.Conv(size, self.filters, self.filters, separable=True),
      ]
    if name in _BOTTLENECKS:
      inner = self.filters // _BOTTLENECK
      layers = [self.Conv((1, 1), input_dim, inner)]
      for height, width in _BOTTLENECKS[name]:
        along = (stride if height > 1 else 1, stride if width > 1 else 1)
        layers.append(self.Conv((height, width), inner, inner, along))
      return [*layers, self.Conv((1, 1), inner, self.filters)]
    raise ValueError(f'unknown operation {name!r}; expected one of {", ".join(NAMES)}')


# {name: (kind, window size)}, {name: filter size} and {name: filter sizes in sequence}.
_POOLS = {'max_pool_2x2': ('MAX', 2), 'max_pool_3x3': ('MAX', 3), 'avg_pool_3x3': ('AVG', 3)}
_SEPARABLE = {'separable_3x3_2': 3, 'separable_5x5_2': 5}
_BOTTLENECKS = {'conv_3x3': [(3, 3)], 'conv_1x7_7x1': [(1, 7), (7, 1)]}
NAMES = (IDENTITY, 'conv_1x1', *_POOLS, *_SEPARABLE, *_BOTTLENECKS)
