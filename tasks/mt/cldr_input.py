# SPDX-License-Identifier: Apache-2.0
"""Names from CLDR as sentence pairs: 100 languages and more into English. No download."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import (
  hyperparams,
  parallel_text,
  sentence_pairs,
  sentencepiece_tokenizer,
  sentencepiece_training,
)
from tasks.mt import cldr_names

# Characters that are rarer get no piece of their own: bytes spell them. Chinese has many.
_CHARACTER_COVERAGE = 0.995


class CldrInput(parallel_text.ParallelText):
  """Pairs of a name in some language and the same in English; see `cldr_names`.

  The vocabulary is one for all languages, whichever of them `p.languages` takes. Where there is no
  `p.vocab_filepath` yet, it is trained at the first use, on all names of train.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a CldrInput."""
    p = super().Params()
    p.Define('split', 'train', f'Which names: {", ".join(cldr_names.SPLITS)}.')
    p.Define('languages', [], 'Codes of languages beside English; empty: all there are.')
    p.Define('min_names', 800, 'Languages with fewer names are not used, nor for the vocabulary.')
    p.Define(
      'max_names', {}, "{'fr': 100}: of this language's names in the split a choice of so many."
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._CheckInteger('min_names', minimum=1)
    p = self.params
    if p.split not in cldr_names.SPLITS:
      raise ValueError(
        f'{self._Where("split")}: expected {" or ".join(cldr_names.SPLITS)}, got {p.split!r}'
      )

  @functools.cached_property
  def tokenizer(self) -> sentencepiece_tokenizer.SentencePieceTokenizer:
    """The vocabulary, trained and written where there is none yet."""
    p = self.params
    if p.vocab_filepath and not tf.io.gfile.exists(p.vocab_filepath):
      logging.info('training the vocabulary %s', p.vocab_filepath)
      sentencepiece_training.Train(
        self.VocabularyTexts(),
        p.vocab_filepath.removesuffix('.model'),
        p.vocab_size,
        character_coverage=_CHARACTER_COVERAGE,
        control_symbols=self.ControlSymbols(),
      )
    return super().tokenizer

  def VocabularyTexts(self) -> Iterator[str]:
    """The names of train in all languages, and for each of them its English one."""
    english = cldr_names.Names(cldr_names.ENGLISH)
    for language in cldr_names.Languages(self.params.min_names):
      names = cldr_names.Names(language)
      for entry in cldr_names.Entries(language, 'train'):
        yield names[entry]
        yield english[entry]

  def ControlSymbols(self) -> list[str]:
    """The symbols of all languages."""
    languages = (cldr_names.ENGLISH, *cldr_names.Languages(self.params.min_names))
    return [parallel_text.LanguageSymbol(language) for language in languages]

  def _Pairs(self) -> Iterator[sentence_pairs.SentencePair]:
    p = self.params
    english = cldr_names.Names(cldr_names.ENGLISH)
    for language in self._Languages():
      names = cldr_names.Names(language)
      for entry in cldr_names.Entries(language, p.split, p.max_names.get(language)):
        yield sentence_pairs.SentencePair(
          language, cldr_names.ENGLISH, names[entry], english[entry]
        )

  def _SourceParts(self) -> list[Any]:
    p = self.params
    languages = self._Languages()
    return [cldr_names.Fingerprint(languages), languages, p.split, sorted(p.max_names.items())]

  def _Languages(self) -> list[str]:
    p = self.params
    known = cldr_names.Languages(p.min_names)
    chosen = list(p.languages or known)
    for name, codes in (('languages', chosen), ('max_names', p.max_names)):
      if unknown := sorted(set(codes) - set(known)):
        raise ValueError(
          f'{self._Where(name)}: {", ".join(unknown)} are not among the {len(known)} languages '
          f'with min_names {p.min_names}: {" ".join(known)}'
        )
    return chosen
