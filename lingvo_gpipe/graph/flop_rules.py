# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations (FLOPs) of one TensorFlow operation, from its static shapes.

`graph_cost` walks whole graphs and calls `OpFlops(op)` for each operation. The conventions:

* A multiply-add is 2 FLOPs. A matrix product `[m, k] x [k, n]` is `2 m k n`; a convolution is
  twice its output elements times the filter taps that make one of them (padding is not deducted).
* An elementwise operation is 1 per output element, for every function and dtype: `tanh` costs as
  much as `add`. `AddN` of n tensors is n - 1 per element.
* A reduction, scan or segment sum is 1 per input element; a pool is its window per output element.
* Softmax and log-softmax are 5 per element (maximum, subtract, exp, sum, divide or subtract);
  cross entropy from dense labels is 7 (log-softmax, multiply, sum), from sparse labels 5 per
  element and 1 per row. Batch norm is 2 per element with given moments and 6 with its own.
* Moving, creating or converting data is free: reshape, transpose, gather, slices, concatenation,
  padding, casts, one-hot, constants, variable reads and writes, random bits, tensor lists,
  assertions. These take time, but no floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

# FLOPs per element of a (log-)softmax, and of a batch norm.
_SOFTMAX_PER_ELEMENT = 5
_BATCH_NORM_GIVEN_MOMENTS = 2
_BATCH_NORM_OWN_MOMENTS = 6

# Operations that move, create or convert data: no FLOPs.
FREE_OPS = frozenset(
  """
  Const Placeholder PlaceholderWithDefault VarHandleOp ReadVariableOp AssignVariableOp
  VarIsInitializedOp VariableShape DestroyResourceOp
  Identity IdentityN Snapshot NoOp StopGradient PreventGradient CheckNumerics CheckNumericsV2
  Assert EnsureShape Print PrintV2 StringFormat ControlTrigger
  Reshape Squeeze ExpandDims Shape ShapeN Size Rank BroadcastArgs BroadcastGradientArgs BroadcastTo
  Transpose ConjugateTranspose Cast Bitcast Real Imag
  Concat ConcatV2 ConcatOffset Split SplitV Pack Unpack Slice StridedSlice StridedSliceGrad Tile
  Pad PadV2 MirrorPad Reverse ReverseV2 ReverseSequence Roll
  Gather GatherV2 GatherNd ResourceGather ResourceGatherNd OneHot Where Fill Empty Range LinSpace
  ZerosLike OnesLike InvertPermutation DynamicStitch ParallelDynamicStitch DynamicPartition
  MatrixBandPart Diag DiagPart MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart
  MatrixDiagPartV2 MatrixDiagPartV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
  SpaceToBatch SpaceToBatchND BatchToSpace BatchToSpaceND SpaceToDepth DepthToSpace
  ExtractImagePatches ResizeNearestNeighbor
  TensorScatterUpdate ResourceScatterUpdate ResourceScatterNdUpdate
  RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomShuffle Multinomial
  StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt
  StatelessRandomNormal StatelessTruncatedNormal StatelessMultinomial
  StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2
  StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessShuffle
  StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomGetAlg
  StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormalV2
  StatefulTruncatedNormal RngSkip RngReadAndSkip
  EmptyTensorList TensorListReserve TensorListFromTensor TensorListStack TensorListGetItem
  TensorListSetItem TensorListLength TensorListPushBack TensorListPopBack TensorListElementShape
  TensorListGather TensorListScatter TensorListScatterV2 TensorListConcatV2 TensorListSplit
  TensorListResize
  WriteSummary WriteScalarSummary WriteHistogramSummary
  """.split()
)

# 1 per element of the first output.
ELEMENTWISE_OPS = frozenset(
  """
  Abs Acos Acosh Add AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e
  Betainc BiasAdd BiasAddV1 BitwiseAnd BitwiseOr BitwiseXor Ceil Complex ComplexAbs Conj Cos Cosh
  Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater
  GreaterEqual Igamma Igammac Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad
  LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
  MulNoNan Ndtri Neg NextAfter NotEqual Polygamma PopulationCount Pow RealDiv Reciprocal
  ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad Select SelectV2
  Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt
  SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py
  Xlogy Zeta
  """.split()
)

# 1 per element of the first input.
REDUCTION_OPS = frozenset(
  """
  Sum Mean Prod Max Min All Any ArgMax ArgMin BiasAddGrad
  Cumsum Cumprod TopK TopKV2 SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd
  UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
  """.split()
)


def Elements(tensor: tf.Tensor) -> int:
  """Returns the number of elements of a graph tensor.

  Raises:
    ValueError: its static shape is not fully known; the message names the operation.
  """
  return math.prod(Shape(tensor))


