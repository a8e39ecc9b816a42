# SPDX-License-Identifier: Apache-2.0
"""Trains SentencePiece vocabularies with the special tokens of `sentencepiece_tokenizer`."""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.input.text import sentencepiece_tokenizer

MODEL_TYPES = ('unigram', 'bpe')
LEAST_COVERAGE = 0.98  # The minimum that SentencePiece accepts.

# Maximum length of a line; longer ones are split, because SentencePiece drops lines of more than
# 4192 bytes.
_MAX_CHARACTERS = 1000
# The result depends on it (sums are per thread), so it is not the number of cores.
_NUM_THREADS = 16


def Train(
  texts: Iterable[str],
  prefix: str,
  vocab_size: int,
  *,
  model_type: str = 'unigram',
  max_sentences: int = 1_000_000,
  random_seed: int = 0,
  character_coverage: float = 0.9995,
  lossless: bool = False,
  control_symbols: Sequence[str] = (),
  user_defined_symbols: Sequence[str] = (),
  overwrite: bool = False,
) -> sentencepiece_tokenizer.SentencePieceTokenizer:
  """Trains a vocabulary; equal texts and arguments give equal vocabularies.

  Characters without a piece are encoded as their UTF-8 bytes, so that no text is unknown.

  Args:
    texts: of any length; training uses their lines.
    prefix: the files are <prefix>.model and, as text, <prefix>.vocab.
    vocab_size: number of pieces, including special tokens, symbols and 256 bytes.
    model_type: unigram or bpe.
    max_sentences: number of lines to train on, drawn at random.
    random_seed: seed of that draw.
    character_coverage: share of all characters that get their own pieces, 0.98 to 1.
    lossless: keep all characters unchanged, spaces and line ends included, as source code needs.
      Otherwise white space is reduced to single spaces, and characters are normalised (NFKC).
    control_symbols: additional ids that no text contains, such as '<2de>'; they decode to nothing.
    user_defined_symbols: strings that always form one piece.
    overwrite: replace an existing vocabulary.

  Returns:
    The tokenizer of the written model.

  Raises:
    ValueError: there is no text, these texts and arguments allow no such vocabulary, or a
      vocabulary exists and `overwrite` is not set.
    OSError: the files cannot be written.
  """
  if model_type not in MODEL_TYPES:
    raise ValueError(f'model_type: expected {" or ".join(MODEL_TYPES)}, got {model_type!r}')
  if max_sentences < 1:
    raise ValueError(f'max_sentences: expected 1 or more, got {max_sentences}')
  if not LEAST_COVERAGE <= character_coverage <= 1:
    raise ValueError(
      f'character_coverage: expected {LEAST_COVERAGE} to 1, got {character_coverage!r}'
    )
  if tf.io.gfile.exists(f'{prefix}.model') and not overwrite:
    raise ValueError(
      f'{prefix}.model exists: models trained with it will not fit another vocabulary; set '
      'overwrite to replace it anyway'
    )
  library = sentencepiece_tokenizer.Library()
  sentences = _Sample(_Sentences(texts, lossless), max_sentences, random_seed)
  if not sentences:
    raise ValueError('there is no text to train a vocabulary on: every document is empty')
  _MakeFolder(prefix)  # Before training, so that an unwritable path fails early.
  model = io.BytesIO()
  try:
    library.SentencePieceTrainer.Train(
      sentence_iterator=iter(sentences),
      model_writer=model,
      model_type=model_type,
      vocab_size=vocab_size,
      character_coverage=character_coverage,
      byte_fallback=True,
      pad_id=sentencepiece_tokenizer.PAD_ID,
      bos_id=sentencepiece_tokenizer.SOS_ID,
      eos_id=sentencepiece_tokenizer.EOS_ID,
      unk_id=sentencepiece_tokenizer.UNK_ID,
      control_symbols=list(control_symbols),
      user_defined_symbols=list(user_defined_symbols),
      normalization_rule_name='identity' if lossless else 'nmt_nfkc',
      remove_extra_whitespaces=not lossless,
      add_dummy_prefix=not lossless,
      allow_whitespace_only_pieces=lossless,
      shuffle_input_sentence=False,
      num_threads=_NUM_THREADS,
      minloglevel=2,
    )
  except (RuntimeError, ValueError) as e:
    # The message starts with a line of code and its condition; drop them if a reason follows.
    reason = re.sub(r'^.*\] (?=.)', '', str(e)).strip()
    raise ValueError(
      f'no vocabulary of {vocab_size} pieces can be trained on these {len(sentences)} lines: '
      f'{reason}'
    ) from e
  files.WriteWhole(f'{prefix}.model', model.getvalue())
  tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(f'{prefix}.model')
  files.WriteWhole(f'{prefix}.vocab', tokenizer.Text())
  return tokenizer


def _Sentences(texts: Iterable[str], lossless: bool) -> Iterator[str]:
  """Yields the non-empty lines of texts, with long lines in pieces."""
  for text in texts:
    # SentencePiece strips line ends after a line, so they are put before the next line.
    lines = re.findall(r'\n*[^\n]+', text) if lossless else text.splitlines()
    for line in lines:
      if line.strip():
        for begin in range(0, len(line), _MAX_CHARACTERS):
          yield line[begin : begin + _MAX_CHARACTERS]


def _Sample(sentences: Iterable[str], size: int, seed: int) -> list[str]:
  """Returns a random sample of at most `size`: reservoir sampling (Vitter 1985, algorithm R)."""
  generator = random.Random(seed)
  chosen: list[str] = []
  for i, sentence in enumerate(sentences):
    if i < size:
      chosen.append(sentence)
    elif (slot := int(generator.random() * (i + 1))) < size:
      chosen[slot] = sentence
  return chosen


def _MakeFolder(prefix: str) -> None:
  if folder := os.path.dirname(prefix):
    try:
      tf.io.gfile.makedirs(folder)
    except tf.errors.OpError as e:
      raise OSError(f'the folder {folder!r} cannot be created: {e.message}') from e
