# SPDX-License-Identifier: Apache-2.0
"""Rejects layers and losses with side effects, because re-materialisation runs a stage again.

A variable would be written once or twice for a micro-batch, depending on the policy. A random
operation with internal state would draw other numbers, and the gradients would be wrong. A weight
that a layer does not take from its arguments would get no gradient under some schedules, nor would
a weight that a custom gradient does not take from its arguments.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
def ForbidOtherVariables(layer_path: str, weights: Iterable[Any]) -> Iterator[None]:
  """Raises ValueError if the enclosed code reads a trainable variable other than a weight.

  It would not be trained, because a pipeline trains only the weights that layers declare.

  Args:
    layer_path: the path of the layer that runs the code.
    weights: the layer's weights, variables among them.
  """
  with tf.GradientTape() as tape:
    yield
  known = set(map(id, weights))
  for v in tape.watched_variables():
    if id(v) not in known:
      raise ValueError(
        f'{layer_path}: FProp reads the variable {v.name} {v.shape}, which is not a weight of the '
        'layer and would not be trained: make weights by CreateVariable and layers by CreateChild; '
        'or set trainable=False if the variable is to stay as it is'
      )


def CheckCaptures(
  where: str,
  operations: Sequence[tf.Operation],
  weights: Mapping[str, Any],
  results: Iterable[Any],
) -> None:
  """Raises ValueError if the function of a custom gradient takes a weight of its surroundings.

  TensorFlow asks such a function for the gradients of variables, but not of tensors. It ends the
  function in an IdentityN of its results and its arguments, of which the code after it takes the
  results only.

  Args:
    where: the layer's path or another name for the code, at the beginning of the message.
    operations: the operations of the code.
    weights: {name: trained weight}; variables have their gradients.
    results: the tensors that leave the code.
  """
  names = {t.name: name for name, t in weights.items() if tf.is_symbolic_tensor(t)}
  if not names or not operations:
    return
  graph = operations[0].graph
  types = {op.type for op in operations}
  calls = any(_EffectOf(graph, op_type) == 'calls' for op_type in types)
  functions = _Functions(graph) if calls else {}
  inner = (node for function in functions.values() for node in function.node_def)
  if 'IdentityN' not in types and all(node.op != 'IdentityN' for node in inner):
    return
  nodes = {op.name: _Node.Of(op) for op in operations}
  leaving = {t.name for t in results if tf.is_symbolic_tensor(t)}
  if name := _Captured(nodes, names, leaving, functions):
    raise ValueError(
      f'{where}: the function of a tf.custom_gradient or tf.recompute_grad takes the weight {name} '
      'from its surroundings, so a pipeline would lose the gradient: make it an argument of the '
      'function, or leave recomputation to remat_policy'
    )


class _Node(NamedTuple):
  """An operation of a graph or of a function in its library.

  Attributes:
    type: the type of the operation.
    inputs: the names of its inputs. Up to the first colon each is the name of an operation, or of
      an argument of the function.
    outputs: the prefix of the names of its outputs, which end in their numbers.
    called: the names of the functions that it calls.
    is_gradient: whether it has a gradient of its own.
  """

  type: str
  inputs: list[str]
  outputs: str
  called: list[str]
  is_gradient: bool

  @classmethod
  def Of(cls, op: tf.Operation) -> _Node:
    """Returns the node of an operation; inputs without gradients have no names."""
    inputs = [t.name if t.dtype.is_floating else '' for t in op.inputs]
    is_plain = op.type != 'IdentityN' and _EffectOf(op.graph, op.type) != 'calls'
    if is_plain:  # Each access to a NodeDef copies.
      return cls(op.type, inputs, f'{op.name}:', [], False)
    return cls.OfFunction(op.node_def)._replace(inputs=inputs, outputs=f'{op.name}:')

  @classmethod
  def OfFunction(cls, node: Any) -> _Node:
    """Returns the node of a NodeDef in a function."""
    inputs = [name for name in node.input if not name.startswith('^')]
    return cls(
      node.op, inputs, f'{node.name}:output:', _Called(node), '_gradient_op_type' in node.attr
    )


def _Captured(
  nodes: Mapping[str, _Node],
  weights: Mapping[str, str],
  leaving: Iterable[str],
  functions: Mapping[str, Any],
) -> str | None:
  """Returns a weight that the function of a custom gradient takes from its surroundings.

  Args:
    nodes: {name: operation} of a graph or function.
    weights: {name of a tensor or argument: name of the weight}.
    leaving: the names of the tensors that leave the graph or function.
    functions: {name: FunctionDef}.
  """
  used = {x for node in nodes.values() for x in node.inputs}.union(leaving)

  def WeightBefore(tensors: Iterable[str], seen: Iterable[str] = ()) -> str | None:
    """Returns a weight on which some tensors depend, other than by tensors that were seen."""
    todo, known = list(tensors), set(seen)
    while todo:
      x = todo.pop()
      if x in known:
        continue
      if x in weights:
        return weights[x]
      known.add(x)
      maker = nodes.get(x.partition(':')[0])
      if maker is not None and maker.type != 'StopGradient':
        todo += maker.inputs
    return None

  for node in nodes.values():
    for function in (functions[name] for name in node.called if name in functions):
      parameters = [arg.name for arg in function.signature.input_arg]
      # From the end: an If has a condition before the arguments of its branches.
      pairs = zip(reversed(parameters), reversed(node.inputs), strict=False)
      inner = {parameter: weight for parameter, x in pairs if (weight := WeightBefore([x]))}
      inner_nodes = {n.name: _Node.OfFunction(n) for n in function.node_def} if inner else {}
      if name := _Captured(inner_nodes, inner, function.ret.values(), functions):
        return name
    if node.type == 'IdentityN' and node.is_gradient:
      is_result = [f'{node.outputs}{i}' in used for i in range(len(node.inputs))]
      arguments = itertools.compress(node.inputs, map(operator.not_, is_result))
      if name := WeightBefore(itertools.compress(node.inputs, is_result), arguments):
        return name
  return None


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
      for name in _Called(node):
        if name in functions:
          nodes += functions.pop(name).node_def
    # Recurrent networks of cuDNN draw only for dropout.
    elif effect and not (node.op.startswith('CudnnRNN') and not node.attr['dropout'].f):
      yield node, effect


def _Functions(graph: tf.Graph) -> dict[str, Any]:
  """Returns {name: FunctionDef} of the functions that the operations of a graph may call."""
  return {f.signature.name: f for f in graph.as_graph_def().library.function}


def _Called(node: Any) -> list[str]:
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
  if any(attr.type in ('func', 'list(func)') for attr in op_def.attr):
    return 'calls'
  if any(attr.name == 'seed2' for attr in op_def.attr):
    return 'draws'
  if any(arg.type == tf.resource.as_datatype_enum for arg in op_def.input_arg):
    return 'draws' if op_def.name.startswith(('Rng', 'Stateful')) else 'writes'
  return ''
