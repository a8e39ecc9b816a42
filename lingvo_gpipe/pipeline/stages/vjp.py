# SPDX-License-Identifier: Apache-2.0
"""One traced vector-Jacobian product of a stage, split into forward, input and weight gradients.

If a schedule splits the backward, or nothing is recomputed, the parts must not run any expensive
operation twice. The whole product is therefore traced once, and each part is a subgraph. A later
part gets the results that it needs from an earlier part, its residuals, as tensors:

    weights, inputs ──> [forward] ──> y
                            └─ residuals ──> [input gradient]  dy ──> dx
                                                 └─ residuals ──> [weight gradient] ──> dw

Residuals are results of expensive operations (products, convolutions, reductions, random numbers)
and masks. Cheap results are recomputed from them, which XLA fuses. Weights and the stage's inputs
are never residuals, because all parts have them. A policy may recompute more: the results of a
recomputed operation are residuals only if operations of the forward pass that are not recomputed
take them.

tf.compat.v1.wrap_function is the only public way to take a subgraph out of a traced function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

# Cheap, so recomputed rather than kept: elementwise operations, and moving data.
_CHEAP = frozenset(
  'Abs Add AddN AddV2 BroadcastTo Cast Ceil ClipByValue Concat ConcatV2 Cos Div DivNoNan Equal Erf '
  'Erfc Exp ExpandDims Expm1 Fill Floor FloorDiv Greater GreaterEqual Identity IdentityN Inv '
  'LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan '
  'Neg NotEqual OnesLike Pack PlaceholderWithDefault Pow Range Rank ReadVariableOp RealDiv '
  'Reciprocal Relu Relu6 Reshape Round Rsqrt Select SelectV2 Shape ShapeN Sigmoid Sign Sin Size '
  'Slice Softplus Split SplitV Sqrt Square SquaredDifference Squeeze StopGradient StridedSlice Sub '
  'Tanh Tile Transpose Unpack ZerosLike Const BroadcastGradientArgs'.split()
)

_Part = Callable[..., Any]


class SplitVjp:
  """A vector-Jacobian product of weights, inputs and dy, and its parts.

  Each part is a function of flat tensors: the weights' resource handles, the inputs, then the
  arguments named below. Each is made at its first use, because no schedule needs all parts.

  Attributes:
    forward: (handles, inputs) -> y + residuals for `backward`.
    backward: (handles, inputs, residuals, dy) -> dx + dw.
    input_gradient: (handles, inputs, dy) -> dx + residuals for `weight_gradient`.
    weight_gradient: (handles, inputs, dy, residuals) -> dw.
    kept_input_gradient: (handles, inputs, residuals of forward, dy) -> dx + residuals.
    kept_weight_gradient: (handles, inputs, residuals of forward, dy, residuals) -> dw.
    has_weight_gradient: for each weight whether it has a gradient; dw leaves out the others.
    is_sparse: for each existing gradient whether it is sparse: values and indices.
    num_y: number of tensors in y.
    num_dx: number of tensors in dx.
  """

  def __init__(
    self,
    vjp: Callable[[list[tf.Tensor], list[tf.Tensor]], Any],
    weights: Sequence[tf.Variable],
    inputs: Sequence[tf.Tensor],
    *,
    xla: bool = False,
    is_recomputed: Callable[[str], bool] = lambda name: False,
  ) -> None:
    """Traces the product.

    Args:
      vjp: (weights as tensors, inputs) -> (y, dy, dx, dw), lists of tensors of one graph; dy are
        placeholders, and dw has None for a weight without a gradient.
      weights: variables, or their stand-ins in a trace.
      inputs: tensors with the shapes and dtypes of later calls.
      xla: whether XLA compiles the parts. Lists of tensors cannot leave XLA, so results that a loop
        keeps for its backward are recomputed.
      is_recomputed: whether to recompute the operation of a name rather than keep its results.
    """
    handles = [tf.TensorSpec([], tf.resource)] * len(weights)
    specs = [*handles, *(tf.TensorSpec(t.shape, t.dtype) for t in inputs)]
    kinds = [(w.shape, w.dtype) for w in weights]
    parts: list[Any] = []
    gradients: list[Any] = []

    def Trace(*flat: tf.Tensor) -> list[tf.Tensor]:
      read = []
      for handle, (shape, dtype) in zip(flat, kinds, strict=False):
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        value.set_shape(shape)
        read.append(value)
      y, dy, dx, gradients[:] = vjp(read, list(flat[len(kinds) :]))
      parts[:] = [list(y), list(dy), list(dx), _Components(gradients)]
      return parts[0] + parts[2]

    # Not in tf.init_scope, which pauses gradient tapes.
    self._whole = tf.compat.v1.wrap_function(Trace, specs)
    self._xla = xla
    self._is_recomputed = is_recomputed
    self._y, self._dy, self._dx, self._dw = parts
    self._inputs = list(self._whole.inputs)
    self.num_y, self.num_dx = len(self._y), len(self._dx)
    self.has_weight_gradient = [g is not None for g in gradients]
    self.is_sparse = [isinstance(g, tf.IndexedSlices) for g in gradients if g is not None]

  @functools.cached_property
  def forward(self) -> _Part:
    return self._whole.prune(self._inputs, [*self._y, *self._kept])

  @functools.cached_property
  def backward(self) -> _Part:
    return self._whole.prune([*self._inputs, *self._kept, *self._dy], [*self._dx, *self._dw])

  @functools.cached_property
  def input_gradient(self) -> _Part:
    return self._InputGradient([])

  @functools.cached_property
  def weight_gradient(self) -> _Part:
    return self._WeightGradient([])

  @functools.cached_property
  def kept_input_gradient(self) -> _Part:
    return self._InputGradient(self._kept)

  @functools.cached_property
  def kept_weight_gradient(self) -> _Part:
    return self._WeightGradient(self._kept)

  def WeightGradients(self, components: Sequence[tf.Tensor]) -> list[Any]:
    """Returns the existing gradients, dense or sparse, from the tensors in dw."""
    parts = iter(components)
    return [
      tf.IndexedSlices(next(parts), next(parts)) if s else next(parts) for s in self.is_sparse
    ]

  def Rows(self) -> list[tuple[int | None, bool]]:
    """Returns for each existing gradient its number of rows, and whether their ids are constant.

    The number is None if it is unknown, or the gradient is dense. Constant ids depend on no
    argument and no state.
    """
    rows: list[tuple[int | None, bool]] = []
    for g in self.WeightGradients(self._dw):
      if isinstance(g, tf.IndexedSlices):
        ops = Ancestors([g.indices]).values()
        varies = any(op.type == 'Placeholder' or op.op_def.is_stateful for op in ops)
        rows.append((g.indices.shape[0], not varies))
      else:
        rows.append((None, False))
    return rows

  @functools.cached_property
  def _kept(self) -> list[tf.Tensor]:
    """Residuals of `forward`."""
    return self.ForwardResiduals(self._is_recomputed)

  def ForwardResiduals(self, is_recomputed: Callable[[str], bool]) -> list[tf.Tensor]:
    """Returns the residuals of `forward` if these operations were recomputed."""
    return _Residuals(
      [*self._dx, *self._dw], self._inputs, self.forward_ops, self._xla, is_recomputed
    )

  def RepeatedOps(self, residuals: Sequence[tf.Tensor]) -> set[str]:
    """Returns the names of the operations of the forward pass that backward runs again.

    Args:
      residuals: the residuals of `forward`, see `ForwardResiduals`.
    """
    ran = Ancestors([*self._dx, *self._dw], [*self._inputs, *residuals])
    return ran.keys() & self.forward_ops.keys()

  @functools.cached_property
  def forward_ops(self) -> dict[str, tf.Operation]:
    """The operations of the forward pass by name."""
    return Ancestors(self._y, self._inputs)

  def _InputGradient(self, residuals: list[tf.Tensor]) -> _Part:
    fed = [*self._inputs, *residuals, *self._dy]
    return self._whole.prune(fed, [*self._dx, *self._WeightResiduals(fed)])

  def _WeightGradient(self, residuals: list[tf.Tensor]) -> _Part:
    fed = [*self._inputs, *residuals, *self._dy]
    return self._whole.prune([*fed, *self._WeightResiduals(fed)], self._dw)

  def _WeightResiduals(self, fed: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the residuals of the input gradient."""
    return _Residuals(self._dw, fed, Ancestors(self._dx, fed), self._xla)


