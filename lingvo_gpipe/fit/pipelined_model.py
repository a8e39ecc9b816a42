# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel`: a Keras model that `fit` trains as a pipeline.

    model = keras_hub.models.CausalLM.from_preset(...)
    pipe = PipelinedModel(model, num_stages=4, num_micro_batches=8, schedule='1f1b')
    pipe.compile(optimizer='adam', loss=...)
    pipe.fit(dataset)
    pipe.save('model.keras')

The class has Keras's names, because it replaces a keras.Model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.distributed import accelerators, cluster
from lingvo_gpipe.fit import keras_data, keras_generation, placed_model
from lingvo_gpipe.layers.keras import keras_cut, keras_equality, keras_preset, keras_variables
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.schedule import schedules

# Methods of a keras.Model that the pipeline replaces, so an override would be ignored.
_REPLACED = (
  *('train_step', 'test_step', 'predict_step', 'compute_loss', 'compute_metrics'),
  *('get_metrics_result', 'make_train_function', 'make_test_function', 'make_predict_function'),
)
# Further replaced methods. KerasHub's classes may override them: the pipeline does the same work.
_REPLACED_IN_KERAS = (
  *('fit', 'evaluate', 'predict', 'train_on_batch', 'test_on_batch', 'predict_on_batch'),
  *('_compute_loss', 'reset_metrics', 'metrics', 'losses', 'trainable_variables'),
  *('trainable_weights', '__call__'),
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
    sum_embedding_gradients: bool = False,
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
      sum_embedding_gradients: whether to add the gradients of all occurrences of a row of an
        embedding before the optimizer squares or clips them. Plain Keras on TensorFlow does not,
        and needs `[tokens, dim]` for the tokens of a batch.
      xla: whether XLA compiles the stages and, on accelerators, the updates of the weights; None:
        on accelerators, as Keras does, unless a GPU is too new for it.
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
    if isinstance(model, PipelinedModel):
      raise TypeError('the model is a PipelinedModel already: give its `model`')
    _CheckOverrides(model)
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
      xla=xla,
      random_seed=random_seed,
    )
    p.CheckDomains('PipelinedModel: ')
    if num_stages % stages_per_device:
      raise ValueError(
        f'num_stages={num_stages} is not a multiple of stages_per_device={stages_per_device}'
      )
    if devices is not None:
      known = {d.name for d in tf.config.list_logical_devices()}
      for device in devices:
        if not any(_Names(device, name) for name in known):
          raise ValueError(f'there is no device {device!r}; known are {", ".join(sorted(known))}')
    else:
      num_devices = num_stages // stages_per_device
      if isinstance(schedule, schedules.Schedule):
        num_devices = schedule.num_devices
      devices = cluster.Cluster.Create(num_devices, num_replicas=num_replicas).devices
    if xla is None and all('CPU' in device.upper() for device in devices):
      xla = False
    p.xla = accelerators.UsesXla(xla, devices)
    self.model = model
    self.built = model.built
    self._settings = placed_model.Settings(
      p, tuple(devices), num_replicas, loss_chunk_size, sum_embedding_gradients
    )
    self._placed: placed_model.PlacedModel | None = None
    self.cut: Any = None
    self._num_evaluations = 0
    # Keras does not set an attribute that already has the value, and `__getattr__` returns the
    # model's.
    self.__dict__.update(optimizer=None)
    self._first_trainable: list[bool] | None = None  # For each variable.
    if model.compiled:  # The model was read from a file, for example.
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
      lora_rank: rank of LoRA; then only its weights and the biases of the same layers are trained.
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
    pipe._Place(_AsTensors(keras.utils.unpack_x_y_sample_weight(example)[0]))
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
    """The losses of the model's layers and regularizers, which the stages add to the loss."""
    return self.model.losses

  @property
  def stop_training(self) -> bool:
    """Whether `fit` ends after this epoch; callbacks may set it for the model, too."""
    return bool(getattr(self.model, 'stop_training', False))

  @stop_training.setter
  def stop_training(self, value: bool) -> None:
    if 'model' in self.__dict__:  # Otherwise Keras initialises this object.
      self.model.stop_training = value

  @property
  def output_names(self) -> Any:
    """Names of the model's outputs; AttributeError if it has none."""
    return self.model.output_names

  @property
  def stack(self) -> pipelining_layer.PipeliningLayer | None:
    """The pipeline; None before the first batch."""
    return None if self._placed is None else self._placed.stack

  def compile(self, *args: Any, **kwargs: Any) -> None:
    """Configures training; see `compile` of the model. The stages have `xla` for `jit_compile`."""
    # The plain model is saved with its optimizer, and may have defaults, as KerasHub's tasks do.
    self.model.compile(*args, **kwargs)
    self._CompileAsTheModel()

  def _CompileAsTheModel(self) -> None:
    _CheckOverrides(self.model)
    if self.model._metrics:
      raise ValueError(
        f'the model has metrics of its own ({", ".join(m.name for m in self.model._metrics)}), '
        'which a pipeline does not update; give them to compile()'
      )
    # The model's optimizer already scales the loss if that is wanted.
    options = {'jit_compile': False, 'auto_scale_loss': False}
    super().compile(**{**keras_variables.CompileArguments(self.model), **options})
    self._Forget()
    self._first_trainable = None

  def _Forget(self) -> None:
    """Drops the stages, which the next batch makes again; the variables stay where they are."""
    if self._placed is not None:
      self._placed.stack.engine.DropAccumulators()
    self._placed = None

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
    if self._placed is None:  # One prompt cannot be split into micro-batches.
      num_rows = self._settings.num_micro_batches
      inputs = keras.tree.map_structure(lambda t: tf.repeat(t[:1], num_rows, axis=0), inputs)
    return self._Place(_AsTensors(inputs)).generation

  fit = keras_data.PreprocessedMethod('fit')
  evaluate = keras_data.PreprocessedMethod('evaluate')
  predict = keras_data.PreprocessedMethod('predict')
  train_on_batch = keras_data.PreprocessedMethod('train_on_batch')
  test_on_batch = keras_data.PreprocessedMethod('test_on_batch')
  predict_on_batch = keras_data.PreprocessedMethod('predict_on_batch')

  def summary(self, *args: Any, **kwargs: Any) -> None:
    """Prints the summary of the model, and the stages once there was a batch."""
    self.model.summary(*args, **kwargs)
    if self._placed is not None:
      self._placed.Show(kwargs.get('print_fn') or print)

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
      # Eager batches have static shapes, even the last batch of an epoch, which is smaller.
      logs = run(next(iterator))
      for _ in range(int(self.steps_per_execution) - 1):
        data = next(iterator, None)
        if data is None:
          break
        logs = run(data)
      return logs

    return Run

  def _TrainBatch(self, data: Any) -> Any:
    x, side = _Unpack(data)
    return self._Place(x, side).TrainBatch(x, side)

  def _TestBatch(self, data: Any) -> Any:
    x, side = _Unpack(data)
    return self._Place(x, side).TestBatch(x, side, self._Counter())

  def _PredictBatch(self, data: Any) -> Any:
    x = _AsTensors(keras.utils.unpack_x_y_sample_weight(data)[0])
    return self._Place(x).PredictBatch(x, self._Counter())

  def CheckTrainable(self) -> None:
    """Raises ValueError if variables to train have changed since the first step after compile()."""
    trainable = [v.trainable for v in self.model.variables]
    if self._first_trainable is None:
      self._first_trainable = trainable
    pairs = zip(self.model.variables, trainable, self._first_trainable, strict=True)
    if changed := [v.path for v, a, b in pairs if a != b]:
      raise ValueError(
        f'`trainable` of {", ".join(changed)} has changed since the first step after compile(), '
        f'and {self.model.name} is placed on stages once more: compile again, or set it back'
      )

  def _Counter(self) -> tf.Tensor:
    """Returns a step counter for another evaluation, in which layers may draw random numbers."""
    self._num_evaluations += 1
    return fprop_context.StepCounter(tf.constant(self._num_evaluations, tf.int64))

  def _Place(self, x: Any, side: nested_map.NestedMap | None = None) -> placed_model.PlacedModel:
    """Returns the model on its stages; cuts it at the first batch.

    Args:
      x: tensors, the inputs as the model takes them.
      side: the inputs of the loss, which is then checked before anything moves.
    """
    specs = None
    if self._placed is not None:
      if self._placed.IsStale() or (specs := self._placed.graph.OtherSizes(x)) is not None:
        self._Forget()
    if self._placed is None:
      ends = self.cut.ends if self.cut is not None else ()
      self._placed = placed_model.PlacedModel(self, self._settings, x, side, specs=specs, ends=ends)
      self.cut = self._placed.cut
      self.built = True
    return self._placed


def _CheckOverrides(model: Any) -> None:
  """Raises ValueError if a model has methods of its own that the pipeline would not call."""
  for name in (*_REPLACED, *_REPLACED_IN_KERAS):
    owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
    is_known = getattr(type(model), name) is getattr(keras.Model, name)
    if name in _REPLACED_IN_KERAS:
      is_known = is_known or keras_equality.IsOfKeras(owner)
    if not is_known or name in vars(model):
      raise ValueError(
        f'{type(model).__name__} overrides {name}, which a pipeline would not call: move its '
        'computations into layers, the loss or metrics'
      )


def _Unpack(data: Any) -> tuple[Any, nested_map.NestedMap]:
  """Returns the inputs of the model and of the loss in a batch, as tensors."""
  x, y, sample_weight = _AsTensors(keras.utils.unpack_x_y_sample_weight(data))
  return x, nested_map.NestedMap(y=y, sample_weight=sample_weight)


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
