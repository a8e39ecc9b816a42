# SPDX-License-Identifier: Apache-2.0
"""Layers of the translation pipeline: each takes and gives source and target together.

The arguments between layers are always (source, source paddings, target, target paddings): an
encoder layer changes the source and lets the embedded target pass, a decoder layer (see
`lingvo_gpipe.layers.transformer_decoder`) changes the target and lets the encoded source pass. So
the whole model is one flat list of layers, to be cut anywhere.

While a target is extended token by token, source and paddings are None: the decoder layers keep
what they need of them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import (
  base_layer,
  dropout,
  embedding,
  hyperparams,
  nested_map,
  norm,
  shapes,
  transformer,
  transformer_decoder,
)


class TranslationEmbeddingLayer(base_layer.BaseLayer):
  """Token and position embeddings of source and target, from one table or from two."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a TranslationEmbeddingLayer."""
    p = super().Params()
    p.Define('vocab_size', 0, 'Number of ids.')
    p.Define('embedding_dim', 0, 'Size of a vector.')
    p.Define('share_embedding', True, 'Whether source and target have one table of tokens.')
    p.Define('input_dropout_prob', 0.0, 'Probability to drop an entry of a vector.')
    p.Define(
      'emb_tpl',
      embedding.EmbeddingLayer.Params().Set(scale_sqrt_depth=True),
      'What the tables are made from.',
    )
    p.Define('position_tpl', embedding.PositionalEmbeddingLayer.Params(), 'The same for positions.')
    p.Define('dropout_tpl', dropout.DropoutLayer.Params(), 'The same for the dropout.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'vocab_size', 'embedding_dim')
    shapes.CheckProbability(p, 'input_dropout_prob')
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
    """Embeds both sides.

    Args:
      theta: the weights.
      source_ids: integers [batch, source time] in [0, vocab_size).
      source_paddings: None, or [batch, source time] of any dtype, 1 (True) at padding. As booleans
        or integers nothing floating enters the layer, and the gradients of the tables stay slices
        where the pipeline recomputes it.
      target_ids: integers [batch, target time].
      target_paddings: None, or [batch, target time].

    Returns:
      (source vectors [batch, source time, embedding_dim], source paddings in float32, target
      vectors, target paddings), the vectors in fprop_dtype.
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
    """Embeds the target's ids [batch, 1] at position `time_step`; the rest becomes None."""
    del source_ids, source_paddings, target_paddings
    table = self._target_table
    x, _ = self.children[table].FProp(theta[table], target_ids)
    x += self.position.FPropWithPosition(theta.position, tf.reshape(time_step, [1, 1]))
    return (None, None, x, None), states


class EncoderLayer(base_layer.BaseLayer):
  """Runs a layer of (vectors, paddings) on the source; the target passes."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of an EncoderLayer."""
    p = super().Params()
    p.Define(
      'body',
      transformer.TransformerLayer.Params(),
      'What is done to the source: a layer without '
      'state that takes and returns (vectors, paddings).',
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
    """The source [batch, source time, dim] through the body; all else as it is."""
    source, paddings = self.body.FProp(theta.body, source_vecs, source_paddings)
    return source, paddings, target_vecs, target_paddings

  def ExtendStep(
    self,
    theta: nested_map.NestedMap,
    states: nested_map.NestedMap,
    *args: Any,
    time_step: Any,
  ) -> tuple[tuple[Any, ...], nested_map.NestedMap]:
    """The arguments as they are: Prefill encoded the source, and the decoder layers keep it."""
    del theta, time_step
    return args, states


class DecoderOutputLayer(base_layer.BaseLayer):
  """Normalises the decoder's output and drops the source: what a softmax takes."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a DecoderOutputLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.')
    p.Define('ln_tpl', norm.LayerNorm.Params(), 'What the layer norm is made from.')
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
    """Maps target_vecs [batch, target time, input_dim] to the same shape."""
    del source_vecs, source_paddings, target_paddings
    return self.layer_norm.FProp(theta.layer_norm, target_vecs)


def _AsFloat(paddings: tf.Tensor | None) -> tf.Tensor | None:
  return None if paddings is None else tf.cast(paddings, tf.float32)
