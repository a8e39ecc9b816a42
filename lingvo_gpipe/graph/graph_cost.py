# SPDX-License-Identifier: Apache-2.0
"""Counts the floating point operations of a traced TensorFlow function.

`CountFlops(concrete_function)` walks the traced graph and the graphs of the functions that it
calls, and adds up `flop_rules.OpFlops`. It counts only operations that the function's outputs or
side effects need, because TensorFlow prunes all others before it runs the graph. Operations that
depend on constants and static shapes alone cost nothing, because TensorFlow folds them, up to
tensors of 100 KiB.

The body of a called function is counted with the shapes (and the constant shape arguments) of the
call. For `If` and `Case`, the taken branch is counted if it is known, otherwise the most expensive
branch. A `While` whose number of iterations follows from constants counts its body and condition
that many times. Any other `While` counts as often as a constant bound allows
(`maximum_iterations`), or once, and is listed in `Cost.unknown`. Bodies of `tf.custom_gradient` and
`tf.recompute_grad` are part of the graph itself.

The same walk adds up the bytes of the results that a backward pass may keep: see `Cost`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.graph import flop_rules, result_bytes

# An operation without a rule is reported if its outputs or its inputs have more elements.
UNKNOWN_REPORT_ELEMENTS = 1024
# Larger constant results count as computed in every step.
_FOLD_LIMIT_BYTES = 100 * 1024
# Larger constant arguments of a called function are not passed as values.
_STATIC_VALUE_ELEMENTS = 1024

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
_BRANCHES = ('If', 'StatelessIf', 'Case', 'StatelessCase')
_LOOPS = ('While', 'StatelessWhile')
# The results of these depend on the shapes of the inputs alone.
_SHAPE_OPS = frozenset(('Shape', 'ShapeN', 'Size', 'Rank', 'ZerosLike', 'OnesLike'))
# Constant if their inputs are. Random draws from a constant seed count as part of the step.
_FOLDABLE_OPS = frozenset(
  x
  for x in flop_rules.FREE_OPS | flop_rules.ELEMENTWISE_OPS | flop_rules.REDUCTION_OPS
  if not x.startswith(('Stateless', 'Placeholder'))
)


@dataclasses.dataclass(frozen=True)
class Cost:
  """Cost of a computation.

  Attributes:
    flops: floating point operations, a multiply-add = 2.
    unknown: {op type: elements} of operations without a rule that have more than
      `UNKNOWN_REPORT_ELEMENTS` elements (`flops` counts 1 per element), and of loops with an
      unknown number of iterations. `flops` is then an estimate.
    result_bytes: bytes of the results of all operations, except weights, constants and new shapes
      of the same data; see `result_bytes`.
    fused_bytes: `result_bytes` if XLA fuses elementwise operations with their consumers.
  """

  flops: int = 0
  unknown: dict[str, int] = dataclasses.field(default_factory=dict)
  result_bytes: int = 0
  fused_bytes: int = 0

  def __add__(self, other: Cost) -> Cost:
    unknown = dict(self.unknown)
    for op_type, elements in other.unknown.items():
      unknown[op_type] = unknown.get(op_type, 0) + elements
    return Cost(
      self.flops + other.flops,
      unknown,
      self.result_bytes + other.result_bytes,
      self.fused_bytes + other.fused_bytes,
    )

  def Times(self, n: int) -> Cost:
    """Returns the cost of n repetitions."""
    unknown = {k: n * v for k, v in self.unknown.items()} if n else {}
    return Cost(n * self.flops, unknown, n * self.result_bytes, n * self.fused_bytes)


def CountFlops(func_graph_or_concrete_function: Any) -> Cost:
  """Counts one execution of a traced function.

  Args:
    func_graph_or_concrete_function: the result of `tf.function(...).get_concrete_function(...)`, or
      its `.graph`. In a plain `tf.Graph`, which has no outputs, every operation counts.

  Returns:
    The `Cost`.

  Raises:
    ValueError: a required static shape is unknown; the message names the operation.
    TypeError: the argument is neither a concrete function nor a graph.
  """
  graph = getattr(func_graph_or_concrete_function, 'graph', func_graph_or_concrete_function)
  if not isinstance(graph, tf.Graph):
    raise TypeError(
      'CountFlops expects a concrete function or its graph, got '
      f'{type(func_graph_or_concrete_function).__name__}; call get_concrete_function(*specs) on a '
      'tf.function first.'
    )
  outputs = getattr(graph, 'outputs', None)
  if outputs is None:
    ops = graph.get_operations()
  else:
    ops = _FindNeeded([x.op for x in outputs] + list(graph.control_outputs))
  return _Counter(graph).CountOps(ops)


@dataclasses.dataclass(frozen=True)
class _Arg:
  """The known facts of one argument of a called function."""

  dtype: tf.DType
  shape: tf.TensorShape
  value: Any = None  # A NumPy array if the argument is a small constant of integers or bools.

  @property
  def key(self) -> tuple:
    dims = None if self.shape.rank is None else tuple(self.shape.as_list())
    value = None if self.value is None else (self.value.dtype.str, self.value.tobytes())
    return self.dtype.name, dims, value


@dataclasses.dataclass
class _Body:
  """A called function as operations of the scratch graph."""

  args: list[tf.Tensor]
  outputs: list[tf.Tensor]
  ops: list[tf.Operation]


class _Counter:
  """Counts operations and the functions that they call."""

  def __init__(self, graph: tf.Graph):
    self._graph = graph
    self._library: dict[str, Any] | None = None
    self._scratch = tf.Graph()
    self._num_bodies = 0
    self._constants: dict[tf.Operation, bool] = {}
    self._costs: dict[tuple, Cost] = {}

  def CountOps(self, ops: Iterable[tf.Operation]) -> Cost:
    total = Cost()
    operands: dict[str, int] = {}
    for op in ops:
      total += self._OpCost(op)
      operands.update(result_bytes.CountOperandBytes(op))
    return total + Cost(fused_bytes=sum(operands.values()))

  def _OpCost(self, op: tf.Operation) -> Cost:
    if self._IsConstant(op) and all(_Bytes(x) <= _FOLD_LIMIT_BYTES for x in op.outputs):
      return Cost()
    if op.type in _CALLS:
      return self._FunctionCost(op.get_attr('f').name, self._Args(op.inputs))
    if op.type in _BRANCHES:
      return self._BranchCost(op)
    if op.type in _LOOPS:
      return self._LoopCost(op)
    if self._FindFunction(op.type) is not None:  # An op may have a function's name as its type.
      return self._FunctionCost(op.type, self._Args(op.inputs))
    flops = flop_rules.OpFlops(op)
    num_bytes, fused = result_bytes.CountOpBytes(op)
    if flops is not None:
      return Cost(flops, {}, num_bytes, fused)
    # A large operation may have a small result.
    elements = max(sum(map(flop_rules.Elements, x)) for x in (op.outputs, op.inputs))
    unknown = {op.type: elements} if elements > UNKNOWN_REPORT_ELEMENTS else {}
    return Cost(elements, unknown, num_bytes, fused)

  def _BranchCost(self, op: tf.Operation) -> Cost:
    if op.type in ('If', 'StatelessIf'):
      names = [op.get_attr('else_branch').name, op.get_attr('then_branch').name]
    else:
      names = [x.name for x in op.get_attr('branches')]
    choice = self._StaticValue(op.inputs[0])
    if choice is not None:
      # TensorFlow takes the last branch for an index out of range.
      index = int(choice)
      names = [names[index if 0 <= index < len(names) else -1]]
    args = self._Args(list(op.inputs)[1:])
    return max((self._FunctionCost(x, args) for x in names), key=lambda cost: cost.flops)

  def _LoopCost(self, op: tf.Operation) -> Cost:
    body_name, cond_name = op.get_attr('body').name, op.get_attr('cond').name
    starts = self._Args(op.inputs)
    # A variable may change its shape between iterations; the loop's output has the common shape.
    args = [
      _Arg(x.dtype, out.shape if out.shape.rank is not None else x.shape)
      for x, out in zip(starts, op.outputs, strict=True)
    ]
    first = self._ImportBody(body_name, args)
    for i, (arg, out) in enumerate(zip(first.args, first.outputs, strict=True)):
      if _Source(out) is arg:  # The same in every iteration.
        args[i] = starts[i]
    body, cond = self._ImportBody(body_name, args), self._ImportBody(cond_name, args)
    iterations, exact = self._CountIterations(cond, body, starts)
    cost = (self.CountOps(body.ops) + self.CountOps(cond.ops)).Times(iterations)
    if exact:
      return cost
    return cost + Cost(0, {op.type: sum(flop_rules.Elements(x) for x in op.outputs)})

  def _CountIterations(self, cond: _Body, body: _Body, starts: Sequence[_Arg]) -> tuple[int, bool]:
    """Returns (iterations of a loop, whether exact), from a conjunction of `counter < constant`."""
    bounds, exact = [], True
    conjuncts = [_Source(cond.outputs[0])]
    while conjuncts:
      op = conjuncts.pop().op
      if op.type == 'LogicalAnd':
        conjuncts += [_Source(x) for x in op.inputs]
        continue
      bound = self._IterationBound(op, cond, body, starts)
      if bound is None:
        exact = False
      else:
        bounds.append(bound)
    return (min(bounds), exact) if bounds else (1, False)

  def _IterationBound(
    self, op: tf.Operation, cond: _Body, body: _Body, starts: Sequence[_Arg]
  ) -> int | None:
    """Returns how often a comparison of a loop's condition holds, or None if that is unknown."""
    if op.type not in ('Less', 'LessEqual', 'Greater', 'GreaterEqual'):
      return None
    smaller, larger = op.inputs
    if op.type.startswith('Greater'):
      smaller, larger = larger, smaller
    limit = self._StaticValue(larger)
    counter = next((i for i, arg in enumerate(cond.args) if arg is _Source(smaller)), None)
    if limit is None or counter is None or starts[counter].value is None:
      return None
    add = _Source(body.outputs[counter]).op
    if add.type not in ('Add', 'AddV2'):
      return None
    steps = [x for x in add.inputs if _Source(x) is not body.args[counter]]
    step = self._StaticValue(steps[0]) if len(steps) == 1 else None
    if step is None or int(step) <= 0:
      return None
    distance = int(limit) - int(starts[counter].value) + op.type.endswith('Equal')
    return max(0, -(-distance // int(step)))

  def _FunctionCost(self, name: str, args: Sequence[_Arg]) -> Cost:
    key = (name, *(x.key for x in args))
    if key not in self._costs:
      self._costs[key] = self.CountOps(self._ImportBody(name, args).ops)
    return self._costs[key]

  def _FindFunction(self, name: str) -> Any:
    """Returns the FunctionDef of that name from the graph's library, or None."""
    if self._library is None:
      graph_def = self._graph.as_graph_def(add_shapes=True)
      self._library = {x.signature.name: x for x in graph_def.library.function}
      del graph_def.node[:]
      # With these functions, the scratch graph also infers shapes through calls.
      with self._scratch.as_default():
        tf.graph_util.import_graph_def(graph_def, name='')
    return self._library.get(name)

  def _ImportBody(self, name: str, args: Sequence[_Arg]) -> _Body:
    """Creates a function's needed operations in the scratch graph, for these arguments."""
    function = self._FindFunction(name)
    if function is None:
      raise ValueError(f'The graph calls the function {name!r}, which its library lacks.')
    scope = f'body_{self._num_bodies}'
    self._num_bodies += 1
    nodes = {x.name: x for x in function.node_def}
    ops: dict[str, tf.Operation] = {}
    tensors: dict[str, tf.Tensor] = {}
    with self._scratch.as_default():
      for spec, arg in zip(function.signature.input_arg, args, strict=True):
        if arg.value is not None:
          tensors[spec.name] = tf.constant(arg.value, arg.dtype, name=f'{scope}/{spec.name}')
        else:
          tensors[spec.name] = tf.raw_ops.Placeholder(
            dtype=arg.dtype, shape=arg.shape, name=f'{scope}/{spec.name}'
          )
      returned = [function.ret[x.name] for x in function.signature.output_arg]
      pending = [x.split(':')[0] for x in [*returned, *function.control_ret.values()]]
      while pending:
        node = nodes.get(pending[-1])
        if node is None or node.name in ops:  # An argument, or created for another consumer.
          pending.pop()
          continue
        sources = [x.lstrip('^').split(':')[0] for x in node.input]
        missing = [x for x in sources if x in nodes and x not in ops]
        if missing:
          pending += missing
          continue
        inputs = [tensors[x] for x in node.input if not x.startswith('^')]
        ops[node.name] = _CopyNode(self._scratch, node, inputs, f'{scope}/{node.name}')
        tensors.update(_NameOutputs(node.name, ops[node.name]))
        pending.pop()
    return _Body(
      args=[tensors[x.name] for x in function.signature.input_arg],
      outputs=[tensors[x] for x in returned],
      ops=list(ops.values()),
    )

  def _Args(self, inputs: Iterable[tf.Tensor]) -> list[_Arg]:
    return [_Arg(x.dtype, x.shape, self._StaticValue(x)) for x in inputs]

  def _IsConstant(self, op: tf.Operation) -> bool:
    """Whether the op's value depends on constants and static shapes alone."""
    for needed in _FindNeeded([op], self._constants):
      self._constants[needed] = _IsFoldable(needed) and (
        (needed.type in _SHAPE_OPS and all(x.shape.is_fully_defined() for x in needed.inputs))
        or needed.type == 'Const'
        or (len(needed.inputs) > 0 and all(self._constants[x.op] for x in needed.inputs))
      )
    return self._constants[op]

  def _StaticValue(self, tensor: tf.Tensor) -> Any:
    """Returns the value (a NumPy array) of a small constant integer or bool tensor, or None."""
    dtype = tensor.dtype
    if not (dtype.is_integer or dtype.is_bool) or not tensor.shape.is_fully_defined():
      return None
    if flop_rules.Elements(tensor) > _STATIC_VALUE_ELEMENTS:
      return None
    value = tf.get_static_value(tensor)
    if value is not None or not self._IsConstant(tensor.op):
      return value
    return _Evaluate(tensor)


def _IsFoldable(op: tf.Operation) -> bool:
  return not op.op_def.is_stateful and op.type in _FOLDABLE_OPS


def _Evaluate(tensor: tf.Tensor) -> Any:
  """Returns the value (a NumPy array) of a constant tensor of a graph."""

  @tf.function(autograph=False)
  def Compute() -> tf.Tensor:
    return _CopyConstant(tensor, {})

  with tf.init_scope():
    return Compute().numpy()


def _CopyConstant(tensor: tf.Tensor, copies: dict[str, tf.Tensor]) -> tf.Tensor:
  """Copies a constant tensor to the current graph; `copies` is {original name: copy}."""
  if tensor.name not in copies:
    op = tensor.op
    static = tf.get_static_value(tensor)
    if static is not None:
      copies[tensor.name] = tf.constant(static, tensor.dtype)
    elif op.type == 'ShapeN':
      copies[tensor.name] = tf.constant(op.inputs[tensor.value_index].shape, tensor.dtype)
    elif op.type in ('ZerosLike', 'OnesLike'):
      copies[tensor.name] = tf.fill(tensor.shape, tf.cast(op.type == 'OnesLike', tensor.dtype))
    else:
      inputs = [_CopyConstant(x, copies) for x in op.inputs]
      copy = _CopyNode(inputs[0].graph, op.node_def, inputs)
      copies.update((x.name, y) for x, y in zip(op.outputs, copy.outputs, strict=True))
  return copies[tensor.name]


def _FindNeeded(roots: Iterable[tf.Operation], known: Any = ()) -> list[tf.Operation]:
  """Returns the ops that the roots need, through data and control edges, in topological order.

  Leaves out the `known` ops and all ops that only they need.
  """
  order: dict[tf.Operation, None] = {}
  pending = list(roots)
  while pending:
    op = pending[-1]
    missing = []
    if op not in order and op not in known:
      sources = [*(x.op for x in op.inputs), *op.control_inputs]
      missing = [x for x in sources if x not in order and x not in known]
      if not missing:
        order[op] = None
    if missing:
      pending += missing
    else:
      pending.pop()
  return list(order)


def _Source(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor that identities copy."""
  while tensor.op.type in ('Identity', 'StopGradient'):
    tensor = tensor.op.inputs[0]
  return tensor


def _Bytes(tensor: tf.Tensor) -> float:
  if not tensor.shape.is_fully_defined():
    return math.inf
  return flop_rules.Elements(tensor) * tensor.dtype.size


def _CopyNode(
  graph: tf.Graph, node: Any, inputs: Sequence[tf.Tensor], name: str | None = None
) -> tf.Operation:
  """Creates a NodeDef's operation in a graph, with the shapes known from tracing and `inputs`."""
  op = graph.create_op(
    node.op,
    list(inputs),
    name=name,
    attrs={k: v for k, v in node.attr.items() if not k.startswith('_')},
  )
  # The list of shapes is shorter if autodiff has added outputs since.
  for output, shape in zip(op.outputs, node.attr['_output_shapes'].list.shape, strict=False):
    if not shape.unknown_rank:
      output.set_shape([None if x.size < 0 else x.size for x in shape.dim])
  return op


def _NameOutputs(name: str, op: tf.Operation) -> dict[str, tf.Tensor]:
  """Returns {`node:output:index`: tensor}, the names by which nodes of a function refer to it."""
  names, outputs = {}, iter(op.outputs)
  for spec in op.op_def.output_arg:
    if spec.number_attr:
      count = op.get_attr(spec.number_attr)
    elif spec.type_list_attr:
      count = len(op.get_attr(spec.type_list_attr))
    else:
      count = 1
    for i in range(count):
      names[f'{name}:{spec.name}:{i}'] = next(outputs)
  return names
