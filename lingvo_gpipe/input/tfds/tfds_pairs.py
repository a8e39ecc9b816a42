# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs of TensorFlow Datasets with a Translation, such as wmt14_translate/de-en."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from lingvo_gpipe.core import domain, hyperparams
from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.text import parallel_text, sentence_pairs
from lingvo_gpipe.input.tfds import tfds_builder


class _Source(NamedTuple):
  """A prepared data set and its languages."""

  builder: Any
  source_language: str
  target_language: str
  num_examples: int


class TfdsPairs(parallel_text.ParallelText):
  """A split of a data set of two languages, or of several such data sets.

  The source language is the first of a data set's supervised keys, for example German in
  wmt14_translate/de-en; p.direction reverses it. Set p.cache_dir for all but small data sets.
  """

  # Alternatives without a network: the end of the message about a data set that is not prepared.
  offline = (
    '--model=mt.cldr.Bilingual needs no data set, TsvPairs reads your own files, and '
    'input.num_fake_examples:1000 trains on random tokens, for measuring time'
  )

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a TfdsPairs."""
    p = super().Params()
    p.Define(
      'datasets',
      [],
      'Names of data sets in TFDS.',
      domain.ListOf(tfds_builder.DATASET, not_empty=True),
    )
    p.Define('split', 'train', 'Split of the data sets, such as train[:90%].')
    p.Define('data_dir', '', 'Directory of the prepared data sets; empty: the default of TFDS.')
    tf_records.DefinePolicy(p)
    return p

  @functools.cached_property
  def _sources(self) -> list[_Source]:
    return [self._Find(name) for name in self.params.datasets]

  def _Find(self, name: str) -> _Source:
    """Returns a prepared data set; ValueError with advice if it has no sentence pairs."""
    p = self.params
    context = self._Context('datasets')
    builder = tfds_builder.LoadPrepared(name, p.data_dir, context, self.offline)
    features = builder.info.features
    if not isinstance(features, tfds.features.Translation) or len(features.languages) != 2:
      raise ValueError(
        f'{context}: expected a data set whose examples are a Translation of two languages, got '
        f'{name!r} in {str(builder.data_path)!r} with {" ".join(repr(features).split())}'
      )
    num_examples = tfds_builder.NumExamples(builder, p.split, self._Context('split'))
    source, target = builder.info.supervised_keys or features.languages
    return _Source(builder, source, target, num_examples)

  def _SourceParts(self) -> list[Any]:
    parts: list[Any] = ['tfds', tfds_builder.ORDER, self.params.split]
    for source in self._sources:
      info = source.builder.info
      languages = (source.source_language, source.target_language)
      parts.append((info.full_name, str(info.file_format), *languages, source.num_examples))
    # A cache made with skip must not hide damage from a run that should stop.
    return parts + (['skip'] if self.params.damaged_records == 'skip' else [])

  def _Pairs(self) -> Iterator[sentence_pairs.SentencePair]:
    p, context = self.params, self._Context('damaged_records')
    num_damaged = 0
    for builder, source, target, num_examples in self._sources:
      num_read = 0
      for texts in tfds_builder.Texts(
        builder, p.split, (source, target), context, p.damaged_records
      ):
        yield sentence_pairs.SentencePair(source, target, *texts)
        num_read += 1
      num_damaged += num_examples - num_read
    self._num_damaged_read = num_damaged