def Shape(tensor: tf.Tensor) -> list[int]:
  """Returns the static shape of a graph tensor.

  Raises:
    ValueError: the shape is not fully known; the message names the operation.
  """
  if not tensor.shape.is_fully_defined():
    raise ValueError(
      f'The shape of {tensor.name!r} (operation {tensor.op.name!r} of type {tensor.op.type}) is '
      f'{tensor.shape}, but counting its cost needs a static shape. Trace the function with '
      'tf.TensorSpec inputs whose dimensions are all numbers, and set shapes that TensorFlow '
      'cannot infer (tf.ensure_shape).'
    )
  return tensor.shape.as_list()


def EinsumFlops(equation: str, shapes: Sequence[Sequence[int]]) -> int:
  """Returns the FLOPs of an einsum of one or two operands.

  Labels that occur in one operand alone, and not in the output, are summed first (1 per element of
  that operand). The remaining product costs 2 per point of the iteration space if a label is
  summed, 1 per point if no label is (an outer or elementwise product), and 0 for a single operand
  (a transpose).

  Args:
    equation: for example `ab,bc->ac`; `...` stands for broadcast dimensions. A label repeated
      within an operand takes the diagonal, which is free. Without `->`, the output has the labels
      that occur once.
    shapes: the operands' static shapes.

  Raises:
    ValueError: the equation does not match the shapes.
  """
  equation = equation.replace(' ', '')
  input_text, arrow, output_text = equation.partition('->')
  terms = input_text.split(',')
  if len(terms) != len(shapes) or len(terms) > 2:
    raise ValueError(
      f'einsum {equation!r} has {len(terms)} operands in its text and {len(shapes)} in the graph; '
      'expected the same number, 1 or 2.'
    )
  if not arrow:
    letters = input_text.replace(',', '').replace('.', '')
    output_text = ('...' if '...' in input_text else '') + ''.join(
      x for x in sorted(set(letters)) if letters.count(x) == 1
    )
  sizes: dict[str, int] = {}
  operands = []
  for term, shape in zip(terms, shapes, strict=True):
    labels = _EinsumLabels(term, shape, equation)
    for label, size in labels.items():
      if sizes.get(label, 1) != 1 and size not in (1, sizes[label]):
        raise ValueError(
          f'einsum {equation!r} of {list(shapes)}: {label!r} is {sizes[label]} and {size}.'
        )
      if size != 1 or label not in sizes:  # 1 is broadcast.
        sizes[label] = size
    operands.append(labels)
  outputs = {x for x in sizes if x in output_text or (x.startswith('...') and '...' in output_text)}

  flops = 0
  used: set[str] = set()
  for i, labels in enumerate(operands):
    shared = set().union(*(o for j, o in enumerate(operands) if j != i))
    summed = {x for x in labels if x not in outputs and x not in shared}
    if math.prod(labels[x] for x in summed) > 1:
      flops += math.prod(labels.values())
    used |= set(labels) - summed
  if len(operands) == 1:
    return flops
  points = math.prod(sizes[x] for x in used)
  return flops + (2 if used - outputs else 1) * points


def _EinsumLabels(term: str, shape: Sequence[int], equation: str) -> dict[str, int]:
  """Returns {label: size} of one operand; the dimensions of `...` are numbered from the right."""
  head, dots, tail = term.partition('...')
  num_dots = len(shape) - len(head) - len(tail)
  if num_dots < 0 or (num_dots and not dots):
    raise ValueError(f'einsum {equation!r}: operand {term!r} does not fit the shape {list(shape)}.')
  names = [*head, *(f'...{i}' for i in range(num_dots, 0, -1)), *tail]
  return dict(zip(names, shape, strict=True))


def _Product(*elements: Sequence[int]) -> int:
  return math.prod(math.prod(x) for x in elements)


def _MatMul(op: tf.Operation) -> int:
  contracted = -2 if op.get_attr('transpose_a') else -1
  return 2 * Elements(op.outputs[0]) * Shape(op.inputs[0])[contracted]


def _BatchMatMul(op: tf.Operation) -> int:
  contracted = -2 if op.get_attr('adj_x') else -1
  return 2 * Elements(op.outputs[0]) * Shape(op.inputs[0])[contracted]


def _Einsum(op: tf.Operation) -> int:
  return EinsumFlops(op.get_attr('equation').decode(), [Shape(x) for x in op.inputs])


def _Conv(op: tf.Operation) -> int:
  # Filter [..spatial.., in_channels / groups, out_channels].
  return 2 * Elements(op.outputs[0]) * _Product(Shape(op.inputs[1])[:-1])


def _ConvInputGrad(op: tf.Operation) -> int:
  # Also the transposed convolution. Inputs: input sizes, filter, gradient of the output.
  return 2 * Elements(op.inputs[2]) * _Product(Shape(op.inputs[1])[:-1])


def _ConvFilterGrad(op: tf.Operation) -> int:
  return 2 * Elements(op.inputs[2]) * _Product(Shape(op.outputs[0])[:-1])


