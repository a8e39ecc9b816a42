# SPDX-License-Identifier: Apache-2.0
"""`KerasStep`: training steps of a placed pipeline by one Keras optimizer, without a task.

    stack.Place(devices, tf.TensorSpec([batch, dim]), loss_fn=Loss)
    step = keras_step.KerasStep(stack, keras.optimizers.Adam(1e-3))
    for x, labels in data:
      metrics = step((x,), labels)

`Loss(theta, outputs, labels)` runs in the last stage on each micro-batch and returns
{'loss': (mean, weight)}. Any schedule and re-materialisation policy will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.layers.keras import keras_cell_layer, keras_equality, keras_variables
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline import failed_step, layer_statistics, pipelining_layer, replicas
from lingvo_gpipe.pipeline.stages import micro_batch

# Maps the side inputs of a micro-batch to the weight of its loss, a scalar.
LossWeight = Callable[[Any], tf.Tensor]
# Maps a device and the ids of its weights to the compiled function that updates them.
_Updates = dict[tuple[Any, ...], Any]


class KerasStep:
  """Takes training steps; the optimizer's count of them seeds dropout."""

  def __init__(
    self,
    stack: pipelining_layer.PipeliningLayer,
    optimizer: keras.optimizers.Optimizer,
    *,
    loss_weight: LossWeight | None = None,
    variables: Mapping[str, Any] | None = None,
    all_variables: Sequence[Any] = (),
    connected: Collection[str] | None = None,
    sum_embedding_gradients: bool = False,
  ) -> None:
    """Makes the accumulators and, unless the optimizer has been built, its slots.

    Args:
      stack: the pipeline, after `Place` with a loss.
      optimizer: a Keras optimizer. Each slot is made on the device of its weight.
      loss_weight: the weight of a micro-batch's loss, for example its number of tokens; None: its
        number of examples.
      variables: {path of a trained weight: the variable to give to the optimizer}, in the order in
        which it gets them; default: the weights themselves.
      all_variables: everything that the optimizer is built for; default: the trained weights.
      connected: paths of the weights that the loss may depend on; None: all. The optimizer leaves
        the others alone, without decay or momentum, as Keras does.
      sum_embedding_gradients: whether to add the gradients of all occurrences of a row before the
        optimizer gets them, as is always done if the pipeline has other layers than Keras's. Plain
        Keras on TensorFlow does not, so that an optimizer squares and clips each of them
        separately; all of them then wait for the update, `[tokens, dim]` for each table.
    """
    self.stack = stack
    self.optimizer = optimizer
    self._loss_weight = loss_weight
    self._variables = variables or stack.engine.trained
    self._connected = set(self._variables if connected is None else connected)
    stack.engine.MakeAccumulators()
    self._sum = replicas.GradientSum(stack.engine.replicas)
    self._updates: _Updates = {}
    if not optimizer.built:
      optimizer.build(list(all_variables or self._variables.values()))
    stack.engine.KeepSparseGradients(KeepsSparse(stack, optimizer, sum_embedding_gradients))
    self._step = tf.function(self._Step, autograph=False)

  def __call__(self, args: Sequence[Any], side: Any = None) -> dict[str, tf.Tensor]:
    """Takes one step: forward, backward and update.

    Args:
      args: the arguments of the first layer, nests of tensors `[batch, ...]`.
      side: the inputs of the loss, a nest of tensors `[batch, ...]`.

    Returns:
      The metrics by name, means over the mini-batch.

    Raises:
      ValueError: the arguments do not match each other or the pipeline.
    """
    args = tuple(args)
    with self.LocateFailure(lambda: self.MicroBatches(args, side)):
      return dict(self._step(args, side))

  def LocateFailure(
    self, make_micro_batches: Callable[[], Sequence[micro_batch.MicroBatch]]
  ) -> contextlib.AbstractContextManager[None]:
    """Names layer, stage and micro-batch in the errors of an enclosed step.

    Args:
      make_micro_batches: returns the micro-batches of the step, which runs again up to the update.
    """
    return failed_step.Locate(self.stack.engine, lambda: self._Accumulate(make_micro_batches()))

  def _Step(self, args: tuple[Any, ...], side: Any) -> dict[str, tf.Tensor]:
    sums = self.Update(self.MicroBatches(args, side))
    return Means(sums)

  def MicroBatches(self, args: tuple[Any, ...], side: Any) -> list[micro_batch.MicroBatch]:
    """Returns the micro-batches of a mini-batch; their loss weights add up to 1."""
    pairs = self.stack.SplitBatch((args, side))
    weights = [tf.cast(self._Weight(args, side), tf.float32) for args, side in pairs]
    total = tf.add_n(weights)
    return [
      micro_batch.MicroBatch(args, side, tf.math.divide_no_nan(weight, total))
      for (args, side), weight in zip(pairs, weights, strict=True)
    ]

  def _Weight(self, args: tuple[Any, ...], side: Any) -> Any:
    if self._loss_weight is not None:
      return self._loss_weight(side)
    return micro_batch.BatchSize(args, self.stack.params.batch_dim)

  def Update(self, micro_batches: Sequence[micro_batch.MicroBatch]) -> dict[str, tf.Tensor]:
    """Takes one step; to be called in a tf.function.

    Args:
      micro_batches: the micro-batches, whose loss weights add up to 1.

    Returns:
      The sums of the metrics, see `engine.Sums`.
    """
    engine, optimizer = self.stack.engine, self.optimizer
    # Weights may have been set by others since the last step.
    engine.SyncReplicas()
    sums = self._Accumulate(micro_batches)
    state = layer_statistics.Next(engine, sums.layers)
    self._sum.Add()
    # Stages pass zeros in place of None, so traces alone do not show which weights are connected.
    connected = engine.ConnectedPaths() & self._connected
    with _ClipByStage(optimizer) as clip_norm:
      gradients = self._Gradients(clip_norm, sums.sparse_gradients)
      is_compiled = engine.compiles_updates and _CanBeCompiled(optimizer)
      updates = (
        _CompileUpdates(optimizer, self._updates) if is_compiled else _UpdateOneByOne(optimizer)
      )
      with _PlaceWithInputs(), updates:
        pairs = self._variables.items()
        optimizer.apply_gradients(  # Keras's `train_step` calls it, and a user may override it.
          [(gradients[path] if path in connected else None, v) for path, v in pairs]
        )
    layer_statistics.Assign(engine, state)
    return sums.metrics

  def _Accumulate(self, micro_batches: Sequence[micro_batch.MicroBatch]) -> engine_lib.Sums:
    """Runs forward and backward; see `PipelineEngine.Accumulate`."""
    scale = self.optimizer.scale_loss(tf.constant(1.0))
    scaled = [
      b._replace(loss_weight=b.loss_weight * tf.cast(scale, b.loss_weight.dtype))
      for b in micro_batches
    ]
    step = tf.cast(keras_variables.NumUpdates(self.optimizer), tf.int64)
    return self.stack.engine.Accumulate(scaled, step)

  def _Gradients(
    self, clip_norm: float | None, sparse: Mapping[str, tf.IndexedSlices]
  ) -> dict[str, Any]:
    """Returns {path: gradient}, each on its stage's device, clipped to a global norm."""
    squares = []
    gradients: dict[str, Any] = {}
    for s in self.stack.engine.holders:
      with tf.device(s.device):
        for (path, v), accumulator in zip(s.trained.items(), s.accumulators, strict=True):
          if path in sparse:
            gradients[path] = sparse[path]
          else:
            gradients[path] = tf.cast(tf.convert_to_tensor(accumulator), v.dtype)
        if clip_norm is not None and s.trained:
          values = [getattr(gradients[path], 'values', gradients[path]) for path in s.trained]
          squares.append(tf.add_n([tf.reduce_sum(tf.square(x)) for x in values]))
    if clip_norm is None:
      return gradients
    norm = tf.sqrt(tf.add_n(squares))
    # A norm that is not finite makes every gradient not finite, as in Keras.
    factor = clip_norm * tf.minimum(1 / norm, 1 / clip_norm) + (norm - norm)
    for s in self.stack.engine.holders:
      with tf.device(s.device):
        for path in s.trained:
          dense = tf.convert_to_tensor(gradients[path])  # Keras, too, makes sparse ones dense here.
          gradients[path] = dense * tf.cast(factor, dense.dtype)
    return gradients


