# SPDX-License-Identifier: Apache-2.0
"""Language modelling on texts of TensorFlow Datasets, such as lm1b."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.text import text_tokens
from lingvo_gpipe.input.tfds import tfds_builder

_OFFLINE = 'lm.stdlib.ByteTransformerGPipe2'


class TfdsTextInput(text_tokens.TextTokensInput):
  """Documents from a split of a data set whose examples have a text.

  Set p.cache_dir for all but small data sets: tokenising the 30 million sentences of lm1b takes a
  while, and 4 GB.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('dataset', '', 'Name of the data set in TFDS.', tfds_builder.DATASET)
    p.Define('split', 'train', 'Split of the data set, such as train[:90%].')
    p.Define('data_dir', '', 'Directory of the prepared data set; empty: the default of TFDS.')
    p.Define('feature', 'text', 'The feature that is the text.')
    tf_records.DefinePolicy(p)
    return p

  @functools.cached_property
  def _builder(self) -> Any:
    """The prepared builder; ValueError that says how to fix it if there is none."""
    p = self.params
    builder = tfds_builder.LoadPrepared(
      p.dataset,
      p.data_dir,
      self._Context('dataset'),
      offline=f'--model={_OFFLINE} needs no data set, and input.num_fake_examples:1000 trains on '
      'random tokens, for measuring time',
    )
    tfds_builder.CheckFeature(builder, p.feature, tfds.features.Text, self._Context('feature'))
    return builder

  def _Documents(self) -> Iterator[str]:
    p = self.params
    context = self._Context('damaged_records')
    for (text,) in tfds_builder.Texts(
      self._builder, p.split, [p.feature], context, p.damaged_records
    ):
      yield text

  def NumDamaged(self) -> int:
    """See the base class."""
    return self._num_damaged

  @functools.cached_property
  def _num_damaged(self) -> int:
    p = self.params
    if p.damaged_records == 'stop' or p.num_fake_examples:
      return 0
    return tfds_builder.NumDamaged(self._builder, p.split, self._Context('damaged_records'))

  def _SourceParts(self) -> list[Any]:
    p = self.params
    info = self._builder.info
    size = tfds_builder.NumExamples(self._builder, p.split, self._Context('split'))
    parts = ['tfds', tfds_builder.ORDER, info.full_name, str(info.file_format)]
    parts += [p.split, p.feature, size]
    # A cache made with skip must not hide damage from a run that should stop.
    return parts + (['skip'] if p.damaged_records == 'skip' else [])
