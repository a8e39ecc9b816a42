# SPDX-License-Identifier: Apache-2.0
"""`KerasCellLayer`: a cell of a live Keras model as a layer of this library."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  domain,
  fprop_context,
  hyperparams,
  nested_map,
  weight_params,
)
from lingvo_gpipe.graph import side_effects
from lingvo_gpipe.layers import chunked_logits, dropout
from lingvo_gpipe.layers.keras import keras_cells, keras_nodes, keras_symbols, keras_variables

# Names of auxiliary losses: what layers add, and the regularizers of weights.
ADDED, _REGULARIZERS = 'added_losses', 'regularizers'


class _CellScope(keras.StatelessScope):
  """Gives the variables of a cell their values, and seeds to generators that no layer tracks.

  `where` begins error messages; `trained` has the ids of the variables that the model trains.

  Attributes:
    reads: {id: variable} that the model does not train and the call reads.
  """

  def __init__(
    self,
    values: Sequence[tuple[Any, tf.Tensor]],
    where: str,
    trained: frozenset[int],
    new_seed: Callable[[Any], tf.Tensor],
  ) -> None:
    super().__init__(collect_losses=True)
    # Set here, because the constructor expects the shapes of variables, and weights may be slices.
    self.state_mapping.update((id(variable), value) for variable, value in values)
    self._where = where
    self._trained = trained
    self._new_seed = new_seed
    self.reads: dict[int, Any] = {}

  def get_current_value(self, variable: Any) -> Any:
    """Returns the value of a variable; None for a constant one outside the cell.

    Raises:
      ValueError: the variable is trained but not the cell's, so its gradient would be lost.
    """
    value = super().get_current_value(variable)
    if value is None and keras_variables.IsSeed(variable):  # For keras.random without a seed.
      value = self._new_seed(variable)
      self.add_update((variable, value))
    if value is None and id(variable) in self._trained:
      raise ValueError(
        f'{self._where} reads the variable {variable.path}, which is not its own, so a pipeline '
        'would lose its gradient: call the layer that owns the variable, or use the variable in '
        'keras.ops outside layers'
      )
    if id(variable) not in self._trained and not keras_variables.IsSeed(variable):
      self.reads[id(variable)] = variable
    return value

  def add_update(self, update: Any) -> None:
    """Changes a variable for this call; raises ValueError unless it belongs to the cell."""
    variable, value = update
    if id(variable) not in self.state_mapping and not keras_variables.IsSeed(variable):
      raise ValueError(
        f'{self._where} changes the variable {variable.path}, which none of its layers tracks, so '
        'a pipeline would lose the change: make it by add_weight(trainable=False) in the layer'
      )
    # A variable that is read after an assignment lets no gradient through.
    super().add_update((variable, tf.stop_gradient(value)))


class KerasCellLayer(base_layer.BaseLayer):
  """Runs a cell of a Keras model; its weights are the variables of the model itself.

  FProp runs the live Keras layers with the weights in place of their variables:

  * Seed generators take their seeds from the context's seeds.
  * Losses of add_loss become the auxiliary loss `ADDED`, regularizers of weights another one.
  * State that a call changes (moving averages of a BatchNormalization, vectors of a
    SpectralNormalization) becomes the mean of its values after each micro-batch alone, weighted by
    the rows of the micro-batches. So one micro-batch changes it as Keras does. The moving variance
    counts the differences between the micro-batches' means, too.
  """

  # Keras does not train variables that a layer takes from outside of the model.
  reads_other_variables = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a cell; `keras_cut.Cut` fills them in."""
    p = super().Params()
    p.Define('cell', None, 'A `keras_cells.Cell` of a live model.')
    p.Define('reused', (), 'Names of the weights that an earlier cell owns.')
    p.Define(
      'chunk_size',
      0,
      'If above 0, this is a softmax, the last cell, and the loss computes the logits of this many '
      'positions at a time.',
      domain.Int(0, 2**31 - 1),
    )
    p.Define(
      'shares_vocabulary', False, 'Whether this is a softmax, the last cell, to be shared out.'
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._cell: keras_cells.Cell = self.params.cell
    self._keras_variables = self._cell.Weights()
    self._seeds = self._cell.Seeds()
    self._norms = [
      x for x in self._cell.Layers() if isinstance(x, keras.layers.BatchNormalization) and x.built
    ]
    # For each attention the names of its layers with weights.
    self._attentions = {
      _StripNumbers(x.name): {
        _StripNumbers(child.name)
        for child in keras_nodes.Sublayers(x)
        if child is not x and child.weights
      }
      for x in self._cell.Layers()
      if type(x).__name__.endswith('Attention')
    }
    for layer in self._cell.Layers():
      if layer._metrics:
        raise ValueError(
          f'{self.path}: the Keras layer {layer.name} has metrics of its own, which a pipeline '
          'does not update; give them to compile()'
        )
      if isinstance(layer, keras.layers.TextVectorization):
        raise ValueError(
          f'{self.path}: the Keras layer {layer.name} makes tensors of unknown shapes from text; '
          'apply it in the input pipeline: dataset.map'
        )
      if getattr(layer, 'stateful', False):
        raise ValueError(
          f'{self.path}: the Keras layer {layer.name} is stateful: it carries the state of a batch '
          'to the next, which micro-batches cannot do'
        )
    if self.loss_takes_inputs or self.params.shares_vocabulary:
      self._CheckHead()
    for name, v in self._keras_variables.items():
      if v.trainable and id(v) not in self._cell.trained:
        raise ValueError(
          f'{self.path}: the variable {v.path} belongs to no layer of the model, so Keras does not '
          'train it; make it with trainable=False, or in a layer'
        )
      init = weight_params.WeightInit.Constant(0)  # Never used: the variable has its value.
      spec = weight_params.WeightParams(list(v.shape), init, tf.as_dtype(v.dtype))
      self.CreateVariable(name, spec, trainable=v.trainable)

  def _CheckHead(self) -> None:
    """Raises ValueError unless the cell computes the logits of each position by itself."""
    cell = self._cell
    wrong = [node.operation.name for node in cell.nodes if not _IsPositionWise(node)]
    tensors = [*cell.args, *cell.outputs]
    is_alone = len(cell.args) == len(cell.outputs) == 1 and not cell.skips_in
    is_floating = all(tf.as_dtype(v.dtype).is_floating for v in tensors)
    ranks = {len(v.shape) for v in tensors}
    if wrong or not is_alone or not is_floating or cell.has_loss or len(ranks) != 1:
      raise ValueError(
        f"{self.path}: loss_chunk_size and vocabulary='shared' need a model whose only output "
        'comes from a Dense or ReversibleEmbedding in a cell of its own, without activation, '
        f'losses and mask_zero; got {", ".join(wrong) or cell.name}'
      )

  @property
  def loss_takes_inputs(self) -> bool:
    """Whether the loss computes the logits in chunks."""
    return bool(self.params.chunk_size)

  @property
  def class_axes(self) -> Mapping[str, int]:
    """The axis of the classes of each weight, with a shared vocabulary; see PipelineElement."""
    if not self.params.shares_vocabulary:
      return {}
    variables = self._keras_variables
    if unknown := [v.path for v in variables.values() if v.name not in _CLASS_AXES]:
      raise ValueError(
        f"{self.path}: vocabulary='shared' cannot cut {', '.join(unknown)} into slices; merge the "
        'weights of LoRA or quantization first'
      )
    return {name: _CLASS_AXES[v.name] for name, v in variables.items()}

  def ForLoss(self, theta: nested_map.NestedMap, *args: Any) -> tuple[Any, ...]:
    """Returns the logits of the inputs, [batch, dim] or [batch, time, dim], not computed yet."""
    inputs, mask = Parts(args[0])
    num_classes = self._cell.outputs[0].shape[-1]
    assert num_classes is not None
    logits = chunked_logits.ChunkedLogits(
      self._Logits, theta, inputs, num_classes=num_classes, chunk_size=self.params.chunk_size
    )
    # Some operations drop the mask of their argument: a call without examples shows it.
    no_rows = tf.nest.map_structure(lambda x: x[:0], args[0])
    if Parts(self.FProp(theta, no_rows)[0])[1] is not None:
      logits._keras_mask = mask
    return (logits,)

  def _Logits(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    # Each position is an example of its own, as rows of a chunk come from several examples.
    shape = [-1, *[1] * (len(self._cell.args[0].shape) - 2), inputs.shape[-1]]
    logits = self.FProp(theta, tf.reshape(inputs, shape))[0]
    return tf.reshape(logits, tf.concat([tf.shape(inputs)[:-1], logits.shape[-1:]], axis=0))

  @property
  def compute_dtypes(self) -> frozenset[tf.DType]:
    """The dtypes of the policies of the cell's Keras layers."""
    return frozenset(tf.as_dtype(x.compute_dtype) for x in self._cell.Layers())

  @property
  def structure(self) -> Any:
    """Equal for cells that compute the same function."""
    # The regularizer of a reused weight counts in its first cell only.
    return keras_cells.Structure(self._cell), tuple(self.params.reused)

  def PartOf(self, op_name: str) -> str | None:
    """Returns the part of an operation.

    'scores' is an attention without its projections, which belong to no part. 'feed_forward' is
    everything outside of the attentions of a cell that has some. Keras names operations after the
    layers whose calls they are in. An attention is a layer whose class has a name that ends with
    Attention.
    """
    if not self._attentions:
      return None
    scopes = [_StripNumbers(scope) for scope in op_name.split('/')]
    for i, scope in enumerate(scopes[:-1]):
      if scope in self._attentions:
        return None if scopes[i + 1] in self._attentions[scope] else 'scores'
    return 'feed_forward'

  @property
  def skips_in(self) -> tuple[str, ...]:
    """Names of the tensors of earlier cells."""
    return tuple(map(_SkipName, self._cell.skips_in))

  @property
  def skips_out(self) -> tuple[str, ...]:
    """Names of the tensors for later cells."""
    return tuple(map(_SkipName, self._cell.skips_out))

  def _NewVariable(self, name: str, device: str | None) -> tf.Variable:
    """Moves the Keras variable to the device, or copies it if an earlier cell owns it."""
    variable = self._keras_variables[name]
    device = device or '/device:CPU:0'
    if name not in self.params.reused:
      return keras_variables.Move(variable, device)
    with tf.init_scope(), tf.device(device):
      return tf.Variable(variable.value, trainable=variable.trainable, name='reused')

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns the weights unchanged: Keras casts each weight when it uses it."""
    return nested_map.NestedMap(variables)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Runs a cell that has no skip connections; see `FPropSkips`."""
    return self.FPropSkips(theta, nested_map.NestedMap(), *args)[0]

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Runs the cell.

    Args:
      theta: the weights.
      skips: {name: tensor `[batch, ...]`} of earlier cells. A tensor to which Keras attached a mask
        is NestedMap(value, mask). An output of the model made by a softmax or sigmoid has logits.
      *args: the tensors from the previous cell; for the first cell the model's inputs.

    Returns:
      A tuple of the tensors for the next cell, and {name: tensor} for later cells.

    Raises:
      ValueError: the call changes a trained weight, or state that another cell owns.
    """
    cell, context = self._cell, fprop_context.Current()
    values: dict[keras_nodes.Value, Any] = {}
    for v, x in zip(cell.args, args, strict=True):
      values[v] = RestoreAttributes(x)
    for v in cell.skips_in:
      values[v] = RestoreAttributes(skips[_SkipName(v)])
    entering = dict(values)
    before = {name: tf.convert_to_tensor(theta[name]) for name in self._keras_variables}
    mapping = [(v, before[name]) for name, v in self._keras_variables.items()]
    numbers = itertools.count()
    mapping += [(v, self._Seed(next(numbers), v)) for v in self._seeds]
    where = f'{self.path}: the call of {cell.name}'
    with _CellScope(mapping, where, cell.trained, lambda v: self._Seed(next(numbers), v)) as scope:
      in_batches, no_remat = keras_variables.InBatches(), keras_variables.WithoutRemat()
      trained = {v.path: before[name] for name, v in self._keras_variables.items() if v.trainable}
      captures = side_effects.CheckCaptures(where, trained)
      with in_batches, no_remat, captures, tf.GradientTape() as tape:
        self._RunNodes(values, training=not context.do_eval)
      for name, losses in ((ADDED, scope.losses), (_REGULARIZERS, self._RegularizerLosses())):
        if losses:
          dtype = tf.float64 if tf.float64 in [x.dtype for x in losses] else tf.float32
          total = tf.add_n([tf.cast(tf.reduce_sum(x), dtype) for x in losses])
          context.AddAuxLoss(self, total, name=name)
    mine = {id(v) for name, v in self._keras_variables.items() if name not in self.params.reused}
    reads = [v for key, v in scope.reads.items() if key not in mine]
    changed = {
      name: new
      for name, v in self._keras_variables.items()
      if (new := scope.get_current_value(v)) is not before[name]
    }
    self._ReportState(before, changed, entering)
    if not context.do_eval:
      cell.state_uses.Add(cell, [self._keras_variables[name] for name in changed], reads)
    self._CheckReads(tape.watched_variables(), where)

    def Payload(v: keras_nodes.Value) -> Any:
      x = values[v]
      if v in cell.results:
        return _Payload(x, _ATTRIBUTES)
      empty = _EmptyOfSizes(x)
      if empty is not None:
        return nested_map.NestedMap({_SIZES[x.shape.rank]: empty})
      return _Payload(x, ('mask',))

    return tuple(map(Payload, cell.outputs)), nested_map.NestedMap(
      {_SkipName(v): Payload(v) for v in cell.skips_out}
    )

  def _CheckReads(self, variables: Iterable[tf.Variable], where: str) -> None:
    """Raises ValueError if the call read a trained weight's variable, and not its value."""
    read = {v._unique_id for v in variables}
    for v in self._keras_variables.values():
      if v.trainable and getattr(v._value, '_unique_id', None) in read:
        raise ValueError(
          f'{where} reads the weight {v.path} in a tf.function that was traced before, so a '
          'pipeline would lose its gradient: call the Python function itself'
        )

  def _RunNodes(self, values: dict[keras_nodes.Value, Any], training: bool) -> None:
    """Runs the calls of the cell; adds their results to `values`."""

    def Fill(nest: Any) -> Any:
      return keras.tree.map_structure(
        lambda x: values[x] if isinstance(x, keras_nodes.Value) else x, nest
      )

    for node in self._cell.nodes:
      mode = training if node.training is None else node.training

      def Run(node: keras_nodes.Node = node, mode: bool = mode) -> Any:
        kwargs = Fill(node.kwargs)
        if 'training' in getattr(node.operation, '_call_context_args', ()):
          kwargs['training'] = mode
        return node.operation(*Fill(node.args), **kwargs)

      result = keras_symbols.RunInCall(Run, node.policy, mode)
      outputs = [] if result is None else keras.tree.flatten(result)
      values.update(zip(node.outputs, outputs, strict=True))

  def _Seed(self, index: int, variable: Any) -> tf.Tensor:
    """Returns the state of a seed generator for this call."""
    context = fprop_context.Current()
    if context.step_counter is None and id(self) not in context.seed_rows:
      return tf.zeros(variable.shape, variable.dtype)  # Evaluation outside a stage.
    # Keras takes the seeds modulo 2^31, which would repeat the seeds of other steps.
    bits = dropout.RandomBits(variable.shape, context.OpSeed(self, f'seed_{index}'))
    return tf.cast(bits, variable.dtype)

  def _RegularizerLosses(self) -> list[Any]:
    """Returns the losses of the weights' regularizers; a reused weight counts in its own cell."""
    return [
      v.regularizer(v)
      for name, v in self._keras_variables.items()
      if v.regularizer is not None and v.trainable and name not in self.params.reused
    ]

  def _ReportState(
    self,
    before: Mapping[str, tf.Tensor],
    changed: Mapping[str, Any],
    entering: Mapping[keras_nodes.Value, Any],
  ) -> None:
    """Reports the state that the call changed, for `StateFromSums`."""
    context = fprop_context.Current()
    if not changed or context.do_eval:
      return
    for name in changed:
      if self._keras_variables[name].trainable or name in self.params.reused:
        owner = 'the trained' if name not in self.params.reused else "another cell's"
        raise ValueError(
          f'{self.path}: the call of {self._cell.name} changes {owner} variable '
          f'{self._keras_variables[name].path}, which a pipeline cannot do'
        )
    rows = _RelativeRows(entering)
    sums = {'rows': rows}
    for name, new in changed.items():
      sums[name] = rows * tf.cast(new, tf.float64)
    for i, momentum, mean, _ in self._MovingNames(changed):
      old, new = tf.cast(before[mean], tf.float64), tf.cast(changed[mean], tf.float64)
      batch_mean = (new - momentum * old) / (1 - momentum)
      sums[f'mean_{i}'] = rows * batch_mean
      sums[f'square_{i}'] = rows * tf.square(batch_mean)
    context.AddSums(self, sums)

  def _MovingNames(self, names: Any) -> list[tuple[int, float, str, str]]:
    """Returns (index, momentum, name of mean, name of variance) of BatchNormalizations."""
    name_of = {id(v): name for name, v in self._keras_variables.items()}
    moving = []
    for i, norm in enumerate(self._norms):
      mean, variance = name_of[id(norm.moving_mean)], name_of[id(norm.moving_variance)]
      if mean in names and variance in names and norm.momentum < 1:
        moving.append((i, float(norm.momentum), mean, variance))
    return moving

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]:
    """Returns the state after a mini-batch: means over its micro-batches, weighted by rows."""
    names = [name for name in self._keras_variables if name in sums]
    new = {name: sums[name] / sums.rows for name in names}
    for i, momentum, _, variance in self._MovingNames(names):
      between = sums[f'square_{i}'] / sums.rows - tf.square(sums[f'mean_{i}'] / sums.rows)
      new[variance] += (1 - momentum) * tf.maximum(between, 0)
    return {
      name: value if state[name].dtype.is_floating else tf.round(value)
      for name, value in new.items()
    }


# The axis of the classes of the weights of a Dense or ReversibleEmbedding.
_CLASS_AXES = {'kernel': 1, 'bias': 0, 'embeddings': 0, 'reverse_embeddings': 1}


def _IsPositionWise(node: keras_nodes.Node) -> bool:
  """Whether each position of the result depends on the same position of the arguments alone."""
  operation = node.operation
  if not type(operation).__module__.startswith(('keras.', 'keras_hub.')):
    return False
  kind = type(operation).__name__
  if kind in ('Dense', 'Activation'):
    return operation.activation is keras.activations.linear
  if kind == 'ReversibleEmbedding':  # KerasHub also has a class of this name.
    return not operation.mask_zero
  # The parts of a soft cap.
  is_scalar = all(
    isinstance(x, keras_nodes.Value) or not np.ndim(x)
    for x in keras.tree.flatten((node.args, node.kwargs))
  )
  return kind in ('Cast', 'Divide', 'Multiply', 'Tanh', 'TrueDivide') and is_scalar


def _SkipName(value: keras_nodes.Value) -> str:
  return f'v{value.index}'


def _RelativeRows(entering: Mapping[keras_nodes.Value, Any]) -> tf.Tensor:
  """Returns a multiple of the number of examples in the micro-batch, a float64 scalar.

  The examples are on an axis of unknown size, usually the first, of the tensors that enter a cell.
  Other axes of unknown size, such as time, have equal sizes in all micro-batches of a mini-batch,
  which are pieces of the same tensors. So the product of all unknown sizes weights micro-batches
  as the number of examples does.
  """
  unknown = {
    v: [i for i, size in enumerate(v.shape) if size is None]
    for v, x in entering.items()
    if x is not None
  }
  if not unknown:  # Constants only: each micro-batch computes the same.
    return tf.ones([], tf.float64)
  # A tensor [time, 1, dim] has fewer unknown sizes than [time, batch, dim], and no examples.
  v = min(unknown, key=lambda v: (min(unknown[v], default=math.inf), -len(unknown[v])))
  shape = tf.shape(entering[v])
  return tf.reduce_prod([tf.cast(shape[i], tf.float64) for i in unknown[v] or [0]])


# Keras attaches masks to tensors, and to a softmax or sigmoid its logits, which losses use.
_ATTRIBUTES = ('mask', 'logits')
# The parts of a payload for a size, and for a vector of sizes.
_SIZES = ('size', 'sizes')
_MAX_RANK = 8


def _Payload(x: Any, attributes: Sequence[str]) -> Any:
  """Returns a tensor for another cell, with what Keras attached to it."""
  parts = {name: getattr(x, f'_keras_{name}', None) for name in attributes}
  parts = {name: part for name, part in parts.items() if part is not None}
  return nested_map.NestedMap(value=x, **parts) if parts else x


def _EmptyOfSizes(x: Any) -> tf.Tensor | None:
  """Returns an empty tensor of the static shape `[0, *sizes]`; None if x does not hold sizes.

  Sizes go to other cells in this form, so that these know them when they are traced.

  Args:
    x: a tensor; sizes are an int32 scalar or vector that is known when this cell is traced.
  """
  is_vector = x.shape.rank == 1 and (x.shape[0] or _MAX_RANK) < _MAX_RANK
  if tf.executing_eagerly() or x.dtype != tf.int32 or not (is_vector or x.shape.rank == 0):
    return None
  try:
    empty = tf.zeros(tf.concat([[0], tf.reshape(x, [-1])], axis=0), tf.int32)
  except ValueError:  # A negative number is not a size.
    return None
  return empty if empty.shape.is_fully_defined() else None


def Parts(x: Any) -> tuple[Any, Any]:
  """Returns a tensor of another cell, and the mask that Keras attached to it or None."""
  return (x['value'], x.get('mask')) if isinstance(x, Mapping) else (x, None)


def RestoreAttributes(x: Any) -> Any:
  """Returns a tensor of another cell, with what Keras attached to it."""
  if not isinstance(x, Mapping):
    return x
  for rank, name in enumerate(_SIZES):
    if name in x:
      sizes = x[name].shape[1:].as_list()
      return tf.constant(sizes if rank else sizes[0])
  value = tf.identity(x['value'])  # The attributes belong to this tensor alone.
  for name in _ATTRIBUTES:
    if name in x:
      with contextlib.suppress(AttributeError):
        setattr(value, f'_keras_{name}', x[name])
  return value


def _StripNumbers(name: str) -> str:
  """Returns a name without the numbers by which Keras and TensorFlow make names unique."""
  return re.sub(r'(_\d+)+$', '', name)
