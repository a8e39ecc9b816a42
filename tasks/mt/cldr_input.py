# SPDX-License-Identifier: Apache-2.0
"""Names from CLDR as sentence pairs of over 100 languages and English; needs no download."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import (
  domain,
  hyperparams,
  parallel_text,
  sentence_pairs,
  sentencepiece_tokenizer,
  sentencepiece_training,
)
from tasks.mt import cldr_names

# The rarest characters, of which Chinese has many, are spelled by bytes.
_CHARACTER_COVERAGE = 0.995


class CldrInput(parallel_text.ParallelText):
  """Pairs of names in another language and in English; see `cldr_names`.

  All languages share one vocabulary, which does not depend on `p.languages`. If `p.vocab_filepath`
  does not exist, the vocabulary is trained on first use, on all names of the train split.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a CldrInput."""
    p = super().Params()
    p.Define(
      'split',
      'train',
      f'Which names: {", ".join(cldr_names.SPLITS)}.',
      domain.OneOf(*cldr_names.SPLITS),
    )
    p.Define(
      'languages', [], 'Codes of the languages other than English; empty: all.', domain.STRINGS
    )
    p.Define(
      'min_names',
      800,
      'Minimum number of names of a language, also for the vocabulary.',
      domain.Int(1),
    )
    p.Define(
      'max_names',
      {},
      "{'fr': 100}: use a random choice of 100 of the names of fr in the split.",
      domain.DictOf(domain.STR, domain.COUNT),
    )
    return p

  @functools.cached_property
  def tokenizer(self) -> sentencepiece_tokenizer.SentencePieceTokenizer:
    """The vocabulary; trained and written first if its file does not exist."""
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
    """Yields the train names of all languages, each followed by its English name."""
    english = cldr_names.Names(cldr_names.ENGLISH)
    for language in cldr_names.Languages(self.params.min_names):
      names = cldr_names.Names(language)
      for entry in cldr_names.Entries(language, 'train'):
        yield names[entry]
        yield english[entry]

  def ControlSymbols(self) -> list[str]:
    """Returns the symbols of all languages."""
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
    languages = list(p.languages or known)
    for name, codes in (('languages', languages), ('max_names', p.max_names)):
      if unknown := sorted(set(codes) - set(known)):
        raise ValueError(
          f'{self._Context(name)}: {", ".join(unknown)} are not among the {len(known)} languages '
          f'with min_names {p.min_names}: {" ".join(known)}'
        )
    return languages
