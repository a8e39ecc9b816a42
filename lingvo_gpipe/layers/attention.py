# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention, batch-major: [batch, time, dim]."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, fprop_context, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import dropout, linear


def AttentionMask(
  query_time: Any, key_time: Any, paddings: tf.Tensor | None, is_causal: bool
) -> tf.Tensor | None:
  """Returns a bool mask, True where a query may attend to a key.

  Args:
    query_time: number of queries, an integer or a scalar tensor.
    key_time: number of keys; equal to query_time if is_causal.
    paddings: None, or [batch, key_time] with 1.0 at padded keys, which are masked out.
    is_causal: whether query i attends to the keys 0 ... i only.

  Returns:
    A mask that broadcasts to [batch, heads, query_time, key_time]; None if every query attends to
    every key.
  """
  mask = None
  if is_causal:
    earlier = tf.range(query_time)[:, tf.newaxis] >= tf.range(key_time)[tf.newaxis, :]
    mask = earlier[tf.newaxis, tf.newaxis, :, :]
  if paddings is not None:
    present = (paddings < 0.5)[:, tf.newaxis, tf.newaxis, :]
    mask = present if mask is None else tf.logical_and(mask, present)
  return mask


def SegmentMask(segment_ids: tf.Tensor) -> tf.Tensor:
  """Returns a bool mask [batch, 1, time, time] that limits attention to a position's own segment.

  Args:
    segment_ids: integers [batch, time], equal for all positions of a segment, for example of one
      document in a packed row.
  """
  row = segment_ids[:, tf.newaxis, :]
  return tf.equal(row[..., tf.newaxis], row[..., tf.newaxis, :])


