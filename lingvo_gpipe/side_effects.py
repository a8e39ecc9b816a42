# SPDX-License-Identifier: Apache-2.0
"""Refuses side effects of layers and losses, which run again where a stage is re-materialised.

A variable would be written once or twice for a micro-batch, as the policy has it. A random
operation with a state of its own would draw other numbers, and the gradients would be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Of the operations that take a variable or a table, those that leave it as it is.
_READS = frozenset(
  'ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp Identity '
  'LookupTableFindV2 LookupTableSizeV2'.split()
)


@contextlib.contextmanager
def Refused(where: str) -> Iterator[None]:
  """Raises where the enclosed code, while it is traced, writes a variable or draws such numbers.

  Args:
    where: begins the message.

  Raises:
    ValueError: it does; or it writes a weight that came as a tensor.
  """
  mark = tf.no_op()
  if mark is None:  # Where code runs eagerly.
    yield
    return
  num_before = len(mark.graph.get_operations())
  try:
    yield
  except AttributeError as e:
    if tf.is_tensor(e.obj) and str(e.name).startswith(('assign', 'scatter_')):
      raise ValueError(_WritesMessage(where, str(e.name))) from e
    raise
  for op in mark.graph.get_operations()[num_before:]:
    if _Writes(op):
      raise ValueError(_WritesMessage(where, f'{op.type} {op.name}'))
    if any(attr.name == 'seed2' for attr in op.op_def.attr):
      raise ValueError(
        f'{where}: {op.type} {op.name} draws other numbers when backward runs it again; use '
        'tf.random.stateless_uniform and the like, with fprop_context.Current().OpSeed(layer)'
      )


def _WritesMessage(where: str, what: str) -> str:
  return (
    f'{where}: {what} writes a variable, but runs again in backward, or never; report sums with '
    'fprop_context.Current().AddSums and make new state of them in StateFromSums'
  )


def _Writes(op: tf.Operation) -> bool:
  """Whether a resource that the operation takes may be another afterwards."""
  taken = {i for i, t in enumerate(op.inputs) if t.dtype == tf.resource}
  return bool(taken) and op.type not in _READS and not taken <= _ReadOnly(op)


def _ReadOnly(op: tf.Operation) -> set[Any]:
  """Where a call, branch or loop takes resources that are only read inside."""
  try:
    return set(op.get_attr('_read_only_resource_inputs'))
  except ValueError:
    return set()
