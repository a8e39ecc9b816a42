# SPDX-License-Identifier: Apache-2.0
"""The loss and metrics of a compiled Keras model, by micro-batch in the last stage.

Keras's loss of a batch is a sum divided by a number that depends on the reduction:

    sum_over_batch_size    number of values, or of values that a mask or `ignore_class` keeps
    mean_with_sample_weight   sum of the sample weights
    sum                    1

A micro-batch m computes that loss for its own rows, with the divisor D_m. Weighted by D_m / D, with
the D of the batch, the losses add up to the loss of the batch. The engine weights by rows; `scale`
corrects that. D and D_m depend on shapes, sample weights and masks only, so they are known before
the first forward.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers.keras import keras_cell_layer, keras_nodes
from lingvo_gpipe.pipeline.stages import micro_batch, weighted_loss

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
    """Changes a variable; raises ValueError if it is not of a metric."""
    if id(update[0]) not in self._states:
      raise ValueError(
        f'the loss changes the variable {update[0].path}, which a pipeline cannot do: make it a '
        'metric'
      )
    super().add_update(update)


@dataclasses.dataclass
class _SeedContext(fprop_context.FPropContext):
  """Gives layers seeds of zeros, and lists them."""

  seeds: list[tf.Tensor] = dataclasses.field(default_factory=list)

  def OpSeed(self, layer: Any, name: str = '') -> tf.Tensor:
    """Returns a new tensor."""
    del layer, name
    self.seeds.append(tf.zeros([2], tf.int64))
    return self.seeds[-1]


def WithoutSeeds(masks: Callable[[], list[Any]], *, do_eval: bool) -> list[Any]:
  """Returns the masks that a traced function computes.

  Args:
    masks: runs the function, for which it may trace it.
    do_eval: whether layers compute as in evaluation.

  Raises:
    ValueError: a mask depends on random numbers.
  """
  # Any step will do: its seeds are not used.
  context = _SeedContext(do_eval, tf.zeros([], tf.int64))
  with fprop_context.Enter(context):
    values = masks()
  for graph in {id(s.graph): s.graph for s in context.seeds}.values():
    reached = keras_cell_layer.Reached(graph.outputs)
    if any(s.graph is graph and s.op.name in reached for s in context.seeds):
      raise ValueError(
        'the mask of an output depends on random numbers, so its size is not known before the '
        'forward; set num_micro_batches=1'
      )
  return values


class KerasLoss:
  """The loss of a micro-batch; see `stage_math.LossFn`.

  Attributes:
    needs_predictions: whether a metric needs the predictions of the whole batch at once.
  """

  def __init__(self, trainer: Any, graph: keras_nodes.Graph, num_micro_batches: int) -> None:
    """Reads how the trainer was compiled.

    Args:
      trainer: a compiled keras.Model, with Keras's `compute_loss` and `compute_metrics`.
      graph: the model whose outputs the loss takes.
      num_micro_batches: number of micro-batches of a batch.

    Raises:
      ValueError: a reduction cannot be computed by micro-batch.
    """
    self._trainer = trainer
    self._graph = graph
    self._num_micro_batches = num_micro_batches
    self._trained = frozenset(map(id, graph.model.trainable_variables))
    losses = [x for x in keras.tree.flatten(trainer.loss) if x is not None]
    self._reductions = {getattr(x, 'reduction', 'sum_over_batch_size') for x in losses}
    self._ignored = [x.ignore_class for x in losses if getattr(x, 'ignore_class', None) is not None]
    self._num_losses = max(len(losses), len(graph.outputs) if losses else 0)
    if self._reductions & {None, 'none'}:
      raise ValueError(
        "a loss has the reduction None, so it is not a scalar; use 'sum_over_batch_size' or 'sum'"
      )
    self._needs_predictions: bool | None = None

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
      side: tensors or specs as `__call__` takes them.
      batch_size: the number of rows.

    Raises:
      ValueError: the losses cannot be computed by micro-batch.
    """
    if self._num_micro_batches > 1 and 'sum' in self._reductions and len(self._reductions) > 1:
      raise self._Mixed()

    def Compute(y: Any, y_pred: Any, sample_weight: Any) -> None:
      self._Compute(y, y_pred, sample_weight, with_metrics=True)

    self._Trace(Compute, side, batch_size)
    if self._num_micro_batches > 1:
      # A number that shows which dimension of a loss is the batch.
      tensors = [t for t in tf.nest.flatten((side.y, side.sample_weight)) if t is not None]
      sizes = [d or 0 for t in (*tensors, *self._graph.outputs) for d in t.shape[1:]]
      prime = _PrimeAbove(max([batch_size, *sizes]))

      def Check(y: Any, y_pred: Any, sample_weight: Any) -> None:
        self._CheckLosses(y, y_pred, prime)

      self._Trace(Check, side, prime)

  def _Trace(
    self, run: Callable[[Any, Any, Any], None], side: nested_map.NestedMap, batch_size: int
  ) -> None:
    """Traces `run(y, y_pred, sample_weight)` for a number of rows."""

    def Spec(t: Any) -> tf.TensorSpec:
      return tf.TensorSpec([batch_size, *t.shape[1:]], tf.as_dtype(t.dtype))

    labels = (side.y, side.sample_weight)
    specs = tf.nest.map_structure(lambda t: None if t is None else Spec(t), labels)
    outputs = [Spec(v) for v in self._graph.outputs]
    none_at = [i for i, s in enumerate(tf.nest.flatten(specs)) if s is None]

    def Run(*flat: tf.Tensor) -> tf.Tensor:
      predictions, labels = list(flat[: len(outputs)]), list(flat[len(outputs) :])
      for i in none_at:
        labels.insert(i, None)
      y, sample_weight = tf.nest.pack_sequence_as(specs, labels)
      with keras.StatelessScope():
        run(y, self._graph.PackOutputs(predictions), sample_weight)
      return tf.zeros([])

    flat_specs = [s for s in tf.nest.flatten(specs) if s is not None]
    tf.function(Run, autograph=False).get_concrete_function(*outputs, *flat_specs)

  def Outputs(self) -> list[keras_nodes.Value]:
    """Returns the outputs of the model that a loss takes; call `Build` before."""
    outputs = []
    for path, *_ in getattr(self._trainer._compile_loss, '_flat_losses', None) or ():
      output = self._graph.output_structure
      try:
        for key in path:
          output = output[key]
      except (KeyError, IndexError, TypeError):  # Keras has packed the outputs otherwise.
        output = self._graph.output_structure
      outputs += keras.tree.flatten(output)
    return outputs

  def _CheckLosses(self, y: Any, y_pred: Any, batch_size: int) -> None:
    """Raises ValueError if a loss is not a mean over the examples.

    Args:
      y: the labels.
      y_pred: the predictions.
      batch_size: the number of examples, a prime number that no other dimension has as a factor.
    """
    for path, loss, *_ in getattr(self._trainer._compile_loss, '_flat_losses', None) or ():
      y_true, predicted = y, y_pred
      try:
        for key in path:
          y_true, predicted = y_true[key], predicted[key]
      except (KeyError, IndexError, TypeError):  # Keras has packed the labels otherwise.
        y_true = keras.tree.flatten(y)[0]
      if keras.tree.is_nested(y_true) and not keras.tree.is_nested(predicted):
        y_true = keras.tree.flatten(y_true)[0]
      # Neither of these shows in the shape of the values.
      is_joint = type(loss).__call__ is not keras.losses.Loss.__call__ or (
        getattr(loss, 'fn', None) is keras.losses.circle
      )
      if not is_joint:
        pair = keras.tree.map_structure(
          lambda t, dtype=loss.dtype: keras.ops.convert_to_tensor(t, dtype), (y_true, predicted)
        )
        shape = loss.call(*pair).shape
        multiples = [d for d in shape if d is not None and d % batch_size == 0]
        # Outputs of unknown length may have values of unknown length.
        is_unknown = None in shape and any(None in v.shape[1:] for v in self._graph.outputs)
        is_joint = len(multiples) != 1 and not is_unknown
      if is_joint:
        raise ValueError(
          f'the loss {loss.name} compares examples of a batch, or is not a number for each, '
          'which micro-batches cannot add up; return a number for each example from its `call`, or '
          'set num_micro_batches=1'
        )

  def __call__(
    self, theta: Any, outputs: tuple[Any, ...], side: nested_map.NestedMap
  ) -> dict[str, weighted_loss.Metric]:
    """Returns the loss, and what it adds to the states of the metrics."""
    del theta
    tensors = [keras_cell_layer.Attached(x) for x in outputs]
    y_pred = self._graph.PackOutputs(tensors)
    states = self.States()
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in states]
    with _LossScope(zeros, self._trained) as scope:
      loss = self._Compute(
        side.y, y_pred, side.sample_weight, with_metrics=not self.needs_predictions
      )
      new = [scope.get_current_value(v) for v in states]
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    rows = tf.cast(tf.shape(tensors[0])[0], tf.float32)
    scale = tf.cast(side.scale[0], loss.dtype)
    metrics: dict[str, weighted_loss.Metric] = {'loss': (loss * scale, rows)}
    trackers = {id(m.total) for m in getattr(self._trainer._compile_loss, 'metrics', ())}
    for i, (v, value) in enumerate(zip(states, new, strict=True)):
      if id(v) in trackers:  # The mean of one output's loss.
        value *= tf.cast(side.scale[0], value.dtype)
      metrics[f'{STATE}{i}'] = weighted_loss.Sum(value)
    if self.needs_predictions:
      for i, x in enumerate(outputs):
        for name, part in (x if isinstance(x, Mapping) else {'value': x}).items():
          metrics[f'{PREDICTION}{i}_{name}'] = weighted_loss.Rows(part)
    return metrics

  def States(self) -> list[Any]:
    """Returns the variables of the metrics that the last stage updates."""
    trainer = self._trainer
    metrics = [*getattr(trainer._compile_loss, 'metrics', ())]
    if not self.needs_predictions and trainer._compile_metrics is not None:
      metrics.append(trainer._compile_metrics)
    return [v for m in metrics for v in m.variables]

  def _Compute(self, y: Any, y_pred: Any, sample_weight: Any, *, with_metrics: bool) -> tf.Tensor:
    trainer = self._trainer
    loss = tf.zeros([])
    if trainer.loss is not None:
      loss = tf.convert_to_tensor(trainer.compute_loss(None, y, y_pred, sample_weight))
    if with_metrics and trainer._compile_metrics is not None:
      trainer._compile_metrics.update_state(y, y_pred, sample_weight)
    if loss.shape.rank != 0:
      raise ValueError(f'the loss must be a scalar, got the shape {loss.shape}')
    return loss

  def Scales(
    self,
    micro_batches: Sequence[tuple[tuple[Any, ...], nested_map.NestedMap]],
    masks: Callable[[tuple[Any, ...]], list[tf.Tensor | None]] | None,
  ) -> list[tf.Tensor]:
    """Returns for each micro-batch D_m / D over its share of the rows, a tensor [1].

    Args:
      micro_batches: the arguments of the first layer and the side of each.
      masks: computes the masks of the outputs from the arguments; None if outputs have no masks.

    Raises:
      ValueError: several losses have different divisors.
    """
    ones = [tf.ones([1], tf.float64) for _ in micro_batches]
    if len(micro_batches) == 1 or not self._reductions:
      return ones
    rows = [float(micro_batch.BatchSize(args)) for args, _ in micro_batches]
    weights = [side.sample_weight for _, side in micro_batches]
    of_weights = 'mean_with_sample_weight' in self._reductions and any(
      w is not None for w in tf.nest.flatten(weights)
    )
    is_sum = 'sum' in self._reductions
    if masks is None and not of_weights and not is_sum and not self._ignored:
      return ones
    if is_sum:
      return [tf.constant([sum(rows) / r], tf.float64) for r in rows]
    if self._num_losses > 1 or (of_weights and (masks is not None or self._ignored)):
      raise self._Mixed()
    if of_weights:
      divisors = [tf.reduce_sum(tf.cast(w, tf.float64)) for w in weights]
    else:
      divisors = []
      for args, side in micro_batches:
        counts = [] if masks is None else [tf.cast(m, tf.float64) for m in masks(args)]
        for ignored in self._ignored:
          (y,) = tf.nest.flatten(side.y)
          is_counted = tf.cast(tf.not_equal(y, tf.cast(ignored, y.dtype)), tf.float64)
          if counts:
            is_counted = tf.reshape(is_counted, tf.shape(counts[0]))
          counts.append(is_counted)
        divisors.append(tf.reduce_sum(math.prod(counts)))
    total = tf.add_n(divisors)
    return [
      tf.reshape(tf.math.divide_no_nan(d, total) * (sum(rows) / r), [1])
      for d, r in zip(divisors, rows, strict=True)
    ]

  def _Mixed(self) -> ValueError:
    return ValueError(
      'several losses divide by different numbers (reductions '
      f'{", ".join(sorted(map(str, self._reductions)))}, masks or weights), which micro-batches '
      'cannot compute; give all losses one reduction, or set num_micro_batches=1'
    )


def IsSum(metric: Any) -> bool:
  """Whether the state of a metric is known to add up over the examples.

  So it does in all metrics of Keras, except means of a function of all examples.
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
