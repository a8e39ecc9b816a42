# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: pre-LayerNorm, with residual connections and dropout.

Every layer here maps (x, paddings) to (x, paddings), x [batch, time, dim], so that blocks follow
each other in a sequence and a pipeline may be cut between any two. Where rows are packed with
several documents, (x, paddings, segment_ids) becomes (x, paddings, segment_ids): the integers
travel, and every attention makes its mask of them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import attention, dropout, linear, norm

Outputs = tuple[tf.Tensor, tf.Tensor | None] | tuple[tf.Tensor, tf.Tensor | None, tf.Tensor]


def _Outputs(x: Any, paddings: Any, segment_ids: Any) -> tuple[Any, ...]:
  """What the next block takes: segment ids only where there are any."""
  return (x, paddings) if segment_ids is None else (x, paddings, segment_ids)


class TransformerAttentionLayer(base_layer.BaseLayer):
  """x + dropout(self_attention(layer_norm(x)))."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a TransformerAttentionLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.')
    p.Define('hidden_dim', 0, 'Width of all attention heads together. 0: input_dim.')
    p.Define('num_heads', 8, 'Number of attention heads.')
    p.Define('is_causal', False, 'Whether a position sees only itself and earlier ones.')
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'What the layer norm is made from.')
    p.Define('atten_tpl', attention.MultiHeadedAttention.Params(), 'The same for the attention.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'The same for the residual dropout.')
    p.Define('atten_dropout_prob', 0.0, 'Probability to drop an attention weight.')
    p.Define('residual_dropout_prob', 0.0, 'Probability to drop an entry before the residual add.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'input_dim')
    shapes.CheckProbability(p, 'atten_dropout_prob', 'residual_dropout_prob')
    self.CreateChild('layer_norm', p.ln_tpl.Copy().Set(input_dim=p.input_dim))
    atten = p.atten_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_dim=p.hidden_dim,
      num_heads=p.num_heads,
      is_causal=p.is_causal,
      atten_dropout_prob=p.atten_dropout_prob,
    )
    self.CreateChild('atten', atten)
    self.CreateChild(
      'residual_dropout', p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.residual_dropout_prob)
    )

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> Outputs:
    """Maps inputs [batch, time, input_dim] to the same shape; see TransformerLayer."""
    shapes.CheckIntegers(self.path, segment_ids, inputs, 'segment_ids')
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    mask = None if segment_ids is None else attention.SegmentMask(segment_ids)
    x = self.atten.FProp(theta.atten, x, x, x, paddings, mask)
    x = inputs + self.residual_dropout.FProp(theta.residual_dropout, x)
    return _Outputs(x, paddings, segment_ids)

  def Prefill(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
    *,
    max_length: int,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """See BaseLayer.Prefill; NotImplementedError unless causal, or with segment_ids."""
    self._CheckOneDocument(segment_ids)
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    x, states = self.atten.Prefill(theta.atten, x, x, x, paddings, max_length=max_length)
    x = inputs + self.residual_dropout.FProp(theta.residual_dropout, x)
    return (x, paddings), nested_map.NestedMap(atten=states)

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
    *,
    time_step: Any,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """See BaseLayer.ExtendStep; NotImplementedError unless causal, or with segment_ids."""
    self._CheckOneDocument(segment_ids)
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    x, new = self.atten.ExtendStep(
      theta.atten, states.atten, x, x, x, paddings, time_step=time_step
    )
    x = inputs + self.residual_dropout.FProp(theta.residual_dropout, x)
    return (x, paddings), nested_map.NestedMap(atten=new)

  def _CheckOneDocument(self, segment_ids: tf.Tensor | None) -> None:
    if segment_ids is not None:
      raise NotImplementedError(
        f'{self.path}: a row of several documents (segment_ids) cannot decode position by '
        'position; give each document a row of its own'
      )


class TransformerFeedForwardLayer(base_layer.BaseLayer):
  """x + dropout(feed_forward(layer_norm(x))) with one hidden layer."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a TransformerFeedForwardLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.')
    p.Define('hidden_dim', 0, 'Size of the hidden layer.')
    p.Define('activation', 'RELU', 'Name of the activation of the hidden layer.')
    p.Define('has_bias', True, 'Whether the two projections have a bias.')
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'What the layer norm is made from.')
    p.Define('fflayer_tpl', linear.FeedForwardNet.Params(), 'The same for the feed-forward net.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'The same for every dropout.')
    p.Define('relu_dropout_prob', 0.0, 'Probability to drop an entry of the hidden layer.')
    p.Define('residual_dropout_prob', 0.0, 'Probability to drop an entry before the residual add.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'input_dim', 'hidden_dim')
    shapes.CheckProbability(p, 'relu_dropout_prob', 'residual_dropout_prob')
    self.CreateChild('layer_norm', p.ln_tpl.Copy().Set(input_dim=p.input_dim))
    fflayer = p.fflayer_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_layer_dims=[p.hidden_dim, p.input_dim],
      activation=[p.activation, 'NONE'],
      has_bias=p.has_bias,
      dropout=[
        p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.relu_dropout_prob),
        p.dropout_tpl.Copy().Set(keep_prob=1.0),
      ],
    )
    self.CreateChild('fflayer', fflayer)
    self.CreateChild(
      'residual_dropout', p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.residual_dropout_prob)
    )

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> Outputs:
    """Maps inputs [batch, time, input_dim] to the same shape; the others are handed on."""
    shapes.CheckPaddings(self.path, paddings, inputs)
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    x = self.fflayer.FProp(theta.fflayer, x)
    x = inputs + self.residual_dropout.FProp(theta.residual_dropout, x)
    return _Outputs(x, paddings, segment_ids)


