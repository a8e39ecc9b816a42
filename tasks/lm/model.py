# SPDX-License-Identifier: Apache-2.0
"""Decoder-only Transformer language models, pipelined from the embedding to the softmax."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import (
  batches,
  domain,
  dropout,
  embedding,
  hyperparams,
  nested_map,
  norm,
  pipelining_layer,
  sampling,
  sequential,
  task,
  transformer,
  weight_params,
)


class LanguageModel(task.BaseTask):
  """The data, loss and metrics of models that predict the next token.

  Batches have `ids` and `labels` (int32) and `weights` (float32), each [batch, time]. If batches
  have `words` (float32 [batch, time]), the number of words that begin with each label, the metrics
  and the report include the loss per word.
  """

  loss_unit = 'tokens'

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: the number of token ids, and `stack`, the pipeline."""
    p = super().Params()
    p.Define('vocab_size', 256, 'Number of token ids.', domain.SIZE)
    p.Define(
      'stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline; the task sets `sub`.'
    )
    return p

  def CheckBatch(self, input_batch: nested_map.NestedMap) -> None:
    """Raises ValueError for ids or labels outside [0, vocab_size).

    Without this check a gather compiled by XLA would silently take the nearest row of the table.
    """
    for name in ('ids', 'labels'):
      self._CheckIds(name, input_batch[name])

  def _CheckIds(self, name: str, values: Any) -> None:
    low, high = batches.Range(values)
    if low < 0 or high >= self.params.vocab_size:
      raise ValueError(
        f'{self.path}: {name} must lie in [0, {self.params.vocab_size}), got {low} ... {high}; '
        'check the input generator, or set vocab_size'
      )

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns labels, weights and, if the batch has them, words, each [batch, time]."""
    names = ('labels', 'weights', 'words')
    return nested_map.NestedMap({k: input_batch[k] for k in names if k in input_batch})

  def LossWeight(self, input_batch: nested_map.NestedMap) -> tf.Tensor:
    """Returns the number of predicted tokens."""
    return tf.reduce_sum(input_batch.weights)

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: tf.Tensor, input_batch: nested_map.NestedMap
  ) -> tuple[task.Metrics, dict[str, tf.Tensor]]:
    """Computes the cross entropy of logits `predictions` [batch, time, vocab] and the accuracy.

    `loss` is in nats per token. If the batch has `words`, `log_pplx_per_word` is the total loss in
    nats divided by the number of words (including ends of documents), which does not depend on the
    vocabulary.
    """
    del theta
    xent = embedding.XentLossFromLogits(predictions, input_batch.labels)
    weights = tf.cast(input_batch.weights, xent.dtype)
    total = tf.reduce_sum(weights)
    loss = tf.math.divide_no_nan(tf.reduce_sum(xent * weights), total)
    correct = tf.reduce_sum(embedding.Hits(predictions, input_batch.labels) * weights)
    metrics = {
      'loss': (loss, total),
      'bits_per_token': (loss / math.log(2.0), total),
      'accuracy': (tf.math.divide_no_nan(correct, total), total),
    }
    if 'words' in input_batch:
      # A batch may continue words without beginning one. Its tokens count anyway, so its weight
      # must not be 0.
      num_words = tf.reduce_sum(tf.cast(input_batch.words, xent.dtype) * weights)
      words = tf.maximum(num_words, 1e-6 * total)
      metrics['log_pplx_per_word'] = (tf.math.divide_no_nan(loss * total, words), words)
    return metrics, {'xent': tf.reduce_sum(xent * weights, axis=-1)}

  def Report(self, metrics: dict[str, float], input_generator: Any) -> str:
    """Returns the perplexity per token, and per word if words are counted, as text."""
    del input_generator
    # exp of the mean loss, which differs from the mean of the batches' perplexities.
    names = {'loss': 'token', 'log_pplx_per_word': 'word'}
    texts = [
      f'{math.exp(min(metrics[name], 700.0)):.2f} a {unit}'
      for name, unit in names.items()
      if name in metrics
    ]
    return f'perplexity {", ".join(texts)}'


class TransformerLm(LanguageModel):
  """Pre-LayerNorm Transformer layers under a causal mask.

  Rows packed with several documents also have `segment_ids`, the number of the document or 0 for
  padding, and `segment_pos`, the position within the document (int32); attention stays within a
  document.

  `ff_init_depth_exponent` and `softmax_tpl.logits_abs_max` prevent the divergence of deep models
  (GPipe section 5, which gives neither the exponent nor the bound).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: sizes of the model."""
    p = super().Params()
    p.Define('model_dim', 128, 'Size of the vectors between layers.', domain.SIZE)
    p.Define('hidden_dim', 512, 'Size of the feed-forward hidden layer.', domain.SIZE)
    p.Define('num_heads', 4, 'Number of attention heads.', domain.SIZE)
    p.Define('num_layers', 4, 'Number of Transformer layers.', domain.NUM_LAYERS)
    p.Define(
      'layers_per_block',
      1,
      'Number of layers of a Transformer block, between which a cut may be. 2: the attention and '
      'the feed-forward part. 3: also before and after the hidden layer, which then goes from '
      'stage to stage. Weights have other names.',
      domain.Int(1, 3),
    )
    p.Define(
      'input_dropout_prob', 0.0, 'Dropout probability of the embeddings.', domain.PROBABILITY
    )
    p.Define(
      'residual_dropout_prob',
      0.0,
      'Dropout probability of the output of each sub-layer.',
      domain.PROBABILITY,
    )
    p.Define(
      'atten_dropout_prob', 0.0, 'Dropout probability of attention weights.', domain.PROBABILITY
    )
    p.Define(
      'relu_dropout_prob',
      0.0,
      'Dropout probability of the feed-forward hidden layer.',
      domain.PROBABILITY,
    )
    p.Define(
      'ff_init_depth_exponent',
      0.0,
      'x: scales the initial feed-forward weights by num_layers^-x; 0.5: XavierWithFixupParams.',
      domain.Number(0, 8),
    )
    p.Define('final_layer_norm', True, 'Whether there is a LayerNorm before the softmax.')
    p.Define(
      'softmax_tpl',
      embedding.SimpleFullSoftmax.Params(),
      'Template of the softmax. The embedding has as many shards.',
    )
    p.Define(
      'sampling',
      sampling.SamplingParams().Set(temperature=0.8),
      'How to choose the tokens of continuations.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    layers = [
      embedding.EmbeddingLayer.Params().Set(
        vocab_size=p.vocab_size,
        embedding_dim=p.model_dim,
        num_shards=p.softmax_tpl.num_shards,
        scale_sqrt_depth=True,
      ),
      embedding.PositionalEmbeddingLayer.Params().Set(embedding_dim=p.model_dim),
    ]
    if p.input_dropout_prob:
      layers.append(dropout.DropoutLayer.Params().Set(keep_prob=1.0 - p.input_dropout_prob))
    block = transformer.TransformerLayer.Params().Set(
      input_dim=p.model_dim,
      hidden_dim=p.hidden_dim,
      num_heads=p.num_heads,
      is_causal=True,
      residual_dropout_prob=p.residual_dropout_prob,
      atten_dropout_prob=p.atten_dropout_prob,
      relu_dropout_prob=p.relu_dropout_prob,
    )
    if p.ff_init_depth_exponent:
      scale = p.num_layers**-p.ff_init_depth_exponent
      block.tr_fflayer_tpl.fflayer_tpl.params_init = weight_params.WeightInit.Xavier(scale)
    sub = transformer.TransformerLayer.InLayers(block, p.layers_per_block)
    layers.append(sequential.SequentialLayer.Params().Set(sub=sub, repeat=p.num_layers))
    if p.final_layer_norm:
      layers.append(norm.LayerNorm.Params().Set(input_dim=p.model_dim))
    layers.append(p.softmax_tpl.Copy().Set(input_dim=p.model_dim, num_classes=p.vocab_size))
    self.CreateChild('stack', p.stack.Copy().Set(sub=layers))

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns the ids; for packed rows also None (paddings), segment ids and positions."""
    if 'segment_ids' not in input_batch:
      return (input_batch.ids,)
    return input_batch.ids, None, input_batch.segment_ids, input_batch.segment_pos

  def InferenceSignatures(self, batch_spec: nested_map.NestedMap) -> dict[str, task.Signature]:
    """Returns the signatures of an export, for rows of any length without segments.

    `serving_default` maps ids [batch, time] to logits [batch, time, vocab] of the token after each
    id. `next_token` maps ids [batch, time] and lengths [batch] to log_probs [batch, vocab]
    (float32) of the token after the first `lengths` ids; later ids are ignored.
    """
    batch = batch_spec.ids.shape[0]
    ids = tf.TensorSpec([batch, None], batch_spec.ids.dtype)
    signatures = super().InferenceSignatures(nested_map.NestedMap(ids=ids))

    def NextToken(
      theta: nested_map.NestedMap, inputs: nested_map.NestedMap
    ) -> dict[str, tf.Tensor]:
      logits = self.PredictInOrder(theta, nested_map.NestedMap(ids=inputs.ids))
      last = tf.gather(logits, inputs.lengths - 1, axis=1, batch_dims=1)
      return {'log_probs': tf.nn.log_softmax(tf.cast(last, tf.float32))}

    lengths = tf.TensorSpec([batch], tf.int32)
    signatures['next_token'] = task.Signature({'ids': ids, 'lengths': lengths}, NextToken)
    return signatures

  def InferenceOutputs(self, predictions: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the logits [batch, time, vocab]."""
    return {'logits': predictions}

  def Generate(
    self,
    prompts: np.ndarray,
    num_tokens: int,
    *,
    lengths: np.ndarray | None = None,
    examples: np.ndarray | None = None,
    **settings: Any,
  ) -> np.ndarray:
    """Continues prompts through the pipeline, with cached keys and values.

    Args:
      prompts: integers [batch, time] in [0, vocab_size).
      num_tokens: number of tokens to add. Positions beyond the length of training examples are
        valid, but the model has not learned them.
      lengths: int [batch], number of tokens used of each prompt; None: all.
      examples: int [batch], a number for each example that seeds its draws; None: its row.
      **settings: values that override `p.sampling`, for example `temperature=0`.

    Returns:
      int32 [batch, num_tokens]; see `sampling.Generate`.
    """
    pipeline = self.stack
    prompts = np.asarray(prompts)
    self._CheckIds('prompts', prompts)
    max_length = prompts.shape[-1] + num_tokens

    def Inputs(ids: np.ndarray) -> tuple[Any, ...]:
      return self.PipelineInputs(nested_map.NestedMap(ids=tf.constant(ids)))

    return sampling.Generate(
      lambda ids: pipeline.Prefill(*Inputs(ids), max_length=max_length, last_only=True),
      lambda states, ids, t: pipeline.ExtendStep(states, *Inputs(ids), time_step=t),
      prompts,
      num_tokens,
      self.params.sampling.Copy().Set(**settings),
      lengths=lengths,
      examples=examples,
    )


class ByteTransformerLm(TransformerLm):
  """A TransformerLm over bytes that reports bits per byte and continues text."""

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: tf.Tensor, input_batch: nested_map.NestedMap
  ) -> tuple[task.Metrics, dict[str, tf.Tensor]]:
    """Computes the loss with bits per byte instead of bits per token."""
    metrics, per_example = super().ComputeLoss(theta, predictions, input_batch)
    metrics['bits_per_byte'] = metrics.pop('bits_per_token')
    return metrics, per_example

  def Report(self, metrics: dict[str, float], input_generator: Any) -> str:
    """Returns bits per byte and the order-0 entropy of the same bytes, as text."""
    return (
      f'{metrics["bits_per_byte"]:.3f} bits per byte; order-0 entropy of the same bytes: '
      f'{input_generator.ByteEntropy():.3f}'
    )

  def Decode(self, input_batch: nested_map.NestedMap, input_generator: Any) -> dict[str, Any]:
    """Continues the first half of each window; returns prompt, continuation and reference texts."""
    del input_generator
    ids, labels = np.asarray(input_batch.ids), np.asarray(input_batch.labels)
    half = -(-ids.shape[1] // 2)
    # The label of the prompt's last id is the first id after the prompt.
    targets, is_text = labels[:, half - 1 :], np.asarray(input_batch.weights)[:, half - 1 :] > 0
    continuations = self.Generate(
      ids[:, :half], targets.shape[1], examples=input_batch.get('example_index')
    )
    return {
      'prompt': [_Text(row) for row in ids[:, :half]],
      'continuation': [_Text(row) for row in continuations],
      'reference': [_Text(row[mask]) for row, mask in zip(targets, is_text, strict=True)],
    }

  def DecodeFinalize(self, decoded: dict[str, list[Any]]) -> dict[str, float | str]:
    """Returns the mean length of the common prefix of continuation and reference, in characters."""
    pairs = zip(decoded['continuation'], decoded['reference'], strict=True)
    matched = [len(os.path.commonprefix(pair)) for pair in pairs]
    return {'matched_prefix_length': float(np.mean(matched))}


def _Text(tokens: np.ndarray) -> str:
  return bytes(tokens.astype(np.uint8)).decode('utf-8', errors='replace')
