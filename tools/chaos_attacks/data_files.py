# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that inputs read: records, texts, vocabularies and cached tokens."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import random
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, batches
from lingvo_gpipe.input.records import tf_record_index, tf_record_stream, tf_records
from lingvo_gpipe.input.text import (
  parallel_files,
  sentence_pairs,
  sentencepiece_training,
  text_bytes,
  text_files,
)
from lingvo_gpipe.input.tfds import tfds_images, tfds_text
from tools.chaos_attacks import file_attacks, mutation

# Lengths of records that exceed their file.
LENGTHS = (2**20, 2**31, 2**36, 2**62, 2**63, 2**64 - 1)

_NUM_FILES, _NUM_RECORDS, _RECORD_BYTES = 3, 4, 8
_LINES = (
  'a plain sentence, with words', '', '\u6f22\u5b57 and \u2028 more', 'tab\there', 'one',
  'two words',
)  # fmt: skip
_PAIRS = (
  ('de', 'en', 'Stra\u00dfe\u2028', 'street'),
  ('el', 'en', '\u03ba\u03cc\u03c3\u03bc\u03b5', 'world'),
  ('de', 'en', 'ein Satz', 'a sentence'),
)  # fmt: skip
_VOCAB_SIZE = 300
_IMAGE_SIZE = 4
_OVERHEAD = 16  # Bytes of a record in its file, beside its contents.


# ---- records -------------------------------------------------------------------------------------


def Record(content: bytes, length: int | None = None) -> bytes:
  """Returns a record as in a file; a given length has the right checksum, too."""
  header = (len(content) if length is None else length).to_bytes(8, 'little')
  checksums = [tf_records.MaskedChecksum(x).to_bytes(4, 'little') for x in (header, content)]
  return header + checksums[0] + content + checksums[1]


def _MakeRecords(folder: pathlib.Path) -> None:
  for file in range(_NUM_FILES):
    numbers = range(10 * file, 10 * file + _NUM_RECORDS)
    content = b''.join(Record(i.to_bytes(_RECORD_BYTES, 'little')) for i in numbers)
    (folder / f'{file}.tfrecord').write_bytes(content)


def _DamageRecords(draw: random.Random, folder: pathlib.Path) -> str:
  """Damages files, or replaces the length of a record, with the right checksum."""
  if draw.random() < 0.6:
    return file_attacks.DamageAny(draw, folder)
  path = draw.choice(sorted(folder.iterdir()))
  data = path.read_bytes()
  begin = draw.randrange(_NUM_RECORDS) * (_OVERHEAD + _RECORD_BYTES)
  length = draw.choice([*LENGTHS, 0, _RECORD_BYTES - 1, 2 * _RECORD_BYTES + _OVERHEAD])
  path.write_bytes(data[:begin] + Record(b'', length)[:12] + data[begin + 12 :])
  return f'length {length} in {path.name}'


def _IntactContents(folder: pathlib.Path, policy: str) -> list[bytes]:
  """Returns all intact records; with 'stop', ValueError if any is damaged."""
  records = []
  for path in _Present(folder, 'tfrecord'):
    data, at = path.read_bytes(), 0
    while at < len(data):
      length = int.from_bytes(data[at : at + 8], 'little')
      content = data[at + 12 : at + 12 + length] if length <= len(data) else b''
      forged = Record(content, length)
      if data[at : at + 12] != forged[:12] or at + _OVERHEAD + length > len(data):
        if policy == 'stop':
          raise ValueError('a damaged length')
        break
      if data[at : at + _OVERHEAD + length] == forged:
        records.append(content)
      elif policy == 'stop':
        raise ValueError('a damaged record')
      at += _OVERHEAD + length
  return records


def _IntactRecords(folder: pathlib.Path, policy: str) -> list[int]:
  """Returns the numbers of all intact records; ValueError if there are none, too."""
  contents = (x[:_RECORD_BYTES] for x in _IntactContents(folder, policy))
  numbers = [int.from_bytes(x, 'little', signed=len(x) == _RECORD_BYTES) for x in contents]
  if not numbers:
    raise ValueError('no records')
  return sorted(numbers)


def _Number(record: tf.Tensor) -> tf.Tensor:
  return tf.io.decode_raw(record, tf.int64, fixed_length=_RECORD_BYTES)[0]


