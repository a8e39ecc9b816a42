# SPDX-License-Identifier: Apache-2.0
"""One traced vector-Jacobian product of a stage, cut into forward, input and weight gradients.

Where a schedule wants the backward in two halves, or no recomputation, the halves must not run
anything twice that is dear. So the whole product is traced once, and each part is cut out of that
graph: what a later part needs of an earlier one, its residuals, goes between them as tensors.
Residuals are results of dear operations (products, convolutions, reductions, random numbers) and
masks; what is cheap is computed again from them, which XLA fuses. Weights and the stage's inputs
are never residuals: both parts have them anyway.

tf.compat.v1.wrap_function is the only public way to cut a part out of a traced function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

# Computed again rather than kept: element by element, or moving data only.
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
  """A vector-Jacobian product of weights, inputs and dy, and the parts that are cut from it.

  Each part is a function of flat tensors: the weights' resource handles, the inputs, then what is
  named below. It is cut out when it is first asked for: no schedule needs all of them.

  Attributes:
    forward: (handles, inputs) -> y + residuals for `backward`.
    backward: (handles, inputs, residuals, dy) -> dx + dw.
    input_gradient: (handles, inputs, dy) -> dx + residuals for `weight_gradient`.
    weight_gradient: (handles, inputs, dy, residuals) -> dw.
    kept_input_gradient: (handles, inputs, residuals of forward, dy) -> dx + residuals.
    kept_weight_gradient: (handles, inputs, residuals of forward, dy, residuals) -> dw.
    has_weight_gradient: for each gradient in dw whether it exists; the others are left out.
    is_sparse: for each that exists whether it is of slices, two tensors: values and indices.
    num_y: how many tensors y is.
    num_dx: how many tensors dx is.
  """

  def __init__(
    self,
    vjp: Callable[[list[tf.Tensor], list[tf.Tensor]], Any],
    weights: Sequence[tf.Variable],
    inputs: Sequence[tf.Tensor],
    *,
    xla: bool = False,
  ) -> None:
    """Traces the product.

    Args:
      vjp: (weights as tensors, inputs) -> (y, dy, dx, dw), lists of tensors of one graph; dy are
        placeholders, and None in dw stands for a weight without a gradient.
      weights: variables, or what stands for them in a trace.
      inputs: tensors of the shapes and dtypes to come.
      xla: whether the parts are compiled by XLA, out of which no list of tensors can be handed:
        what a loop keeps for its backward is computed again.
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
    self._y, self._dy, self._dx, self._dw = parts
    self._given = list(self._whole.inputs)
    self.num_y, self.num_dx = len(self._y), len(self._dx)
    self.has_weight_gradient = [g is not None for g in gradients]
    self.is_sparse = [isinstance(g, tf.IndexedSlices) for g in gradients if g is not None]

  @functools.cached_property
  def forward(self) -> _Part:
    return self._whole.prune(self._given, [*self._y, *self._kept])

  @functools.cached_property
  def backward(self) -> _Part:
    return self._whole.prune([*self._given, *self._kept, *self._dy], [*self._dx, *self._dw])

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
    """The gradients that exist, tensors or slices, from the tensors in dw."""
    rest = iter(components)
    return [tf.IndexedSlices(next(rest), next(rest)) if s else next(rest) for s in self.is_sparse]

  @functools.cached_property
  def _kept(self) -> list[tf.Tensor]:
    """The residuals of `forward`."""
    ran = _Ancestors(self._y, self._given)
    return _Residuals([*self._dx, *self._dw], self._given, ran, self._xla)

  def _InputGradient(self, kept: list[tf.Tensor]) -> _Part:
    fed = [*self._given, *kept, *self._dy]
    return self._whole.prune(fed, [*self._dx, *self._ForWeights(fed)])

  def _WeightGradient(self, kept: list[tf.Tensor]) -> _Part:
    fed = [*self._given, *kept, *self._dy]
    return self._whole.prune([*fed, *self._ForWeights(fed)], self._dw)

  def _ForWeights(self, fed: list[tf.Tensor]) -> list[tf.Tensor]:
    """The residuals of the input gradient."""
    return _Residuals(self._dw, fed, _Ancestors(self._dx, fed), self._xla)


def _Components(gradients: Sequence[Any]) -> list[tf.Tensor]:
  """The tensors of gradients, None and slices among them."""
  components = []
  for g in gradients:
    if isinstance(g, tf.IndexedSlices):
      components += [g.values, g.indices]
    elif g is not None:
      components.append(g)
  return components


def _Ancestors(fetches: Sequence[tf.Tensor], given: Sequence[tf.Tensor]) -> set[str]:
  """Names of the operations that must run for the fetches, where some tensors are given."""
  stop = {t.name for t in given}
  seen: set[str] = set()
  todo = [t for t in fetches if t.name not in stop]
  while todo:
    op = todo.pop().op
    if op.name not in seen:
      seen.add(op.name)
      todo.extend(t for t in op.inputs if t.name not in stop)
  return seen


def _Residuals(
  fetches: Sequence[tf.Tensor], given: Sequence[tf.Tensor], ran: Collection[str], xla: bool
) -> list[tf.Tensor]:
  """The dear results of operations in `ran` that the fetches need; in a fixed order."""
  stop = {t.name for t in given}
  found: dict[str, tf.Tensor] = {}
  seen: set[str] = set()
  todo = list(fetches)
  while todo:
    t = todo.pop()
    if t.name in seen or t.name in stop:
      continue
    seen.add(t.name)
    is_dear = t.op.type not in _CHEAP or t.dtype == tf.bool
    # A tensor cannot be given to a part that runs the operation for another of its outputs.
    if xla and any(output.dtype == tf.variant for output in t.op.outputs):
      is_dear = False
    if t.op.name in ran and is_dear and t.op.inputs:
      found[t.name] = t
    else:
      todo.extend(t.op.inputs)
  # With one output of an operation prune must be given all that anything takes: it copies what
  # comes before given tensors, too, though nothing needs it.
  for t in list(found.values()):
    found.update({output.name: output for output in t.op.outputs if output.consumers()})
  return [found[name] for name in sorted(found)]
