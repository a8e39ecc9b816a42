# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens and positions, and softmax heads with their cross entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes, weight_params
from lingvo_gpipe.layers import chunked_logits, linear


class _ShardedLayer(base_layer.BaseLayer):
  """Base class of layers that have children `shards` instead of weights if `num_shards` > 1."""

  @property
  def class_shards(self) -> Sequence[base_layer.BaseLayer]:
    """The shards; see PipelineElement."""
    return self.shards if self.params.num_shards > 1 else ()

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns theta; `variables` may have some of the shards only."""
    if not self.class_shards:
      return super().ThetaFrom(variables)
    theta = map(self.shards[0].ThetaFrom, variables.shards)  # All shards are alike.
    return nested_map.NestedMap(shards=list(theta))


class EmbeddingLayer(_ShardedLayer):
  """Maps ids to rows of a table, which start as N(0, 1 / sqrt(embedding_dim)).

  Ids must lie in [0, vocab_size). A task checks this before each step (`BaseTask.CheckBatch`),
  because this layer cannot: a gather compiled by XLA silently takes the nearest row.

  With `num_shards` above 1 the table consists of children `shards`, tables of equally many rows.
  Each can be tied to a shard of a SharedSoftmaxLayer, and can be on another device.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of an EmbeddingLayer."""
    p = super().Params()
    p.Define('vocab_size', 0, 'Number of ids.', domain.SIZE)
    p.Define('embedding_dim', 0, 'Size of the vectors.', domain.SIZE)
    p.Define('num_shards', 1, 'Number of variables that the table consists of.', domain.SIZE)
    p.Define('scale_sqrt_depth', False, 'Whether to multiply the vectors by sqrt(embedding_dim).')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if p.num_shards > 1:
      shard = p.Copy().Set(vocab_size=_ShardSize(self, p.vocab_size), num_shards=1)
      self.CreateChildren('shards', [shard.Set(name='')] * p.num_shards)
      return
    init = weight_params.WeightInit.Gaussian(1.0 / math.sqrt(p.embedding_dim))
    self.CreateVariable('emb', weight_params.WeightParams([p.vocab_size, p.embedding_dim], init))

  def FProp(
    self,
    theta: nested_map.NestedMap,
    ids: tf.Tensor,
    paddings: tf.Tensor | None = None,
    *extras: Any,
  ) -> tuple[Any, ...]:
    """Looks up the vectors of ids.

    Args:
      theta: emb [vocab_size, embedding_dim], or the shards.
      ids: integers [batch, time], or their rows [batch, time, embedding_dim] if they were looked up
        elsewhere (`LookUp`).
      paddings: None or [batch, time]; returned unchanged.
      *extras: arguments of later layers, such as segment_ids and segment_pos; returned unchanged.

    Returns:
      (vectors [batch, time, embedding_dim] in fprop_dtype, paddings, *extras).
    """
    if self.class_shards and not theta.shards:
      return (self._Scale(ids), paddings, *extras)
    _CheckIds(self.path, ids, paddings)
    return (self.EmbLookup(theta, ids), paddings, *extras)

  def EmbLookup(self, theta: nested_map.NestedMap, ids: tf.Tensor) -> tf.Tensor:
    """Returns the vectors [..., embedding_dim] of ids [...]."""
    return self._Scale(self.LookUp(theta, ids))

  def LookUp(self, theta: nested_map.NestedMap, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows [..., embedding_dim] of ids [...].

    Args:
      theta: the table, or some consecutive shards of it.
      ids: integers, counted from the first row of theta. With shards, ids out of range give zeros.
    """
    if not self.class_shards:
      return tf.gather(theta.emb, ids)
    of_shard = self.params.vocab_size // self.params.num_shards
    parts = []
    for i, part in enumerate(theta.shards):
      is_here = ids // of_shard == i
      rows = tf.gather(part.emb, tf.where(is_here, ids - i * of_shard, 0))
      parts.append(tf.where(is_here[..., tf.newaxis], rows, tf.zeros_like(rows)))
    return tf.add_n(parts)

  def _Scale(self, rows: tf.Tensor) -> tf.Tensor:
    p = self.params
    return rows * math.sqrt(p.embedding_dim) if p.scale_sqrt_depth else rows