def KeepsSparse(
  stack: pipelining_layer.PipeliningLayer, optimizer: Any, sum_embedding_gradients: bool
) -> bool:
  """Whether the optimizer gets a gradient for each occurrence of a row; see `KerasStep`.

  It needs only their sum if it adds them before it clips and squares them.
  """
  is_keras = all(isinstance(x, keras_cell_layer.KerasCellLayer) for x in stack.layers)
  inner = keras_variables.Inner(optimizer)
  clips = any(x.clipnorm or x.clipvalue or x.global_clipnorm for x in (optimizer, inner))
  is_linear = type(inner) in (keras.optimizers.SGD, keras.optimizers.Lion)
  adds = bool(inner.gradient_accumulation_steps) or (is_linear and not clips)
  # Plain Keras divides by its own factor, and fails if the gradient is sparse.
  takes_sparse = not adds and inner.loss_scale_factor is None
  return is_keras and takes_sparse and not sum_embedding_gradients


def Means(sums: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
  """Returns the means of metrics from the sums that the engine returns."""
  return {name: tf.math.divide_no_nan(s[0], s[1]) for name, s in sums.items()}


def _PlaceWithInputs() -> contextlib.AbstractContextManager[Any]:
  """Places each operation without a device on the device of its largest input, while traced.

  TensorFlow would run them all on one device, to which every weight, slot and gradient travelled.
  """
  captured: dict[int, str] = {}  # {id of a captured tensor: its device}.

  def DeviceOf(tensor: Any) -> str:
    if hasattr(tensor, 'numpy'):  # Eager: the handle of a variable.
      return str(tensor.device)
    if tensor.op.type == 'ReadVariableOp':
      return DeviceOf(tensor.op.inputs[0])
    if tensor.op.device or tensor.op.type != 'Placeholder':
      return str(tensor.op.device)
    if id(tensor) not in captured:
      # The newest first: a variable is read as soon as it is captured.
      outer = (x for x, inner in reversed(tensor.graph.captures) if inner is tensor)
      captured[id(tensor)] = next(map(DeviceOf, outer), '')
    return captured[id(tensor)]

  def Device(op: tf.Operation) -> str:
    if op.device or op.type in ('If', 'StatelessIf'):  # The inputs of a branch are on many devices.
      return str(op.device)
    placed = [(t.shape.num_elements() or 0, name) for t in op.inputs if (name := DeviceOf(t))]
    return max(placed, default=(0, ''), key=lambda pair: pair[0])[1]

  if tf.executing_eagerly():
    return contextlib.nullcontext()
  return tf.zeros([]).graph.device(Device)  # The graph that is traced; tf.device takes names only.


@contextlib.contextmanager
def _UpdateOneByOne(optimizer: Any) -> Iterator[None]:
  """Lets each device update one weight after another, while traced.

  Otherwise the device would hold the intermediate values of all updates at once, several times its
  weights.
  """
  if tf.executing_eagerly():
    yield
    return
  inner = keras_variables.Inner(optimizer)
  update_step = inner.update_step
  last: dict[tuple[int, str], tf.Operation] = {}  # {graph and device: the end of the last update}.

  def UpdateStep(gradient: Any, variable: Any, learning_rate: Any) -> None:
    place = (id(tf.zeros([]).graph), variable.device)  # A branch has a graph of its own.
    with tf.control_dependencies([last[place]] if place in last else []):
      update_step(gradient, variable, learning_rate)
      last[place] = variable.value().op

  with keras_variables.ReplaceAttributes(inner, update_step=UpdateStep):
    yield


def _CanBeCompiled(optimizer: Any) -> bool:
  """Whether updates may run later and get the step count as a tensor; never in custom classes."""
  inner = keras_variables.Inner(optimizer)
  return keras_equality.IsOfKeras(type(inner)) and not tf.executing_eagerly()


@contextlib.contextmanager
def _CompileUpdates(optimizer: Any, compiled: _Updates) -> Iterator[None]:
  """Lets XLA compile the updates of each device's weights as one function, while traced.

  Args:
    optimizer: the optimizer.
    compiled: gets the functions. The step is traced for each shape of a batch, and finds them here.
  """
  inner = keras_variables.Inner(optimizer)
  update_all = inner._backend_update_step

  def UpdateAll(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
    by_device: dict[str, list[tuple[Any, Any]]] = {}

    def Wait(gradient: Any, variable: Any, learning_rate: Any) -> None:
      del learning_rate
      by_device.setdefault(variable.device, []).append((gradient, variable))

    with keras_variables.ReplaceAttributes(inner, update_step=Wait):
      update_all(gradients, variables, learning_rate)
    rate, count = tf.convert_to_tensor(learning_rate), tf.convert_to_tensor(inner._iterations)
    for device, pairs in by_device.items():
      variables = [v for _, v in pairs]
      key = (device, *map(id, variables))
      if key not in compiled:
        compiled[key] = _DeviceUpdate(inner, variables)
      args = [gradient for gradient, _ in pairs], rate, count
      with tf.device(device):
        used = compiled[key].get_concrete_function(*args).variables
        if {v.device for v in used} == {device}:
          compiled[key](*args)
        else:  # An optimizer with a variable for all weights, such as Nadam's product.
          with _UpdateOneByOne(inner):
            compiled[key].python_function(*args)

  with keras_variables.ReplaceAttributes(inner, _backend_update_step=UpdateAll):
    yield


def _DeviceUpdate(optimizer: Any, variables: Sequence[Any]) -> Any:
  """Returns a function compiled by XLA of (gradients, rate, count) that updates some weights."""

  def Update(gradients: Sequence[Any], rate: tf.Tensor, count: tf.Tensor) -> None:
    # XLA reads no variable of another device, and the optimizer's count is on one of them.
    iterations, vars(optimizer)['_iterations'] = optimizer._iterations, count
    try:
      for gradient, variable in zip(gradients, variables, strict=True):
        optimizer.update_step(gradient, variable, rate)
    finally:
      vars(optimizer)['_iterations'] = iterations

  return tf.function(Update, autograph=False, jit_compile=True)


@contextlib.contextmanager
def _ClipByStage(optimizer: Any) -> Iterator[float | None]:
  """Yields the global norm to clip to, and keeps the optimizer from clipping meanwhile.

  Keras would gather all gradients on one device. An optimizer that scales the loss, accumulates
  gradients or is of a user's class may clip later than here, and so clips itself.
  """
  clip_norm = getattr(optimizer, 'global_clipnorm', None)
  is_plain = not optimizer.gradient_accumulation_steps and optimizer.loss_scale_factor is None
  is_plain = is_plain and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
  is_plain = is_plain and keras_equality.IsOfKeras(type(optimizer))
  if clip_norm is None or not is_plain:
    yield None
    return
  optimizer.global_clipnorm = None
  try:
    yield clip_norm
  finally:
    optimizer.global_clipnorm = clip_norm
