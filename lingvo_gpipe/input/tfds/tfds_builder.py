# SPDX-License-Identifier: Apache-2.0
"""Prepared data sets of TensorFlow Datasets, with errors that say how to prepare them.

Nothing is ever downloaded here: the data sets are prepared once by `PrepareCommand`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe.input.records import tf_records

# What identifies the order in which `Examples` gives them; it was another one in older stores.
ORDER = 'file by file'

_READ_AT_ONCE = 1000


def PrepareCommand(dataset: str, data_dir: str = '') -> str:
  """The command for a shell that downloads and prepares a data set of TFDS.

  TFDS's own program `tfds build` needs apache_beam, which is no dependency of this project.

  Args:
    dataset: its name, with a config where it needs one.
    data_dir: where to; '': TFDS's own place.
  """
  arguments = json.dumps(dataset)  # In double quotes, for the shell takes the single ones.
  if data_dir:
    arguments += f', data_dir={json.dumps(data_dir)}'
  code = f'import tensorflow_datasets as tfds; tfds.builder({arguments}).download_and_prepare()'
  return f'python -c {shlex.quote(code)}'


def NumExamples(builder: tfds.core.DatasetBuilder, split: str, where: str) -> int:
  """The number of examples in a split of a prepared data set, such as 'train[:90%]'.

  Args:
    builder: from `LoadPrepared`.
    split: the split.
    where: what names the split in messages, such as 'TfdsImageInput: param split'.

  Raises:
    ValueError: there is no such split.
  """
  try:
    return builder.info.splits[split].num_examples
  except (KeyError, ValueError) as e:
    raise ValueError(
      f'{where}: {builder.info.full_name!r} has the splits {list(builder.info.splits)}, got '
      f'{split!r}'
    ) from e


def LoadPrepared(dataset: str, data_dir: str, where: str, instead: str) -> tfds.core.DatasetBuilder:
  """The builder of a data set that has been prepared.

  Args:
    dataset: its name in TFDS, with a config where it needs one: wmt14_translate/de-en.
    data_dir: where it was prepared; '': TFDS's own place.
    where: what names the data set in messages, such as 'TfdsImageInput: param dataset'.
    instead: what works without a network, the end of a message.

  Raises:
    ValueError: TFDS has no such data set, or it is not prepared; the message says what to do.
  """
  try:
    builder = tfds.builder(dataset, data_dir=data_dir or None)
  except tfds.core.DatasetNotFoundError as e:
    close = difflib.get_close_matches(dataset, tfds.list_builders(), n=3)
    hint = f'; did you mean {" or ".join(close)}?' if close else ''
    raise ValueError(f'{where}: TFDS has no {dataset!r}{hint}') from e
  if builder.is_prepared():
    return builder
  manual = ''
  if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
    manual = ', and maybe files that one has to fetch by hand: it tells which'
  raise ValueError(
    f'{where}: the data set {dataset!r} is not prepared in {builder.data_path.parent}: run '
    f'`{PrepareCommand(dataset, data_dir)}`, which needs a network{manual}. '
    f'Without network: {instead}'
  )


def Texts(
  builder: tfds.core.DatasetBuilder,
  split: str,
  names: Sequence[str],
  where: str,
  damaged: str = 'stop',
) -> Iterator[tuple[str, ...]]:
  """Some texts of each example of a split, in the order of the files.

  Args:
    builder: of the data set.
    split: the split.
    names: features, each a text.
    where: what names the param `damaged` in messages.
    damaged: one of `tf_records.POLICIES`; behind damage 'skip' is slower.

  Raises:
    ValueError: a record is damaged, or damaged ones are to be skipped of files of another format.
  """
  for texts in Examples(builder, split, names, where, damaged):
    yield tuple(text.decode() for text in texts)


def Examples(
  builder: tfds.core.DatasetBuilder,
  split: str,
  names: Sequence[str],
  where: str,
  damaged: str = 'stop',
  decoders: Any = None,
) -> Iterator[tuple[Any, ...]]:
  """Some features of each example of a split, in the order of the files, as NumPy's values.

  Args:
    builder: of the data set.
    split: the split.
    names: features.
    where: as for `Texts`.
    damaged: as for `Texts`.
    decoders: how some of them are decoded, as `as_dataset` of the builder takes it.

  Raises:
    ValueError: as `Texts`.
  """
  if not IsTfRecord(builder):
    _CheckSkips(builder, where, damaged)
    source = builder.as_data_source(split=split, decoders=decoders)
    for i in range(len(source)):
      try:
        example = source[i]
      except RuntimeError as e:
        raise _CannotRead(builder, split, i, e) from e
      yield tuple(example[name] for name in names)
    return
  is_partial = len(names) < len(builder.info.features)
  wanted = tfds.decode.PartialDecoding(dict.fromkeys(names, True), decoders)
  # By itself TFDS takes a few examples of each file in turns.
  dataset = builder.as_dataset(
    split=split,
    shuffle_files=False,
    decoders=wanted if is_partial else decoders,
    read_config=tfds.ReadConfig(interleave_cycle_length=1),
  )
  num_read = 0
  try:
    for examples in dataset.batch(_READ_AT_ONCE).as_numpy_iterator():
      yield from zip(*(examples[name] for name in names), strict=True)
      num_read += len(examples[names[0]])
  except (tf.errors.DataLossError, tf.errors.FailedPreconditionError):  # Of too few, the latter.
    if damaged == 'stop':
      _RaiseDamage(builder, split, where)
      raise
    # tf.data does not go on behind damage. One by one is slower.
    for record in itertools.islice(_SoundRecords(builder, split), num_read, None):
      example = builder.info.features.deserialize_example_np(record, decoders=decoders)
      yield tuple(example[name] for name in names)


def NumDamaged(builder: tfds.core.DatasetBuilder, split: str, where: str) -> int:
  """How many examples of a split are lost to damaged records; reads the files through.

  Raises:
    ValueError: the files are of another format than TFRecord.
  """
  _CheckSkips(builder, where, 'skip')
  if _IsSound(builder, split):
    return 0
  num_sound = sum(1 for _ in _SoundRecords(builder, split))
  return int(builder.info.splits[split].num_examples) - num_sound


def IsTfRecord(builder: tfds.core.DatasetBuilder) -> bool:
  """Whether the files of a prepared data set are TFRecords."""
  return bool(builder.info.file_format == tfds.core.FileFormat.TFRECORD)


def _CheckSkips(builder: tfds.core.DatasetBuilder, where: str, damaged: str) -> None:
  if damaged == 'skip' and not IsTfRecord(builder):
    raise ValueError(
      f'{where}: damaged records are skipped of TFRecord files only, and {builder.info.full_name} '
      f'was prepared as {builder.info.file_format.value}: set it to stop'
    )


def _CannotRead(
  builder: tfds.core.DatasetBuilder, split: str, index: int, error: Exception
) -> ValueError:
  """The error that names the file of an example that cannot be read by its index."""
  place = index
  for part in builder.info.splits[split].file_instructions:
    if place < part.take:
      break
    place -= part.take
  return ValueError(
    f'{part.filename} is damaged: example {index} of {split!r} cannot be read: {error}. '
    'Restore the file'
  )


def _Files(builder: tfds.core.DatasetBuilder, split: str) -> dict[str, int]:
  """{path: how many records the file should have} of the files that a split reads."""
  parts = builder.info.splits[split].file_instructions
  return {str(part.filename): part.examples_in_shard for part in parts}


def _IsSound(builder: tfds.core.DatasetBuilder, split: str) -> bool:
  # To read a file through does not tell that it was cut between two records.
  return all(
    tf_records.IsIntact(path) and len(tf_records.RecordOffsets(path)) - 1 == expected
    for path, expected in _Files(builder, split).items()
  )


def _SoundRecords(builder: tfds.core.DatasetBuilder, split: str) -> Iterator[bytes]:
  for part in builder.info.splits[split].file_instructions:
    for number, record in tf_records.Records(str(part.filename), damaged='skip'):
      if record is not None and part.skip < number <= part.skip + part.take:
        yield record


def _RaiseDamage(builder: tfds.core.DatasetBuilder, split: str, where: str) -> None:
  """Raises the error that says which file is damaged, and where: tf.data's names neither."""
  files = _Files(builder, split)
  tf_records.RaiseDamage(files, where)
  for path, expected in files.items():
    tf_records.CheckCount(path, len(tf_records.RecordOffsets(path)) - 1, expected)