def _DepthwiseConv(op: tf.Operation) -> int:
  # Filter [height, width, in_channels, multiplier]: every output element reads one channel.
  return 2 * Elements(op.outputs[0]) * _Product(Shape(op.inputs[1])[:2])


def _DepthwiseInputGrad(op: tf.Operation) -> int:
  return 2 * Elements(op.inputs[2]) * _Product(Shape(op.inputs[1])[:2])


def _DepthwiseFilterGrad(op: tf.Operation) -> int:
  return 2 * Elements(op.inputs[2]) * _Product(Shape(op.outputs[0])[:2])


def _Pool(op: tf.Operation) -> int:
  return Elements(op.outputs[0]) * math.prod(op.get_attr('ksize'))


def _CrossEntropy(op: tf.Operation) -> int:
  return (_SOFTMAX_PER_ELEMENT + 2) * Elements(op.inputs[0])


def _SparseCrossEntropy(op: tf.Operation) -> int:
  return _SOFTMAX_PER_ELEMENT * Elements(op.inputs[0]) + Elements(op.inputs[1])


def _BatchNorm(op: tf.Operation) -> int:
  training = op.get_attr('is_training')
  per_element = _BATCH_NORM_OWN_MOMENTS if training else _BATCH_NORM_GIVEN_MOMENTS
  return per_element * Elements(op.inputs[0])


def _PerOutput(op: tf.Operation) -> int:
  return Elements(op.outputs[0])


def _PerInput(index: int, factor: int = 1) -> Callable[[tf.Operation], int]:
  return lambda op: factor * Elements(op.inputs[index])


_RULES: Mapping[str, Callable[[tf.Operation], int]] = {
  **dict.fromkeys(FREE_OPS, lambda op: 0),
  **dict.fromkeys(ELEMENTWISE_OPS, _PerOutput),
  **dict.fromkeys(REDUCTION_OPS, _PerInput(0)),
  'MatMul': _MatMul,
  'BatchMatMul': _BatchMatMul,
  'BatchMatMulV2': _BatchMatMul,
  'BatchMatMulV3': _BatchMatMul,
  'Einsum': _Einsum,
  'Conv': _Conv,
  'Conv2D': _Conv,
  'Conv3D': _Conv,
  'Conv2DBackpropInput': _ConvInputGrad,
  'Conv3DBackpropInputV2': _ConvInputGrad,
  'Conv2DBackpropFilter': _ConvFilterGrad,
  'Conv3DBackpropFilterV2': _ConvFilterGrad,
  'DepthwiseConv2dNative': _DepthwiseConv,
  'DepthwiseConv2dNativeBackpropInput': _DepthwiseInputGrad,
  'DepthwiseConv2dNativeBackpropFilter': _DepthwiseFilterGrad,
  'AvgPool': _Pool,
  'AvgPool3D': _Pool,
  'MaxPool': _Pool,
  'MaxPool3D': _Pool,
  'MaxPoolWithArgmax': _Pool,
  'Softmax': lambda op: _SOFTMAX_PER_ELEMENT * Elements(op.outputs[0]),
  'LogSoftmax': lambda op: _SOFTMAX_PER_ELEMENT * Elements(op.outputs[0]),
  'SoftmaxCrossEntropyWithLogits': _CrossEntropy,
  'SparseSoftmaxCrossEntropyWithLogits': _SparseCrossEntropy,
  'FusedBatchNorm': _BatchNorm,
  'FusedBatchNormV2': _BatchNorm,
  'FusedBatchNormV3': _BatchNorm,
  'AddN': lambda op: (len(op.inputs) - 1) * Elements(op.outputs[0]),
  'AccumulateNV2': lambda op: (len(op.inputs) - 1) * Elements(op.outputs[0]),
  'ClipByValue': lambda op: 2 * Elements(op.outputs[0]),
  'EuclideanNorm': _PerInput(0, 2),
  'L2Loss': _PerInput(0, 2),
  'AssignAddVariableOp': _PerInput(1),
  'AssignSubVariableOp': _PerInput(1),
  'ResourceScatterAdd': _PerInput(2),
  'ResourceScatterSub': _PerInput(2),
  'ScatterNd': _PerInput(1),
  'TensorScatterAdd': _PerInput(2),
  'TensorScatterSub': _PerInput(2),
  'TensorScatterMax': _PerInput(2),
  'TensorScatterMin': _PerInput(2),
}


def OpFlops(op: tf.Operation) -> int | None:
  """Returns the FLOPs of one operation of a graph, or None if its type has no rule.

  Operations that call functions (`PartitionedCall`, `If`, `While` ...) have no rule here.

  Raises:
    ValueError: a required static shape is unknown; the message names the operation.
  """
  rule = _RULES.get(op.type)
  return None if rule is None else rule(op)
