# SPDX-License-Identifier: Apache-2.0
"""Prepared data sets of TensorFlow Datasets, with errors that say how to prepare them.

This module never downloads anything: `PrepareCommand` prepares a data set once.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe.core import domain, files
from lingvo_gpipe.input.records import tf_record_index, tf_records

# Identifies the order of `Examples` in the key of a cache; older caches have another order.
ORDER = 'file by file'

# The domain of params that name a data set.
DATASET = domain.Domain(
  'the name of a data set of TFDS, such as cifar10 or wmt14_translate/de-en',
  lambda x: domain.STR.contains(x) and bool(x),
  '',
)

_READ_AT_ONCE = 1000


def PrepareCommand(dataset: str, data_dir: str = '') -> str:
  """Returns the shell command that downloads and prepares a data set of TFDS.

  The program of TFDS, `tfds build`, needs apache_beam, on which this project does not depend.

  Args:
    dataset: the name of the data set, with a config if it needs one.
    data_dir: the directory to prepare it in; '': the default of TFDS.
  """
  arguments = json.dumps(dataset)  # In double quotes, because the shell needs the single ones.
  if data_dir:
    arguments += f', data_dir={json.dumps(data_dir)}'
  code = f'import tensorflow_datasets as tfds; tfds.builder({arguments}).download_and_prepare()'
  return f'python -c {shlex.quote(code)}'


def NumExamples(builder: tfds.core.DatasetBuilder, split: str, context: str) -> int:
  """Returns the number of examples in a split of a prepared data set, such as 'train[:90%]'.

  Args:
    builder: from `LoadPrepared`.
    split: the split.
    context: start of messages, such as 'TfdsImageInput: param split'.

  Raises:
    ValueError: there is no such split.
  """
  try:
    return builder.info.splits[split].num_examples
  except (KeyError, ValueError) as e:
    raise ValueError(
      f'{context}: {Name(builder)} has the splits {list(builder.info.splits)}, got {split!r}'
    ) from e


def FileRanges(
  builder: tfds.core.DatasetBuilder, split: str, context: str
) -> list[tf_record_index.FileRange]:
  """Returns the records of a split in the order of the files, which are TFRecords.

  Args:
    builder: from `LoadPrepared`.
    split: the split.
    context: start of messages, such as 'TfdsImageInput: param dataset'.

  Raises:
    ValueError: the description of the data set is damaged.
  """
  with _ReadingFiles(builder, context):
    instructions = builder.info.splits[split].file_instructions
    return [
      tf_record_index.FileRange(x.filename, x.skip, x.take, x.examples_in_shard)
      for x in instructions
    ]


def CheckFeature(builder: tfds.core.DatasetBuilder, name: str, cls: type, context: str) -> None:
  """Raises ValueError unless the examples of a data set have a feature of some type.

  Args:
    builder: from `LoadPrepared`.
    name: the name of the feature.
    cls: its type, such as `tfds.features.Text`.
    context: start of the message, such as 'TfdsImageInput: param dataset'.
  """
  features = builder.info.features
  is_dict = isinstance(features, tfds.features.FeaturesDict)
  names = [key for key, value in features.items() if isinstance(value, cls)] if is_dict else []
  if name not in names:
    raise ValueError(
      f'{context}: {Name(builder)} has the {cls.__name__} features {names}, but {name!r} is needed'
    )


def Name(builder: tfds.core.DatasetBuilder) -> str:
  """Returns the name of a data set and its place, for messages."""
  return f'{builder.info.full_name!r} in {str(builder.data_path)!r}'


def LoadPrepared(
  dataset: str, data_dir: str, context: str, offline: str
) -> tfds.core.DatasetBuilder:
  """Returns the builder of a prepared data set.

  Args:
    dataset: the name of the data set in TFDS, with a config if it needs one: wmt14_translate/de-en.
    data_dir: the directory that it was prepared in; '': the default of TFDS.
    context: start of messages, such as 'TfdsImageInput: param dataset'.
    offline: end of a message: alternatives that work without a network.

  Raises:
    ValueError: TFDS has no such data set, or it is damaged or not prepared; the message says how to
      fix it.
  """
  try:
    name = f'the data set {dataset!r}' + (f' in {data_dir!r}' if data_dir else '')
    with _Reading(name, data_dir or dataset, context):
      builder = tfds.builder(dataset, data_dir=data_dir or None)
      if builder.is_prepared() and builder.info.features and builder.info.splits:
        return builder
  except tfds.core.DatasetNotFoundError as e:
    close = difflib.get_close_matches(dataset, tfds.list_builders(), n=3)
    hint = f'; did you mean {" or ".join(close)}?' if close else ''
    folder = f', and {data_dir!r} holds none of that name' if data_dir else ''
    raise ValueError(f'{context}: TFDS has no {dataset!r}{folder}{hint}') from e
  manual = ''
  if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
    manual = ', and possibly files to download by hand: it says which'
  raise ValueError(
    f'{context}: the data set {dataset!r} is not prepared in {builder.data_path.parent}: run '
    f'`{PrepareCommand(dataset, data_dir)}`, which needs a network{manual}. '
    f'Without network: {offline}'
  )


def Texts(
  builder: tfds.core.DatasetBuilder,
  split: str,
  names: Sequence[str],
  context: str,
  damaged: str = 'stop',
) -> Iterator[tuple[str, ...]]:
  """Yields some texts of each example of a split, in the order of the files.

  Args:
    builder: builder of the data set.
    split: the split.
    names: names of features, each a text.
    context: the param `damaged` in messages, such as 'TfdsPairs: param damaged_records'.
    damaged: one of `tf_records.POLICIES`; after damage, 'skip' is slower.

  Raises:
    ValueError: a record is damaged, or 'skip' was set for files of another format than TFRecord.
  """
  for texts in Examples(builder, split, names, context, damaged):
    yield tuple(text.decode() for text in texts)


def Examples(
  builder: tfds.core.DatasetBuilder,
  split: str,
  names: Sequence[str],
  context: str,
  damaged: str = 'stop',
  decoders: Any = None,
) -> Iterator[tuple[Any, ...]]:
  """Yields some features of each example of a split as NumPy values, in the order of the files.

  Args:
    builder: builder of the data set.
    split: the split.
    names: names of the features.
    context: the param `damaged` in messages, such as 'TfdsPairs: param damaged_records'.
    damaged: one of `tf_records.POLICIES`; after damage, 'skip' is slower.
    decoders: decoders of some features, see `as_dataset` of the builder.

  Raises:
    ValueError: a record is damaged, or 'skip' was set for files of another format than TFRecord.
  """
  if not IsTfRecord(builder):
    _CheckSkips(builder, context, damaged)
  with _ReadingFiles(builder, context):
    yield from _Examples(builder, split, names, context, damaged, decoders)


def _Examples(
  builder: tfds.core.DatasetBuilder,
  split: str,
  names: Sequence[str],
  context: str,
  damaged: str,
  decoders: Any,
) -> Iterator[tuple[Any, ...]]:
  """Yields the examples; damaged files raise errors of many kinds."""
  if not IsTfRecord(builder):
    source = builder.as_data_source(split=split, decoders=decoders)
    for i in range(len(source)):
      try:
        example = source[i]
      except RuntimeError as e:
        raise _CannotRead(builder, split, i, e) from e
      yield tuple(example[name] for name in names)
    return
  is_partial = len(names) < len(builder.info.features)
  partial_decoders = tfds.decode.PartialDecoding(dict.fromkeys(names, True), decoders)
  # By default TFDS interleaves the files, a few examples of each at a time.
  dataset = builder.as_dataset(
    split=split,
    shuffle_files=False,
    decoders=partial_decoders if is_partial else decoders,
    read_config=tfds.ReadConfig(interleave_cycle_length=1),
  )
  num_read = 0
  error: Exception | None = None
  if all(map(tf_records.LengthsFit, _Files(builder, split))):
    try:
      for examples in dataset.batch(_READ_AT_ONCE).as_numpy_iterator():
        yield from zip(*(examples[name] for name in names), strict=True)
        num_read += len(examples[names[0]])
      return
    except (
      tf.errors.DataLossError,
      tf.errors.FailedPreconditionError,
    ) as e:  # The latter if there are too few records.
      error = e
  if damaged == 'stop':
    _RaiseDamage(builder, split, context)
    if error is not None:
      raise error
  # tf.data cannot continue after damage, so read the rest one by one, which is slower.
  for record in itertools.islice(_IntactRecords(builder, split), num_read, None):
    example = builder.info.features.deserialize_example_np(record, decoders=decoders)
    yield tuple(example[name] for name in names)


def NumDamaged(builder: tfds.core.DatasetBuilder, split: str, context: str) -> int:
  """Returns the number of examples of a split lost to damaged records; reads the files completely.

  Raises:
    ValueError: the files are of another format than TFRecord.
  """
  _CheckSkips(builder, context, 'skip')
  if _IsIntact(builder, split):
    return 0
  num_intact = sum(1 for _ in _IntactRecords(builder, split))
  return int(builder.info.splits[split].num_examples) - num_intact


@contextlib.contextmanager
def _Reading(name: str, path: str, context: str) -> Iterator[None]:
  """Turns every error by which TFDS and its libraries reject names and files into one line.

  Args:
    name: the data set, for the message.
    path: the place that errors of this package name.
    context: start of the message.
  """
  try:
    yield
  except (
    MemoryError,
    ImportError,
    tf.errors.ResourceExhaustedError,
    tfds.core.DatasetNotFoundError,
  ):
    raise
  except Exception as e:
    if isinstance(e, ValueError | OSError) and path in str(e) and '\n' not in str(e):
      raise
    kind = '' if type(e) is ValueError else f'{type(e).__name__}: '
    raise ValueError(
      f'{context}: {name} cannot be read: {kind}{files.OneLine(e)}. Check its name, or restore it'
    ) from e


def _ReadingFiles(
  builder: tfds.core.DatasetBuilder, context: str
) -> contextlib.AbstractContextManager[None]:
  path = str(builder.data_path)
  return _Reading(f'the data set in {path!r}', path, context)


def IsTfRecord(builder: tfds.core.DatasetBuilder) -> bool:
  """Whether the files of a prepared data set are TFRecords."""
  return bool(builder.info.file_format == tfds.core.FileFormat.TFRECORD)


def _CheckSkips(builder: tfds.core.DatasetBuilder, context: str, damaged: str) -> None:
  if damaged == 'skip' and not IsTfRecord(builder):
    raise ValueError(
      f'{context}: only damaged records of TFRecord files can be skipped, but '
      f'{Name(builder)} was prepared as {builder.info.file_format.value}: set it to stop'
    )


def _CannotRead(
  builder: tfds.core.DatasetBuilder, split: str, index: int, error: Exception
) -> ValueError:
  """Returns the error for an example that cannot be read by index; it names the file."""
  offset = index
  for part in builder.info.splits[split].file_instructions:
    if offset < part.take:
      break
    offset -= part.take
  return ValueError(
    f'{part.filename} is damaged: example {index} of {split!r} cannot be read: {error}. '
    'Restore the file'
  )


def _Files(builder: tfds.core.DatasetBuilder, split: str) -> dict[str, int]:
  """Returns {path: expected number of records} of the files that a split reads."""
  parts = builder.info.splits[split].file_instructions
  return {str(part.filename): part.examples_in_shard for part in parts}


def _IsIntact(builder: tfds.core.DatasetBuilder, split: str) -> bool:
  # Reading alone does not detect a file that was truncated between two records.
  return all(
    tf_records.IsIntact(path) and len(tf_records.RecordOffsets(path)) - 1 == expected
    for path, expected in _Files(builder, split).items()
  )


def _IntactRecords(builder: tfds.core.DatasetBuilder, split: str) -> Iterator[bytes]:
  for part in builder.info.splits[split].file_instructions:
    for number, record in tf_records.Records(str(part.filename), damaged='skip'):
      if record is not None and part.skip < number <= part.skip + part.take:
        yield record


def _RaiseDamage(builder: tfds.core.DatasetBuilder, split: str, context: str) -> None:
  """Raises an error that names the damaged file and record, unlike the error of tf.data."""
  num_records = _Files(builder, split)
  tf_records.RaiseDamage(num_records, context)
  for path, expected in num_records.items():
    tf_records.CheckCount(path, len(tf_records.RecordOffsets(path)) - 1, expected)