class MultiHeadedAttention(base_layer.BaseLayer):
  """Scaled dot-product attention with several heads (Vaswani et al. 2017, section 3.2).

  The layer builds the mask from paddings and `is_causal`, so no tensor quadratic in time is passed
  between layers. The softmax runs in float32 if the logits have a narrower type. A query that may
  not attend to any key gets the mean of all values, which is finite; such a query is padding.

  Decoding: causal self-attention caches keys and values (`Prefill`, `ExtendStep`). To attend to
  fixed vectors, such as an encoder's outputs, project them once (`ProjectKeyValue`) and call
  `AttendTo` in each step.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a MultiHeadedAttention."""
    p = super().Params()
    p.Define(
      'input_dim', 0, 'Size of the last axis of queries, keys, values and outputs.', domain.SIZE
    )
    p.Define('hidden_dim', 0, 'Total width of all heads. 0: input_dim.', domain.INDEX)
    p.Define('num_heads', 1, 'Number of heads; divides hidden_dim.', domain.SIZE)
    p.Define('use_bias', True, 'Whether the four projections have a bias.')
    p.Define('is_causal', False, 'Whether a query attends only to its own and earlier keys.')
    p.Define('proj_tpl', linear.ProjectionLayer.Params(), 'Template of the projections.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'Template of the dropout.')
    p.Define(
      'atten_dropout_prob', 0.0, 'Probability to drop an attention weight.', domain.PROBABILITY
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    width = p.hidden_dim or p.input_dim
    if width % p.num_heads:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: the attention width {width} (hidden_dim, or input_dim '
        f'if that is 0) must be a multiple of num_heads {p.num_heads}'
      )
    self._dim_per_head = width // p.num_heads
    projection = p.proj_tpl.Copy().Set(has_bias=p.use_bias, activation='NONE')
    for name in ('query', 'key', 'value'):
      self.CreateChild(name, projection.Copy().Set(input_dim=p.input_dim, output_dim=width))
    self.CreateChild('post', projection.Copy().Set(input_dim=width, output_dim=p.input_dim))
    self.CreateChild(
      'atten_dropout', p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.atten_dropout_prob)
    )

  def FProp(
    self,
    theta: nested_map.NestedMap,
    query_vec: tf.Tensor,
    key_vec: tf.Tensor,
    value_vec: tf.Tensor,
    paddings: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Attends to the keys and projects the weighted mean of the values.

    Args:
      theta: the weights.
      query_vec: [batch, query time, input_dim].
      key_vec: [batch, key time, input_dim]; for self-attention, query_vec.
      value_vec: [batch, key time, input_dim].
      paddings: None, or [batch, key time] with 1.0 at padded keys, which are masked out.
      mask: None, or a bool tensor that broadcasts to [batch, heads, query time, key time]. A query
        must not attend to a key at which the mask is False. Applies in addition to paddings and
        is_causal.

    Returns:
      The encoded queries, [batch, query time, input_dim] in fprop_dtype.
    """
    self._CheckInputs(self.path, self.params, query_vec, key_vec, value_vec, paddings)
    projected = self.ProjectKeyValue(theta, key_vec, value_vec)
    return self._AttendTo(theta, query_vec, projected, paddings, mask, self.params.is_causal)

  def ProjectKeyValue(
    self, theta: nested_map.NestedMap, key_vec: tf.Tensor, value_vec: tf.Tensor
  ) -> nested_map.NestedMap:
    """Projects keys and values once, for any number of calls of `AttendTo`.

    Args:
      theta: the weights.
      key_vec: [batch, key time, input_dim].
      value_vec: [batch, key time, input_dim].

    Returns:
      NestedMap(key, value), each [batch, heads, key time, dim per head].
    """
    key = self._ToHeads(self.key.FProp(theta.key, key_vec))
    value = self._ToHeads(self.value.FProp(theta.value, value_vec))
    return nested_map.NestedMap(key=key, value=value)

  def AttendTo(
    self,
    theta: nested_map.NestedMap,
    query_vec: tf.Tensor,
    projected: nested_map.NestedMap,
    paddings: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Attends to keys and values from `ProjectKeyValue`, without a causal mask.

    Args:
      theta: the weights.
      query_vec: [batch, query time, input_dim].
      projected: NestedMap(key, value), for example of an encoder's outputs; further entries are
        ignored.
      paddings: None, or [batch, key time] with 1.0 at padded keys, which are masked out.
      mask: None, or a bool tensor that broadcasts to [batch, heads, query time, key time]. A query
        must not attend to a key at which the mask is False.

    Returns:
      The encoded queries, [batch, query time, input_dim] in fprop_dtype.
    """
    shapes.CheckRank(self.path, query_vec, 3, 'query_vec')
    shapes.CheckLastDim(self.path, query_vec, self.params.input_dim, 'query_vec')
    return self._AttendTo(theta, query_vec, projected, paddings, mask, is_causal=False)

  def _AttendTo(
    self,
    theta: nested_map.NestedMap,
    query_vec: tf.Tensor,
    projected: nested_map.NestedMap,
    paddings: tf.Tensor | None,
    mask: tf.Tensor | None,
    is_causal: bool,
  ) -> tf.Tensor:
    """Implements `FProp` and `AttendTo` on vectors that have been checked."""
    query_time, key_time = shapes.GetShape(query_vec)[1], shapes.GetShape(projected.key)[2]
    full_mask = AttentionMask(query_time, key_time, paddings, is_causal)
    if mask is not None:
      full_mask = mask if full_mask is None else tf.logical_and(full_mask, mask)
    query = self._ToHeads(self.query.FProp(theta.query, query_vec))
    return self._Attend(theta, query, projected.key, projected.value, full_mask)

  def Prefill(
    self,
    theta: nested_map.NestedMap,
    query_vec: tf.Tensor,
    key_vec: tf.Tensor,
    value_vec: tf.Tensor,
    paddings: tf.Tensor | None = None,
    *,
    max_length: int,
  ) -> tuple[tf.Tensor, nested_map.NestedMap]:
    """Attends within the prompt and caches its keys and values; see BaseLayer.Prefill.

    Returns:
      The encoded queries, and the states: NestedMap(key, value), each [batch, heads, max_length,
      dim per head] and zero after the prompt, and paddings [batch, max_length] if there are any.

    Raises:
      NotImplementedError: the attention is not causal.
      ValueError: the prompt has more than max_length positions.
    """
    self._CheckCausal()
    self._CheckInputs(self.path, self.params, query_vec, key_vec, value_vec, paddings)
    time = shapes.GetShape(key_vec)[1]
    if isinstance(time, int) and time > max_length:
      raise ValueError(
        f'{self.path}: a prompt of {time} positions does not fit max_length {max_length}; cut the '
        'prompt or raise max_length'
      )
    states = self.ProjectKeyValue(theta, key_vec, value_vec)
    encoded = self._AttendTo(theta, query_vec, states, paddings, None, is_causal=True)
    if paddings is not None:
      states.paddings = paddings
    room = [[0, max_length - time]]
    ends = {'key': [[0, 0], [0, 0], *room, [0, 0]], 'paddings': [[0, 0], *room]}
    ends['value'] = ends['key']
    return encoded, nested_map.NestedMap({k: tf.pad(x, ends[k]) for k, x in states.items()})

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    query_vec: tf.Tensor,
    key_vec: tf.Tensor,
    value_vec: tf.Tensor,
    paddings: tf.Tensor | None = None,
    *,
    time_step: Any,
  ) -> tuple[tf.Tensor, nested_map.NestedMap]:
    """Attends from one position to itself and all earlier ones; see BaseLayer.ExtendStep.

    A `time_step` that lies outside the caches raises an error if its value is known while tracing.
    If it is a tensor, the caller must make sure that it fits.

    Raises:
      NotImplementedError: the attention is not causal.
      ValueError: the position does not fit the states.
    """
    self._CheckCausal()
    self._CheckInputs(self.path, self.params, query_vec, key_vec, value_vec, paddings)
    shapes.CheckShape(self.path, query_vec, [states.key.shape[0], 1, None], 'query_vec')
    max_length, known = shapes.GetShape(states.key)[2], tf.get_static_value(time_step)
    if known is not None and isinstance(max_length, int) and not 0 <= known < max_length:
      raise ValueError(f'{self.path}: time_step {known} lies outside the {max_length} positions')
    new = self.ProjectKeyValue(theta, key_vec, value_vec)
    if 'paddings' in states:
      new.paddings = tf.zeros_like(states.paddings[:, :1]) if paddings is None else paddings
    elif paddings is not None:
      raise ValueError(f'{self.path}: a step has paddings, but Prefill had none')
    is_new = tf.equal(tf.range(max_length), time_step)
    axes = {'key': is_new[:, tf.newaxis], 'value': is_new[:, tf.newaxis], 'paddings': is_new}
    states = nested_map.NestedMap({k: tf.where(axes[k], new[k], x) for k, x in states.items()})
    seen = tf.range(max_length) <= time_step
    return self.AttendTo(theta, query_vec, states, states.get('paddings'), seen), states

  def _CheckCausal(self) -> None:
    if not self.params.is_causal:
      raise NotImplementedError(
        f'{self.path}: attention that is not causal cannot decode position by position, because '
        'earlier outputs would change; set is_causal, or use AttendTo for fixed keys'
      )

  def _ToHeads(self, x: tf.Tensor) -> tf.Tensor:
    """Splits [batch, time, width] into [batch, heads, time, dim per head]."""
    batch, time, _ = shapes.GetShape(x)
    x = tf.reshape(x, [batch, time, self.params.num_heads, self._dim_per_head])
    return tf.transpose(x, [0, 2, 1, 3])

  def _Attend(
    self,
    theta: nested_map.NestedMap,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    mask: tf.Tensor | None,
  ) -> tf.Tensor:
    """Computes attention over projected heads, and the output projection.

    Args:
      theta: the weights.
      query: [batch, heads, query time, dim per head].
      key: [batch, heads, key time, dim per head].
      value: [batch, heads, key time, dim per head].
      mask: None, or a bool tensor that broadcasts to [batch, heads, query time, key time].

    Returns:
      [batch, query time, input_dim].
    """
    with fprop_context.Part('scores'):
      logits = tf.matmul(query * (1.0 / math.sqrt(self._dim_per_head)), key, transpose_b=True)
      if logits.dtype.size < 4:
        logits = tf.cast(logits, tf.float32)
      if mask is not None:
        # Far below any logit but finite, so that a row without any True does not give NaN.
        logits = tf.where(mask, logits, tf.constant(0.5 * logits.dtype.min, logits.dtype))
      probs = tf.cast(tf.nn.softmax(logits), value.dtype)
      probs = self.atten_dropout.FProp(theta.atten_dropout, probs)
      encoded = tf.matmul(probs, value)
    encoded = tf.transpose(encoded, [0, 2, 1, 3])
    batch, time, heads, dim = shapes.GetShape(encoded)
    return self.post.FProp(theta.post, tf.reshape(encoded, [batch, time, heads * dim]))

  @staticmethod
  def _CheckInputs(
    path: str, params: Any, query_vec: Any, key_vec: Any, value_vec: Any, paddings: Any
  ) -> None:
    vectors = {'query_vec': query_vec, 'key_vec': key_vec, 'value_vec': value_vec}
    for name, x in vectors.items():
      shapes.CheckRank(path, x, 3, name)
      shapes.CheckLastDim(path, x, params.input_dim, name)
    shapes.CheckShape(path, value_vec, key_vec.shape, 'value_vec')
    shapes.CheckPaddings(path, paddings, key_vec)
    if params.is_causal and None not in (times := (query_vec.shape[1], key_vec.shape[1])):
      if times[0] != times[1]:
        raise ValueError(
          f'{path}: causal attention needs as many queries as keys, got {times[0]} and {times[1]}'
        )