def _Components(gradients: Sequence[Any]) -> list[tf.Tensor]:
  """Returns the tensors of gradients, None and sparse ones among them."""
  components = []
  for g in gradients:
    if isinstance(g, tf.IndexedSlices):
      components += [g.values, g.indices]
    elif g is not None:
      components.append(g)
  return components


def _Inputs(op: tf.Operation) -> list[tf.Tensor]:
  """Returns the inputs of an operation, and the sums over replicas that it must wait for."""
  sums = (before for before in op.control_inputs if before.type == 'CollectiveReduce')
  return [*op.inputs, *(t for before in sums for t in before.outputs)]


def Ancestors(
  fetches: Sequence[tf.Tensor], fed: Sequence[tf.Tensor] = ()
) -> dict[str, tf.Operation]:
  """Returns the operations, by name, that must run for the fetches if some tensors are fed."""
  stop = {t.name for t in fed}
  seen: dict[str, tf.Operation] = {}
  todo = [t for t in fetches if t.name not in stop]
  while todo:
    op = todo.pop().op
    if op.name not in seen:
      seen[op.name] = op
      todo.extend(t for t in _Inputs(op) if t.name not in stop)
  return seen


def _Residuals(
  fetches: Sequence[tf.Tensor],
  fed: Sequence[tf.Tensor],
  ran: Collection[str],
  xla: bool,
  is_recomputed: Callable[[str], bool] = lambda name: False,
) -> list[tf.Tensor]:
  """Returns the results of expensive operations in `ran` that the fetches need, sorted by name."""

  def IsInner(t: tf.Tensor) -> bool:
    """Whether only recomputed operations of the forward pass take the tensor."""
    if not is_recomputed(t.op.name):
      return False
    takers = [op.name for op in t.consumers() if op.name in ran]
    return bool(takers) and all(map(is_recomputed, takers))

  @functools.cache
  def RepeatedPools() -> set[str]:
    """Returns the names of the max pools whose gradients the fetches need.

    The gradient needs the pool's inputs anyway, and on CPUs oneDNN computes it 20 times as fast if
    the pool runs in the same graph.
    """
    needed = Ancestors(fetches, fed)
    grads = (op for name, op in needed.items() if op.type == 'MaxPoolGrad' and name not in ran)
    return {op.inputs[1].op.name for op in grads}

  stop = {t.name for t in fed}
  residuals: dict[str, tf.Tensor] = {}
  seen: set[str] = set()
  todo = list(fetches)
  while todo:
    t = todo.pop()
    if t.name in seen or t.name in stop:
      continue
    seen.add(t.name)
    is_kept = t.op.type not in _CHEAP or t.dtype == tf.bool
    if t.op.type == 'MaxPool' and not xla and t.op.name in RepeatedPools():
      is_kept = False
    # A tensor cannot be fed to a part that runs its operation for another output.
    if xla and any(output.dtype == tf.variant for output in t.op.outputs):
      is_kept = False
    if t.op.name in ran and is_kept and t.op.inputs and not IsInner(t):
      residuals[t.name] = t
    else:
      todo.extend(_Inputs(t.op))
  # If prune is fed one output of an operation, it must be fed all outputs that have consumers: it
  # also copies operations that precede fed tensors, although nothing needs them.
  for t in list(residuals.values()):
    residuals.update({output.name: output for output in t.op.outputs if output.consumers()})
  return [residuals[name] for name in sorted(residuals)]