class _Stream(tf_record_stream.TfRecordStream):
  """Each record is a number."""

  def _Example(self, record: tf.Tensor) -> nested_map.NestedMap:
    return nested_map.NestedMap(i=_Number(record))


def _ReadStream(folder: pathlib.Path, policy: str) -> list[int]:
  p = _Stream.Params().Set(name='Train', batch_size=2, num_epochs=1, damaged_records=policy)
  source = p.Set(file_pattern=str(folder / '*.tfrecord')).Instantiate()
  source.CheckRestarts()
  rows = [batch.i[batch.example_weights > 0].numpy() for batch in batches.Batches(source)]
  return sorted(np.concatenate(rows).tolist())


def _ReadIndex(folder: pathlib.Path, policy: str) -> list[int]:
  parts = [
    tf_record_index.FileRange(str(path), 0, 1 << 40, _NUM_RECORDS)
    for path in _Present(folder, 'tfrecord')
  ]
  index = tf_record_index.TfRecordIndex(parts, 'damaged_records', policy)
  records = []
  for i in range(len(index.begins)):
    try:
      records.append(int(_Number(index.Read(tf.constant(i)))))
    except tf.errors.DataLossError as e:
      raise index.Explain(e) from e
  if not records:
    raise ValueError(f'no records in {folder}')
  return sorted(records)


def _CountedRecords(folder: pathlib.Path, policy: str) -> list[int]:
  """Returns the records of intact files; ValueError if a file lacks records or has too many."""
  records = _IntactRecords(folder, policy)
  for path in _Present(folder, 'tfrecord'):
    if sum(1 for _ in tf.data.TFRecordDataset(str(path))) != _NUM_RECORDS:
      raise ValueError('another number of records')
  return records


# ---- texts ---------------------------------------------------------------------------------------


def _Present(folder: pathlib.Path, suffix: str) -> list[pathlib.Path]:
  return [path for path in sorted(folder.glob(f'*.{suffix}')) if not path.is_dir()]


def _MakeTexts(folder: pathlib.Path) -> None:
  for i, lines in enumerate((_LINES[:3], _LINES[3:])):
    (folder / f'{i}.txt').write_bytes('\r\n'.join(lines).encode())


def _MakeVocabulary(folder: pathlib.Path) -> None:
  texts = [*_LINES, *(text for pair in _PAIRS for text in pair)]
  sentencepiece_training.Train(texts, str(folder / 'vocab'), _VOCAB_SIZE)


def _MakeTextsAndPairs(folder: pathlib.Path) -> None:
  _MakeTexts(folder)
  _MakePairs(folder)


def _MakeTextsAndVocabulary(folder: pathlib.Path) -> None:
  _MakeTextsAndPairs(folder)
  _MakeVocabulary(folder)


def _Lines(folder: pathlib.Path, suffix: str) -> list[str]:
  """Returns the lines of all files; ValueError if one is not in UTF-8."""
  lines: list[str] = []
  for path in _Present(folder, suffix):
    parts = path.read_bytes().removeprefix(b'\xef\xbb\xbf').decode().split('\n')
    lines += (part.removesuffix('\r') for part in parts[: len(parts) - (not parts[-1])])
  return lines


def _TextInput(folder: pathlib.Path, **values: Any) -> text_files.TextFilesInput:
  p = text_files.TextFilesInput.Params().Set(name='Train', batch_size=2, num_epochs=1, seq_len=16)
  p.Set(file_pattern=str(folder / '*.txt'), vocab_filepath=str(folder / 'vocab.model'))
  return p.Set(shuffle=False, **values).Instantiate()


def _PairInput(
  folder: pathlib.Path, cls: Any = parallel_files.TsvPairs, suffix: str = 'tsv', **values: Any
) -> Any:
  p = cls.Params().Set(name='Train', bucket_upper_bound=[64], bucket_batch_limit=2, num_epochs=1)
  p.Set(file_pattern=str(folder / f'*.{suffix}'), vocab_filepath=str(folder / 'vocab.model'))
  return p.Set(shuffle=False, **values).Instantiate()


