# SPDX-License-Identifier: Apache-2.0
"""Layers of the translation pipeline, which take and return source and target together.

Every layer takes and returns (source, source paddings, target, target paddings). An encoder layer
transforms the source and returns the embedded target unchanged. A decoder layer (see
`lingvo_gpipe.layers.transformer_decoder`) transforms the target and returns the encoded source
unchanged. The whole model is therefore one flat list of layers that can be cut anywhere.

While a target is extended token by token, source and paddings are passed as None: the states of the
decoder layers hold the projected source.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import (
  base_layer,
  domain,
  dropout,
  embedding,
  hyperparams,
  nested_map,
  norm,
  transformer,
  transformer_decoder,
)


class TranslationEmbeddingLayer(base_layer.BaseLayer):
  """Embeds the tokens and positions of source and target, with one table or two."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a TranslationEmbeddingLayer."""
    p = super().Params()
    p.Define('vocab_size', 0, 'Number of ids.', domain.SIZE)
    p.Define('embedding_dim', 0, 'Size of the vectors.', domain.SIZE)
    p.Define('share_embedding', True, 'Whether source and target share one table of tokens.')
    p.Define(
      'input_dropout_prob', 0.0, 'Probability to drop an entry of a vector.', domain.PROBABILITY
    )
    p.Define(
      'emb_tpl',
      embedding.EmbeddingLayer.Params().Set(scale_sqrt_depth=True),
      'Template of the tables.',
    )
    p.Define('position_tpl', embedding.PositionalEmbeddingLayer.Params(), 'Template of positions.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'Template of the dropout.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    table = p.emb_tpl.Copy().Set(vocab_size=p.vocab_size, embedding_dim=p.embedding_dim)
    self.CreateChild('source_emb', table)
    if not p.share_embedding:
      self.CreateChild('target_emb', table)
    self.CreateChild('position', p.position_tpl.Copy().Set(embedding_dim=p.embedding_dim))
    drop = p.dropout_tpl.Copy().Set(keep_prob=1.0 - p.input_dropout_prob)
    self.CreateChild('source_dropout', drop)
    self.CreateChild('target_dropout', drop)

  @property
  def _target_table(self) -> str:
    return 'source_emb' if self.params.share_embedding else 'target_emb'

  def FProp(
    self,
    theta: nested_map.NestedMap,
    source_ids: tf.Tensor,
    source_paddings: tf.Tensor | None,
    target_ids: tf.Tensor,
    target_paddings: tf.Tensor | None = None,
  ) -> transformer_decoder.Outputs:
    """Embeds source and target.

    Args:
      theta: the weights.
      source_ids: integers [batch, source time] in [0, vocab_size).
      source_paddings: None, or [batch, source time] of any dtype, 1 (True) at padding. With
        booleans or integers the layer has no floating inputs, and the gradients of the tables stay
        tf.IndexedSlices if the pipeline recomputes the layer.
      target_ids: integers [batch, target time] in [0, vocab_size).
      target_paddings: None, or [batch, target time] of any dtype, 1 (True) at padding.

    Returns:
      (source vectors [batch, source time, embedding_dim], source paddings, target vectors, target
      paddings), vectors in fprop_dtype and paddings in float32.
    """
    source = self._Embed(theta, 'source_emb', 'source_dropout', source_ids)
    target = self._Embed(theta, self._target_table, 'target_dropout', target_ids)
    return source, _AsFloat(source_paddings), target, _AsFloat(target_paddings)

  def _Embed(self, theta: nested_map.NestedMap, table: str, drop: str, ids: tf.Tensor) -> tf.Tensor:
    x, _ = self.children[table].FProp(theta[table], ids)
    x = self.position.FProp(theta.position, x)
    return self.children[drop].FProp(theta[drop], x)

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    source_ids: Any,
    source_paddings: Any,
    target_ids: tf.Tensor,
    target_paddings: Any = None,
    *,
    time_step: Any,
  ) -> tuple[tuple[Any, ...], nested_map.NestedMap]:
    """Embeds target ids [batch, 1] at position `time_step`; returns None for all other outputs."""
    del source_ids, source_paddings, target_paddings
    table = self._target_table
    x, _ = self.children[table].FProp(theta[table], target_ids)
    x += self.position.FPropWithPosition(theta.position, tf.reshape(time_step, [1, 1]))
    return (None, None, x, None), states


class EncoderLayer(base_layer.BaseLayer):
  """Applies a layer of (vectors, paddings) to the source; returns the target unchanged."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of an EncoderLayer."""
    p = super().Params()
    p.Define(
      'body',
      transformer.TransformerLayer.Params(),
      'The layer for the source; it must be stateless and take and return (vectors, paddings).',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateChild('body', self.params.body)

  def FProp(
    self,
    theta: nested_map.NestedMap,
    source_vecs: tf.Tensor,
    source_paddings: tf.Tensor | None,
    target_vecs: tf.Tensor,
    target_paddings: tf.Tensor | None = None,
  ) -> transformer_decoder.Outputs:
    """Applies the body to the source [batch, source time, dim]."""
    source, paddings = self.body.FProp(theta.body, source_vecs, source_paddings)
    return source, paddings, target_vecs, target_paddings

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    *args: Any,
    time_step: Any,
  ) -> tuple[tuple[Any, ...], nested_map.NestedMap]:
    """Returns the arguments unchanged: Prefill has encoded the source."""
    del theta, time_step
    return args, states


class DecoderOutputLayer(base_layer.BaseLayer):
  """Normalises the target and drops the source, which a softmax does not take."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a DecoderOutputLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'Template of the layer norm.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateChild('layer_norm', self.params.ln_tpl.Copy().Set(input_dim=self.params.input_dim))

  def FProp(
    self,
    theta: nested_map.NestedMap,
    source_vecs: Any,
    source_paddings: Any,
    target_vecs: tf.Tensor,
    target_paddings: Any = None,
  ) -> tf.Tensor:
    """Returns the normalised target_vecs [batch, target time, input_dim]."""
    del source_vecs, source_paddings, target_paddings
    return self.layer_norm.FProp(theta.layer_norm, target_vecs)


def _AsFloat(paddings: tf.Tensor | None) -> tf.Tensor | None:
  return None if paddings is None else tf.cast(paddings, tf.float32)
