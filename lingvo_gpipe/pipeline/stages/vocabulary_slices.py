# SPDX-License-Identifier: Apache-2.0
"""A shared vocabulary: each device has a slice of the softmax, which is a stage of its own.

The softmax is the last layer, the head. For a micro-batch with inputs h of the head:

    device 0   slice 0: h, ids ──> log-sum, label's logit ... ──┐           ┌──> dh, accumulators
    device 1   slice 1: h, ids ──> log-sum, label's logit ... ──┼──> loss ──┼──> dh, accumulators
    device 2   slice 2: h, ids ──> log-sum, label's logit ... ──┘           └──> dh, accumulators

Only some numbers for each token meet (`chunked_logits.SliceStatistics`); the loss is differentiated
with respect to them. The sum of all dh is the gradient of the last stage with layers.

Where the weights are depends on the head:

- A head of several `class_shards`: each slice has whole shards, with their gradient accumulators
  and slots on its device and nowhere else. Slices compute the logits of evaluation and decoding.
- A head with whole weights: they stay on the device of the last stage with layers. Slices have
  copies of their parts, made when a step begins; the gradients of slices are added to the whole
  gradient when it ends. So names, checkpoints, optimizers and decoding know nothing of slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map
from lingvo_gpipe.layers import chunked_logits
from lingvo_gpipe.pipeline.stages import leaves, stage, stage_math, vjp, weighted_loss

# Makes the statistics of all classes for int64 class ids [...] and the logits.
_StatisticsOf = Callable[[tf.Tensor, chunked_logits.ChunkedLogits], chunked_logits.Statistics]


@dataclasses.dataclass
class Slice(stage.Stage):
  """The part of the head for some consecutive classes, as a stage on one device.

  `layers` has the head. If its weights are whole, `mirrors` has copies of parts of those trained.

  Attributes:
    number: the slice's number, from 0.
    first: its first class.
    size: its number of classes.
    paths: if the head's weights are whole, for each leaf of `variables` the path of the weight that
      it is a part of.
    axes: for each of `paths` the axis of the classes.
  """

  number: int = 0
  first: int = 0
  size: int = 0
  paths: tuple[str, ...] = ()
  axes: tuple[int, ...] = ()

  def __str__(self) -> str:
    return f'slice {self.number} of the vocabulary ({self.layers[0].path})'

  def Parts(self) -> Iterator[tuple[tf.Variable, str, int]]:
    """Yields each copy, the path of the whole weight and the axis of the classes."""
    if self.paths:
      yield from zip(tf.nest.flatten(self.variables), self.paths, self.axes, strict=True)


def DevicesOfShards(
  layer: base_layer.BaseLayer, sizes: Sequence[int], devices: Sequence[str]
) -> list[str]:
  """Returns for each of the head's shards the device of its slice.

  Args:
    layer: the head.
    sizes: for each slice its number of classes, a multiple of a shard's.
    devices: for each slice its device.
  """
  num_shards = len(layer.class_shards)
  shard_counts = [num_shards * size // sum(sizes) for size in sizes]
  return [device for n, device in zip(shard_counts, devices, strict=True) for _ in range(n)]


def MoveShards(head: stage.Stage, sizes: Sequence[int], devices: Sequence[str]) -> list[Slice]:
  """Returns slices with the shards of the head, which then has no weights.

  Args:
    head: the stage that consists of the head.
    sizes: for each slice its number of classes, a multiple of a shard's.
    devices: for each slice its device, which has the weights of its shards already.
  """
  (whole,) = head.variables
  num_shards, slices = len(whole.shards), []
  for number, (size, device) in enumerate(zip(sizes, devices, strict=True)):
    first = sum(sizes[:number])
    # The division is exact, because each size is a multiple of a shard's.
    start, end = (num_shards * c // sum(sizes) for c in (first, first + size))
    variables = [nested_map.NestedMap(shards=whole.shards[start:end])]
    trained, mirrors = head.OfVariables(variables)
    slices.append(
      Slice(
        head.index + 1 + number,  # Distinct from all stages.
        head.layers,
        device,
        variables,
        (),
        (),
        trained,
        mirrors,
        head.needs_dx,
        number=number,
        first=first,
        size=size,
      )
    )
  # The slices have these weights and their gradients from now on. The cached properties of the head
  # are not stale, because nothing has read them yet.
  head.variables, head.trained, head.mirrors = [nested_map.NestedMap(shards=[])], {}, {}
  return slices


def CopySlices(
  head: stage.Stage, ties: Mapping[str, str], sizes: Sequence[int], devices: Sequence[str]
) -> list[Slice]:
  """Returns slices for copies of the head's weights, which have no values yet (see `SyncSlices`).

  Args:
    head: the stage that consists of the head.
    ties: {path of a tied weight: path of its owner}.
    sizes: for each slice its number of classes.
    devices: for each slice its device.
  """
  (layer,) = head.layers
  path_of = {id(v): path for path, v in layer.VariablesByPath().items()}
  paths = tuple(path_of[id(v)] for v in tf.nest.flatten(layer.vars))
  names = [path[len(layer.path) + 1 :] for path in paths]
  for name in names:
    if name not in layer.class_axes:
      raise ValueError(
        f'{layer.path}.{name}: class_axes of {type(layer).__name__} lacks this weight, so the '
        "vocabulary cannot be shared out; add the axis of its classes, or set vocabulary='one'"
      )
  axes = tuple(layer.class_axes[name] for name in names)
  is_trained = head.trained_mask
  slices = []
  for number, (size, device) in enumerate(zip(sizes, devices, strict=True)):
    flat, mirrors = [], {}
    for v, path, axis, trained in zip(
      tf.nest.flatten(head.variables), paths, axes, is_trained, strict=True
    ):
      shape = [*v.shape[:axis], size, *v.shape[axis + 1 :]]
      with tf.init_scope(), tf.device(device):
        flat.append(tf.Variable(tf.zeros(shape, v.dtype), trainable=v.trainable, name='slice'))
      # As a mirror it gets an accumulator, but no optimizer updates it, and no checkpoint has it.
      if trained:
        mirrors[path] = flat[-1]
    slices.append(
      Slice(
        head.index + 1 + number,  # Distinct from all stages.
        head.layers,
        device,
        tf.nest.pack_sequence_as(head.variables, flat),
        (),
        (),
        {},
        mirrors,
        head.needs_dx,
        number=number,
        first=sum(sizes[:number]),
        size=size,
        # Parts of a tied weight come from its owner, and their gradients go there at once.
        paths=tuple(ties.get(path, path) for path in paths),
        axes=axes,
      )
    )
  return slices


def SyncSlices(slices: Sequence[Slice], variables: Mapping[str, tf.Variable]) -> None:
  """Copies the parts of the whole weights, {path: variable}, to the slices."""
  for s in slices:
    for v, path, axis in s.Parts():
      whole = variables[path]
      with tf.device(whole.device):
        begin = [s.first if i == axis else 0 for i in range(len(whole.shape))]
        part = tf.slice(whole, begin, v.shape)
      with tf.device(s.device):
        v.assign(part)


def AddSliceGradients(
  slices: Sequence[Slice], owners: Mapping[str, tuple[str, tf.Variable]]
) -> None:
  """Adds the gradients of the slices to the gradients of the whole weights.

  Args:
    slices: all slices.
    owners: {path of a weight: (its device, its accumulator)}.
  """
  parts: dict[tuple[str, int], list[tf.Tensor]] = {}
  for s in slices:
    sink_of = dict(zip(map(id, s.mirrors.values()), s.mirror_accumulators, strict=True))
    for v, path, axis in s.Parts():
      if id(v) in sink_of:
        with tf.device(s.device):
          parts.setdefault((path, axis), []).append(tf.identity(sink_of[id(v)]))
  for (path, axis), gradients in parts.items():
    device, accumulator = owners[path]
    with tf.device(device):
      # The slices are in the order of their classes.
      accumulator.assign_add(tf.concat(gradients, axis=axis))


class SliceMath(stage_math.StageMath):
  """The computations of a slice: it takes the input of the head, and class ids.

  x.args is (*arguments of the head, [class ids, counted from the slice's first class]), and y.args
  a list with the `SliceStatistics` for each of these ids.
  """

  def _FProp(
    self, layer: base_layer.BaseLayer, theta: nested_map.NestedMap, x: nested_map.NestedMap
  ) -> tuple[Any, Any]:
    *args, ids = x.args
    (logits,) = layer.ForLoss(theta, *args)
    return [logits.SliceStatisticsOf(each) for each in ids], {}


class LossMath(stage_math.StageMath):
  """The computations of the head's stage: the loss, from the statistics of slices."""

  _statistics_of: _StatisticsOf | None = None

  @contextlib.contextmanager
  def TakingStatistics(self, statistics_of: _StatisticsOf) -> Iterator[None]:
    """Gives the loss that is traced in the enclosed code these statistics of the logits."""
    self._statistics_of = statistics_of
    try:
      yield
    finally:
      self._statistics_of = None

  def _LossTakesInputs(self, i: int) -> bool:
    del i  # The head is the only layer.
    return True

  def _ThetaOfLoss(self, theta: list[Any]) -> list[Any]:
    (head,) = self.layers
    return [_InSlices(head.path)] if head.class_shards else theta

  def _ForLoss(self, theta: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    assert self._statistics_of is not None
    (logits,) = super()._ForLoss(theta, inputs)
    return (chunked_logits.SharedLogits(logits, self._statistics_of),)


class _InSlices:
  """Replaces theta in a loss, which cannot read weights that are in slices."""

  def __init__(self, path: str) -> None:
    self._path = path

  def __getattr__(self, name: str) -> Any:
    raise ValueError(
      f"{self._path}: vocabulary='shared' needs a loss that uses no weights of the softmax "
      f'({name}), because they are in the slices; or set num_shards=1'
    )


class _Enough(BaseException):
  """Ends a loss whose class ids are known; handlers of errors in the loss must not catch it."""


class SharedLoss:
  """Traced functions of the loss of a shared vocabulary.

  Attributes:
    ClassIds: tf.function (call) -> the class ids that the loss asks statistics for, a list.
    Loss: tf.function (call, statistics) -> sums, in evaluation.
    LossGradient: tf.function (call, accumulators, statistics) -> (for each slice the gradients of
      the floating leaves of its statistics, sums). `statistics` has for each slice a list, with
      an entry for each of the class ids. The accumulators belong to the head's whole weights.
  """

  def __init__(self, math: LossMath, xla: bool) -> None:
    self._math = math
    self.ClassIds = stage_math.Traced(self._ClassIds, xla=False)
    self.Loss = stage_math.Traced(self._Loss, xla)
    self.LossGradient = stage_math.Traced(self._LossGradient, xla)

  def _ClassIds(self, call: stage_math.StageCall) -> list[tf.Tensor]:
    # The loss runs with false statistics, up to the last request: what follows, such as a check of
    # the loss, must not run. The number of requests is known from a trace that never runs.
    requests: list[tf.Tensor] = []
    answers: list[tf.Tensor] = []
    whole = tf.function(lambda call: self._Request(call, requests, answers), autograph=False)
    whole.get_concrete_function(call)
    subject = f"{self._math.layers[0].path}: vocabulary='shared' needs a loss"
    if not requests:
      raise ValueError(
        f'{subject} that takes the logits, by embedding.XentLossFromLogits or a '
        'SparseCategoricalCrossentropy(from_logits=True) of Keras'
      )
    # The class ids must be known before the statistics.
    if vjp.Ancestors(requests).keys() & {t.op.name for t in answers}:
      raise ValueError(f'{subject} whose class ids do not depend on the logits')
    ids: list[tf.Tensor] = []
    with contextlib.suppress(_Enough):
      self._Request(call, ids, [], len(requests))
    return ids

  def _Request(
    self,
    call: stage_math.StageCall,
    ids: list[tf.Tensor],
    answers: list[tf.Tensor],
    most: int | None = None,
  ) -> None:
    """Runs the loss with false statistics.

    Args:
      call: the arguments of the head.
      ids: receives the class ids that the loss asks for.
      answers: receives the tensors that it gets.
      most: the number of requests after which to raise _Enough; None: never.
    """

    def StatisticsOf(
      class_ids: tf.Tensor, logits: chunked_logits.ChunkedLogits
    ) -> chunked_logits.Statistics:
      ids.append(class_ids)
      if len(ids) == most:
        raise _Enough
      dtype = tf.float64 if logits.inputs.dtype == tf.float64 else tf.float32
      zeros = tf.zeros(tf.shape(class_ids), dtype)
      answers.append(zeros)
      return chunked_logits.Statistics(zeros, zeros, zeros)

    with self._math.EnterContext(call.context.seeds), self._math.TakingStatistics(StatisticsOf):
      self._math.Outputs(call)

  def _Loss(
    self,
    call: stage_math.StageCall,
    statistics: list[list[chunked_logits.SliceStatistics]],
  ) -> nested_map.NestedMap:
    self._math.CountTrace(call.x, call.side)
    with self._math.EnterContext(call.context.seeds):
      return self._Outputs(call, statistics)[0]

  def _Outputs(
    self,
    call: stage_math.StageCall,
    statistics: list[list[chunked_logits.SliceStatistics]],
  ) -> tuple[nested_map.NestedMap, list[tf.Tensor]]:
    """Returns the sums and the objective, from the statistics of each slice."""
    by_ids = zip(*statistics, strict=True)

    def StatisticsOf(
      class_ids: tf.Tensor, logits: chunked_logits.ChunkedLogits
    ) -> chunked_logits.Statistics:
      # By position: each trace of the loss asks for the same class ids in the same order.
      return chunked_logits.Join(next(by_ids), class_ids, logits.shape[-1])

    with self._math.TakingStatistics(StatisticsOf):
      _, sums, objective = self._math.Outputs(call)
    return sums, objective

  def _LossGradient(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    statistics: list[list[chunked_logits.SliceStatistics]],
  ) -> tuple[list[list[tf.Tensor]], nested_map.NestedMap]:
    math = self._math
    math.CountTrace(call.x, call.side)
    floats, weights = [leaves.Floats(s) for s in statistics], math.Trained(call.variables)
    inputs = leaves.Floats(call.x)

    with math.EnterContext(call.context.seeds), tf.GradientTape() as tape:
      # Watch the inputs only to refuse uses besides the logits, whose gradient the slices return.
      tape.watch([floats, inputs])
      # The mean of an empty micro-batch may be NaN, like the outputs of a last layer.
      counted = [
        leaves.WithFloats(
          s, [weighted_loss.WhereItCounts(x, call.context.loss_weight) for x in leaves.Floats(s)]
        )
        for s in statistics
      ]
      sums, objective = self._Outputs(call, counted)
    input_gradients, weight_gradients, float_gradients = tape.gradient(
      objective, [inputs, weights, [*itertools.chain(*floats)]]
    )
    if any(g is not None for g in input_gradients):
      raise ValueError(
        f"{math.layers[0].path}: vocabulary='shared' needs a loss that uses the inputs of the "
        'softmax by its logits only: the gradient of any other use would be lost'
      )
    # Gradients of uses of the weights other than the logits.
    math.Accumulate(accumulators, weight_gradients)
    dense = iter(leaves.DenseGradients([*itertools.chain(*floats)], float_gradients))
    return [[next(dense) for _ in of_slice] for of_slice in floats], sums