def _Digests(source: base_input_generator.BaseInputGenerator) -> list[str]:
  """Reads all batches; returns a digest of each."""
  texts = ({name: x.numpy().tolist() for name, x in b.items()} for b in batches.Batches(source))
  return [hashlib.sha256(repr(text).encode()).hexdigest() for text in texts]


def _ReadDocuments(folder: pathlib.Path) -> tuple[list[str], list[str], bytes]:
  """Returns the lines, the contents of all files, and their bytes."""
  lines = list(_TextInput(folder).VocabularyTexts())
  contents = list(_TextInput(folder, documents='files').VocabularyTexts())
  p = text_bytes.TextBytesInput.Params().Set(name='Train', batch_size=2, seq_len=16, num_epochs=1)
  source = p.Set(file_pattern=str(folder / '*.txt')).Instantiate()
  _Digests(source)
  return lines, contents, source.Text().tobytes()


def _Documents(folder: pathlib.Path) -> tuple[list[str], list[str], bytes]:
  paths = _Present(folder, 'txt')
  contents = [path.read_bytes() for path in paths]
  if not any(contents):
    raise ValueError('no text')
  texts = [content.removeprefix(b'\xef\xbb\xbf').decode() for content in contents]
  return _Lines(folder, 'txt'), texts, b'\0'.join(contents)


def _MakePairs(folder: pathlib.Path) -> None:
  text = '\n'.join('\t'.join(pair) for pair in _PAIRS)
  (folder / 'pairs.tsv').write_bytes(text.encode())
  (folder / 'pairs.tfrecord').write_bytes(b''.join(Record(_Example(pair)) for pair in _PAIRS))


def _Example(pair: tuple[str, ...]) -> bytes:
  features = {
    name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
    for name, text in zip(parallel_files.FIELDS, pair, strict=True)
  }
  proto = tf.train.Example(features=tf.train.Features(feature=features))
  content: bytes = proto.SerializeToString(deterministic=True)
  return content


def _ReadPairs(folder: pathlib.Path) -> list[sentence_pairs.SentencePair]:
  return list(_PairInput(folder)._Pairs())


def _ExpectedPairs(folder: pathlib.Path) -> list[sentence_pairs.SentencePair]:
  if not _Present(folder, 'tsv'):
    raise ValueError('no file')
  pairs = []
  for line in _Lines(folder, 'tsv'):
    columns = line.split('\t')
    if len(columns) != len(parallel_files.FIELDS) or not all(columns[:2]):
      raise ValueError('not a pair')
    pairs.append(sentence_pairs.SentencePair(*columns))
  return pairs


def _ReadRecordPairs(folder: pathlib.Path, policy: str) -> list[sentence_pairs.SentencePair]:
  source = _PairInput(folder, parallel_files.TfRecordPairs, 'tfrecord', damaged_records=policy)
  return list(source._Pairs())


def _ExpectedRecordPairs(folder: pathlib.Path, policy: str) -> list[sentence_pairs.SentencePair]:
  if not _Present(folder, 'tfrecord'):
    raise ValueError('no file')
  pairs = {_Example(pair): sentence_pairs.SentencePair(*pair) for pair in _PAIRS}
  return [pairs[content] for content in _IntactContents(folder, policy)]


def _ReadTokens(folder: pathlib.Path, cache: str = '') -> list[list[str]]:
  """Returns digests of all batches of tokens."""
  cache_dir = str(folder / cache) if cache else ''
  sources = [_TextInput(folder, cache_dir=cache_dir), _PairInput(folder, cache_dir=cache_dir)]
  return [_Digests(source) for source in sources]


