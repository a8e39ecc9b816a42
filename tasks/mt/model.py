# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder Transformers for translation, pipelined from the embeddings to the softmax."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import (
  batches,
  beam_search,
  domain,
  embedding,
  hyperparams,
  nested_map,
  norm,
  pipelining_layer,
  sequential,
  task,
  transformer,
  transformer_decoder,
  translation_metrics,
)
from tasks.mt import layers as mt_layers

_IDS = ('src_ids', 'tgt_ids', 'tgt_labels')


class TransformerMt(task.BaseTask):
  """T(num_layers, hidden_dim, num_heads): predicts the target's next token from source and target.

  The model is one flat list of layers: the embedding of source and target, num_layers encoder
  layers, a norm, num_layers decoder layers, a norm and the softmax. All are pre-LayerNorm.

  Batches have, each [batch, source time] or [batch, target time], the int32 tensors `src_ids`,
  `tgt_ids` (begins with a start or language token) and `tgt_labels` (ends with the end token), and
  the float32 tensors `src_paddings` and `tgt_paddings` (1 at padding) and `tgt_weights`.

  The weight matrices have num_layers (12 d w + 4 d H) entries, with d = model_dim, H = hidden_dim
  and w = num_heads * dim_per_head: 4 d w + 2 d H in an encoder layer and 8 d w + 2 d H in a decoder
  layer. For each pair of encoder and decoder layer, biases have 9 w + 2 H + 5 d and norms 10 d
  entries; the two final norms have 4 d.
  """

  loss_unit = 'tokens'

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: sizes of the model, and `stack`, the pipeline."""
    p = super().Params()
    p.Define('vocab_size', 64_000, 'Number of token ids, shared by source and target.', domain.SIZE)
    p.Define('model_dim', 1024, 'Size of the vectors between layers.', domain.SIZE)
    p.Define('hidden_dim', 8192, 'Size of the feed-forward hidden layers: H.', domain.SIZE)
    p.Define('num_heads', 16, 'A: number of attention heads.', domain.SIZE)
    p.Define(
      'dim_per_head',
      64,
      'Size of a head; the attention width is num_heads * dim_per_head.',
      domain.SIZE,
    )
    p.Define(
      'num_layers', 6, 'L: number of encoder layers, and of decoder layers.', domain.NUM_LAYERS
    )
    p.Define(
      'share_embedding', True, 'Whether source and target share one table; the softmax has its own.'
    )
    p.Define(
      'label_smoothing',
      0.0,
      'In training, total target probability of the wrong tokens.',
      domain.PROBABILITY,
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
      'Dropout probability of the feed-forward hidden layers.',
      domain.PROBABILITY,
    )
    p.Define('encoder_tpl', transformer.TransformerLayer.Params(), 'Template of encoder layers.')
    p.Define(
      'decoder_tpl',
      transformer_decoder.TransformerDecoderLayer.Params(),
      'Template of the decoder layers.',
    )
    p.Define('softmax_tpl', embedding.SimpleFullSoftmax.Params(), 'Template of the softmax.')
    p.Define(
      'beam_search',
      beam_search.BeamSearch.Params(),
      'The beam search; target_seq_len 0: at most twice the length of the padded source.',
    )
    p.Define(
      'stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline; the task sets `sub`.'
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._search = p.beam_search.Instantiate()
    self.CreateChild('stack', p.stack.Copy().Set(sub=self._Layers()))

  def _Layers(self) -> list[hyperparams.InstantiableParams]:
    p = self.params
    sizes = {
      'input_dim': p.model_dim,
      'hidden_dim': p.hidden_dim,
      'num_heads': p.num_heads,
      'atten_hidden_dim': p.num_heads * p.dim_per_head,
      'residual_dropout_prob': p.residual_dropout_prob,
      'atten_dropout_prob': p.atten_dropout_prob,
      'relu_dropout_prob': p.relu_dropout_prob,
    }
    embeddings = mt_layers.TranslationEmbeddingLayer.Params().Set(
      vocab_size=p.vocab_size,
      embedding_dim=p.model_dim,
      share_embedding=p.share_embedding,
      input_dropout_prob=p.input_dropout_prob,
    )

    def Encoder(body: hyperparams.InstantiableParams) -> hyperparams.InstantiableParams:
      return mt_layers.EncoderLayer.Params().Set(body=body)

    return [
      embeddings,
      *[Encoder(p.encoder_tpl.Copy().Set(**sizes)) for _ in range(p.num_layers)],
      Encoder(norm.LayerNorm.Params().Set(input_dim=p.model_dim)),
      *[p.decoder_tpl.Copy().Set(**sizes) for _ in range(p.num_layers)],
      mt_layers.DecoderOutputLayer.Params().Set(input_dim=p.model_dim),
      p.softmax_tpl.Copy().Set(input_dim=p.model_dim, num_classes=p.vocab_size),
    ]

  def CheckBatch(self, input_batch: nested_map.NestedMap) -> None:
    """Raises ValueError for ids outside [0, vocab_size).

    Without this check a gather compiled by XLA would silently take the nearest row of the table.
    """
    for name in _IDS:
      values = input_batch[name]
      low, high = batches.Range(values)
      if low < 0 or high >= self.params.vocab_size:
        raise ValueError(
          f'{self.path}: {name} must lie in [0, {self.params.vocab_size}), got {low} ... {high}; '
          'check the input generator and its vocabulary, or set vocab_size'
        )

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns (source ids, source paddings, target ids, target paddings), paddings as booleans."""
    return (
      input_batch.src_ids,
      input_batch.src_paddings > 0.5,
      input_batch.tgt_ids,
      input_batch.tgt_paddings > 0.5,
    )

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns labels and weights of the target, each [batch, target time]."""
    return nested_map.NestedMap(
      tgt_labels=input_batch.tgt_labels, tgt_weights=input_batch.tgt_weights
    )

  def LossWeight(self, input_batch: nested_map.NestedMap) -> tf.Tensor:
    """Returns the number of predicted tokens."""
    return tf.reduce_sum(input_batch.tgt_weights)

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: tf.Tensor, input_batch: nested_map.NestedMap
  ) -> tuple[task.Metrics, dict[str, tf.Tensor]]:
    """Computes the cross entropy of logits [batch, target time, vocab], in nats per token.

    In training, `loss` has smoothed targets. `log_pplx`, and `loss` in evaluation, have not.
    """
    del theta
    labels = input_batch.tgt_labels
    xent = embedding.XentLossFromLogits(predictions, labels)
    weights = tf.cast(input_batch.tgt_weights, xent.dtype)
    total = tf.reduce_sum(weights)

    def Mean(values: tf.Tensor) -> tf.Tensor:
      return tf.math.divide_no_nan(tf.reduce_sum(tf.cast(values, xent.dtype) * weights), total)

    smoothing = 0.0 if self.do_eval else self.params.label_smoothing
    smoothed = embedding.XentLossFromLogits(predictions, labels, smoothing) if smoothing else xent
    hits = embedding.Hits(predictions, labels)
    metrics = {
      'loss': (Mean(smoothed), total),
      'log_pplx': (Mean(xent), total),
      'accuracy': (Mean(hits), total),
    }
    return metrics, {'xent': tf.reduce_sum(xent * weights, axis=-1)}

  # ---- inference -------------------------------------------------------------------------------

  def InferenceSignatures(self, batch_spec: nested_map.NestedMap) -> dict[str, task.Signature]:
    """Returns the signatures of an export, for sentences of any length.

    `serving_default` maps src_ids, src_paddings, tgt_ids and tgt_paddings, each [batch, source
    time] or [batch, target time], to log_probs [batch, target time, vocab] of the token after each
    of tgt_ids. `greedy` maps src_ids, src_paddings and first_ids [batch], the first tokens of the
    targets, to ids [batch, length], int32: the most likely token at each position, padded after the
    end of the sentence. The length is `beam_search.target_seq_len`, or twice the longest source in
    training.
    """

    def AnyLength(spec: tf.TensorSpec) -> tf.TensorSpec:
      return tf.TensorSpec([spec.shape[0], *[None] * (spec.shape.rank - 1)], spec.dtype)

    free = batch_spec.Transform(AnyLength)
    signatures = super().InferenceSignatures(free)
    length = self.params.beam_search.target_seq_len or 2 * batch_spec.src_ids.shape[1]
    specs = {
      'src_ids': free.src_ids,
      'src_paddings': free.src_paddings,
      'first_ids': tf.TensorSpec([free.src_ids.shape[0]], tf.int32),
    }
    signatures['greedy'] = task.Signature(
      specs, lambda theta, inputs: {'ids': self._Greedy(theta, inputs, length)}
    )
    return signatures

  def InferenceOutputs(self, predictions: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the float32 log_probs [batch, target time, vocab]."""
    return {'log_probs': tf.nn.log_softmax(tf.cast(predictions, tf.float32))}

  def _Greedy(
    self, theta: nested_map.NestedMap, inputs: nested_map.NestedMap, length: int
  ) -> tf.Tensor:
    """Decodes greedily without a pipeline; returns ids [batch, length]."""
    layers, thetas, eos = (
      self.stack.layers,
      theta.stack.layers,
      self.params.beam_search.target_eos_id,
    )
    first = inputs.first_ids[:, tf.newaxis]
    args = inputs.src_ids, inputs.src_paddings > 0.5, first, tf.zeros_like(first, tf.bool)
    logits, states = sequential.PrefillLayers(layers, thetas, *args, max_length=length)

    def BestIds(logits: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
      ids = tf.argmax(logits[:, 0], axis=-1, output_type=tf.int32)
      return tf.where(done, tf.zeros_like(ids), ids)

    none_done = tf.zeros_like(inputs.first_ids, tf.bool)
    ids = BestIds(logits, none_done)

    def Step(
      time_step: tf.Tensor, ids: tf.Tensor, done: tf.Tensor, states: Any, outputs: Any
    ) -> Any:
      outputs = outputs.write(time_step - 1, ids)
      done |= ids == eos
      args = None, None, ids[:, tf.newaxis], None
      logits, states = sequential.ExtendStepLayers(
        layers, thetas, states, *args, time_step=time_step
      )
      return time_step + 1, BestIds(logits, done), done, states, outputs

    outputs = tf.TensorArray(tf.int32, length, element_shape=ids.shape)
    start = tf.constant(1), ids, none_done, states, outputs
    *_, ids, _, _, outputs = tf.while_loop(lambda t, *_: t < length, Step, start)
    return tf.transpose(outputs.write(length - 1, ids).stack())

  # ---- decoding --------------------------------------------------------------------------------

  def Translate(self, input_batch: nested_map.NestedMap) -> beam_search.Hypotheses:
    """Translates a batch by beam search, through the pipeline with cached keys and values.

    Args:
      input_batch: a batch. Only the first ids of the target are used: the start of a sentence, or
        the target language.
    """
    pipeline = self.pipeline
    assert pipeline is not None
    max_length = self.params.beam_search.target_seq_len or 2 * input_batch.src_ids.shape[1]

    def ExtendStep(states: Any, ids: np.ndarray, time_step: int) -> tuple[Any, Any]:
      return pipeline.ExtendStep(states, None, None, ids, None, time_step=time_step)

    first_ids = input_batch.tgt_ids[:, :1]
    # Encode the source once for all hypotheses.
    logits, states = pipeline.Prefill(
      input_batch.src_ids,
      input_batch.src_paddings > 0.5,
      first_ids,
      tf.zeros(first_ids.shape, tf.bool),
      max_length=max_length,
      last_only=True,
    )
    return self._search.Search(
      logits,
      states,
      ExtendStep,
      pipeline.ReorderStates,
      first_time_step=1,
      target_seq_len=max_length,
    )

  def Decode(self, input_batch: nested_map.NestedMap, input_generator: Any) -> dict[str, Any]:
    """Translates each example; returns texts, languages and the score of the hypothesis."""
    hypotheses = self.Translate(input_batch)
    is_example = np.asarray(input_batch.example_weights) > 0
    pairs = iter(input_generator.SentencePairs(input_batch))
    rows = []
    for i, is_real in enumerate(is_example):
      pair = next(pairs) if is_real else None
      rows.append(
        {
          'source': pair.source if pair else '',
          'hypothesis': input_generator.Text(hypotheses.Best(i)) if pair else '',
          'reference': pair.target if pair else '',
          'source_language': pair.source_language if pair else '',
          'target_language': pair.target_language if pair else '',
          'score': float(hypotheses.scores[i, 0]),
        }
      )
    return {name: [row[name] for row in rows] for name in rows[0]}

  def DecodeFinalize(self, decoded: dict[str, list[Any]]) -> dict[str, float | str]:
    """Returns BLEU, chrF and the share of exact matches, as means over the pairs of languages.

    For several pairs of languages there are also metrics of each pair, such as `bleu/de-en`.
    """
    languages = decoded['source_language'], decoded['target_language']
    hypotheses, references = decoded['hypothesis'], decoded['reference']
    by_pair = translation_metrics.ScoresByPair(hypotheses, references, *languages)
    metrics = translation_metrics.Metrics(by_pair)
    exact: dict[tuple[str, str], list[bool]] = {}
    for source, target, hypothesis, reference in zip(
      *languages, hypotheses, references, strict=True
    ):
      exact.setdefault((source, target), []).append(hypothesis == reference)
    shares = {f'{a}-{b}': statistics.fmean(hits) for (a, b), hits in sorted(exact.items())}
    metrics['exact'] = statistics.fmean(shares.values())
    if len(shares) > 1:
      metrics |= {f'exact/{pair}': share for pair, share in shares.items()}
    return metrics
