# SPDX-License-Identifier: Apache-2.0
"""Transformer decoder blocks: self-attention, attention to a source, feed-forward.

A decoder block takes and returns (source, source paddings, target, target paddings), so that blocks
can be stacked: it returns the source unchanged and transforms the target.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map
from lingvo_gpipe.layers import activations, attention, dropout, norm, transformer

Outputs = tuple[tf.Tensor | None, tf.Tensor | None, tf.Tensor, tf.Tensor | None]


class TransformerCrossAttentionLayer(base_layer.BaseLayer):
  """x + dropout(attention of layer_norm(x) to a source)."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TransformerCrossAttentionLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis, also of the source.', domain.SIZE)
    p.Define('hidden_dim', 0, 'Total width of the attention heads. 0: input_dim.', domain.INDEX)
    p.Define('num_heads', 8, 'Number of attention heads.', domain.SIZE)
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
      is_causal=False,
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
    source_vecs: tf.Tensor,
    source_paddings: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Attends from the inputs to the source.

    Args:
      theta: the weights.
      inputs: [batch, time, input_dim].
      source_vecs: [batch, source time, input_dim].
      source_paddings: None, or [batch, source time] with 1.0 at padded positions, which are masked
        out.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype.
    """
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    x = self.atten.FProp(theta.atten, x, source_vecs, source_vecs, source_paddings)
    return inputs + self.residual_dropout.FProp(theta.residual_dropout, x)

  def Prefill(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    source_vecs: tf.Tensor,
    source_paddings: tf.Tensor | None = None,
    *,
    max_length: int,
  ) -> tuple[tf.Tensor, nested_map.NestedMap]:
    """Runs FProp over the prompt; the states are the projected source and its paddings."""
    del max_length
    states = self.atten.ProjectKeyValue(theta.atten, source_vecs, source_vecs)
    if source_paddings is not None:
      states.paddings = source_paddings
    return self._AttendToStates(theta, states, inputs), states

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    inputs: tf.Tensor,
    source_vecs: tf.Tensor | None = None,
    source_paddings: tf.Tensor | None = None,
    *,
    time_step: Any,
  ) -> tuple[tf.Tensor, nested_map.NestedMap]:
    """Runs FProp of one position [batch, 1, input_dim], with the source in the states."""
    del source_vecs, source_paddings, time_step
    return self._AttendToStates(theta, states, inputs), states

  def _AttendToStates(
    self, theta: nested_map.NestedMap, states: nested_map.NestedMap, inputs: tf.Tensor
  ) -> tf.Tensor:
    inputs = self._CastToFPropDtype(inputs)
    x = self.layer_norm.FProp(theta.layer_norm, inputs)
    return inputs + self.atten.AttendTo(theta.atten, x, states, states.get('paddings'))


class TransformerDecoderLayer(base_layer.BaseLayer):
  """One decoder block: causal self-attention, cross-attention, feed-forward; pre-LayerNorm.

  It does not normalise the source: an encoder normalises its own outputs.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TransformerDecoderLayer; they override the templates' Params."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis, also of the source.', domain.SIZE)
    p.Define('hidden_dim', 0, 'Size of the hidden layer of the feed-forward part.', domain.SIZE)
    p.Define('num_heads', 8, 'Number of attention heads.', domain.SIZE)
    p.Define(
      'atten_hidden_dim', 0, 'Total width of the attention heads. 0: input_dim.', domain.INDEX
    )
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
    p.Define(
      'tr_self_atten_tpl',
      transformer.TransformerAttentionLayer.Params(),
      'Template of the self-attention.',
    )
    p.Define(
      'tr_cross_atten_tpl',
      TransformerCrossAttentionLayer.Params(),
      'Template of the attention to the source.',
    )
    p.Define(
      'tr_fflayer_tpl',
      transformer.TransformerFeedForwardLayer.Params(),
      'Template of the feed-forward.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    atten = {
      'input_dim': p.input_dim,
      'hidden_dim': p.atten_hidden_dim,
      'num_heads': p.num_heads,
      'atten_dropout_prob': p.atten_dropout_prob,
      'residual_dropout_prob': p.residual_dropout_prob,
    }
    self.CreateChild('self_atten', p.tr_self_atten_tpl.Copy().Set(**atten, is_causal=True))
    self.CreateChild('cross_atten', p.tr_cross_atten_tpl.Copy().Set(**atten))
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
    source_vecs: tf.Tensor,
    source_paddings: tf.Tensor | None,
    target_vecs: tf.Tensor,
    target_paddings: tf.Tensor | None = None,
  ) -> Outputs:
    """Applies the block to the target.

    Args:
      theta: the weights.
      source_vecs: [batch, source time, input_dim].
      source_paddings: None, or [batch, source time] with 1.0 at padded positions, which are masked
        out.
      target_vecs: [batch, target time, input_dim].
      target_paddings: None, or [batch, target time] with 1.0 at padded positions, which are masked
        out.

    Returns:
      (source_vecs, source_paddings, outputs, target_paddings), with outputs of the shape of
      target_vecs in fprop_dtype. Outputs at padded positions are finite but meaningless.
    """
    x, _ = self.self_atten.FProp(theta.self_atten, target_vecs, target_paddings)
    x = self.cross_atten.FProp(theta.cross_atten, x, source_vecs, source_paddings)
    x, _ = self.fflayer.FProp(theta.fflayer, x, target_paddings)
    return source_vecs, source_paddings, x, target_paddings

  def Prefill(
    self,
    theta: nested_map.NestedMap,
    source_vecs: tf.Tensor,
    source_paddings: tf.Tensor | None,
    target_vecs: tf.Tensor,
    target_paddings: tf.Tensor | None = None,
    *,
    max_length: int,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """Runs FProp over the prompt; returns the states of both attention layers."""
    (x, _), self_states = self.self_atten.Prefill(
      theta.self_atten, target_vecs, target_paddings, max_length=max_length
    )
    x, cross_states = self.cross_atten.Prefill(
      theta.cross_atten, x, source_vecs, source_paddings, max_length=max_length
    )
    x, _ = self.fflayer.FProp(theta.fflayer, x, target_paddings)
    states = nested_map.NestedMap(self_atten=self_states, cross_atten=cross_states)
    return (source_vecs, source_paddings, x, target_paddings), states

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    source_vecs: tf.Tensor | None,
    source_paddings: tf.Tensor | None,
    target_vecs: tf.Tensor,
    target_paddings: tf.Tensor | None = None,
    *,
    time_step: Any,
  ) -> tuple[Outputs, nested_map.NestedMap]:
    """Runs FProp of one position of the target [batch, 1, input_dim]; the source may be None."""
    (x, _), self_states = self.self_atten.ExtendStep(
      theta.self_atten, states.self_atten, target_vecs, target_paddings, time_step=time_step
    )
    x, cross_states = self.cross_atten.ExtendStep(
      theta.cross_atten, states.cross_atten, x, time_step=time_step
    )
    x, _ = self.fflayer.FProp(theta.fflayer, x, target_paddings)
    states = nested_map.NestedMap(self_atten=self_states, cross_atten=cross_states)
    return (source_vecs, source_paddings, x, target_paddings), states
