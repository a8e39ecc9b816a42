# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs from files: tab-separated lines, or records of tf.Example."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from google.protobuf import message

from lingvo_gpipe.core import domain, hyperparams
from lingvo_gpipe.input import file_pattern
from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.text import parallel_text, sentence_pairs

# The columns of a line, and the features of a record.
FIELDS = sentence_pairs.SentencePair._fields


class _ParallelFiles(parallel_text.ParallelText):
  """Base of the inputs that read files."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input that reads files."""
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Glob of the files, or a list of globs; any tf.io.gfile path.',
      domain.STR | domain.STRINGS,
    )
    return p

  def _Files(self) -> list[tuple[list[str], str]]:
    """Returns for each file the known languages of its pairs, and its path."""
    paths = file_pattern.Files(self.params.file_pattern, self._Context('file_pattern'))
    return [([], path) for path in paths]

  _version: tuple[int, ...] = ()  # Version of the code that reads the files.

  def _FilesParam(self, languages: list[str]) -> str:
    """Returns the param that names a file, for messages; by the known languages of its pairs."""
    return self._Context('pair_files' if languages else 'file_pattern')

  def _SourceParts(self) -> list[Any]:
    return [type(self).__name__, *self._version] + [
      (languages, os.path.basename(path), file_pattern.Digest(path, self._FilesParam(languages)))
      for languages, path in self._Files()
    ]


class TsvPairs(_ParallelFiles):
  """Sentence pairs in lines of UTF-8, without a header and without quotes.

  Files of `p.file_pattern` have four columns: source language, target language, source, target.
  Files of `p.pair_files` hold one pair of languages and have two columns: source, target.
  """

  _version = (file_pattern.LINES_VERSION,)

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input of tab-separated files."""
    p = super().Params()
    p.Define(
      'pair_files',
      [],
      "Lists of source language, target language and glob, such as [['de', 'en', 'de-en.*.tsv']].",
      domain.ListOf(domain.ListOf(domain.STR, 3)),
    )
    return p

  def _Files(self) -> list[tuple[list[str], str]]:
    p = self.params
    files = super()._Files() if p.file_pattern or not p.pair_files else []
    for source, target, pattern in p.pair_files:
      paths = file_pattern.Files(pattern, self._Context('pair_files'))
      files += [([source, target], path) for path in paths]
    return files

  def _Pairs(self) -> Iterator[sentence_pairs.SentencePair]:
    for languages, path in self._Files():
      lines = file_pattern.Lines(path, self._FilesParam(languages))
      for number, line in enumerate(lines, 1):
        context = f'{path}, line {number}'
        columns = line.split('\t')
        if len(languages) + len(columns) != len(FIELDS):
          expected = FIELDS[len(languages) :]
          raise ValueError(
            f'{context}: expected {len(expected)} columns ({", ".join(expected)}), separated by '
            f'tabs, got {len(columns)}: {line[:60]!r}'
          )
        yield _Pair([*languages, *columns], context)


class TfRecordPairs(_ParallelFiles):
  """Sentence pairs in TFRecords of tf.Example.

  Each example has the features source_language, target_language, source and target: a UTF-8 string
  each.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input of TFRecords."""
    p = super().Params()
    tf_records.DefinePolicy(p)
    return p

  def _SourceParts(self) -> list[Any]:
    # A cache made with skip must not hide damage from a run that should stop.
    skips = ['skip'] if self.params.damaged_records == 'skip' else []
    return super()._SourceParts() + skips

  def _Pairs(self) -> Iterator[sentence_pairs.SentencePair]:
    policy, name = self.params.damaged_records, self._Context('damaged_records')
    num_damaged = 0
    for _, path in self._Files():
      for number, record in tf_records.Records(path, name, policy):
        context = f'{path}, record {number}'
        if record is None:
          num_damaged += 1
        else:
          yield _Pair(_Features(record, context), context)
    self._num_damaged_read = num_damaged


def _Features(record: bytes, context: str) -> list[str]:
  try:
    features = tf.train.Example.FromString(record).features.feature
  except message.DecodeError as e:
    raise ValueError(f'{context}: expected a tf.Example, got {record[:40]!r} ...') from e
  values = []
  for name in FIELDS:
    strings = features[name].bytes_list.value if name in features else []
    if len(strings) != 1:
      raise ValueError(
        f'{context}: expected the features {", ".join(FIELDS)}, a string each; {name} has '
        f'{len(strings)} strings, and the record has {sorted(features)}'
      )
    values.append(_Utf8(strings[0], context))
  return values


def _Utf8(text: bytes, context: str) -> str:
  try:
    return text.decode()
  except UnicodeDecodeError as e:
    raise ValueError(f'{context}: not in UTF-8: {e.reason} at byte {e.start}') from e


def _Pair(values: list[str], context: str) -> sentence_pairs.SentencePair:
  pair = sentence_pairs.SentencePair(*values)
  if not pair.source_language or not pair.target_language:
    raise ValueError(f'{context}: expected the name of each language, got {pair}')
  return pair
