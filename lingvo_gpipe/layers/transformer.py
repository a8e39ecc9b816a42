# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: pre-LayerNorm, with residual connections and dropout.

Every layer in this module maps (x, paddings) to (x, paddings), with x [batch, time, dim], so that
layers can be stacked and a pipeline can be cut between any two of them. If rows are packed with
several documents, the arguments and outputs are (x, paddings, segment_ids), and each attention
makes its own mask from the segment ids.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, fprop_context, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import activations, attention, dropout, linear, norm

Outputs = tuple[tf.Tensor, tf.Tensor | None] | tuple[tf.Tensor, tf.Tensor | None, tf.Tensor]


def _Outputs(x: Any, paddings: Any, segment_ids: Any) -> tuple[Any, ...]:
  """Returns the arguments of the next block, with segment ids only if there are any."""
  return (x, paddings) if segment_ids is None else (x, paddings, segment_ids)


class TransformerAttentionLayer(base_layer.BaseLayer):
  """x + dropout(self_attention(layer_norm(x)))."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TransformerAttentionLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define('hidden_dim', 0, 'Total width of the attention heads. 0: input_dim.', domain.INDEX)
    p.Define('num_heads', 8, 'Number of attention heads.', domain.SIZE)
    p.Define('is_causal', False, 'Whether a position attends only to itself and earlier positions.')
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'Template of the layer norm.')
    p.Define('atten_tpl', attention.MultiHeadedAttention.Params(), 'Template of the attention.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'Template of the residual dropout.')
    p.Define(
      'atten_dropout_prob', 0.0, 'Probability to drop an attention weight.', domain.PROBABILITY
    )
    p.Define(
      'residual_dropout_prob',
      0.0,
      'Probability to drop an entry before the residual add.',
      domain.PROBABILITY,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
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
    """Attends within inputs [batch, time, input_dim]; see TransformerLayer.FProp."""
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
    """See BaseLayer.Prefill. Raises NotImplementedError unless causal, and for segment_ids."""
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
    """See BaseLayer.ExtendStep. Raises NotImplementedError unless causal, and for segment_ids."""
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
        'position; put each document into its own row'
      )


class TransformerFeedForwardLayer(base_layer.BaseLayer):
  """x + dropout(feed_forward(layer_norm(x))) with one hidden layer."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TransformerFeedForwardLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define('hidden_dim', 0, 'Size of the hidden layer.', domain.SIZE)
    p.Define('activation', 'RELU', 'Name of the activation of the hidden layer.', activations.NAME)
    p.Define('has_bias', True, 'Whether the two projections have a bias.')
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'Template of the layer norm.')
    p.Define('fflayer_tpl', linear.FeedForwardNet.Params(), 'Template of the feed-forward net.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'Template of every dropout.')
    p.Define(
      'relu_dropout_prob',
      0.0,
      'Probability to drop an entry of the hidden layer.',
      domain.PROBABILITY,
    )
    p.Define(
      'residual_dropout_prob',
      0.0,
      'Probability to drop an entry before the residual add.',
      domain.PROBABILITY,
    )
    return p

  # Both projections; each half of the layer has one of them.
  _projections = slice(0, 2)

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p, which = self.params, self._projections
    dims = [p.input_dim, p.hidden_dim, p.input_dim]
    if which.start == 0:
      self.CreateChild('layer_norm', p.ln_tpl.Copy().Set(input_dim=p.input_dim))
    fflayer = p.fflayer_tpl.Copy().Set(
      input_dim=dims[which.start],
      hidden_layer_dims=dims[1:][which],
      activation=[p.activation, 'NONE'][which],
      has_bias=p.has_bias,
      dropout=[
        p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.relu_dropout_prob),
        p.dropout_tpl.Copy().Set(keep_prob=1.0),
      ][which],
    )
    self.CreateChild('fflayer', fflayer)
    if which.stop == 2:
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
    """Maps inputs [batch, time, input_dim] to the same shape; returns the other arguments too."""
    shapes.CheckPaddings(self.path, paddings, inputs)
    inputs = self._CastToFPropDtype(inputs)
    with fprop_context.Part('feed_forward'):
      x = self.layer_norm.FProp(theta.layer_norm, inputs)
      x = self.fflayer.FProp(theta.fflayer, x)
    x = inputs + self.residual_dropout.FProp(theta.residual_dropout, x)
    return _Outputs(x, paddings, segment_ids)


class FeedForwardHiddenLayer(TransformerFeedForwardLayer):
  """The first half of a TransformerFeedForwardLayer, up to the hidden layer."""

  is_position_wise = True
  _projections = slice(0, 1)

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> tuple[Any, ...]:
    """Returns the hidden layer [batch, time, hidden_dim], and the arguments."""
    shapes.CheckPaddings(self.path, paddings, inputs)
    inputs = self._CastToFPropDtype(inputs)
    with fprop_context.Part('feed_forward'):
      x = self.layer_norm.FProp(theta.layer_norm, inputs)
      hidden = self.fflayer.FProp(theta.fflayer, x)
    return hidden, *_Outputs(inputs, paddings, segment_ids)


