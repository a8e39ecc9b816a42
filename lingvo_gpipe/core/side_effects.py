# SPDX-License-Identifier: Apache-2.0
"""Rejects layers and losses with side effects, because re-materialisation runs a stage again.

A variable would be written once or twice for a micro-batch, depending on the policy. A random
operation with internal state would draw other numbers, and the gradients would be wrong. A weight
that a layer does not take from its arguments would get no gradient under some schedules.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

# Operations that take a variable or a table without changing it.
_READS = frozenset(
  'ReadVariableOp _ReadVariablesOp DisableCopyOnRead ResourceGather ResourceGatherNd VariableShape '
  'VarIsInitializedOp LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2'.split()
)

# The layer or other code that may have no side effects now.
_pure: contextvars.ContextVar[str] = contextvars.ContextVar('pure', default='')

# {type of operation: its effect}. A cache, because a layer has many operations of few types.
_EFFECTS: dict[str, str] = {}


@contextlib.contextmanager
def Forbid(where: str) -> Iterator[None]:
  """Raises if the enclosed code, while it is traced, has a side effect.

  It may not write a variable, draw stateful numbers or take weights from layers (`CheckWeights`).

  Args:
    where: the layer's path or another name for the code, at the beginning of the message.

  Raises:
    ValueError: the code has such an effect, directly or in a function, branch or loop; or it
      writes a weight that is passed as a tensor.
  """
  mark = tf.no_op()  # An operation of the traced graph; None in eager mode.
  if mark is None:
    yield
    return
  num_before = len(mark.graph.get_operations())
  token = _pure.set(where)
  try:
    yield
  except AttributeError as e:
    if tf.is_tensor(e.obj) and str(e.name).startswith(('assign', 'scatter_')):
      raise ValueError(_WritesMessage(where, str(e.name))) from e
    raise
  finally:
    _pure.reset(token)
  for node, effect in _Effects(mark.graph, mark.graph.get_operations()[num_before:]):
    op = f'{node.op} {node.name}'
    if effect == 'writes':
      raise ValueError(_WritesMessage(where, op))
    raise ValueError(
      f'{where}: {op} draws other numbers when backward runs it again; use '
      'tf.random.stateless_uniform or another stateless operation, with the seed '
      'fprop_context.Current().OpSeed(layer)'
    )


def CheckWeights(layer_path: str) -> None:
  """Raises ValueError if traced code within `Forbid` asks for a layer's variables."""
  if where := _pure.get():
    raise ValueError(
      f'{where} takes the weights of {layer_path} from the layer: take them from the argument '
      'theta, and call a child as self.child.FProp(theta.child, x). Otherwise they may get no '
      "gradient, and equal layers, which share one trace, would use one layer's weights"
    )


def _WritesMessage(where: str, op: str) -> str:
  return (
    f'{where}: {op} writes a variable, but backward may run it again; report sums with '
    'fprop_context.Current().AddSums and compute the new state in StateFromSums'
  )


def _Effects(graph: tf.Graph, ops: Iterable[tf.Operation]) -> Iterator[tuple[Any, str]]:
  """Yields (NodeDef, `writes` or `draws`) of operations, also inside the functions they call."""
  # Most operations have no effect. Skip these first: each access to a NodeDef or a library copies.
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
    # Recurrent networks of cuDNN draw only for dropout.
    elif effect and not (node.op.startswith('CudnnRNN') and not node.attr['dropout'].f):
      yield node, effect


def _EffectOf(graph: tf.Graph, op_type: str) -> str:
  """Returns the effect of such an operation: `calls` (functions), `draws`, `writes` or ''."""
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
