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
LEAST_COVERAGE = 0.98  # SentencePiece takes no less.

# Longer lines are cut: SentencePiece would leave out those of more than 4192 bytes.
_MAX_CHARACTERS = 1000
# The result depends on it (sums are per thread), and so it is not that of the machine.
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
  """Trains a vocabulary; the same texts and arguments give the same one.

  Characters that it lacks become their bytes in UTF-8, so that no text is unknown.

  Args:
    texts: of any length; lines are what is trained on.
    prefix: the files are <prefix>.model and, as text, <prefix>.vocab.
    vocab_size: the number of pieces, special tokens, symbols and 256 bytes included.
    model_type: unigram or bpe.
    max_sentences: trained on a random choice of so many lines out of all.
    random_seed: of that choice.
    character_coverage: the share of all characters that get pieces of their own, 0.98 to 1.
    lossless: keep all characters as they are, spaces and line ends included, as source code needs.
      Else white space becomes one space, and characters their usual form (NFKC).
    control_symbols: further ids that no text contains, such as '<2de>'; they decode to nothing.
    user_defined_symbols: strings that are one piece wherever a text contains them.
    overwrite: replace a vocabulary that is there already.

  Returns:
    The tokenizer of the written model.

  Raises:
    ValueError: no text, these texts and arguments allow no such vocabulary, or there is one already
      and `overwrite` is not set.
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
      f'{prefix}.model is there already: what was trained with it will not fit another one; set '
      'overwrite to replace it all the same'
    )
  library = sentencepiece_tokenizer.Library()
  sentences = _Sample(_Sentences(texts, lossless), max_sentences, random_seed)
  if not sentences:
    raise ValueError('there is no text to train a vocabulary on: every document is empty')
  _MakeFolder(prefix)  # Training may take long: what hinders writing shows before it.
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
    # Before the reason stand a line of code and its condition; they alone say more than nothing.
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
  """The lines of texts that are not empty, long ones in pieces."""
  for text in texts:
    # SentencePiece cuts line ends off behind a line, so they stand before it.
    lines = re.findall(r'\n*[^\n]+', text) if lossless else text.splitlines()
    for line in lines:
      if line.strip():
        for begin in range(0, len(line), _MAX_CHARACTERS):
          yield line[begin : begin + _MAX_CHARACTERS]


def _Sample(sentences: Iterable[str], size: int, seed: int) -> list[str]:
  """A random choice of at most `size`: reservoir sampling (Vitter 1985, algorithm R)."""
  generator = random.Random(seed)
  chosen: list[str] = []
  for i, sentence in enumerate(sentences):
    if i < size:
      chosen.append(sentence)
    elif (place := int(generator.random() * (i + 1))) < size:
      chosen[place] = sentence
  return chosen


def _MakeFolder(prefix: str) -> None:
  if folder := os.path.dirname(prefix):
    try:
      tf.io.gfile.makedirs(folder)
    except tf.errors.OpError as e:
      raise OSError(f'the folder {folder!r} cannot be made: {e.message}') from e
