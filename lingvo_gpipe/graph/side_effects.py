# SPDX-License-Identifier: Apache-2.0
"""Rejects layers and losses with side effects, because re-materialisation runs a stage again.

A variable would be written once or twice for a micro-batch, depending on the policy. A random
operation with internal state would draw other numbers, and the gradients would be wrong. A weight
that a layer does not take from its arguments would get no gradient under some schedules.
So would a weight that the function of a `tf.custom_gradient` takes from its surroundings:
TensorFlow asks it for the gradients of its arguments and of the variables that it reads, but in a
pipeline a weight may be a tensor.

No public name shows where such a function begins and ends. A graph does not show it either: it
cannot distinguish an unused result from an argument. So this module wraps the function of
TensorFlow that runs all of them in graphs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import custom_gradient

# Operations that take a variable or a table without changing it.
_READS = frozenset(
  'ReadVariableOp _ReadVariablesOp DisableCopyOnRead ResourceGather ResourceGatherNd VariableShape '
  'VarIsInitializedOp LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2'.split()
)

# The layer or other code that may have no side effects now.
_pure: contextvars.ContextVar[str] = contextvars.ContextVar('pure', default='')

# {type of operation: its effect}. A cache, because a layer has many operations of few types.
_EFFECTS: dict[str, str] = {}


class _Captures(NamedTuple):
  """The captures of custom gradients in code that must not capture a weight."""

  weights: Mapping[Any, str]  # {_Key(weight): name}
  captured: list[str]  # Names of weights that functions take from their surroundings.


_captures: contextvars.ContextVar[_Captures | None] = contextvars.ContextVar(
  'captures', default=None
)


@contextlib.contextmanager
def NewOperations() -> Iterator[list[tf.Operation]]:
  """Yields a list that gets the operations which the enclosed code adds to the traced graph."""
  operations: list[tf.Operation] = []
  mark = tf.no_op()  # An operation of the graph; None in eager mode.
  num_before = 0 if mark is None else len(mark.graph.get_operations())
  yield operations
  if mark is not None:
    operations += mark.graph.get_operations()[num_before:]


def WithChecks(operations: Iterable[tf.Operation], results: Any) -> Any:
  """Returns a nest of tensors that wait for the assertions and messages among the operations.

  A subgraph of a traced function has only the operations that its results need.

  Args:
    operations: the operations of code that passed `Forbid`.
    results: the results of the code.
  """
  checks = [
    op
    for op in operations
    if op.op_def.is_stateful and op.type not in _READS and not op.type.startswith('Collective')
  ]
  if not checks:
    return results
  with tf.control_dependencies(checks):
    return tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), results)


@contextlib.contextmanager
def Forbid(where: str) -> Iterator[list[tf.Operation]]:
  """Raises if the enclosed code, while it is traced, has a side effect.

  It may not write a variable, draw stateful numbers or take weights from layers (`CheckWeights`).
  Yields the list of its operations, see `NewOperations`.

  Args:
    where: the layer's path or another name for the code, at the beginning of the message.

  Raises:
    ValueError: the code has such an effect, directly or in a function, branch or loop; or it
      writes a weight that is passed as a tensor.
  """
  if tf.executing_eagerly():
    yield []
    return
  token = _pure.set(where)
  try:
    with NewOperations() as operations:
      yield operations
  except AttributeError as e:
    if tf.is_tensor(e.obj) and str(e.name).startswith(('assign', 'scatter_')):
      raise ValueError(_WritesMessage(where, str(e.name))) from e
    raise
  finally:
    _pure.reset(token)
  for node, effect in _Effects(operations):
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


@contextlib.contextmanager
def ForbidOtherVariables(where: str, weights: Iterable[Any]) -> Iterator[None]:
  """Raises ValueError if the enclosed code reads a trainable variable other than a weight.

  It would not be trained, because a pipeline trains only the weights that layers declare.

  Args:
    where: the layer's path or another name for the code, at the beginning of the message.
    weights: the weights, variables among them.
  """
  with tf.GradientTape() as tape:
    yield
  known = set(map(id, weights))
  for v in tape.watched_variables():
    if id(v) not in known:
      raise ValueError(
        f'{where}: this code reads the variable {v.name} {v.shape}, which is not one of its '
        'weights and would not be trained: make weights by CreateVariable and layers by '
        'CreateChild; or set trainable=False if the variable is to stay as it is'
      )


@contextlib.contextmanager
def CheckCaptures(where: str, weights: Mapping[str, Any]) -> Iterator[None]:
  """Raises ValueError if a custom gradient in the enclosed code captures a weight.

  A tensor that is computed from a weight before the function begins is let through: plain
  TensorFlow gives it no gradient either.

  Args:
    where: the layer's path or another name for the code, at the beginning of the message.
    weights: {name: trained weight}; variables among them have their gradients.
  """
  keys = {_Key(t): name for name, t in weights.items() if tf.is_symbolic_tensor(t)}
  captures = _Captures(keys, [])
  token = _captures.set(captures if keys else None)
  try:
    yield
  finally:
    _captures.reset(token)
  # Not in the function: AutoGraph would put lines of the program before the message.
  for name in captures.captured:
    raise ValueError(
      f'{where}: the function of a tf.custom_gradient or tf.recompute_grad takes the weight {name} '
      'from its surroundings, so a pipeline would lose the gradient: make it an argument of the '
      'function, or leave recomputation to remat_policy'
    )


def _Key(t: tf.Tensor) -> tuple[int, str]:
  return id(t.graph), t.name


def _AddCheck(run: Callable[..., Any]) -> Callable[..., Any]:
  """Returns TensorFlow's function (f, args, kwargs) -> results of f, with the check."""

  @functools.wraps(run)
  def Run(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    captures = _captures.get()
    if captures is None:
      return run(f, args, kwargs)

    @functools.wraps(f)
    def Checked(*args: Any) -> Any:
      # A weight that is an argument must differ from the same weight in the surroundings.
      args = tf.nest.map_structure(tf.identity, args, expand_composites=True)
      with NewOperations() as operations:
        results, gradient = f(*args)
      captures.captured.extend(_CapturedWeights(results, operations, captures.weights))
      return results, gradient

    return run(Checked, args, kwargs)

  return Run


def _CapturedWeights(
  results: Any, operations: Sequence[tf.Operation], weights: Mapping[Any, str]
) -> Iterator[str]:
  """Yields the names of the weights on which results depend by these operations alone."""
  inside = {(id(op.graph), op.name) for op in operations}
  todo = [t for t in tf.nest.flatten(results, expand_composites=True) if tf.is_symbolic_tensor(t)]
  seen: set[Any] = set()
  while todo:
    t = todo.pop()
    key = _Key(t)
    # A loop's list of tensors is a variant.
    has_gradient = t.dtype.is_floating or t.dtype.is_complex or t.dtype == tf.variant
    if key in seen or not has_gradient:
      continue
    seen.add(key)
    if key in weights:
      yield weights[key]
    elif (id(t.graph), t.op.name) in inside and t.op.type != 'Placeholder':
      todo += [] if t.op.type == 'StopGradient' else t.op.inputs
    else:  # In the body of a loop or branch a weight is a placeholder.
      todo += [outer for outer, inner in getattr(t.graph, 'captures', ()) if inner is t]


def _WritesMessage(where: str, op: str) -> str:
  return (
    f'{where}: {op} writes a variable, but backward may run it again; report sums with '
    'fprop_context.Current().AddSums and compute the new state in StateFromSums'
  )


def _Effects(operations: Sequence[tf.Operation]) -> Iterator[tuple[Any, str]]:
  """Yields (NodeDef, `writes` or `draws`) of operations, also inside the functions they call."""
  if not operations:
    return
  graph = operations[0].graph
  # Most operations have no effect. Skip these first: each access to a NodeDef or a library copies.
  nodes = [op.node_def for op in operations if _EffectOf(graph, op.type)]
  functions = _Functions(graph) if nodes else {}
  while nodes:
    node = nodes.pop()
    effect = _EffectOf(graph, node.op)
    if effect == 'calls':
      for name in _CalledFunctions(node):
        if name in functions:
          nodes += functions.pop(name).node_def
    # Recurrent networks of cuDNN draw only for dropout.
    elif effect and not (node.op.startswith('CudnnRNN') and not node.attr['dropout'].f):
      yield node, effect


def _Functions(graph: tf.Graph) -> dict[str, Any]:
  """Returns {name: FunctionDef} of the functions that the operations of a graph may call."""
  return {f.signature.name: f for f in graph.as_graph_def().library.function}


def _CalledFunctions(node: Any) -> list[str]:
  """Returns the names of the functions that a NodeDef calls."""
  values = node.attr.values()
  return [f.name for value in values for f in (value.func, *value.list.func) if f.name]


def _EffectOf(graph: tf.Graph, op_type: str) -> str:
  """Returns the effect of such an operation: `calls` (functions), `draws`, `writes` or ''."""
  if op_type not in _EFFECTS:
    _EFFECTS[op_type] = _Effect(graph.op_def_for_type(op_type))
  return _EFFECTS[op_type]


def _Effect(op_def: Any) -> str:
  if op_def.name in _READS:
    return ''
  if op_def.name == 'Timestamp':
    return 'draws'
  if any(attr.type in ('func', 'list(func)') for attr in op_def.attr):
    return 'calls'
  if any(attr.name == 'seed2' for attr in op_def.attr):
    return 'draws'
  if any(arg.type == tf.resource.as_datatype_enum for arg in op_def.input_arg):
    return 'draws' if op_def.name.startswith(('Rng', 'Stateful')) else 'writes'
  return ''


custom_gradient._graph_mode_decorator = _AddCheck(custom_gradient._graph_mode_decorator)