def _ShardSize(layer: base_layer.BaseLayer, size: int) -> int:
  """Returns the size of a shard; raises ValueError if shards are not equal."""
  num_shards = layer.params.num_shards
  if size % num_shards:
    raise ValueError(f'{layer.path}: {size} does not divide into num_shards {num_shards}')
  return size // num_shards


class _PositionLayer(base_layer.BaseLayer):
  """Base class of layers that add the vector of a position to the inputs; decodes step by step."""

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    inputs: tf.Tensor,
    *extras: Any,
    time_step: Any,
  ) -> tuple[Any, nested_map.NestedMap]:
    """Adds the vector of position `time_step`; see BaseLayer.ExtendStep."""
    shapes.CheckShape(self.path, inputs, [None, 1, self.params.embedding_dim])
    y = self._CastToFPropDtype(inputs) + self.FPropWithPosition(theta, time_step)
    return ((y, *extras) if extras else y), states

  def FPropWithPosition(self, theta: nested_map.NestedMap, position: tf.Tensor) -> tf.Tensor:
    """Returns the vectors [..., embedding_dim] of integer positions [...]."""
    raise NotImplementedError(f'{type(self).__name__} has no FPropWithPosition')


class PositionalEmbeddingLayer(_PositionLayer):
  """Adds sinusoids of the position to the inputs; has no weights.

  Half of the channels are sin(position / timescale), the other half cos(position / timescale). The
  timescales grow geometrically from min_timescale to max_timescale. If the number of channels is
  odd, the last channel is zero (Vaswani et al. 2017, section 3.5).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a PositionalEmbeddingLayer."""
    p = super().Params()
    p.Define('embedding_dim', 0, 'Size of the vectors.', domain.SIZE)
    p.Define('min_timescale', 1, 'Shortest wavelength / (2 pi).', domain.POSITIVE)
    p.Define('max_timescale', 10000, 'Longest wavelength / (2 pi).', domain.POSITIVE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if p.min_timescale > p.max_timescale:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: expected min_timescale <= max_timescale, '
        f'got {p.min_timescale!r} and {p.max_timescale!r}'
      )

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> Any:
    """Adds the vectors of positions 0, 1, ... time - 1, or of `segment_pos`.

    Args:
      theta: empty.
      inputs: [batch, time, embedding_dim].
      *extras: further outputs of the previous layer: up to three of paddings, segment_ids and
        segment_pos. paddings and segment_ids are returned unchanged. segment_pos, None or integers
        [batch, time], has the positions within documents if a row is packed with several; it is not
        returned.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype; if there are `extras`, the tuple (tensor,
      paddings, segment_ids), as far as they were passed.
    """
    _CheckVectors(self.path, inputs, self.params.embedding_dim)
    extras, positions = _SplitSegmentPositions(self.path, inputs, extras)
    if positions is None:
      positions = tf.range(shapes.GetShape(inputs)[1])
    y = self._CastToFPropDtype(inputs) + self.FPropWithPosition(theta, positions)
    return (y, *extras) if extras else y

  def FPropWithPosition(self, theta: nested_map.NestedMap, position: tf.Tensor) -> tf.Tensor:
    """Returns the vectors [..., embedding_dim] of integer positions [...]."""
    del theta
    p = self.params
    compute = tf.float64 if p.fprop_dtype == tf.float64 else tf.float32
    num_timescales = p.embedding_dim // 2
    step = math.log(p.max_timescale / p.min_timescale) / max(num_timescales - 1, 1)
    frequencies = tf.exp(tf.range(num_timescales, dtype=compute) * -step) / p.min_timescale
    angles = tf.cast(position, compute)[..., tf.newaxis] * frequencies
    signal = tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)
    if p.embedding_dim % 2:
      signal = tf.pad(signal, [[0, 0]] * (signal.shape.rank - 1) + [[0, 1]])
    return tf.cast(signal, p.fprop_dtype)


