# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel`: a Keras model that `fit` trains as a pipeline.

    model = keras_hub.models.CausalLM.from_preset(...)
    pipe = PipelinedModel(model, num_stages=4, num_micro_batches=8, schedule='1f1b')
    pipe.compile(optimizer='adam', loss=...)
    pipe.fit(dataset)
    pipe.save('model.keras')

The class has Keras's names, for it takes the place of a keras.Model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.distributed import accelerators, cluster
from lingvo_gpipe.fit import keras_data, keras_generation, keras_loss, keras_step
from lingvo_gpipe.layers.keras import (
  keras_cell_layer,
  keras_cells,
  keras_cut,
  keras_masks,
  keras_nodes,
  keras_preset,
  keras_variables,
)
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.pipeline.stages import micro_batch

# Methods of a keras.Model that the pipeline replaces, so an override would be ignored.
_REPLACED = (
  *('train_step', 'test_step', 'predict_step', 'compute_loss', 'compute_metrics'),
  *('get_metrics_result', 'make_train_function', 'make_test_function', 'make_predict_function'),
)


class PipelinedModel(keras.Model):
  """Trains, evaluates and predicts with a Keras model that is cut into stages on several devices.

  The pipeline trains the variables of the model itself. At the first batch it moves each to the
  device of its stage, so to read, set or save the model is to read, set or save them.

  Attributes:
    model: the Keras model.
    cut: the cut into stages; None before the first batch.
    stack: the pipeline; None before the first batch.
  """

  def __init__(
    self,
    model: Any,
    num_stages: int,
    *,
    num_micro_batches: int = 1,
    schedule: str | schedules.Schedule = '1f1b_fused',
    remat_policy: str = 'stage',
    offload: float = 0.0,
    splits: Sequence[int] = (),
    partition_by: str = 'flops',
    stages_per_device: int = 1,
    memory_limit: int = 0,
    loss_chunk_size: int = 0,
    vocabulary: str = 'one',
    xla: bool | None = None,
    num_replicas: int = 1,
    devices: Sequence[str] | None = None,
    random_seed: int = 0,
  ) -> None:
    """Finds the devices; moves and allocates nothing yet.

    Args:
      model: any keras.Model: Sequential, Functional, a subclass of them, or a subclassed model
        whose `call` uses layers and keras.ops only.
      num_stages: number of stages.
      num_micro_batches: M, the number of micro-batches that a batch is split into.
      schedule: name of the training schedule, or a Schedule. With 1f1b_fused the last stage, and so
        a single one, recomputes nothing.
      remat_policy: the part that backward recomputes: stage, except_last, layer or none; auto:
        in each stage the least that keeps memory_limit.
      offload: greatest share of the stages and micro-batches of a device whose activations wait for
        backward in the memory of the host.
      splits: for each stage the index after its last cell; empty: the cut is computed.
      partition_by: the cost that the cut balances: flops, params or time.
      stages_per_device: number of stages on each device.
      memory_limit: most bytes that a device may need, as predicted; 0: no limit.
      loss_chunk_size: the loss computes the logits of this many positions at a time, so they are
        never whole; for SparseCategoricalCrossentropy from logits. 0: all at once.
      vocabulary: one, or shared: training computes a slice of the logits' classes on each device;
        for SparseCategoricalCrossentropy from logits.
      xla: whether XLA compiles the stages; None: on accelerators, as Keras does, unless a GPU is
        too new for it.
      num_replicas: number of copies of the pipeline, each of which takes its share of a batch.
      devices: names of the devices, replica by replica; None: from `cluster.Cluster.Create`.
      random_seed: seed of dropout.

    Raises:
      TypeError: `model` is not a keras.Model.
      ValueError: there are too few devices, they cannot run XLA as `xla` asks, or the model
        overrides a method that the pipeline replaces.
    """
    if not isinstance(model, keras.Model):
      raise TypeError(f'expected a keras.Model, got {type(model).__name__}')
    for name in _REPLACED:
      if getattr(type(model), name) is not getattr(keras.Model, name):
        raise ValueError(
          f'{type(model).__name__} overrides {name}, which a pipeline would not call: move what it '
          'does into layers, the loss or metrics'
        )
    super().__init__(name=f'{model.name}_pipeline', dtype=model.dtype_policy)
    p = pipelining_layer.PipeliningLayer.Params().Set(
      name='model',
      num_stages=num_stages,
      stages_per_device=stages_per_device,
      num_micro_batches=num_micro_batches,
      schedule=schedule,
      remat_policy=remat_policy,
      offload=offload,
      splits=list(splits),
      partition_by=partition_by,
      memory_limit=memory_limit,
      vocabulary=vocabulary,
      random_seed=random_seed,
    )
    if devices is not None:
      known = {d.name for d in tf.config.list_logical_devices()}
      for device in devices:
        if not any(_Names(device, name) for name in known):
          raise ValueError(f'there is no device {device!r}; known are {", ".join(sorted(known))}')
    else:
      num_devices = -(-num_stages // stages_per_device)
      if isinstance(schedule, schedules.Schedule):
        num_devices = schedule.num_devices
      devices = cluster.Cluster.Create(num_devices, num_replicas=num_replicas).devices
    if xla is None and all('CPU' in device.upper() for device in devices):
      xla = False
    p.xla = accelerators.UsesXla(xla, devices)
    self.model = model
    self.built = model.built
    # Keras would track these objects, and copy lists of them.
    self.__dict__.update(
      _pipeline_params=p,
      _pipeline_devices=tuple(devices),
      _num_replicas=num_replicas,
      _loss_chunk_size=loss_chunk_size,
    )
    self.__dict__.update(stack=None, cut=None, _cells=(), _is_built=False, _num_evaluations=0)
    # Keras sets no attribute that has the value already, and `__getattr__` has the model's.
    self.__dict__.update(optimizer=None, stop_training=False)
    self._Forget()
    if model.compiled:  # Read from a file, for example.
      self._CompileAsTheModel()

  @classmethod
  def from_preset(
    cls,
    preset: str,
    num_stages: int,
    *,
    example: Any,
    keras_class: Any = None,
    lora_rank: int = 0,
    preset_arguments: Mapping[str, Any] | None = None,
    **kwargs: Any,
  ) -> PipelinedModel:
    """Makes the stages of a model of KerasHub, and then fills them one weight after another.

    Besides the weights on its own devices, the host holds one weight at a time.

    Args:
      preset: a preset of KerasHub, or a directory of Hugging Face with safetensors.
      num_stages: number of stages.
      example: a batch of the model's inputs, which the cut is computed for.
      keras_class: a class of keras_hub.models; None: CausalLM.
      lora_rank: rank of LoRA; its weights and the biases beside them are then all that is trained.
        0: no LoRA.
      preset_arguments: arguments of the `from_preset` of KerasHub.
      **kwargs: arguments of PipelinedModel.
    """
    if keras_class is None:
      import keras_hub  # An extra, and slow to import.

      keras_class = keras_hub.models.CausalLM
    with keras_cut.InitialValues(kwargs.get('random_seed', 0)):
      model = keras_preset.Model(keras_class, preset, **(preset_arguments or {}))
      if lora_rank:
        keras_preset.EnableLora(model, lora_rank)
    pipe = cls(model, num_stages, **kwargs)
    if hasattr(model, 'preprocess_samples'):
      example = model.preprocess_samples(example)
    pipe._Place(keras.utils.unpack_x_y_sample_weight(example)[0])
    keras_preset.LoadWeights(model, preset)
    return pipe

  train_function: Any
  test_function: Any
  predict_function: Any

  # ---- a keras.Model -----------------------------------------------------------------------------

  def call(self, inputs: Any, training: bool | None = None) -> Any:
    """Runs the model as Keras does, without micro-batches and stages."""
    return self.model(inputs, training=training)

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute of the model, such as `input_shape` or `preprocessor`."""
    model = self.__dict__.get('model')
    if model is None or name.startswith('_'):
      raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
    return getattr(model, name)

  @property
  def layers(self) -> list[Any]:
    """The layers of the model."""
    return list(self.model.layers)

  @property
  def losses(self) -> list[Any]:
    """Empty: the stages add the losses of the model's layers to the loss."""
    return []

  @property
  def output_names(self) -> Any:
    """Names of the model's outputs; AttributeError if it has none."""
    return self.model.output_names

  def compile(self, *args: Any, **kwargs: Any) -> None:
    """Configures training; see `compile` of the model. The stages have `xla` for `jit_compile`."""
    # The plain model is saved with its optimizer, and may have defaults, as KerasHub's tasks do.
    self.model.compile(*args, **kwargs)
    self._CompileAsTheModel()

  def _CompileAsTheModel(self) -> None:
    super().compile(**{**keras_variables.CompileArguments(self.model), 'jit_compile': False})
    self._Forget()

  def _Forget(self) -> None:
    """Drops the stages, which the next batch makes again; the variables stay where they are."""
    if self.stack is not None:
      engine = self.stack.engine
      for s in (*engine.stages, *engine.replicas[0].slices):  # Traces may live longer.
        s.accumulators.clear()
        s.mirror_accumulators.clear()
    self.__dict__.update(stack=None, _graph=None, _keras_loss=None, _keras_step=None, _masks={})
    self.__dict__.update(_train=None, _test=None, _predict=None, _places=[], _generation=None)

  def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Saves the plain Keras model, with its optimizer; see keras.Model.save."""
    with keras_variables.Streaming():
      self.model.save(filepath, *args, **kwargs)

  def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Saves the weights of the plain Keras model; see keras.Model.save_weights."""
    with keras_variables.Streaming():
      self.model.save_weights(filepath, *args, **kwargs)

  def save_to_preset(self, preset_dir: Any, *args: Any, **kwargs: Any) -> None:
    """Saves the plain model of KerasHub as a preset; see its `save_to_preset`."""
    with keras_variables.Streaming():
      self.model.save_to_preset(preset_dir, *args, **kwargs)

  def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
    """Loads weights of the plain Keras model; see keras.Model.load_weights."""
    with keras_variables.Streaming():
      self.model.load_weights(filepath, *args, **kwargs)

  def export(self, *args: Any, **kwargs: Any) -> Any:
    """Exports the plain Keras model; see keras.Model.export."""
    return self.model.export(*args, **kwargs)

  def get_config(self) -> dict[str, Any]:
    """Raises ValueError: files hold the plain Keras model."""
    raise ValueError(
      'a PipelinedModel has no configuration: save the plain Keras model by its `save`, load that, '
      'and wrap it again'
    )

  def generate(self, *args: Any, **kwargs: Any) -> Any:
    """Generates with a CausalLM of KerasHub; see its `generate`.

    Each layer computes, and has its cache, on the device of its stage. The plain model generates
    the same greedy tokens.

    Raises:
      ValueError: the model is not a CausalLM of KerasHub.
    """
    return keras_generation.Generate(self.model, self._GenerationSteps, *args, **kwargs)

  def _GenerationSteps(self, inputs: Any) -> keras_generation.GenerationSteps:
    """Returns the functions that generate; places the stages."""
    if self.stack is None:  # One prompt cannot be split into micro-batches.
      num_rows = self._num_replicas * self._pipeline_params.num_micro_batches
      inputs = keras.tree.map_structure(lambda t: tf.repeat(t[:1], num_rows, axis=0), inputs)
    self._Place(inputs)
    if self._generation is None:
      devices = [s.device for s in self.stack.engine.stages]
      self.__dict__['_generation'] = keras_generation.GenerationSteps(self.model, devices)
    return self._generation

  fit = keras_data.Preprocessed('fit')
  evaluate = keras_data.Preprocessed('evaluate')
  predict = keras_data.Preprocessed('predict')
  train_on_batch = keras_data.Preprocessed('train_on_batch')
  test_on_batch = keras_data.Preprocessed('test_on_batch')
  predict_on_batch = keras_data.Preprocessed('predict_on_batch')

  def summary(self, *args: Any, **kwargs: Any) -> None:
    """Prints the summary of the model, and the stages once there was a batch."""
    self.model.summary(*args, **kwargs)
    if self.stack is not None:
      show = kwargs.get('print_fn') or print
      for s in self.stack.engine.stages:
        names = [self._cells[self.stack.layers.index(layer)].name for layer in s.layers]
        show(f'stage {s.index}: {", ".join(names)}')
      show(self.cut.Table(self._pipeline_devices))

  # ---- steps -------------------------------------------------------------------------------------

  def make_train_function(self, force: bool = False) -> Any:
    """Makes the function that `fit` calls with an iterator over batches."""
    if self.train_function is None or force:
      self.train_function = self._EachBatch(self._TrainBatch)
    return self.train_function

  def make_test_function(self, force: bool = False) -> Any:
    """Makes the function that `evaluate` calls with an iterator over batches."""
    if self.test_function is None or force:
      self.test_function = self._EachBatch(self._TestBatch)
    return self.test_function

  def make_predict_function(self, force: bool = False) -> Any:
    """Makes the function that `predict` calls with a list of batches."""

    def Predict(batches: Sequence[Any]) -> Any:
      outputs = [self._PredictBatch(data) for data in batches]
      if len(outputs) == 1:
        return outputs[0]
      return keras.tree.map_structure(lambda *x: tf.concat(x, axis=0), *outputs)

    if self.predict_function is None or force:
      self.predict_function = Predict
    return self.predict_function

  def _EachBatch(self, run: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
    """Returns a function that runs `steps_per_execution` batches of an iterator."""

    def Run(iterator: Iterator[Any]) -> Any:
      # Eager batches have static shapes, also the last one of an epoch, which is smaller.
      logs = run(next(iterator))
      for _ in range(int(self.steps_per_execution) - 1):
        data = next(iterator, None)
        if data is None:
          break
        logs = run(data)
      return logs

    return Run

  def _TrainBatch(self, data: Any) -> Any:
    args, side = self._Prepare(*keras.utils.unpack_x_y_sample_weight(data))
    if self._keras_step is None:
      self._MakeStep()
    with self._keras_step.LocateFailure(lambda: self._MicroBatches(args, side)):
      return self._train(args, side)

  def _TestBatch(self, data: Any) -> Any:
    args, side = self._Prepare(*keras.utils.unpack_x_y_sample_weight(data))
    return self._test(args, side, self._Counter())

  def _PredictBatch(self, data: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    args = self._Place(x)
    return self._predict(args, self._Counter())

  def _Counter(self) -> tf.Tensor:
    """Returns a step counter for another evaluation, in which layers may draw random numbers."""
    self.__dict__['_num_evaluations'] += 1
    return fprop_context.StepCounter(tf.constant(self._num_evaluations, tf.int64))

  def _Prepare(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, nested_map.NestedMap]:
    """Returns the arguments of the first cell and the inputs of the loss; places the stages."""
    tensors = _AsTensors((y, sample_weight))
    side = nested_map.NestedMap(y=tensors[0], sample_weight=tensors[1])
    args = self._Place(x, side)
    if not self._is_built:
      self._keras_loss.Build(side, micro_batch.BatchSize(args))
      self.__dict__['_is_built'] = True
    return args, side

  def _Place(self, x: Any, side: nested_map.NestedMap | None = None) -> tuple[Any, ...]:
    """Returns the flat inputs of the model; cuts the model at the first batch.

    Args:
      x: the inputs as the model takes them.
      side: the inputs of the loss, which is then checked before anything moves.
    """
    x = _AsTensors(x)
    places = keras_variables.Places(self.model) if self._places else []
    if [id(v) for v, *_ in places] != [id(v) for v, *_ in self._places]:
      raise ValueError(
        f'the variables of {self.model.name} have changed (by quantize or enable_lora?): compile '
        'again'
      )
    pairs = list(zip(places, self._places, strict=True))
    # Another pipeline of the model may move its variables; and as in Keras, `trainable` counts at
    # the first step after compile().
    is_moved = any(a is not b for (_, a, _), (_, b, _) in pairs)
    is_other = self._keras_step is None and any(a != b for (*_, a), (*_, b) in pairs)
    if is_moved or is_other:
      self._Forget()
    if self._graph is not None and (specs := self._graph.OtherSizes(x)) is not None:
      self._Forget()
      self._Trace(specs)
    if self._graph is None:
      self._Trace(x)
      self.built = True
    args = tuple(self._graph.FlatInputs(x))
    if self._keras_loss is None:
      self._MakeStack(args, side)
    return args

  def _Trace(self, x: Any) -> None:
    """Finds the cells of the model for inputs like `x`."""
    graph = keras_nodes.FromModel(self.model, x)
    self.__dict__.update(_graph=graph, _cells=tuple(keras_cells.Cut(graph)))

  def _MakeStack(self, args: tuple[Any, ...], side: nested_map.NestedMap | None) -> None:
    """Cuts the model for a first batch, and moves its variables to their stages."""
    cells = self._cells
    p = self._pipeline_params.Copy()
    p.Set(**keras_cut.Params(cells))
    p.sub[-1].Set(chunk_size=self._loss_chunk_size, shares_vocabulary=p.vocabulary == 'shared')
    if p.num_stages > len(cells):
      raise ValueError(
        f'{self.model.name} has {len(cells)} cells, too few for {p.num_stages} stages; a cell is a '
        f'layer with a matrix: {", ".join(c.name for c in cells)}'
      )
    used = {id(v) for cell in cells for v in cell.Weights().values()}
    for v in self.model.trainable_variables:
      if v.regularizer is not None and id(v) not in used:
        raise ValueError(
          f'{v.path} has a regularizer, but no call of {self.model.name} uses it: set its '
          '`trainable` to False, or remove the regularizer'
        )
    num_micro_batches = p.num_micro_batches * self._num_replicas
    is_fixed = all(None not in v.shape[1:] for v in self._graph.inputs)
    if num_micro_batches > 1 and is_fixed:
      for v in self._graph.outputs:
        if None in v.shape[1:]:
          raise ValueError(
            f'{self.model.name} has an output of shape {v.shape}, which depends on the number of '
            'examples, so it compares examples of a batch; set num_micro_batches=1'
          )
    without_xla = sorted({x.name for c in cells for x in c.Layers() if not x.supports_jit})
    if p.xla and without_xla:
      logging.warning('XLA is off: %s cannot be compiled by it.', ', '.join(without_xla))
      p.xla = False
    if self.cut is not None and self.cut.ends[-1] == len(cells):  # The variables are in place.
      p.splits = list(self.cut.ends)
    loss = keras_loss.KerasLoss(self, self._graph, num_micro_batches)
    if side is not None:
      loss.Build(side, micro_batch.BatchSize(args))
    stack = p.Instantiate()
    specs = [None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in args]
    devices, num_replicas = self._pipeline_devices, self._num_replicas
    cut = stack.MakeCut(*specs, device=devices[0], num_replicas=num_replicas)
    has_masks = any(isinstance(s, dict) and 'mask' in s for s in cut.layers[-1].out_specs)
    masks: dict[bool, keras_masks.Masks] = {}
    if has_masks and num_micro_batches > 1:
      masks = {e: keras_masks.OutputMasks(stack.layers, do_eval=e) for e in (False, True)}
      for compute in masks.values() if loss.outputs else ():  # A loss needs the masks.
        tf.function(compute, autograph=False).get_concrete_function(tuple(specs))
    stack.Place(devices, *specs, loss_fn=loss, num_replicas=num_replicas, cut=cut)
    keras_variables.GiveValues(self.model)
    keras_variables.ForgetFunctions(self.model)
    self.__dict__.update(
      _places=keras_variables.Places(self.model),
      stack=stack,
      cut=cut,
      _keras_loss=loss,
      _keras_step=None,
      _is_built=side is not None or not self.compiled,
      _masks=masks,
    )
    # By shape of the batch; relaxed shapes would not be static.
    for name in ('train', 'test', 'predict'):
      run = getattr(self, f'_{name.title()}')
      function = run if self.run_eagerly else tf.function(run, autograph=False)
      self.__dict__[f'_{name}'] = function

  def _MakeStep(self) -> None:
    variables = {}
    for k, cell in enumerate(self._cells):
      for name, v in cell.Weights().items():
        variables[f'{self.stack.layers[k].path}.{name}'] = v
    trained = {path: variables[path] for path in self.stack.engine.trained}
    if not trained:
      raise ValueError(f'{self.model.name} has no weights to train')
    if self.loss is None and not any(c.has_loss for c in self._cells):
      raise ValueError('there is no loss to minimise: give `loss` to compile()')
    outputs = self._keras_loss.outputs
    connected = keras_nodes.VariablesBefore(self._graph, outputs)
    if keras_nodes.MayCutGradients(self._graph):
      connected &= keras_nodes.ConnectedVariables(self._graph, outputs)
    keras_variables.MoveSlots(self.optimizer, self.model.trainable_variables)
    self.__dict__['_keras_step'] = keras_step.KerasStep(
      self.stack,
      self.optimizer,
      variables=trained,
      connected={path for path, v in trained.items() if id(v) in connected},
      all_variables=self.model.trainable_variables,
    )

  # ---- functions to trace ------------------------------------------------------------------------

  def _Train(self, args: tuple[Any, ...], side: nested_map.NestedMap) -> Any:
    return self._UpdateMetrics(self._keras_step.Update(self._MicroBatches(args, side)), args, side)

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
    return self._graph.PackOutputs(micro_batch.MergeOutputs(outputs, inputs))

  def _MicroBatches(
    self, args: tuple[Any, ...], side: nested_map.NestedMap, *, do_eval: bool = False
  ) -> list[micro_batch.MicroBatch]:
    pieces = self.stack.SplitBatch((args, side))
    scales = self._keras_loss.Scales(pieces, self._masks.get(do_eval))
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
    loss, sums = self._keras_loss, dict(sums)
    for i, v in enumerate(loss.States()):
      v.assign_add(sums.pop(f'{keras_loss.STATE}{i}'))
    predictions: dict[str, dict[str, tf.Tensor]] = {}
    for name in [name for name in sums if name.startswith(keras_loss.PREDICTION)]:
      prediction, part = name.rsplit('_', 1)
      predictions.setdefault(prediction, {})[part] = sums.pop(name)
    if predictions:
      outputs = [predictions[f'{keras_loss.PREDICTION}{i}'] for i in range(len(predictions))]
      y_pred = self._graph.PackOutputs([keras_cell_layer.Attached(x) for x in outputs])
      self._compile_metrics.update_state(side.y, y_pred, side.sample_weight)
    # Losses of layers may have another dtype than the loss.
    total = tf.add_n([tf.cast(x, tf.float64) for x in keras_step.Means(sums).values()])
    self._loss_tracker.update_state(total, sample_weight=micro_batch.BatchSize(args))
    return self.get_metrics_result()


def _AsTensors(nest: Any) -> Any:
  """Returns a nest with arrays as tensors; None stays.

  Raises:
    ValueError: a tensor is sparse or ragged.
  """

  def Convert(x: Any) -> Any:
    if isinstance(x, tf.experimental.Optional):
      return None
    if isinstance(x, (tf.SparseTensor, tf.RaggedTensor)):
      raise ValueError(f'a pipeline takes dense tensors, got a {type(x).__name__}')
    return x if x is None else tf.convert_to_tensor(x)

  return keras.tree.map_structure(Convert, nest)


def _Names(device: str, full_name: str) -> bool:
  """Whether a name, such as '/device:GPU:0', stands for a device with this full name."""
  a, b = tf.DeviceSpec.from_string(device), tf.DeviceSpec.from_string(full_name)
  parts = ('job', 'task', 'device_type', 'device_index')
  pairs = [(getattr(a, part), getattr(b, part)) for part in parts]
  return all(None in pair or pair[0] == pair[1] for pair in pairs)
