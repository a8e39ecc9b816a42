# SPDX-License-Identifier: Apache-2.0
"""The loss and metrics of a compiled Keras model, by micro-batch in the last stage.

Keras's loss of a batch is a sum divided by a number that depends on the reduction:

    sum_over_batch_size    number of values, or of values that a mask keeps
    mean_with_sample_weight   sum of the sample weights, without the values that a mask drops
    sum                    1

A micro-batch m computes that loss for its own rows, with the divisor D_m. Weighted by D_m / D, with
the D of the batch, the losses add up to the loss of the batch. The engine weights by rows; `scale`
corrects that, for the loss of each output by itself. D and D_m depend on shapes, labels, sample
weights and masks only, so they are known before the first forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.graph import side_effects
from lingvo_gpipe.layers import chunked_logits
from lingvo_gpipe.layers.keras import keras_cell_layer, keras_masks, keras_nodes, keras_variables
from lingvo_gpipe.pipeline.stages import micro_batch, weighted_loss

# Largest number of values of an output with which a loss is tried.
_MOST_TRIED = 2**24

# Computes a loss from y, y_pred and sample_weight of its output.
_RunLoss = Callable[[Any, Any, Any, Any], tf.Tensor]

# Begins the names of the predictions in traced functions.
_OUTPUT = 'model_output'

# Names of metrics in the results of the loss.
STATE, PREDICTION = 'keras_state_', 'prediction_'


class _LossScope(keras.StatelessScope):
  """Gives the variables of the metrics their values; the loss may have no others."""

  def __init__(self, values: Sequence[tuple[Any, tf.Tensor]], trained: frozenset[int]) -> None:
    super().__init__(values)
    self._states = {id(v) for v, _ in values}
    self._trained = trained

  def get_current_value(self, variable: Any) -> Any:
    """Returns the value of a variable; raises ValueError if the model trains it."""
    if id(variable) in self._trained:
      raise ValueError(
        f'the loss reads the variable {variable.path} of the model, whose gradient a pipeline '
        'would lose: use a regularizer, or add_loss in a layer'
      )
    return super().get_current_value(variable)

  def add_update(self, update: Any) -> None:
    """Changes a variable; raises ValueError if it does not belong to a metric."""
    if id(update[0]) not in self._states:
      raise ValueError(
        f'the loss changes the variable {update[0].path}, which a pipeline cannot do: make it a '
        'metric'
      )
    super().add_update(update)


class KerasLoss:
  """The loss of a micro-batch; see `stage_math.LossFn`.

  Attributes:
    outputs: the outputs of the model that a loss takes; known after `Build`.
    needs_predictions: whether a metric needs the predictions of the whole batch at once.
  """

  def __init__(self, trainer: Any, graph: keras_nodes.Graph, num_micro_batches: int) -> None:
    """Reads how the trainer was compiled.

    Args:
      trainer: a compiled keras.Model, with Keras's `compute_loss` and `compute_metrics`.
      graph: the model whose outputs the loss takes.
      num_micro_batches: number of micro-batches of a batch.
    """
    self._trainer = trainer
    self._graph = graph
    self._num_micro_batches = num_micro_batches
    self._trained = frozenset(map(id, graph.model.trainable_variables))
    self._needs_predictions: bool | None = None
    self._divisors = self._Function(self._Divisors)
    self._is_sum: list[bool] = []  # For each loss.
    self.outputs: list[keras_nodes.Value] = []

  @property
  def needs_predictions(self) -> bool:
    if self._needs_predictions is None:
      metrics = getattr(self._trainer._compile_metrics, 'metrics', ())
      names = [m.name for m in metrics if not IsSum(m)]
      self._needs_predictions = bool(names)
      if names:
        logging.warning(
          'The metrics %s are not known to add up, so all metrics get the predictions of a whole '
          'batch at once, which takes memory.',
          ', '.join(names),
        )
    return self._needs_predictions

  def Build(self, side: nested_map.NestedMap, batch_size: int) -> None:
    """Makes the variables of the metrics, which Keras does at their first use.

    Args:
      side: tensors as `__call__` takes them.
      batch_size: the number of rows.

    Raises:
      ValueError: the losses cannot be computed by micro-batch.
    """

    metrics = self._trainer._compile_metrics
    is_new = metrics is not None and not metrics.built

    def Compute(y: Any, y_pred: Any, sample_weight: Any) -> None:
      self._is_sum, self.outputs = [], []  # A trace that makes variables is repeated.
      predictions = dict(zip(map(id, keras.tree.flatten(y_pred)), self._graph.outputs, strict=True))

      def Run(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        if loss.reduction in (None, 'none'):
          raise ValueError(
            f'the loss {loss.name} has the reduction None, so it is not a scalar; use '
            "'sum_over_batch_size' or 'sum'"
          )
        self._is_sum.append(loss.reduction == 'sum')
        self.outputs += [predictions[id(t)] for t in keras.tree.flatten(y_pred)]
        return loss(y, y_pred, sample_weight)

      self._Compute(y, y_pred, sample_weight, Run)
      self._UpdateMetrics(y, y_pred, sample_weight)

    self._Trace(self._Function(Compute), side, batch_size)
    # Keras resets metrics before an epoch only if they are built, but another model may have
    # updated one of them.
    for metric in metrics.metrics if is_new else ():
      if not _IsNew(metric):
        metric.reset_state()

    def Call(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
      return loss(y, y_pred, sample_weight)

    def Refuse(y: Any, y_pred: Any, sample_weight: Any) -> None:
      """Raises ValueError if the loss reads a weight, changes a variable or draws numbers."""
      with side_effects.Forbid('the loss'):
        self._LossAndStates(y, y_pred, sample_weight, Call)

    self._Trace(self._Function(Refuse), side, batch_size)
    if self._num_micro_batches > 1 and self.outputs:
      # A number that shows which dimension of a loss is the batch.
      tensors = [t for t in tf.nest.flatten((side.y, side.sample_weight)) if t is not None]
      sizes = [d or 0 for t in (*tensors, *self._graph.outputs) for d in t.shape[1:]]
      prime = _PrimeAbove(max([batch_size, *sizes]))

      def Check(y: Any, y_pred: Any, sample_weight: Any) -> None:
        run = functools.partial(self._CheckLoss, batch_size=prime)
        self._Compute(y, y_pred, sample_weight, run)

      self._Trace(self._Function(Check), side, prime)
      self._CheckSums(side, batch_size)
      graph = self._Trace(self._divisors, side, prime)
      if any(name.startswith(_OUTPUT) for name in keras_masks.NeededOps(graph.outputs)):
        raise ValueError(
          'the mask of a loss depends on the predictions, so its size is not known before the '
          'forward; set num_micro_batches=1'
        )

  def _Function(self, run: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a tf.function that calls `run(y, y_pred, sample_weight)`.

    It takes the number of rows, the masks of the flat outputs, the labels and the sample weights.
    The predictions have no values.
    """

    def Function(rows: int, masks: Sequence[Any], y: Any, sample_weight: Any) -> Any:
      outputs = []
      for spec, mask in zip(self._OutputSpecs(rows, y), masks, strict=True):
        output = tf.raw_ops.Placeholder(dtype=spec.dtype, shape=spec.shape, name=_OUTPUT)
        if mask is not None:
          output._keras_mask = mask
        outputs.append(output)
      with keras.StatelessScope():
        return run(y, self._graph.PackOutputs(outputs), sample_weight)

    return tf.function(Function, autograph=False)

  def _OutputSpecs(self, rows: int, y: Any) -> list[tf.TensorSpec]:
    """Returns specs of the outputs; an unknown length is taken from the labels, if they agree."""
    shapes = [t.shape for t in tf.nest.flatten(y) if t is not None]

    def Size(axis: int, size: int | None) -> int | None:
      sizes = {shape[axis] for shape in shapes if len(shape) > axis}
      return sizes.pop() if size is None and len(sizes) == 1 else size

    return [
      tf.TensorSpec([rows, *itertools.starmap(Size, enumerate(v.shape[1:], 1))], v.dtype)
      for v in self._graph.outputs
    ]

  def _Trace(self, function: Any, side: nested_map.NestedMap, rows: int) -> Any:
    """Returns the graph of a `_Function` for a number of rows."""
    y, sample_weight = tf.nest.map_structure(
      lambda t: None if t is None else tf.TensorSpec([rows, *t.shape[1:]], t.dtype),
      (side.y, side.sample_weight),
    )
    masks = [None] * len(self._graph.outputs)
    return function.get_concrete_function(rows, masks, y, sample_weight).graph

  def _CheckLoss(
    self, loss: Any, y: Any, y_pred: Any, sample_weight: Any, *, batch_size: int
  ) -> tf.Tensor:
    """Raises ValueError if a loss is not a mean over the examples.

    Args:
      loss: the loss of an output, or of several.
      y: its labels.
      y_pred: the predictions.
      sample_weight: the weights of the examples.
      batch_size: the number of examples, a prime number that no other dimension has as a factor.
    """
    del sample_weight
    is_joint = type(loss).__call__ is not keras.losses.Loss.__call__
    if not is_joint:
      shape = _Values(loss, y, y_pred).shape
      # Outputs of unknown length may have values of unknown length.
      is_unknown = shape.rank is None or (
        None in shape and any(None in t.shape for t in keras.tree.flatten(y_pred))
      )
      is_joint = not is_unknown and sum(d is not None and d % batch_size == 0 for d in shape) != 1
    if is_joint:
      raise _Joint(loss)
    return tf.zeros([])

  def _CheckSums(self, side: nested_map.NestedMap, batch_size: int) -> None:
    """Raises ValueError if the loss of the batch is not the sum over its micro-batches.

    This does not show in shapes: a contrastive loss, for example, is a number for each example.
    """
    rows, num_pieces = list(range(batch_size)), self._num_micro_batches
    if batch_size < 2 or self._AreLarge(batch_size, side.y):
      # Rows from all parts of the batch, because it may be ordered by class.
      rows, num_pieces = [i * batch_size // 8 for i in range(8)], 2
    if self._AreLarge(len(rows), side.y):
      return
    y, sample_weight = tf.nest.map_structure(
      lambda t: None if t is None else tf.gather(t, rows), (side.y, side.sample_weight)
    )
    for power in (1, 8):  # Even and uneven; both logits and probabilities may be between 0 and 1.
      outputs = [
        tf.cast(tf.random.stateless_uniform(spec.shape, [i, power], 0.1, 0.9) ** power, spec.dtype)
        for i, spec in enumerate(self._OutputSpecs(len(rows), y))
      ]
      batch = (outputs, y, sample_weight)
      whole, again = self._Sums(batch), self._Sums(batch)
      parts = [self._Sums(piece) for piece in micro_batch.Split(batch, num_pieces)]
      for (loss, total, size), (_, other, _), *pieces in zip(whole, again, *parts, strict=True):
        error = abs(total - sum(piece for _, piece, _ in pieces))
        if total == other and error > size:  # Neither random nor NaN.
          raise _Joint(loss)

  def _AreLarge(self, rows: int, y: Any) -> bool:
    sizes = [spec.shape.num_elements() for spec in self._OutputSpecs(rows, y)]
    return None in sizes or max(sizes) > _MOST_TRIED

  def _Sums(self, batch: tuple[Any, Any, Any]) -> list[tuple[Any, tf.Tensor, tf.Tensor]]:
    """Returns each loss, its sum over a batch of outputs, labels and weights, and its rounding."""
    outputs, y, sample_weight = batch
    sums: list[Any] = []

    def Run(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
      try:
        values = _Values(loss, y, y_pred)
        if (mask := _Mask(values)) is not None:
          values *= tf.cast(mask, values.dtype)
        total = _SUM(values, values, sample_weight)
        sizes = [None if x is None else tf.abs(x) for x in (values, sample_weight)]
        size = _SUM(sizes[0], *sizes)
        sums.append((loss, total, size * (1e-4 if values.dtype.size >= 4 else 0.05)))
      except tf.errors.OpError:  # Random predictions fail an assertion of the loss.
        sums.append((loss, tf.constant(math.inf, tf.float64), tf.zeros([], tf.float64)))
      return tf.zeros([])

    with keras.StatelessScope():
      self._Compute(y, self._graph.PackOutputs(outputs), sample_weight, Run)
    return sums

  def __call__(
    self, theta: Any, outputs: tuple[Any, ...], side: nested_map.NestedMap
  ) -> dict[str, weighted_loss.Metric]:
    """Returns the loss, and what it adds to the states of the metrics."""
    del theta
    tensors = [keras_cell_layer.RestoreAttributes(x) for x in outputs]
    y_pred = self._graph.PackOutputs(tensors)
    if isinstance(y_pred, chunked_logits.SharedLogits):
      self._CheckSlices()
    scales = iter(tf.unstack(side.scale))

    def Run(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
      if isinstance(y_pred, chunked_logits.ChunkedLogits):
        value = _ChunkedLoss(loss, y, y_pred, sample_weight)
      else:
        value = loss(y, y_pred, sample_weight)
      value = tf.cast(value, tf.float32) if value.dtype.size < 4 else value
      return value * tf.cast(next(scales), value.dtype)

    loss, states = self._LossAndStates(side.y, y_pred, side.sample_weight, Run)
    rows = tf.cast(tf.shape(getattr(tensors[0], 'inputs', tensors[0]))[0], tf.float32)
    metrics: dict[str, weighted_loss.Metric] = {'loss': (loss, rows)}
    for i, value in enumerate(states):
      metrics[f'{STATE}{i}'] = weighted_loss.Sum(value)
    if self.needs_predictions:
      for i, x in enumerate(outputs):
        parts = x if isinstance(x, Mapping) else {'value': x, 'mask': _Mask(x)}
        for name, part in parts.items():
          if part is not None:
            part = tf.convert_to_tensor(part)
            metrics[f'{PREDICTION}{i}_{name}'] = weighted_loss.Rows(part)
    return metrics

  def _CheckSlices(self) -> None:
    """Raises ValueError if a metric takes the logits of a shared vocabulary."""
    metrics = getattr(self._trainer._compile_metrics, 'metrics', ())
    if names := [m.name for m in metrics if not _TakesChunks(m)]:
      raise ValueError(
        f"vocabulary='shared': the metrics {', '.join(names)} take the logits as a tensor, but no "
        "device has all of them; use accuracy, or vocabulary='one'"
      )

  def States(self) -> list[Any]:
    """Returns the variables of the metrics that the last stage updates."""
    trainer = self._trainer
    metrics = [*getattr(trainer._compile_loss, 'metrics', ())]
    if not self.needs_predictions and trainer._compile_metrics is not None:
      metrics.append(trainer._compile_metrics)
    return [v for m in metrics for v in m.variables]

  def _Compute(self, y: Any, y_pred: Any, sample_weight: Any, run: _RunLoss) -> tf.Tensor:
    """Returns the loss of all outputs, with `run` in the place of the call of each loss."""
    trainer = self._trainer
    if trainer.loss is None:
      return tf.zeros([])
    compiled = trainer._compile_loss
    if not compiled.built:
      compiled(y, y_pred, sample_weight)
    losses = [x._replace(loss=functools.partial(run, x.loss)) for x in compiled._flat_losses]
    with (
      keras_variables.InBatches(),
      keras_variables.ReplaceAttributes(compiled, _flat_losses=losses),
    ):
      loss = compiled(y, y_pred, sample_weight)  # This leaves out the losses of layers.
    if loss is None:
      raise ValueError('compile() got no loss for any output')
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
      raise ValueError(f'the loss must be a scalar, got the shape {loss.shape}')
    return tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss

  def _LossAndStates(
    self, y: Any, y_pred: Any, sample_weight: Any, run: _RunLoss
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the loss as `_Compute` does, and what it adds to the `States`."""
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self.States()]
    with _LossScope(zeros, self._trained) as scope:
      loss = self._Compute(y, y_pred, sample_weight, run)
      if not self.needs_predictions:
        self._UpdateMetrics(y, y_pred, sample_weight)
      return loss, [scope.get_current_value(v) for v, _ in zeros]

  def _UpdateMetrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
    metrics = self._trainer._compile_metrics
    if metrics is None:
      return
    with contextlib.ExitStack() as replaced:
      replaced.enter_context(keras_variables.InBatches())
      if isinstance(y_pred, chunked_logits.ChunkedLogits):
        hits = functools.partial(_Hits, logits=y_pred)
        in_chunks = [m for m in metrics.metrics if _TakesChunks(m)]
        for metric in in_chunks:
          replaced.enter_context(keras_variables.ReplaceAttributes(metric, _fn=hits))
        if len(in_chunks) < len(metrics.metrics):
          mask, y_pred = _Mask(y_pred), tf.convert_to_tensor(y_pred)
          if mask is not None:
            y_pred._keras_mask = mask
      metrics.update_state(y, y_pred, sample_weight)

  def _Divisors(self, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """Returns the divisor of each loss except sums, float64 `[losses]`, up to a constant factor."""
    divisors = []

    def Run(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
      masks = [m for m in (_Mask(y_pred), _Mask(_Values(loss, y, y_pred))) if m is not None]
      weights = sample_weight if loss.reduction == 'mean_with_sample_weight' else None
      if masks:
        counted = functools.reduce(tf.logical_and, [tf.cast(m, tf.bool) for m in masks])
      else:
        like = keras.tree.flatten(y_pred)[0].shape[:1] if weights is None else weights.shape
        counted = tf.ones(like)
      divisors.append(_SUM(counted, counted, weights))
      return tf.zeros([])

    self._Compute(y, y_pred, sample_weight, Run)
    return tf.stack(divisors)

  def Scales(
    self,
    micro_batches: Sequence[tuple[tuple[Any, ...], nested_map.NestedMap]],
    masks: keras_masks.Masks | None,
  ) -> list[tf.Tensor]:
    """Returns `[losses]` for each micro-batch: D_m / D, divided by its share of the rows.

    Args:
      micro_batches: the arguments of the first layer and the side of each.
      masks: computes the masks of the outputs from the arguments; None if outputs have no masks.
    """
    if len(micro_batches) == 1 or not self._is_sum:
      return [tf.ones([len(self._is_sum)], tf.float64) for _ in micro_batches]
    rows = [micro_batch.BatchSize(args) for args, _ in micro_batches]
    divisors = []
    for (args, side), r in zip(micro_batches, rows, strict=True):
      output_masks = [None] * len(self._graph.outputs) if masks is None else masks(args)
      divisors.append(
        keras_masks.RunNeeded(self._divisors, r, output_masks, side.y, side.sample_weight)
      )
    total = tf.add_n(divisors)
    is_sum, ones = tf.constant(self._is_sum, tf.bool), tf.ones_like(total)
    shares = [tf.where(is_sum, ones, tf.math.divide_no_nan(d, total)) for d in divisors]
    return [share * (sum(rows) / r) for share, r in zip(shares, rows, strict=True)]


def _Joint(loss: Any) -> ValueError:
  return ValueError(
    f'the loss {loss.name} compares examples of a batch, or is not a number for each, which '
    'micro-batches cannot add up; return a number for each example, or set '
    'num_micro_batches=1'
  )


class _Reduction(keras.losses.Loss):
  """Reduces values, each times its weight, with Keras's rules for their shapes."""

  def call(self, y_true: Any, y_pred: Any) -> Any:
    """Returns the values."""
    del y_pred
    return y_true


_SUM = _Reduction(name='sum', reduction='sum', dtype='float64')


def _IsNew(metric: Any) -> bool:
  """Whether a metric has the state that it was made with; True if that is not known."""
  try:
    first = type(metric).from_config(metric.get_config()).variables
  except Exception:  # A custom class may have no complete configuration.
    return True
  state = metric.variables
  return len(first) == len(state) and all(map(np.array_equal, first, state))


def _TakesChunks(metric: Any) -> bool:
  """Whether a metric follows from the statistics of chunks of the logits."""
  return type(metric) is keras.metrics.SparseCategoricalAccuracy


def _Hits(y: Any, y_pred: Any, *, logits: chunked_logits.ChunkedLogits) -> tf.Tensor:
  del y_pred  # The same logits.
  return logits.StatisticsOf(y).hits


def _ChunkedLoss(
  loss: Any, y: Any, logits: chunked_logits.ChunkedLogits, sample_weight: Any
) -> tf.Tensor:
  """Returns a loss of logits that are computed in chunks."""
  settings = getattr(loss, '_fn_kwargs', {})
  if (
    type(loss) is not keras.losses.SparseCategoricalCrossentropy
    or not settings.get('from_logits')
    or settings.get('ignore_class') is not None
  ):
    raise ValueError(
      "loss_chunk_size and vocabulary='shared' need the loss "
      'SparseCategoricalCrossentropy(from_logits=True) without ignore_class, got '
      f'{loss.name}'
    )
  values = logits.StatisticsOf(y).xent
  if (mask := _Mask(logits)) is not None:
    values._keras_mask = mask
  return _Reduction(reduction=loss.reduction, dtype=loss.dtype)(values, values, sample_weight)


def _Values(loss: Any, y: Any, y_pred: Any) -> Any:
  """Returns the values of a loss before their reduction, with the mask that it attaches."""
  return loss.call(
    *keras.tree.map_structure(lambda t: keras.ops.convert_to_tensor(t, loss.dtype), (y, y_pred))
  )


def _Mask(x: Any) -> tf.Tensor | None:
  """Returns the mask that Keras attached to a tensor, if any."""
  return getattr(x, '_keras_mask', None)


def IsSum(metric: Any) -> bool:
  """Whether the state of a metric is known to add up over the examples.

  The states of all of Keras's metrics add up, except means of a function of all examples.
  """
  function = getattr(metric, '_fn', None)
  parts = [type(metric)] if function is None else [type(metric), function]
  if any(str(getattr(p, '__module__', '')).split('.')[0] != 'keras' for p in parts):
    return False
  if function is None:
    return True
  if isinstance(function, keras.losses.Loss) or function is keras.losses.circle:
    return False
  defaults = inspect.signature(function).parameters
  axis = defaults['axis'].default if 'axis' in defaults else -1
  return metric._fn_kwargs.get('axis', axis) in (-1, [-1], (-1,))


def _PrimeAbove(number: int) -> int:
  """Returns the next prime number."""
  return next(
    n for n in itertools.count(number + 1) if all(n % d for d in range(2, math.isqrt(n) + 1))
  )
