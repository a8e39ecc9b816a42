# SPDX-License-Identifier: Apache-2.0
"""The memory of an operation's results, as far as a backward pass may keep them.

TensorFlow keeps tensors unchanged for the backward pass, so the results of all operations of a
forward graph together are an upper estimate of the memory. XLA does not materialise an elementwise
result or moved data if its consumer can compute it in passing. XLA does materialise the results of
products, convolutions, reductions, look-ups and random draws, the operands of products and
convolutions, and masks.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from lingvo_gpipe.graph import flop_rules

# The results of these are not new data, or exist all the time.
_NOT_NEW = frozenset(
  'Const Placeholder PlaceholderWithDefault VarHandleOp ReadVariableOp Identity IdentityN '
  'StopGradient PreventGradient EnsureShape Reshape Squeeze ExpandDims Shape ShapeN Size Rank '
  'BroadcastArgs BroadcastGradientArgs'.split()
)
# Draws and look-ups cost no FLOPs, but XLA does not repeat them in their consumers.
_DATA_SOURCES = ('Random', 'Stateless', 'Stateful', 'Gather', 'ResourceGather', 'TensorList')
_JOINED = flop_rules.ELEMENTWISE_OPS | {
  x for x in flop_rules.FREE_OPS if not x.startswith(_DATA_SOURCES)
}
# XLA materialises the operands of these.
_NEVER_JOINED = frozenset(
  'MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv Conv2D Conv3D '
  'DepthwiseConv2dNative PartitionedCall StatefulPartitionedCall'.split()
)
_SAME_DATA = frozenset('Identity Reshape Squeeze ExpandDims'.split())


def CountOpBytes(op: tf.Operation) -> tuple[int, int]:
  """Returns (bytes of the op's results, bytes of the results that XLA materialises)."""
  if op.type in _NOT_NEW:
    return 0, 0
  everything = _Bytes(op.outputs)
  if op.type in _JOINED:
    return everything, _Bytes(x for x in op.outputs if x.dtype == tf.bool)
  return everything, everything


def CountOutputBytes(outputs: Iterable[tf.Tensor]) -> tuple[int, int]:
  """Returns the share of a graph's outputs in the sums of `CountOpBytes` over its operations."""
  results = fused = 0
  for tensor in {_Source(x).name: _Source(x) for x in outputs}.values():
    if tensor.op.type not in _NOT_NEW and not tensor.op.type.endswith('PartitionedCall'):
      results += _Bytes([tensor])
      fused += 0 if tensor.op.type in _JOINED and tensor.dtype != tf.bool else _Bytes([tensor])
  return results, fused


def CountOperandBytes(op: tf.Operation) -> dict[str, int]:
  """Returns {tensor: its bytes} of elementwise results that XLA materialises for this op."""
  if op.type not in _NEVER_JOINED:
    return {}
  operands = {}
  for tensor in map(_Source, op.inputs):
    if tensor.op.type in flop_rules.ELEMENTWISE_OPS and tensor.dtype != tf.bool:
      operands[tensor.name] = _Bytes([tensor])
  return operands


def _Source(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor of which `tensor` is the same data, possibly in another shape."""
  while tensor.op.type in _SAME_DATA:
    tensor = tensor.op.inputs[0]
  return tensor


def _Bytes(tensors: Iterable[tf.Tensor]) -> int:
  """Returns the bytes of the tensors of known shape; handles and lists count as 0."""
  return sum(
    flop_rules.Elements(x) * x.dtype.size
    for x in tensors
    if x.shape.is_fully_defined() and x.dtype.size
  )
