# SPDX-License-Identifier: Apache-2.0
"""Refuses side effects of layers and losses, which run again where a stage is re-materialised.

A variable would be written once or twice for a micro-batch, as the policy has it. A random
operation with a state of its own would draw other numbers, and the gradients would be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

# Of the operations that take a variable or a table, those that leave it as it is.
_READS = frozenset(
  'ReadVariableOp _ReadVariablesOp DisableCopyOnRead ResourceGather ResourceGatherNd VariableShape '
  'VarIsInitializedOp LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2'.split()
)

# {type of operation: its effect}: a layer has many operations of few types.
_EFFECTS: dict[str, str] = {}


@contextlib.contextmanager
def Refused(where: str) -> Iterator[None]:
  """Raises where the enclosed code, while it is traced, writes a variable or draws such numbers.

  Args:
    where: begins the message.

  Raises:
    ValueError: it does, itself or in a function, branch or loop; or it writes a weight that came
      as a tensor.
  """
  mark = tf.no_op()  # Tells the graph that is traced, None where code runs eagerly.
  if mark is None:
    yield
    return
  num_before = len(mark.graph.get_operations())
  try:
    yield
  except AttributeError as e:
    if tf.is_tensor(e.obj) and str(e.name).startswith(('assign', 'scatter_')):
      raise ValueError(_WritesMessage(where, str(e.name))) from e
    raise
  for node, effect in _Effects(mark.graph, mark.graph.get_operations()[num_before:]):
    what = f'{node.op} {node.name}'
    if effect == 'writes':
      raise ValueError(_WritesMessage(where, what))
    raise ValueError(
      f'{where}: {what} draws other numbers when backward runs it again; use '
      'tf.random.stateless_uniform and the like, with fprop_context.Current().OpSeed(layer)'
    )


def _WritesMessage(where: str, what: str) -> str:
  return (
    f'{where}: {what} writes a variable, but runs again in backward, or never; report sums with '
    'fprop_context.Current().AddSums and make new state of them in StateFromSums'
  )


def _Effects(graph: tf.Graph, ops: Iterable[tf.Operation]) -> Iterator[tuple[Any, str]]:
  """(NodeDef, `writes` or `draws`) of operations, and of those in the functions that they call."""
  # Most have no effect: a NodeDef and a library are made anew for each who asks.
  nodes = [op.node_def for op in ops if _EffectOf(graph, op.type)]
  library = graph.as_graph_def().library.function if nodes else ()
  functions = {function.signature.name: function for function in library}
  while nodes:
    node = nodes.pop()
    effect = _EffectOf(graph, node.op)
    if effect == 'calls':
      values = node.attr.values()
      for name in [f.name for value in values for f in (value.func, *value.list.func)]:
        if name in functions:
          nodes += functions.pop(name).node_def
    # Recurrent networks of cuDNN draw for their dropout alone.
    elif effect and not (node.op.startswith('CudnnRNN') and not node.attr['dropout'].f):
      yield node, effect


def _EffectOf(graph: tf.Graph, op_type: str) -> str:
  """What such an operation does: `calls` functions, `draws`, `writes` or nothing of these."""
  if op_type not in _EFFECTS:
    _EFFECTS[op_type] = _Effect(graph.op_def_for_type(op_type))
  return _EFFECTS[op_type]


def _Effect(op_def: Any) -> str:
  if op_def.name in _READS:
    return ''
  if any(attr.type in ('func', 'list(func)') for attr in op_def.attr):
    return 'calls'
  if any(attr.name == 'seed2' for attr in op_def.attr):
    return 'draws'
  if any(arg.type == tf.resource.as_datatype_enum for arg in op_def.input_arg):
    return 'draws' if op_def.name.startswith(('Rng', 'Stateful')) else 'writes'
  return ''
