# SPDX-License-Identifier: Apache-2.0
"""AmoebaNet-B and -D (Real et al. 2019), the networks of GPipe's image experiments."""

from __future__ import annotations

from lingvo_gpipe import batch_norm, conv_batch_norm, domain, drop_path, hyperparams, skip
from tasks.image import amoebanet_cell, classifier, heads

_AUX_KEY = 'aux_head'


class AmoebaNet(classifier.ImageClassifier):
  """AmoebaNet (L, D): L = `num_cells` normal cells, with D = `reduction_size` channels at first.

  The network has a stem convolution, stem cells that halve the image, and three stacks of together
  L normal cells. A reduction cell before the second and the third stack halves the image and
  doubles the channels. Every cell is one layer of the pipeline.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of the network."""
    p = super().Params()
    p.Define('variant', 'D', 'Which cells: B or D.', domain.OneOf('B', 'D'))
    p.Define('num_cells', 18, 'L: number of normal cells in all three stacks.', domain.NUM_LAYERS)
    p.Define('reduction_size', 256, 'D: channels of the states in the first stack.', domain.SIZE)
    p.Define('stem_filters', 32, 'Channels of the stem convolution.', domain.SIZE)
    p.Define(
      'stem_stride', 2, 'Stride of the stem convolution; 1 (padded) for small images.', domain.SIZE
    )
    p.Define(
      'num_stem_cells',
      2,
      'Reduction cells before the first stack; 0 for small images.',
      domain.Int(0, 16),
    )
    p.Define('aux_head_scale', 0.4, 'Scale of the widths of the auxiliary head.', domain.POSITIVE)
    p.Define(
      'dropout_prob', 0.0, 'Dropout probability before the last projection.', domain.PROBABILITY
    )
    p.Define(
      'drop_path_keep_prob',
      1.0,
      'Final probability of keeping an operation.',
      domain.Number(above=0, high=1),
    )
    p.Define(
      'drop_path_total_steps',
      0,
      'Steps until that probability is reached; 0: at once.',
      domain.INDEX,
    )
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'Template of the batch norms.')
    return p

  def _Layers(self) -> list[hyperparams.InstantiableParams]:
    p = self.params
    self._CheckParams()
    drop = drop_path.DropPathLayer.Params().Set(
      keep_prob=p.drop_path_keep_prob, total_steps=p.drop_path_total_steps
    )
    cell_tpl = amoebanet_cell.AmoebaNetCell.Params().Set(
      batch_norm_tpl=p.batch_norm_tpl, drop_path_tpl=drop
    )
    layers = [
      conv_batch_norm.ConvBatchNormLayer.Params().Set(
        filter_shape=(3, 3, p.num_channels, p.stem_filters),
        filter_stride=(p.stem_stride, p.stem_stride),
        padding='SAME' if p.stem_stride == 1 else 'VALID',
        activation='NONE',
        batch_norm_tpl=p.batch_norm_tpl,
      )
    ]
    size = p.image_size if p.stem_stride == 1 else (p.image_size - 3) // p.stem_stride + 1
    dim, previous_dim, is_previous_wider = p.stem_filters, 0, False

    def AddCell(kind: str, filters: int) -> None:
      nonlocal size, dim, previous_dim, is_previous_wider
      kind = f'{p.variant.lower()}_{kind}'
      cell = cell_tpl.Copy().Set(
        kind=kind,
        filters=filters,
        input_dim=dim,
        previous_dim=previous_dim,
        is_previous_wider=is_previous_wider,
      )
      layers.append(cell)
      is_previous_wider = amoebanet_cell.CELLS[kind].is_reduction
      size = -(-size // 2) if is_previous_wider else size
      dim, previous_dim = amoebanet_cell.AmoebaNetCell.OutputDim(kind, filters), dim

    for i in range(p.num_stem_cells):
      AddCell('reduction', p.reduction_size >> (p.num_stem_cells - i))
    filters = p.reduction_size
    for i in range(p.num_cells):
      if i in (p.num_cells // 3, 2 * p.num_cells // 3):
        filters *= 2
        AddCell('reduction', filters)
      AddCell('normal', filters)
      if p.aux_loss_weight and i == 2 * p.num_cells // 3 - 1:
        if size < heads.MIN_SIZE:
          raise ValueError(
            f'{self.path}: with image_size {p.image_size} the auxiliary head would see features of '
            f'{size}x{size}, but needs {heads.MIN_SIZE}x{heads.MIN_SIZE}: use larger images or '
            'aux_loss_weight 0'
          )
        layers.append(skip.StashLayer.Params().Set(key=_AUX_KEY))
        aux_head = heads.AuxiliaryHead.Params().Set(
          key=_AUX_KEY,
          input_dim=dim,
          input_size=size,
          num_classes=p.num_classes,
          scale=p.aux_head_scale,
          batch_norm_tpl=p.batch_norm_tpl,
        )
    if p.aux_loss_weight:
      layers.append(aux_head)
    layers.append(
      heads.ClassifierHead.Params().Set(
        input_dim=dim, num_classes=p.num_classes, dropout_prob=p.dropout_prob
      )
    )
    return layers

  def _CheckParams(self) -> None:
    p = self.params
    if p.aux_loss_weight and p.num_cells < 2:
      raise ValueError(
        f'{self.path}: an auxiliary head (aux_loss_weight) needs num_cells of at least 2, got 1'
      )
    factor = 4 << p.num_stem_cells
    if p.reduction_size < factor or p.reduction_size % factor:
      raise ValueError(
        f'{self.path}: with {p.num_stem_cells} stem cells reduction_size must be a multiple of '
        f'{factor}, got {p.reduction_size}'
      )
