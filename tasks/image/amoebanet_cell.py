# SPDX-License-Identifier: Apache-2.0
"""The cells of AmoebaNet-B and AmoebaNet-D (Real et al. 2019), each one layer of a pipeline."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gpipe import (
  base_layer,
  batch_norm,
  domain,
  drop_path,
  factorized_reduction,
  hyperparams,
  nested_map,
)
from tasks.image import amoebanet_ops


@dataclasses.dataclass(frozen=True)
class CellSpec:
  """The graph of a cell.

  States 0 and 1 are the two inputs. Each pair ((operation, state), (operation, state)) applies two
  operations to earlier states; their sum is the next state. The output is the concatenation of the
  states in `outputs`.
  """

  pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
  outputs: tuple[int, ...]
  is_reduction: bool = False


# The states that give GPipe's numbers of parameters; the figures of Real et al. join other states.
CELLS = {
  'd_normal': CellSpec(
    (
      (('conv_1x1', 1), ('max_pool_3x3', 1)),
      (('identity', 1), ('conv_1x7_7x1', 0)),
      (('conv_1x1', 0), ('conv_1x7_7x1', 0)),
      (('max_pool_3x3', 2), ('identity', 2)),
      (('avg_pool_3x3', 1), ('conv_1x1', 5)),
    ),
    outputs=(0, 3, 4, 6),
  ),
  'd_reduction': CellSpec(
    (
      (('max_pool_2x2', 0), ('max_pool_3x3', 0)),
      (('identity', 2), ('conv_3x3', 1)),
      (('conv_1x7_7x1', 2), ('max_pool_3x3', 2)),
      (('identity', 3), ('max_pool_2x2', 1)),
      (('avg_pool_3x3', 2), ('conv_1x1', 3)),
    ),
    outputs=(4, 5, 6),
    is_reduction=True,
  ),
  'b_normal': CellSpec(
    (
      (('conv_1x1', 1), ('max_pool_3x3', 1)),
      (('identity', 1), ('separable_3x3_2', 0)),
      (('conv_1x1', 1), ('separable_3x3_2', 0)),
      (('conv_1x1', 2), ('identity', 2)),
      (('avg_pool_3x3', 1), ('conv_1x1', 5)),
    ),
    outputs=(0, 3, 4, 6),
  ),
  'b_reduction': CellSpec(
    (
      (('max_pool_2x2', 0), ('max_pool_3x3', 0)),
      (('identity', 2), ('conv_3x3', 1)),
      (('separable_5x5_2', 2), ('max_pool_3x3', 2)),
      (('identity', 3), ('separable_3x3_2', 1)),
      (('avg_pool_3x3', 4), ('conv_1x1', 3)),
    ),
    outputs=(5, 6),
    is_reduction=True,
  ),
}


class AmoebaNetCell(base_layer.BaseLayer):
  """Maps the outputs of the two previous cells to its own output and the output of the last cell.

  In a reduction cell the operations on states 0 and 1 have stride 2. The first cell of a network
  has a single input, which stands for both; as the older input it is not projected.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of an AmoebaNetCell."""
    p = super().Params()
    p.Define('kind', 'd_normal', 'Name of the graph; see CELLS.', domain.OneOf(*CELLS))
    p.Define('filters', 0, 'Channels of every state of the cell.', domain.Size(4, multiple_of=4))
    p.Define('input_dim', 0, 'Channels of the last cell.', domain.SIZE)
    p.Define(
      'previous_dim',
      0,
      'Channels of the cell before the last; 0: there is no such cell.',
      domain.INDEX,
    )
    p.Define('is_previous_wider', False, 'Whether that cell has twice the height and width.')
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'Template of the batch norms.')
    p.Define(
      'drop_path_tpl',
      drop_path.DropPathLayer.Params(),
      'Template of the drop-path at the end of each operation.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    spec = CELLS[p.kind]
    builder = amoebanet_ops.OpBuilder(p.filters, p.batch_norm_tpl, p.drop_path_tpl)
    self.CreateChild('project_inputs', builder.Conv((1, 1), p.input_dim, p.filters))
    if p.is_previous_wider:
      reduction = factorized_reduction.FactorizedReductionLayer.Params().Set(
        input_dim=p.previous_dim, output_dim=p.filters, batch_norm_tpl=p.batch_norm_tpl
      )
      self.CreateChild('project_previous', reduction)
    elif p.previous_dim not in (0, p.filters):
      self.CreateChild('project_previous', builder.Conv((1, 1), p.previous_dim, p.filters))
    dims = [p.filters, p.filters if p.previous_dim else p.input_dim]
    dims += [p.filters] * len(spec.pairs)
    ops = {}
    for i, pair in enumerate(spec.pairs):
      for side, (name, state) in zip(_SIDES, pair, strict=True):
        stride = 2 if spec.is_reduction and state < 2 else 1
        op = builder.Op(name, dims[state], stride)
        if op is not None:
          ops[f'{side}{i}'] = op
    self.CreateChildren('ops', ops)

  @classmethod
  def OutputDim(cls, kind: str, filters: int) -> int:
    """Returns the number of output channels of a cell."""
    return filters * len(CELLS[kind].outputs)

  def FProp(
    self, theta: nested_map.NestedMap, inputs: tf.Tensor, previous: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs the cell.

    Args:
      theta: the weights.
      inputs: [batch, height, width, input_dim], output of the last cell.
      previous: output of the cell before the last, [batch, height, width, previous_dim] with height
        and width doubled if is_previous_wider; None if there is no such cell.

    Returns:
      The output [batch, height', width', OutputDim], with half the height and width in a reduction
      cell, and `inputs`.
    """
    p = self.params
    spec = CELLS[p.kind]
    older = inputs if previous is None else previous
    if 'project_previous' in self.children:
      older = self.project_previous.FProp(theta.project_previous, older)
    states = [self.project_inputs.FProp(theta.project_inputs, inputs)]
    states.append(self._CastToFPropDtype(older))
    for i, pair in enumerate(spec.pairs):
      terms = []
      for side, (_, state) in zip(_SIDES, pair, strict=True):
        name, x = f'{side}{i}', states[state]
        terms.append(self.ops[name].FProp(theta.ops[name], x) if name in self.ops else x)
      states.append(terms[0] + terms[1])
    return tf.concat([states[i] for i in spec.outputs], axis=-1), inputs


_SIDES = ('left', 'right')
