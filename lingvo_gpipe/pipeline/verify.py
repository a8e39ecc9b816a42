# SPDX-License-Identifier: Apache-2.0
"""Compares one training step of a pipeline with the same layers run without a pipeline.

The reference is plain eager code on one device, micro-batch by micro-batch with the same seeds: no
engine, no traced function, no recomputation. It uses the pipeline's own variables and changes
nothing. In addition the loss is computed in evaluation mode, once on the micro-batches and once on
the whole batch. These two differ if a layer looks at other examples of its batch.

    layer.Place(devices, *input_specs, loss_fn=Loss)
    report = verify.Verify(layer, inputs, side, loss_fn=Loss, loss_weight=Weight)
    print(report.Text())

The bounds: in float64, for every variable max|g - g0| <= 1e-10 of the global gradient norm; in
float32, |g - g0| <= 1e-5 of the larger of the variable's |g0| and 1e-3 of the global norm, because
some gradients (of an attention key bias, for example) are zero in theory.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map, pipeline_element
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline import failed_step, pipelining_layer, replicas
from lingvo_gpipe.pipeline.stages import failures, micro_batch, stage_math

# By dtype: the largest error of a gradient and of a loss.
GRADIENT_BOUNDS = {'float64': 1e-10, 'float32': 1e-5}
LOSS_BOUNDS = {'float64': 1e-10, 'float32': 1e-5}
# A variable's own norm counts for no less than this share of the global norm.
_LEAST_SHARE = 1e-3
_LOSS_WEIGHT_BOUND = 1e-3


@dataclasses.dataclass(frozen=True)
class VariableError:
  """The error of the gradient of one variable.

  Attributes:
    path: the variable's path.
    norm: the norm of its reference gradient.
    absolute: the largest entry of the error, divided by the global gradient norm.
    relative: the norm of the error, divided by the larger of `norm` and 1e-3 of the global norm.
  """

  path: str
  norm: float
  absolute: float
  relative: float


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of `Verify`.

  Attributes:
    dtype: float32 or float64, the dtype of the layers.
    losses: the losses `pipelined` and `reference` in training, `micro-batches` and `whole batch` in
      evaluation.
    loss_weights: sum of the loss weights `announced` before the step and `returned` with the loss.
    global_norm: the norm of all reference gradients.
    variables: the errors of all variables.
  """

  dtype: str
  losses: dict[str, float]
  loss_weights: dict[str, float]
  global_norm: float
  variables: tuple[VariableError, ...]

  def Error(self, variable: VariableError) -> float:
    """Returns the variable's error on the scale of this dtype."""
    return variable.absolute if self.dtype == 'float64' else variable.relative

  def Failures(self) -> list[str]:
    """Returns a line for each value out of bounds."""
    failures = []
    for got, expected in (('pipelined', 'reference'), ('micro-batches', 'whole batch')):
      error = _Relative(self.losses[got], self.losses[expected])
      if not error <= LOSS_BOUNDS[self.dtype]:
        failures.append(f'loss: {got} and {expected} differ by {error:.1e} of the loss')
    error = _Relative(self.loss_weights['announced'], self.loss_weights['returned'])
    if not error <= _LOSS_WEIGHT_BOUND:
      failures.append(
        'loss weight: {announced:g} was announced before the step, {returned:g} came with the '
        'loss'.format(**self.loss_weights)
      )
    bound = GRADIENT_BOUNDS[self.dtype]
    wrong = [v for v in self.variables if not self.Error(v) <= bound]
    if wrong:
      failures.append(
        f'gradients: {len(wrong)} of {len(self.variables)} variables exceed {bound:g}'
      )
    return failures

  def Text(self, num_worst: int = 5) -> str:
    """Returns the losses, the worst variables on both scales, and the verdict."""
    lines = [f'{name:14} {value:.15g}' for name, value in self.losses.items()]
    lines += ['', f'gradients of {len(self.variables)} variables, norm {self.global_norm:.6g}']
    width = max((len(v.path) for v in self.variables), default=0)
    for scale in ('absolute', 'relative'):
      lines.append(f'worst on the {scale} scale:')
      worst = sorted(self.variables, key=operator.attrgetter(scale), reverse=True)[:num_worst]
      for v in worst:
        lines.append(
          f'  {v.path:{width}}  absolute {v.absolute:.1e}  relative {v.relative:.1e}  '
          f'norm {v.norm:.3g}'
        )
    scale = 'absolute' if self.dtype == 'float64' else 'relative'
    bound = f'{self.dtype}: losses within {LOSS_BOUNDS[self.dtype]:g}, gradients within '
    bound += f'{GRADIENT_BOUNDS[self.dtype]:g} on the {scale} scale'
    failures = self.Failures()
    lines += ['', *(f'DIFFERENT: {line}' for line in failures)]
    lines.append(('the bounds are: ' if failures else 'EQUAL: ') + bound)
    return '\n'.join(lines)


