# SPDX-License-Identifier: Apache-2.0
"""`PlacedModel`: a Keras model on its stages, with the functions that run a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.fit import keras_generation, keras_loss, keras_step, trials
from lingvo_gpipe.layers.keras import (
  keras_cell_layer,
  keras_cells,
  keras_cut,
  keras_graph,
  keras_masks,
  keras_nodes,
  keras_variables,
)
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.stages import micro_batch


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings with which a model is placed.

  Attributes:
    params: Params of a PipeliningLayer without its layers.
    devices: names of the devices, replica by replica.
    num_replicas: number of copies of the pipeline.
    loss_chunk_size: number of positions whose logits the loss computes at a time; 0: all.
    sum_embedding_gradients: see `keras_step.KerasStep`.
  """

  params: hyperparams.Params
  devices: tuple[str, ...]
  num_replicas: int
  loss_chunk_size: int
  sum_embedding_gradients: bool

  @property
  def num_micro_batches(self) -> int:
    """Number of micro-batches of a batch, over all replicas."""
    return self.params.num_micro_batches * self.num_replicas


class PlacedModel:
  """A Keras model whose variables lie on the devices of their stages.

  Attributes:
    graph: the calls of the model.
    cells: the pieces that the cut is made of, one for each layer of the stack.
    cut: the cut into stages.
    stack: the pipeline.
    step: takes training steps; None before the first.
  """

  def __init__(
    self,
    trainer: Any,
    settings: Settings,
    x: Any,
    side: nested_map.NestedMap | None,
    *,
    specs: Any = None,
    ends: Sequence[int] = (),
  ) -> None:
    """Cuts the model for a first batch, and moves its variables to their stages.

    Args:
      trainer: the PipelinedModel, whose loss, metrics and optimizer are used.
      settings: how the model is placed.
      x: tensors, the inputs as the model takes them.
      side: the inputs of the loss, which is then checked before anything moves.
      specs: specs like `x` with None for sizes that may change; None: as in `x`.
      ends: for each stage the index after its last cell in an earlier cut, which is used again if
        it has as many cells: the variables are in place.

    Raises:
      ValueError: the model cannot be cut this way, or its loss cannot be computed by micro-batch.
    """
    self._trainer = trainer
    self._settings = settings
    model = trainer.model
    self.graph = keras_graph.FromModel(model, x if specs is None else specs)
    if specs is not None:
      keras_graph.CheckSizes(self.graph, x)
    self.cells = tuple(keras_cells.Cut(self.graph))
    num_stages = settings.params.num_stages
    if len(self.cells) < num_stages:
      self.graph = keras_graph.OpenLayers(self.graph, num_stages)
      self.cells = tuple(keras_cells.Cut(self.graph))
    self.step: keras_step.KerasStep | None = None
    args = self._Args(x)
    p = self._Params(ends)
    num_micro_batches = settings.num_micro_batches
    self._CheckOutputs()
    self._loss = keras_loss.KerasLoss(trainer, self.graph, num_micro_batches)
    self.stack = p.Instantiate()
    self._is_built = not trainer.compiled
    if side is not None:
      self._BuildLoss(args, side)
    arg_specs = [None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in args]
    devices, num_replicas = settings.devices, settings.num_replicas
    weights = layer_costs.Weights()
    if trainer.optimizer is not None:
      keeps_sparse = keras_step.KeepsSparse(
        self.stack, trainer.optimizer, settings.sum_embedding_gradients
      )
      weights = layer_costs.Weights(
        slots_per_weight=keras_variables.SlotsPerWeight(trainer.optimizer),
        num_kept_sparse=num_micro_batches if keeps_sparse else 0,
      )
    self.cut = self.stack.MakeCut(
      *arg_specs, weights=weights, device=devices[0], num_replicas=num_replicas
    )
    has_masks = any(isinstance(s, dict) and 'mask' in s for s in self.cut.layers[-1].out_specs)
    self._masks: dict[bool, keras_masks.Masks] = {}
    if has_masks and num_micro_batches > 1:
      for do_eval in (False, True):
        self._masks[do_eval] = keras_masks.OutputMasks(self.stack.layers, do_eval=do_eval)
      for compute in self._masks.values() if self._loss.outputs else ():  # A loss needs the masks.
        tf.function(compute, autograph=False).get_concrete_function(tuple(arg_specs))
    self.stack.Place(
      devices, *arg_specs, loss_fn=self._loss, num_replicas=num_replicas, cut=self.cut
    )
    self.stack.engine.functions.num_batch_shapes = 2  # The last batch may be smaller.
    keras_variables.GiveValues(model)
    keras_variables.ForgetFunctions(model, but=type(trainer))
    self._places = keras_variables.Places(model)
    functions: tuple[Callable[..., Any], ...] = (self._Train, self._Test, self._Predict)
    if not trainer.run_eagerly:  # Relaxed shapes would not be static: one trace a shape.
      # TensorFlow counts the traces of a method for all its objects together. It would warn about
      # several models in one process as if one model were traced too often.
      functions = tuple(functools.partial(function) for function in functions)
      functions = tuple(tf.function(function, autograph=False) for function in functions)
    self._train, self._test, self._predict = functions

  def _Params(self, ends: Sequence[int]) -> hyperparams.Params:
    """Returns the Params of the stack."""
    model, cells = self._trainer.model, self.cells
    p = self._settings.params.Copy()
    p.Set(**keras_cut.Params(cells))
    p.sub[-1].Set(
      chunk_size=self._settings.loss_chunk_size, shares_vocabulary=p.vocabulary == 'shared'
    )
    if p.num_stages > len(cells):
      raise ValueError(
        f'{model.name}: expected at least {p.num_stages} cells, one for each stage, got '
        f'{len(cells)}; a cell is a layer with a matrix: {", ".join(c.name for c in cells)}'
        + ''.join(f'; {name} stays closed: {why}' for name, why in self.graph.closed.items())
      )
    used = {id(v) for cell in cells for v in cell.Weights().values()}
    for v in model.trainable_variables:
      if v.regularizer is not None and id(v) not in used:
        raise ValueError(
          f'{v.path} has a regularizer, but no call of {model.name} uses it: set its '
          '`trainable` to False, or remove the regularizer'
        )
    without_xla = sorted({x.name for c in cells for x in c.Layers() if not x.supports_jit})
    if p.xla and without_xla:
      logging.warning('XLA is off: %s cannot be compiled by it.', ', '.join(without_xla))
      p.xla = False
    if ends and ends[-1] == len(cells):
      p.splits = list(ends)
    return p

  def _CheckOutputs(self) -> None:
    """Raises ValueError if the shape of an output shows that it compares examples of a batch."""
    is_fixed = all(None not in v.shape[1:] for v in self.graph.inputs)
    if self._settings.num_micro_batches == 1 or not is_fixed:
      return
    for v in self.graph.outputs:
      if None in v.shape[1:]:
        raise ValueError(
          f'{self._trainer.model.name} has an output of shape {v.shape}, which depends on the '
          'number of examples, so it compares examples of a batch; set num_micro_batches=1'
        )

  def IsStale(self) -> bool:
    """Whether the model must be placed once more.

    Another pipeline of the model may have moved its variables; and as in Keras, `trainable` counts
    at the first step after compile().

    Raises:
      ValueError: the model has other variables.
    """
    places = keras_variables.Places(self._trainer.model)
    if [id(v) for v, *_ in places] != [id(v) for v, *_ in self._places]:
      raise ValueError(
        f'the variables of {self._trainer.model.name} have changed (by quantize or enable_lora?): '
        'compile again'
      )
    pairs = list(zip(places, self._places, strict=True))
    is_moved = any(a is not b for (_, a, _), (_, b, _) in pairs)
    return is_moved or (self.step is None and any(a != b for (*_, a), (*_, b) in pairs))

  def _Args(self, x: Any) -> tuple[Any, ...]:
    """Returns the arguments of the first cell for the inputs of the model."""
    return tuple(self.graph.FlatInputs(x))

  def Show(self, show: Callable[[str], Any]) -> None:
    """Shows the cells of each stage, and the table of the cut."""
    for s in self.stack.engine.stages:
      names = [self.cells[self.stack.layers.index(layer)].name for layer in s.layers]
      show(f'stage {s.index}: {", ".join(names)}')
    show(self.cut.Table(self._settings.devices))

  @functools.cached_property
  def generation(self) -> keras_generation.GenerationSteps:
    """The functions that generate."""
    devices = [s.device for s in self.stack.engine.stages]
    return keras_generation.GenerationSteps(self._trainer.model, devices)

  # ---- batches -----------------------------------------------------------------------------------

  def TrainBatch(self, x: Any, side: nested_map.NestedMap) -> Any:
    """Takes a training step.

    Args:
      x: tensors, the inputs as the model takes them.
      side: the inputs of the loss.

    Returns:
      The metrics.
    """
    args = self._Prepare(x, side)
    if self.step is None:
      self.step = self._MakeStep()
    with self.step.LocateFailure(lambda: self._MicroBatches(args, side)):
      return self._train(args, side)

  def TestBatch(self, x: Any, side: nested_map.NestedMap, counter: tf.Tensor) -> Any:
    """Returns the metrics of a batch; see `TrainBatch`. `counter` seeds random numbers."""
    return self._test(self._Prepare(x, side), side, counter)

  def PredictBatch(self, x: Any, counter: tf.Tensor) -> Any:
    """Returns the outputs of the model for a batch; see `TestBatch`."""
    return self._predict(self._Args(x), counter)

  def _Prepare(self, x: Any, side: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns the arguments of the first cell; builds the loss if `predict` came first."""
    args = self._Args(x)
    if not self._is_built:
      self._BuildLoss(args, side, self.stack.engine.stages)
    return args

  def _BuildLoss(
    self, args: tuple[Any, ...], side: nested_map.NestedMap, stages: Sequence[Any] = ()
  ) -> None:
    """Makes the loss; raises ValueError if micro-batches cannot compute it.

    Args:
      args: the arguments of the first cell.
      side: the inputs of the loss.
      stages: the stages, if the variables are on them.
    """
    self._loss.Build(side, micro_batch.BatchSize((args, side)))
    if (num_micro_batches := self._settings.num_micro_batches) > 1:
      places = {layer: s.device for s in stages for layer in s.layers}
      trial = trials.Trial(
        self.stack.layers, args, lambda x: places.get(x, self._settings.devices[0])
      )
      trial.CheckIndependence()
      trial.CheckAddedLosses(num_micro_batches)
    self._is_built = True

  def _MakeStep(self) -> keras_step.KerasStep:
    trainer, model = self._trainer, self._trainer.model
    trainer.CheckTrainable()
    variables = {}
    for k, cell in enumerate(self.cells):
      for name, v in cell.Weights().items():
        variables[f'{self.stack.layers[k].path}.{name}'] = v
    position = {id(v): i for i, v in enumerate(model.trainable_variables)}
    # The optimizer gets the variables in Keras's order.
    paths = sorted(self.stack.engine.trained, key=lambda path: position[id(variables[path])])
    trained = {path: variables[path] for path in paths}
    if not trained:
      raise ValueError(f'{model.name} has no weights to train')
    for path, v in trained.items():
      if getattr(v, 'overwrite_with_gradient', False):
        raise ValueError(
          f'{path}: the gradient of the variable {v.path} is its next value, as in float8 '
          'training, and a pipeline would add up the values of micro-batches; use another dtype'
        )
    if trainer.loss is None and not any(c.has_loss for c in self.cells):
      raise ValueError('there is no loss to minimise: give `loss` to compile()')
    outputs = self._loss.outputs
    connected = keras_nodes.VariablesBefore(self.graph, outputs)
    if keras_nodes.MayCutGradients(self.graph):
      connected &= keras_nodes.ConnectedVariables(self.graph, outputs)
    keras_variables.MoveSlots(trainer.optimizer, model.trainable_variables)
    return keras_step.KerasStep(
      self.stack,
      trainer.optimizer,
      variables=trained,
      connected={path for path, v in trained.items() if id(v) in connected},
      all_variables=model.trainable_variables,
      sum_embedding_gradients=self._settings.sum_embedding_gradients,
    )

  # ---- functions to trace ------------------------------------------------------------------------

  def _Train(self, args: tuple[Any, ...], side: nested_map.NestedMap) -> Any:
    assert self.step is not None  # `TrainBatch` makes it.
    return self._UpdateMetrics(self.step.Update(self._MicroBatches(args, side)), args, side)

  def _Test(self, args: tuple[Any, ...], side: nested_map.NestedMap, counter: tf.Tensor) -> Any:
    self.stack.engine.SyncReplicas()
    sums = self.stack.engine.Evaluate(self._MicroBatches(args, side, do_eval=True), counter)
    return self._UpdateMetrics(sums, args, side)

  def _Predict(self, args: tuple[Any, ...], counter: tf.Tensor) -> Any:
    self.stack.engine.SyncTies()
    inputs = self.stack.SplitBatch(args)
    outputs = [
      [keras_cell_layer.Parts(x)[0] for x in y]
      for y in self.stack.engine.Forward(inputs, counter=counter).Outputs()
    ]
    return self.graph.PackOutputs(micro_batch.MergeOutputs(outputs, inputs))

  def _MicroBatches(
    self, args: tuple[Any, ...], side: nested_map.NestedMap, *, do_eval: bool = False
  ) -> list[micro_batch.MicroBatch]:
    pieces = self.stack.SplitBatch((args, side))
    scales = self._loss.Scales(pieces, self._masks.get(do_eval))
    total = micro_batch.BatchSize(args)
    return [
      micro_batch.MicroBatch(
        args,
        nested_map.NestedMap(side, scale=scale),
        tf.constant(micro_batch.BatchSize(args) / total, tf.float64),
      )
      for (args, side), scale in zip(pieces, scales, strict=True)
    ]

  def _UpdateMetrics(
    self, sums: dict[str, tf.Tensor], args: tuple[Any, ...], side: nested_map.NestedMap
  ) -> Any:
    """Adds a batch to the metrics; returns their results."""
    sums = dict(sums)
    for i, v in enumerate(self._loss.States()):
      v.assign_add(sums.pop(f'{keras_loss.STATE}{i}'))
    predictions: dict[str, dict[str, tf.Tensor]] = {}
    for name in [name for name in sums if name.startswith(keras_loss.PREDICTION)]:
      prediction, part = name.rsplit('_', 1)
      predictions.setdefault(prediction, {})[part] = sums.pop(name)
    if predictions:
      outputs = [predictions[f'{keras_loss.PREDICTION}{i}'] for i in range(len(predictions))]
      y_pred = self.graph.PackOutputs([keras_cell_layer.RestoreAttributes(x) for x in outputs])
      self._trainer._compile_metrics.update_state(side.y, y_pred, side.sample_weight)
    # Losses of layers may have another dtype than the loss.
    total = tf.add_n([tf.cast(x, tf.float64) for x in keras_step.Means(sums).values()])
    self._trainer._loss_tracker.update_state(total, sample_weight=micro_batch.BatchSize(args))
    return self._trainer.get_metrics_result()
