# SPDX-License-Identifier: Apache-2.0
"""What an operation's results take in memory, as far as a backward pass may want them kept.

TensorFlow keeps tensors for the backward pass as they are; so the results of all operations of a
forward graph together are an upper estimate of what it keeps. XLA does not materialise an
elementwise result or moved data if whoever takes it can compute it on the way; left are the results
of products, convolutions, reductions, look-ups and random draws, the operands of products and
convolutions, and masks.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from lingvo_gpipe.core import flop_rules

# Their results are no new data, or are there all the time.
_NOT_KEPT = frozenset(
  'Const Placeholder PlaceholderWithDefault VarHandleOp ReadVariableOp Identity IdentityN '
  'StopGradient PreventGradient EnsureShape Reshape Squeeze ExpandDims Shape ShapeN Size Rank '
  'BroadcastArgs BroadcastGradientArgs'.split()
)
# Draws and look-ups cost no FLOPs, but are not made again on the way.
_MAKES = ('Random', 'Stateless', 'Stateful', 'Gather', 'ResourceGather', 'TensorList')
_JOINED = flop_rules.ELEMENTWISE_OPS | {x for x in flop_rules.FREE_OPS if not x.startswith(_MAKES)}
# XLA computes the operands of these before them.
_NEVER_JOINED = frozenset(
  'MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv Conv2D Conv3D '
  'DepthwiseConv2dNative PartitionedCall StatefulPartitionedCall'.split()
)
_SAME_DATA = frozenset('Identity Reshape Squeeze ExpandDims'.split())


def OfOp(op: tf.Operation) -> tuple[int, int]:
  """(bytes of the op's results, what of them XLA materialises)."""
  if op.type in _NOT_KEPT:
    return 0, 0
  everything = _Bytes(op.outputs)
  if op.type in _JOINED:
    return everything, _Bytes(x for x in op.outputs if x.dtype == tf.bool)
  return everything, everything


def OfOutputs(outputs: Iterable[tf.Tensor]) -> tuple[int, int]:
  """What of a graph's outputs is in the sums of `OfOp` over its operations, for both numbers."""
  results = fused = 0
  for tensor in {_Behind(x).name: _Behind(x) for x in outputs}.values():
    if tensor.op.type not in _NOT_KEPT and not tensor.op.type.endswith('PartitionedCall'):
      results += _Bytes([tensor])
      fused += 0 if tensor.op.type in _JOINED and tensor.dtype != tf.bool else _Bytes([tensor])
  return results, fused


def Operands(op: tf.Operation) -> dict[str, int]:
  """{tensor: its bytes} of elementwise results that XLA computes because the op takes them."""
  if op.type not in _NEVER_JOINED:
    return {}
  found = {}
  for tensor in map(_Behind, op.inputs):
    if tensor.op.type in flop_rules.ELEMENTWISE_OPS and tensor.dtype != tf.bool:
      found[tensor.name] = _Bytes([tensor])
  return found


def _Behind(tensor: tf.Tensor) -> tf.Tensor:
  """The tensor behind identities and other shapes of the same data."""
  while tensor.op.type in _SAME_DATA:
    tensor = tensor.op.inputs[0]
  return tensor


def _Bytes(tensors: Iterable[tf.Tensor]) -> int:
  """What tensors of known shape take; handles and lists count as nothing."""
  return sum(
    flop_rules.Elements(x) * x.dtype.size
    for x in tensors
    if x.shape.is_fully_defined() and x.dtype.size
  )