class LearnablePositionalEmbeddingLayer(_PositionLayer):
  """Adds a learned vector for each position below max_pos to the inputs."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a LearnablePositionalEmbeddingLayer."""
    p = super().Params()
    p.Define('embedding_dim', 0, 'Size of the vectors.', domain.SIZE)
    p.Define('max_pos', 0, 'Number of positions.', domain.SIZE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    init = weight_params.WeightInit.Gaussian(1.0 / math.sqrt(p.embedding_dim))
    self.CreateVariable('emb', weight_params.WeightParams([p.max_pos, p.embedding_dim], init))

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> Any:
    """Adds the vectors of positions 0, 1, ... time - 1, or of `segment_pos`.

    Args:
      theta: emb [max_pos, embedding_dim].
      inputs: [batch, time, embedding_dim], time at most max_pos.
      *extras: further outputs of the previous layer: up to three of paddings, segment_ids and
        segment_pos; see PositionalEmbeddingLayer.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype; if there are `extras`, the tuple (tensor,
      paddings, segment_ids), as far as they were passed.
    """
    self._CheckInputs(self.path, self.params, inputs)
    extras, positions = _SplitSegmentPositions(self.path, inputs, extras)
    if positions is None:
      vectors = tf.convert_to_tensor(theta.emb)[: shapes.GetShape(inputs)[1]]
    else:
      vectors = self.FPropWithPosition(theta, positions)
    y = self._CastToFPropDtype(inputs) + vectors
    return (y, *extras) if extras else y

  def Prefill(
    self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any, max_length: int
  ) -> tuple[Any, nested_map.NestedMap]:
    """See BaseLayer.Prefill. Raises ValueError if max_length is more than max_pos."""
    if max_length > self.params.max_pos:
      raise ValueError(
        f'{self.path}: max_length {max_length} is more than max_pos {self.params.max_pos}; '
        'positions from max_pos on have no vectors'
      )
    return super().Prefill(theta, inputs, *extras, max_length=max_length)

  def FPropWithPosition(self, theta: nested_map.NestedMap, position: tf.Tensor) -> tf.Tensor:
    """Returns the vectors [..., embedding_dim] of integer positions [...]."""
    return tf.gather(theta.emb, position)

  @staticmethod
  def _CheckInputs(path: str, params: Any, inputs: Any) -> None:
    _CheckVectors(path, inputs, params.embedding_dim)
    if (inputs.shape[1] or 0) > params.max_pos:
      raise ValueError(f'{path}: inputs of time {inputs.shape[1]}, but max_pos is {params.max_pos}')


class _SoftmaxLayer(_ShardedLayer):
  """Base class of softmax heads, whose logits the loss may compute in chunks.

  With `num_shards` above 1 the head has no weights of its own, but children `shards`: heads of its
  class, each for equally many consecutive classes. If the vocabulary is shared out, each shard can
  be on another device.
  """

  is_position_wise = True

  # Whether each logit depends on its own class's weights and its position's inputs alone.
  _is_separable = True

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """Makes a class with other logits declare `class_axes` again to be computed in parts."""
    super().__init_subclass__(**kwargs)

    def Place(name: str) -> int:
      """Returns the place of the first class, mixins included, that defines the name."""
      return next((i for i, base in enumerate(cls.__mro__) if name in vars(base)), len(cls.__mro__))

    logits = ('FProp', 'FPropSkips', 'ForLoss', 'ThetaFrom', '_CreateWeights', '_Logits')
    cls._is_separable = Place('class_axes') <= min(map(Place, logits))

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: the sizes of all heads."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis of the inputs.', domain.SIZE)
    p.Define('num_classes', 0, 'Number of classes.', domain.SIZE)
    p.Define(
      'num_shards',
      1,
      'Number of variables, of equally many classes, that each weight consists of.',
      domain.SIZE,
    )
    p.Define(
      'chunk_size',
      0,
      'If above 0, the loss computes the logits of this many positions at a time, and backward '
      'does so again: they are never whole.',
      domain.Int(0, 2**31 - 1),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if not self._is_separable and (p.chunk_size or p.num_shards > 1):
      raise ValueError(
        f'{type(self).__name__} {p.name!r} overrides FProp or _Logits, which chunk_size and '
        'num_shards would call with some of the positions or classes: if each logit depends on '
        'its own class and position alone, define class_axes in the class, too'
      )
    if p.num_shards == 1:
      self._CreateWeights()
      return
    of_shard = _ShardSize(self, p.num_classes)
    shard = p.Copy().Set(name='', num_classes=of_shard, num_shards=1)
    sizes = [p.input_dim, of_shard], [p.input_dim, p.num_classes]
    shard.params_init = weight_params.ForPart(p.params_init, *sizes)
    self.CreateChildren('shards', [shard] * p.num_shards)

  def _CreateWeights(self) -> None:
    """Declares the weights of a head without shards."""
    raise NotImplementedError

  def _Logits(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the logits of a head without shards."""
    raise NotImplementedError

  @property
  def class_axes(self) -> Mapping[str, int]:
    """The axis of the classes of each weight; see PipelineElement."""
    return {
      f'shards[{i}].{name}': axis
      for i, shard in enumerate(self.class_shards)
      for name, axis in shard.class_axes.items()
    }

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> tf.Tensor:
    """Computes logits.

    Args:
      theta: the weights, of all shards or some.
      inputs: [..., input_dim].
      *extras: further outputs of the previous layer, such as paddings; not used.

    Returns:
      [..., num_classes] in fprop_dtype.
    """
    del extras
    shapes.CheckLastDim(self.path, inputs, self.params.input_dim)
    if not self.class_shards:
      return self._Logits(theta, inputs)
    return tf.concat([self.shards[0].FProp(t, inputs) for t in theta.shards], axis=-1)

  @property
  def loss_takes_inputs(self) -> bool:
    """Whether a loss takes `ForLoss` of the inputs; see PipelineElement."""
    return self.params.chunk_size > 0

  def ForLoss(
    self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any
  ) -> tuple[chunked_logits.ChunkedLogits]:
    """Returns logits [..., num_classes] of inputs [..., input_dim], not computed yet."""
    del extras
    p = self.params
    shapes.CheckLastDim(self.path, inputs, p.input_dim)
    logits = chunked_logits.ChunkedLogits(
      self.FProp, theta, inputs, num_classes=p.num_classes, chunk_size=p.chunk_size
    )
    return (logits,)


class SimpleFullSoftmax(_SoftmaxLayer):
  """Computes the logits of a softmax; `XentLossFromLogits` computes the loss from them."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a SimpleFullSoftmax."""
    p = super().Params()
    p.Define('use_bias', True, 'Whether there is a bias.')
    p.Define(
      'logits_abs_max',
      None,
      'If set, clip logits to [-logits_abs_max, logits_abs_max].',
      domain.POSITIVE | domain.NONE,
    )
    p.Define(
      'logits_soft_max',
      0.0,
      'If above 0, c: logits become c tanh(logits / c).',
      domain.NOT_NEGATIVE,
    )
    return p

  def _CreateWeights(self) -> None:
    p = self.params
    projection = linear.ProjectionLayer.Params().Set(
      input_dim=p.input_dim, output_dim=p.num_classes, has_bias=p.use_bias, activation='NONE'
    )
    self.CreateChild('linear', projection)

  @property
  def class_axes(self) -> Mapping[str, int]:
    """The axis of the classes of each weight; see PipelineElement."""
    if not self._is_separable or self.class_shards:
      return super().class_axes
    return {'linear.w': 1, 'linear.b': 0} if self.params.use_bias else {'linear.w': 1}

  def _Logits(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    p = self.params
    logits = self.linear.FProp(theta.linear, inputs)
    if p.logits_soft_max:
      logits = p.logits_soft_max * tf.tanh(logits / p.logits_soft_max)
    if p.logits_abs_max is not None:
      logits = tf.clip_by_value(logits, -p.logits_abs_max, p.logits_abs_max)
    return logits


class SharedSoftmaxLayer(_SoftmaxLayer):
  """A softmax head whose weight has the shape of an EmbeddingLayer's, so that both can be tied.

  logits = inputs emb^T + b. In a pipeline: `stack.ties=[['layers[9].emb', 'layers[0].emb']]`.
  """

  @property
  def class_axes(self) -> Mapping[str, int]:
    """The axis of the classes of each weight; see PipelineElement."""
    if not self._is_separable or self.class_shards:
      return super().class_axes
    return {'emb': 0, 'b': 0}

  def _CreateWeights(self) -> None:
    p = self.params
    init = weight_params.WeightInit.Gaussian(1.0 / math.sqrt(p.input_dim))
    self.CreateVariable('emb', weight_params.WeightParams([p.num_classes, p.input_dim], init))
    zero = weight_params.WeightInit.Constant(0.0)
    self.CreateVariable('b', weight_params.WeightParams([p.num_classes], zero))

  def _Logits(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    inputs = self._CastToFPropDtype(inputs)
    return tf.einsum('...d,vd->...v', inputs, tf.convert_to_tensor(theta.emb)) + theta.b


def XentLossFromLogits(
  logits: tf.Tensor | chunked_logits.ChunkedLogits,
  class_ids: tf.Tensor,
  label_smoothing: float = 0.0,
) -> tf.Tensor:
  """Returns the cross entropy of each position, in nats.

  With label smoothing u the target probability is 1 - u for the right class and u / (num_classes -
  1) for each other class (Szegedy et al. 2016, section 7, but without the right class in the
  uniform part).

  Args:
    logits: [..., num_classes], floating.
    class_ids: integers [...] in [0, num_classes). An id out of range raises an error on a CPU
      without XLA and otherwise gives NaN, so padded positions need a valid id too.
    label_smoothing: u, at least 0 and below 1.

  Returns:
    [...] in float32, or float64 if the logits are float64.
  """
  if not 0 <= label_smoothing < 1:
    raise ValueError(f'label_smoothing must be at least 0 and below 1, got {label_smoothing!r}')
  xent, total, _ = _Statistics(logits, class_ids)
  if not label_smoothing:
    return xent
  num_classes = logits.shape[-1]
  if num_classes is None or num_classes < 2:
    raise ValueError(
      f'label smoothing needs at least 2 classes, got logits of shape {logits.shape}'
    )
  wrong = label_smoothing / (num_classes - 1)
  return (1.0 - label_smoothing - wrong) * xent + wrong * total


def Hits(logits: tf.Tensor | chunked_logits.ChunkedLogits, class_ids: tf.Tensor) -> tf.Tensor:
  """Returns for each position 1 if the right class has the largest logit, else 0."""
  return _Statistics(logits, class_ids).hits


def _Statistics(
  logits: tf.Tensor | chunked_logits.ChunkedLogits, class_ids: tf.Tensor
) -> chunked_logits.Statistics:
  if isinstance(logits, chunked_logits.ChunkedLogits):
    return logits.StatisticsOf(class_ids)
  return chunked_logits.FromLogits(logits, class_ids)


def _CheckIds(path: str, ids: Any, paddings: Any) -> None:
  if not ids.dtype.is_integer:
    raise ValueError(f'{path}: ids must be integers, got {ids.dtype.name}')
  shapes.CheckRank(path, ids, 2, 'ids')
  if paddings is not None:
    shapes.CheckShape(path, paddings, ids.shape, 'paddings')


def _SplitSegmentPositions(
  path: str, inputs: Any, extras: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Any]:
  """Splits `extras` into the outputs for the next layer, and segment_pos or None."""
  *passed, segment_pos = extras if len(extras) > 2 else (*extras, None)
  shapes.CheckIntegers(path, segment_pos, inputs, 'segment_pos')
  return tuple(passed), segment_pos


def _CheckVectors(path: str, inputs: Any, dim: int) -> None:
  shapes.CheckRank(path, inputs, 3)
  shapes.CheckLastDim(path, inputs, dim)