class FeedForwardOutputLayer(TransformerFeedForwardLayer):
  """The second half of a TransformerFeedForwardLayer, from the hidden layer on."""

  is_position_wise = True
  _projections = slice(1, 2)

  def FProp(
    self,
    theta: nested_map.NestedMap,
    hidden: tf.Tensor,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> Outputs:
    """Takes what FeedForwardHiddenLayer returns; returns the outputs of the whole layer."""
    x = self.fflayer.FProp(theta.fflayer, self._CastToFPropDtype(hidden))
    x = self._CastToFPropDtype(inputs) + self.residual_dropout.FProp(theta.residual_dropout, x)
    return _Outputs(x, paddings, segment_ids)


class TransformerLayer(base_layer.BaseLayer):
  """Self-attention and feed-forward (Vaswani et al. 2017), each after its own layer norm.

  With biases, d = input_dim = attention width and h = hidden_dim, the number of parameters is
  4 d^2 + 4 d (attention) + 2 d h + h + d (feed-forward) + 4 d (layer norms).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TransformerLayer; they override the templates' Params."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define('hidden_dim', 0, 'Size of the hidden layer of the feed-forward part.', domain.SIZE)
    p.Define('num_heads', 8, 'Number of attention heads.', domain.SIZE)
    p.Define(
      'atten_hidden_dim', 0, 'Total width of the attention heads. 0: input_dim.', domain.INDEX
    )
    p.Define('is_causal', False, 'Whether a position attends only to itself and earlier positions.')
    p.Define(
      'activation', 'RELU', 'Name of the activation of the feed-forward part.', activations.NAME
    )
    p.Define(
      'residual_dropout_prob',
      0.0,
      'Probability to drop an entry before a residual add.',
      domain.PROBABILITY,
    )
    p.Define(
      'atten_dropout_prob', 0.0, 'Probability to drop an attention weight.', domain.PROBABILITY
    )
    p.Define(
      'relu_dropout_prob',
      0.0,
      'Probability to drop an entry of the hidden layer.',
      domain.PROBABILITY,
    )
    p.Define('tr_atten_tpl', TransformerAttentionLayer.Params(), 'Template of the self-attention.')
    p.Define(
      'tr_fflayer_tpl', TransformerFeedForwardLayer.Params(), 'Template of the feed-forward.'
    )
    return p

  @classmethod
  def InLayers(
    cls, params: hyperparams.InstantiableParams, num_layers: int
  ) -> list[hyperparams.InstantiableParams]:
    """Returns the Params of the layers that compute in sequence what the block computes.

    A pipeline can be cut between them. They inherit from the sequence what a block inherits.

    Args:
      params: the Params of the block.
      num_layers: 1: the block; 2: its attention and its feed-forward part; 3: the feed-forward part
        is two layers, before and after its hidden layer.

    Raises:
      ValueError: the feed-forward part is of another class, which cannot be two layers.
    """
    if num_layers == 1:
      return [params]
    self_atten, fflayer = cls._Parts(params).values()
    if num_layers == 2:
      return [self_atten, fflayer]
    if fflayer.cls is not TransformerFeedForwardLayer:
      raise ValueError(
        f'tr_fflayer_tpl is a {fflayer.cls.__name__}, and only a TransformerFeedForwardLayer can '
        'be two layers: cut the block into two layers at most'
      )
    halves = [FeedForwardHiddenLayer.Params(), FeedForwardOutputLayer.Params()]
    for half in halves:
      hyperparams.CopyFieldsTo(fflayer, half)
    return [self_atten, *halves]

  @classmethod
  def _Parts(
    cls, params: hyperparams.InstantiableParams
  ) -> dict[str, hyperparams.InstantiableParams]:
    """Returns the Params of the children."""
    p = params
    self_atten = p.tr_atten_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_dim=p.atten_hidden_dim,
      num_heads=p.num_heads,
      is_causal=p.is_causal,
      atten_dropout_prob=p.atten_dropout_prob,
      residual_dropout_prob=p.residual_dropout_prob,
    )
    fflayer = p.tr_fflayer_tpl.Copy().Set(
      input_dim=p.input_dim,
      hidden_dim=p.hidden_dim,
      activation=p.activation,
      relu_dropout_prob=p.relu_dropout_prob,
      residual_dropout_prob=p.residual_dropout_prob,
    )
    return {'self_atten': self_atten, 'fflayer': fflayer}

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    for name, part in self._Parts(self.params).items():
      self.CreateChild(name, part)

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
  ) -> Outputs:
    """Applies the block to the inputs.

    Args:
      theta: the weights.
      inputs: [batch, time, input_dim].
      paddings: None, or [batch, time] with 1.0 at padded positions, which are masked out. The
        outputs at padded positions are finite but meaningless.
      segment_ids: None, or integers [batch, time]: a position attends only to positions with the
        same id. Paddings are not needed if padding has an id of its own, such as 0.

    Returns:
      (tensor of the shape of `inputs` in fprop_dtype, paddings), and segment_ids unless None.
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
    """See BaseLayer.Prefill. Raises NotImplementedError unless causal, and for segment_ids."""
    (x, paddings), states = self.self_atten.Prefill(
      theta.self_atten, inputs, paddings, segment_ids, max_length=max_length
    )
    outputs, fflayer_states = self.fflayer.Prefill(
      theta.fflayer, x, paddings, max_length=max_length
    )
    return outputs, nested_map.NestedMap(self_atten=states, fflayer=fflayer_states)

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
    """See BaseLayer.ExtendStep. Raises NotImplementedError unless causal, and for segment_ids."""
    (x, paddings), atten_states = self.self_atten.ExtendStep(
      theta.self_atten, states.self_atten, inputs, paddings, segment_ids, time_step=time_step
    )
    outputs, fflayer_states = self.fflayer.ExtendStep(
      theta.fflayer, states.fflayer, x, paddings, time_step=time_step
    )
    return outputs, nested_map.NestedMap(self_atten=atten_states, fflayer=fflayer_states)