def Verify(
  layer: pipelining_layer.PipeliningLayer,
  inputs: tuple[Any, ...],
  side: Any,
  *,
  loss_fn: stage_math.LossFn,
  loss_weight: Callable[[Any], tf.Tensor],
  step: int = 0,
) -> Report:
  """Compares one training step of a pipeline with its layers run one by one.

  Args:
    layer: a pipeline that was placed with `loss_fn`.
    inputs: the whole batch, a nest for each argument of the first layer.
    side: the inputs of the loss besides the outputs, of the whole batch; the batch is at the
      layer's batch_dim here too.
    loss_fn: the loss; see `stage_math.LossFn`.
    loss_weight: maps the side of a micro-batch to the weight of its loss.
    step: the training step that random numbers depend on.

  Raises:
    ValueError: the layers do not compute in float32 or float64.
  """
  sides = micro_batch.Split(side, layer.num_micro_batches, layer.params.batch_dim)
  micro_batches = [
    micro_batch.MicroBatch(args, side, loss_weight(side))
    for args, side in zip(layer.SplitBatch(inputs), sides, strict=True)
  ]
  return VerifyEngine(layer.engine, micro_batches, (inputs, side), loss_fn=loss_fn, step=step)


def VerifyEngine(
  engine: engine_lib.PipelineEngine,
  micro_batches: Sequence[micro_batch.MicroBatch],
  whole: tuple[tuple[Any, ...], Any],
  *,
  loss_fn: stage_math.LossFn,
  step: int = 0,
) -> Report:
  """Compares one training step of an engine, with or without a PipeliningLayer, like `Verify`.

  Args:
    engine: the engine, with `loss_fn` in its last stage.
    micro_batches: the micro-batches.
    whole: (arguments of the first layer, side inputs of the loss) of the whole batch.
    loss_fn: the loss; see `stage_math.LossFn`.
    step: the training step that random numbers depend on.

  Raises:
    ValueError: layers sum statistics over replicas, or do not compute in float32 or float64.
  """
  if engine.sums_statistics:
    raise ValueError(
      'layers sum statistics over replicas (over_replicas), but the reference runs micro-batches '
      'one after another: compare in one replica'
    )
  dtype = _ComputeDtype(engine)
  # Statistics that training changes must start equally in all runs, and be restored at the end.
  fixed = [v for s in engine.holders for v in tf.nest.flatten(s.variables) if not v.trainable]
  saved = [v.numpy() for v in fixed]

  def RunAndRestore(run: Callable[[], Any]) -> Any:
    try:
      return run()
    finally:
      for variable, value in zip(fixed, saved, strict=True):
        variable.assign(value)

  loss, announced, grads = RunAndRestore(lambda: _RunPipeline(engine, micro_batches, step))
  reference = _Reference(engine, loss_fn)
  loss0, returned, grads0 = RunAndRestore(lambda: reference.Train(micro_batches, step))
  in_pieces = RunAndRestore(lambda: reference.Evaluate(micro_batches))
  at_once = RunAndRestore(lambda: reference.Evaluate([micro_batch.MicroBatch(*whole)]))
  norm = float(np.sqrt(sum(np.sum(np.square(g)) for g in grads0.values())))
  return Report(
    dtype=dtype,
    losses={
      'pipelined': loss,
      'reference': loss0,
      'micro-batches': in_pieces,
      'whole batch': at_once,
    },
    loss_weights={'announced': announced, 'returned': returned},
    global_norm=norm,
    variables=tuple(_Error(path, grads[path], g0, norm) for path, g0 in grads0.items()),
  )


def _ComputeDtype(engine: engine_lib.PipelineEngine) -> str:
  dtypes: set[str] = set()
  for s in engine.stages:
    for layer in s.layers:
      dtypes.add(tf.as_dtype(layer.params.fprop_dtype or layer.params.dtype or 'float32').name)
  if not dtypes <= GRADIENT_BOUNDS.keys():
    raise ValueError(
      f'the layers compute in {", ".join(sorted(dtypes))}; results are only comparable in float32 '
      'and float64: set dtype and fprop_dtype to one of them'
    )
  return 'float32' if 'float32' in dtypes else 'float64'


def _RunPipeline(
  engine: engine_lib.PipelineEngine,
  micro_batches: Sequence[micro_batch.MicroBatch],
  step: int,
) -> tuple[float, float, dict[str, np.ndarray]]:
  """Returns (loss, sum of the announced weights, {path: gradient} divided by that sum)."""
  engine.MakeAccumulators()  # TensorFlow traces a function that makes variables twice.
  gradient_sum = replicas.GradientSum(engine.replicas)

  @tf.function(autograph=False)
  def Step(micro_batches: list[micro_batch.MicroBatch], step: tf.Tensor) -> Any:
    sums = engine.Accumulate(micro_batches, step).metrics
    gradient_sum.Add()
    return sums, tf.add_n([b.loss_weight for b in micro_batches])

  args = list(micro_batches), tf.constant(step, tf.int64)
  with failed_step.Locate(engine, lambda: Step.python_function(*args)):
    sums, announced = Step(*args)
  total = float(announced)
  grads: dict[str, np.ndarray] = {}
  for s in engine.holders:
    for path, accumulator in zip(s.trained, s.accumulators, strict=True):
      grads[path] = _Divide(accumulator.numpy().astype(np.float64), total)
  value, weight = sums['loss'].numpy().astype(np.float64)
  return float(_Divide(value, weight)), total, grads