class TransformerLayer(base_layer.BaseLayer):
  """Self-attention and feed-forward (Vaswani et al. 2017), each behind its layer norm.

  With biases and d = input_dim = the attention width, h = hidden_dim it has
  4 d^2 + 4 d (attention) + 2 d h + h + d (feed-forward) + 4 d (layer norms) parameters.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a TransformerLayer; they override those in the templates."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.')
    p.Define('hidden_dim', 0, 'Size of the hidden layer of the feed-forward part.')
    p.Define('num_heads', 8, 'Number of attention heads.')
    p.Define('atten_hidden_dim', 0, 'Width of all attention heads together. 0: input_dim.')
    p.Define('is_causal', False, 'Whether a position sees only itself and earlier ones.')
    p.Define('activation', 'RELU', 'Name of the activation of the feed-forward part.')
    p.Define('residual_dropout_prob', 0.0, 'Probability to drop an entry before a residual add.')
    p.Define('atten_dropout_prob', 0.0, 'Probability to drop an attention weight.')
    p.Define('relu_dropout_prob', 0.0, 'Probability to drop an entry of the hidden layer.')
    p.Define('tr_atten_tpl', TransformerAttentionLayer.Params(), 'The self-attention part.')
    p.Define('tr_fflayer_tpl', TransformerFeedForwardLayer.Params(), 'The feed-forward part.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'input_dim', 'hidden_dim')
    self_atten = p.tr_atten_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_dim=p.atten_hidden_dim,
      num_heads=p.num_heads,
      is_causal=p.is_causal,
      atten_dropout_prob=p.atten_dropout_prob,
      residual_dropout_prob=p.residual_dropout_prob,
    )
    self.CreateChild('self_atten', self_atten)
    fflayer = p.tr_fflayer_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_dim=p.hidden_dim,
      activation=p.activation,
      relu_dropout_prob=p.relu_dropout_prob,
      residual_dropout_prob=p.residual_dropout_prob,
    )
    self.CreateChild('fflayer', fflayer)

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> Outputs:
    """One Transformer block.

    Args:
      theta: the weights.
      inputs: [batch, time, input_dim].
      paddings: None, or [batch, time] with 1.0 at positions that nobody attends to. The outputs at
        such positions are finite and mean nothing.
      segment_ids: None, or integers [batch, time]: positions attend to those of the same number
        only. A number for padding, as 0, makes paddings needless.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype, `paddings`, and `segment_ids` if given.
    """
    outputs = self.self_atten.FProp(theta.self_atten, inputs, paddings, segment_ids)
    return self.fflayer.FProp(theta.fflayer, *outputs)

  def Prefill(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
    *,
    max_length: int,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """See BaseLayer.Prefill; NotImplementedError unless causal, or with segment_ids."""
    (x, paddings), states = self.self_atten.Prefill(
      theta.self_atten, inputs, paddings, segment_ids, max_length=max_length
    )
    outputs, made = self.fflayer.Prefill(theta.fflayer, x, paddings, max_length=max_length)
    return outputs, nested_map.NestedMap(self_atten=states, fflayer=made)

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
    *,
    time_step: Any,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """See BaseLayer.ExtendStep; NotImplementedError unless causal, or with segment_ids."""
    (x, paddings), new = self.self_atten.ExtendStep(
      theta.self_atten, states.self_atten, inputs, paddings, segment_ids, time_step=time_step
    )
    outputs, made = self.fflayer.ExtendStep(
      theta.fflayer, states.fflayer, x, paddings, time_step=time_step
    )
    return outputs, nested_map.NestedMap(self_atten=new, fflayer=made)