def _TrainVocabulary(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  files = draw.choice([['--files={}/*.tsv', '--columns=0,1'], ['--files={}/*.t[sx][vt]']])
  args = [f'--vocab_size={_VOCAB_SIZE}', f'--prefix={folder / "vocab"}']
  return file_attacks.Command('tools.train_sentencepiece', [x.format(folder) for x in files] + args)


def _MakeDataset(folder: pathlib.Path) -> None:
  """Prepares a data set of TFDS, whose class later processes do not know."""
  import tensorflow_datasets as tfds

  class ChaosExamples(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self) -> Any:
      features = tfds.features.FeaturesDict(
        {
          'text': tfds.features.Text(),
          'image': tfds.features.Image(shape=(None, None, 3), encoding_format='png'),
          'label': tfds.features.ClassLabel(num_classes=2),
        }
      )
      return self.dataset_info_from_configs(features=features)

    def _split_generators(self, dl_manager: Any) -> Any:
      return {'train': self._generate_examples()}

    def _generate_examples(self) -> Any:
      for i, text in enumerate(_LINES):
        image = np.full([_IMAGE_SIZE, _IMAGE_SIZE, 3], i, np.uint8)
        yield i, {'text': text, 'image': image, 'label': i % 2}

  ChaosExamples(data_dir=str(folder)).download_and_prepare()


def _TfdsInput(folder: pathlib.Path, p: hyperparams.InstantiableParams, policy: str) -> Any:
  p.Set(name='Train', dataset='chaos_examples', data_dir=str(folder), damaged_records=policy)
  return p.Set(batch_size=2, num_epochs=1, shuffle=False).Instantiate()


def _ReadDatasetTexts(folder: pathlib.Path, policy: str) -> list[str]:
  p = tfds_text.TfdsTextInput.Params().Set(seq_len=16, vocab_filepath=str(folder / 'unused'))
  return list(_TfdsInput(folder, p, policy).VocabularyTexts())


def _ReadDatasetImages(folder: pathlib.Path, policy: str, in_memory: bool) -> list[str]:
  p = tfds_images.TfdsImageInput.Params().Set(num_classes=2, image_size=_IMAGE_SIZE)
  return _Digests(_TfdsInput(folder, p.Set(in_memory=in_memory), policy))


def _MakeCache(folder: pathlib.Path) -> None:
  """Tokenises into a cache; the key of the cache does not depend on the folder."""
  _MakeTextsAndVocabulary(folder)
  _ReadTokens(folder, 'cache')


def _DamageOnly(pattern: str, draw: random.Random, folder: pathlib.Path) -> str:
  paths = [path for path in sorted(folder.rglob(pattern)) if path.is_file()]
  return mutation.File(draw, draw.choice(paths))


KINDS = {
  **{
    f'stream_{policy}': file_attacks.Kind(
      _MakeRecords,
      functools.partial(_ReadStream, policy=policy),
      expected=functools.partial(_IntactRecords, policy=policy),
      damage=_DamageRecords,
    )
    for policy in tf_records.POLICIES
  },
  **{
    f'index_{policy}': file_attacks.Kind(
      _MakeRecords,
      functools.partial(_ReadIndex, policy=policy),
      expected=functools.partial(expected, policy=policy),
      damage=_DamageRecords,
    )
    for policy, expected in (('stop', _CountedRecords), ('skip', _IntactRecords))
  },
  'texts': file_attacks.Kind(_MakeTexts, _ReadDocuments, expected=_Documents),
  'pairs': file_attacks.Kind(
    _MakePairs, _ReadPairs, expected=_ExpectedPairs, damage=functools.partial(_DamageOnly, '*.tsv')
  ),
  **{
    f'record_pairs_{policy}': file_attacks.Kind(
      _MakePairs,
      functools.partial(_ReadRecordPairs, policy=policy),
      expected=functools.partial(_ExpectedRecordPairs, policy=policy),
      damage=functools.partial(_DamageOnly, '*.tfrecord'),
    )
    for policy in tf_records.POLICIES
  },
  **{
    f'dataset_{name}_{policy}': file_attacks.Kind(
      _MakeDataset, functools.partial(read, policy=policy)
    )
    for policy in tf_records.POLICIES
    for name, read in (
      ('texts', _ReadDatasetTexts),
      ('images', functools.partial(_ReadDatasetImages, in_memory=False)),
      ('images_in_memory', functools.partial(_ReadDatasetImages, in_memory=True)),
    )
  },
  'vocabulary': file_attacks.Kind(
    _MakeTextsAndVocabulary, _ReadTokens, damage=functools.partial(_DamageOnly, 'vocab.model')
  ),
  'vocabulary_texts': file_attacks.Kind(_MakeTextsAndPairs, command=_TrainVocabulary),
  'token_cache': file_attacks.Kind(
    _MakeCache,
    functools.partial(_ReadTokens, cache='cache'),
    is_checked=True,
    damage=functools.partial(_DamageOnly, 'cache/*/*'),
  ),
}