class _Reference:
  """The engine's layers without the engine, run eagerly on the first stage's device."""

  def __init__(self, engine: engine_lib.PipelineEngine, loss_fn: stage_math.LossFn) -> None:
    self._layers = [layer for s in engine.stages for layer in s.layers]
    self._last_layers = engine.stages[-1].layers
    self._variables = engine.trained
    # Copies of tied weights: their gradients belong to their owners.
    self._mirrors = {p: v for s in engine.holders for p, v in s.mirrors.items()}
    self._ties = engine.ties
    self._device = engine.stages[0].device
    self._loss_fn = loss_fn

  def Train(
    self, micro_batches: Sequence[micro_batch.MicroBatch], step: int
  ) -> tuple[float, float, dict[str, np.ndarray]]:
    """Returns (loss, sum of its weights, {path: gradient} divided by that sum)."""
    total, weight_sum, rounded = 0.0, 0.0, list[tf.Tensor]()
    sums = {path: np.zeros(v.shape, np.float64) for path, v in self._variables.items()}
    for m, (args, side, loss_weight) in enumerate(micro_batches):
      with tf.device(self._device), tf.GradientTape() as tape:
        with fprop_context.Scope(step=step, micro_batch=m) as context:
          loss, weight = self._Loss(args, side)
        if not float(weight):  # The mean of an empty micro-batch may be NaN.
          continue
        total += float(loss) * float(weight)
        weight_sum += float(weight)
        # In the precision of the weight that was announced to the engine.
        rounded.append(tf.cast(weight, tf.convert_to_tensor(loss_weight).dtype))
        weight = tf.cast(rounded[-1], loss.dtype)
        objective = loss * weight
        for _, _, value, coefficient in context.aux_losses:
          objective += tf.cast(value, loss.dtype) * tf.cast(coefficient * weight, loss.dtype)
      grads = tape.gradient(objective, {**self._variables, **self._mirrors})
      for path, grad in grads.items():
        if grad is not None:
          sums[self._ties.get(path, path)] += tf.convert_to_tensor(grad).numpy()
    divisor = float(tf.add_n(rounded)) if rounded else 0.0
    grads = {path: _Divide(g, divisor) for path, g in sums.items()}
    return float(_Divide(np.float64(total), weight_sum)), weight_sum, grads

  def Evaluate(self, micro_batches: Sequence[micro_batch.MicroBatch]) -> float:
    """Returns the loss in evaluation mode."""
    total, weight_sum = 0.0, 0.0
    for args, side, _ in micro_batches:
      with tf.device(self._device), fprop_context.Scope(do_eval=True):
        loss, weight = self._Loss(args, side)
      total += float(loss) * float(weight) if float(weight) else 0.0
      weight_sum += float(weight)
    return float(_Divide(np.float64(total), weight_sum))

  def _Loss(self, args: tuple[Any, ...], side: Any) -> tuple[tf.Tensor, tf.Tensor]:
    def Run(i: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      del i
      with failures.NoteLayer(layer, args):
        return layer.FPropSkips(layer.theta, skips, *args)

    outputs = pipeline_element.AsTuple(pipeline_element.RunLayers(self._layers, Run, args)[0])
    loss, weight = self._loss_fn([layer.theta for layer in self._last_layers], outputs, side)[
      'loss'
    ]
    return loss, tf.cast(weight, loss.dtype)


def _Error(path: str, grad: np.ndarray, expected: np.ndarray, global_norm: float) -> VariableError:
  error = grad - expected
  norm = float(np.linalg.norm(expected))
  least = max(global_norm, np.finfo(np.float64).tiny)
  return VariableError(
    path=path,
    norm=norm,
    absolute=_InfForNan(np.abs(error).max(initial=0.0) / least),
    relative=_InfForNan(np.linalg.norm(error) / max(norm, _LEAST_SHARE * least)),
  )


def _InfForNan(error: Any) -> float:
  """Returns the error as a comparable number, with infinity for NaN."""
  return float('inf') if np.isnan(error) else float(error)


def _Relative(got: float, expected: float) -> float:
  """Returns the difference divided by the expected value; NaN if one of them is NaN."""
  return abs(got - expected) / max(abs(expected), 1e-6)


def _Divide(value: Any, divisor: float) -> Any:
  return value / divisor if divisor else np.zeros_like(value)
