# SPDX-License-Identifier: Apache-2.0
"""KerasHub's encoders, encoder-decoders and models of images, tiny and random.

They need the extra `keras_hub`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tools.keras_zoo.case import Case
from tools.keras_zoo.hub import Backbone, Task

_BERT = {
  'vocabulary_size': 20,
  'num_layers': 3,
  'num_heads': 2,
  'hidden_dim': 16,
  'intermediate_dim': 32,
  'max_sequence_length': 10,
}
_FNET = {k: v for k, v in _BERT.items() if k != 'num_heads'}
_ELECTRA = {k: v for k, v in _BERT.items() if k != 'vocabulary_size'}
_T5 = {k: v for k, v in _BERT.items() if k != 'max_sequence_length'}
_WHISPER = {
  **_T5,
  'num_mels': 4,
  'max_encoder_sequence_length': 8,
  'max_decoder_sequence_length': 8,
}
_MOONSHINE = {
  'vocabulary_size': 20,
  'filter_dim': 8,
  'encoder_num_layers': 2,
  'decoder_num_layers': 2,
  'hidden_dim': 16,
  'intermediate_dim': 16,
  'encoder_num_heads': 2,
  'decoder_num_heads': 2,
}


def _Ids(limit: int) -> Any:
  """Returns a function that makes ids below a limit."""
  return lambda random, shape: random.randint(0, limit, shape).astype('int32')


def _Positions(random: Any, shape: Any) -> Any:
  """Returns the positions to predict, ascending."""
  return np.sort(random.randint(0, shape[1], shape), axis=1).astype('int32')


_INPUTS = {'segment_ids': _Ids(2), 'mask_positions': _Positions}


def _Case(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> Case:
  """Returns the row of a backbone."""
  make = functools.partial(Backbone, name, config)
  return Case(row, make, **{'inputs': _INPUTS, **fields})


def _Texts(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> list[Case]:
  """Returns the rows of an encoder of texts: backbone, classifier and masked language model."""
  fields = {'inputs': _INPUTS, **fields}
  return [
    Case(row, functools.partial(Backbone, name, config), **fields),
    Case(
      f'{row}, classifier',
      functools.partial(Task, name, 'TextClassifier', config, num_classes=3),
      **fields,
    ),
    Case(f'{row}, masked LM', functools.partial(Task, name, 'MaskedLM', config), **fields),
  ]


_TEXTS = [
  *_Texts('BERT', 'Bert', _BERT),
  *_Texts('RoBERTa', 'Roberta', _BERT),
  *_Texts('XLM-R', 'XLMRoberta', _BERT),
  *_Texts('DistilBERT', 'DistilBert', _BERT),
  *_Texts('ALBERT', 'Albert', {**_BERT, 'embedding_dim': 8, 'num_groups': 1}),
  *_Texts('DeBERTa v3', 'DebertaV3', {**_BERT, 'bucket_size': 4}),
  _Case('ELECTRA', 'Electra', {**_ELECTRA, 'vocab_size': 20, 'embedding_dim': 8}),
  *_Texts('FNet', 'FNet', _FNET),
]

_SEQUENCES = [
  _Case('T5', 'T5', _T5),
  _Case('T5, untied', 'T5', {**_T5, 'tie_embedding_weights': False}),
  Case('T5, LM', functools.partial(Task, 'T5', 'Seq2SeqLM', _T5)),
  _Case('BART', 'Bart', _BERT),
  Case('BART, LM', functools.partial(Task, 'Bart', 'Seq2SeqLM', _BERT)),
  _Case('Whisper', 'Whisper', _WHISPER),
]

CASES = [*_TEXTS, *_SEQUENCES]
