# SPDX-License-Identifier: Apache-2.0
"""Stores many sequences of tokens as two arrays, in memory or mapped from files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files

# Number of sequences to gather into one array.
_BLOCK = 1 << 16

_TOKENS, _OFFSETS, _INFO = 'tokens.int32', 'offsets.int64', 'store.json'
_VERSION = 1

IntSequences = Iterable[Sequence[int] | np.ndarray]


class DamagedStoreError(ValueError):
  """A folder does not hold a complete store; the message names the folder and the problem."""


class TokenStore:
  """An immutable list of token sequences.

  Attributes:
    tokens: int32 [total], the concatenated sequences.
    offsets: int64 [n + 1]: sequence i is tokens[offsets[i]:offsets[i + 1]].
  """

  def __init__(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
    """Takes the two arrays without a copy.

    Raises:
      ValueError: the dtypes differ, or the offsets do not rise from 0 to the number of tokens.
    """
    if tokens.dtype != np.int32 or offsets.dtype != np.int64 or tokens.ndim != 1:
      raise ValueError(
        f'expected tokens int32 [total] and offsets int64 [n + 1], got {tokens.dtype} '
        f'{list(tokens.shape)} and {offsets.dtype} {list(offsets.shape)}'
      )
    if offsets.ndim != 1 or not offsets.size or offsets[0] or offsets[-1] != tokens.size:
      raise ValueError(f'the offsets do not go from 0 to {tokens.size}, the number of tokens')
    if np.any(offsets[1:] < offsets[:-1]):
      raise ValueError('the offsets are not ascending')
    self.tokens = tokens
    self.offsets = offsets
    self._fingerprint = ''
    self._is_mapped = False

  @classmethod
  def Build(cls, sequences: IntSequences) -> TokenStore:
    """Returns a store in memory of some sequences of integers, in their order."""
    blocks, lengths = [], [np.zeros([1], np.int64)]
    for block, block_lengths in _Blocks(sequences):
      blocks.append(block)
      lengths.append(block_lengths)
    tokens = np.concatenate(blocks) if blocks else np.zeros([0], np.int32)
    return cls(tokens, np.cumsum(np.concatenate(lengths)))

  def __len__(self) -> int:
    return self.offsets.size - 1

  def __getitem__(self, index: int) -> np.ndarray:
    """Returns sequence `index`, int32 [length]: a view."""
    if not 0 <= index < len(self):
      raise IndexError(f'sequence {index} of a store of {len(self)}')
    return self.tokens[self.offsets[index] : self.offsets[index + 1]]

  @property
  def lengths(self) -> np.ndarray:
    """int64 [n]: the length of each sequence."""
    return np.diff(self.offsets)

  @property
  def fingerprint(self) -> str:
    """16 hexadecimal digits that change with any token or length."""
    if not self._fingerprint:
      self._fingerprint = _Fingerprint(self.tokens, self.offsets)
    return self._fingerprint

  @functools.cached_property
  def tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
    """`tokens` and `offsets` as tensors on the host, for tf.data pipelines; they share memory."""
    if self._is_mapped:
      return _MappedTensor(self.tokens), _MappedTensor(self.offsets)
    with tf.init_scope(), tf.device('/device:CPU:0'):
      tokens, offsets = tf.constant(self.tokens), tf.constant(self.offsets)
    self.tokens, self.offsets = (np.asarray(memoryview(x)) for x in (tokens, offsets))
    return tokens, offsets

  # ---- files -----------------------------------------------------------------------------------

  def Save(self, directory: str) -> None:
    """Writes the store as `Write` does."""
    lengths, offsets = self.lengths, self.offsets
    begins = range(0, len(self), _BLOCK)
    ends = [min(begin + _BLOCK, len(self)) for begin in begins]
    blocks = (
      (self.tokens[offsets[begin] : offsets[end]], lengths[begin:end])
      for begin, end in zip(begins, ends, strict=True)
    )
    _WriteBlocks(directory, blocks)

  @staticmethod
  def Write(directory: str, sequences: IntSequences) -> None:
    """Writes a store of some sequences into a local folder, with only a part of it in memory.

    The folder appears when it is complete, and replaces an existing one.

    Raises:
      OSError: the folder cannot be written.
    """
    _WriteBlocks(directory, _Blocks(sequences))

  @classmethod
  def Load(cls, directory: str) -> TokenStore:
    """Loads the store of a local folder by mapping its files, and reads them once to check them.

    Raises:
      FileNotFoundError: there is no such folder.
      DamagedStoreError: the folder holds no store, or its files changed since they were written.
    """
    if not os.path.isdir(directory):
      raise FileNotFoundError(f'there is no token store in {directory!r}')
    try:
      with open(os.path.join(directory, _INFO), encoding='utf-8') as f:
        info = json.load(f)
      if info['version'] != _VERSION:
        raise DamagedStoreError(
          f'{directory!r} holds a token store of version {info["version"]!r:.80}, expected '
          f'{_VERSION}'
        )
      tokens = _Map(os.path.join(directory, _TOKENS), np.dtype('<i4'), info['num_tokens'])
      offsets = _Map(os.path.join(directory, _OFFSETS), np.dtype('<i8'), info['num_sequences'] + 1)
      expected = info['fingerprint']
    except DamagedStoreError:
      raise
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as e:
      raise DamagedStoreError(f'{directory!r} holds no complete token store: {e}') from e
    fingerprint = _Fingerprint(tokens, offsets)
    if fingerprint != expected:
      raise DamagedStoreError(
        f'the token store in {directory!r} changed since it was written: expected the fingerprint '
        f'{expected!r:.80}, got {fingerprint}'
      )
    try:
      store = cls(tokens, offsets)
    except ValueError as e:
      raise DamagedStoreError(f'{directory!r} holds no complete token store: {e}') from e
    store._fingerprint = fingerprint
    store._is_mapped = True
    return store


def LoadOrWrite(directory: str, make: Callable[[], IntSequences]) -> TokenStore:
  """Loads the store of a local folder; writes it first if it is missing or damaged.

  Args:
    directory: the folder; its name should identify its content.
    make: returns the sequences.
  """
  try:
    return TokenStore.Load(directory)
  except FileNotFoundError:
    logging.info('writing the token store %s', directory)
  except DamagedStoreError as e:
    logging.warning('%s: writing it again', e)
  try:
    TokenStore.Write(directory, make())
  except FileExistsError:
    logging.info('another process wrote it in the meantime')
  return TokenStore.Load(directory)


def _Blocks(sequences: IntSequences) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens int32, lengths int64) of blocks of consecutive sequences."""
  gathered: list[np.ndarray] = []

  def Block() -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(gathered), np.array([x.size for x in gathered], np.int64)

  for sequence in sequences:
    gathered.append(np.asarray(sequence, np.int32))
    if len(gathered) == _BLOCK:
      yield Block()
      gathered.clear()
  if gathered:
    yield Block()


def _WriteBlocks(directory: str, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
  directory = os.path.abspath(directory)
  files.MakeDirs('tokens', os.path.dirname(directory))
  unfinished = f'{directory}.tmp-{uuid.uuid4().hex[:8]}'
  os.mkdir(unfinished)
  try:
    digest = _Digest()
    num_tokens = num_sequences = 0
    with (
      open(os.path.join(unfinished, _TOKENS), 'wb') as token_file,
      open(os.path.join(unfinished, _OFFSETS), 'wb') as offset_file,
    ):
      first = np.zeros([1], '<i8')
      digest.Add(np.zeros([0], '<i4'), first)
      offset_file.write(first.data)
      for tokens, lengths in blocks:
        tokens = np.ascontiguousarray(tokens, '<i4')
        offsets = (num_tokens + np.cumsum(lengths)).astype('<i8')
        digest.Add(tokens, offsets)
        token_file.write(tokens.data)
        offset_file.write(offsets.data)
        num_tokens += tokens.size
        num_sequences += lengths.size
      for file in (token_file, offset_file):
        file.flush()
        os.fsync(file.fileno())
    info = {
      'version': _VERSION,
      'num_sequences': num_sequences,
      'num_tokens': num_tokens,
      'fingerprint': digest.Text(),
    }
    with open(os.path.join(unfinished, _INFO), 'w', encoding='utf-8') as f:
      json.dump(info, f)
    _Replace(directory, unfinished)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def _Replace(directory: str, unfinished: str) -> None:
  """Renames a folder to `directory`, replacing an existing folder, which its readers keep.

  Raises:
    FileExistsError: another process created `directory` at the same moment.
  """
  old = f'{unfinished}-old'
  with contextlib.suppress(FileNotFoundError):
    os.rename(directory, old)
  try:
    os.rename(unfinished, directory)
  except OSError as e:
    if os.path.isdir(directory):
      raise FileExistsError(f'{directory!r} was written by another process') from e
    raise
  finally:
    shutil.rmtree(old, ignore_errors=True)


def _Map(path: str, dtype: np.dtype, size: int) -> np.ndarray:
  """Maps a file as a read-only array; DamagedStoreError if its size is wrong."""
  num_bytes = os.path.getsize(path)
  if num_bytes != size * dtype.itemsize:
    raise DamagedStoreError(f'{path!r} has {num_bytes} bytes, expected {size * dtype.itemsize}')
  if not size:
    return np.zeros([0], dtype)  # An empty file cannot be mapped.
  return np.asarray(np.memmap(path, dtype, mode='r', shape=(size,)))


class _Writable:
  """Presents an array as writable, as DLPack requires; keeps the array alive."""

  def __init__(self, array: np.ndarray) -> None:
    self._array = array
    address, _ = array.__array_interface__['data']
    self.__array_interface__ = {**array.__array_interface__, 'data': (address, False)}


def _MappedTensor(array: np.ndarray) -> tf.Tensor:
  """Returns a mapped file as a tensor without a copy; operations never write to their inputs.

  Not for arbitrary arrays: TensorFlow needs aligned memory, which mapped files have.
  """
  return tf.experimental.dlpack.from_dlpack(np.asarray(_Writable(array)).__dlpack__())


class _Digest:
  """The fingerprint of tokens and offsets that are added in pieces."""

  def __init__(self) -> None:
    self._tokens, self._offsets = hashlib.sha256(), hashlib.sha256()

  def Add(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
    self._tokens.update(np.ascontiguousarray(tokens).data)
    self._offsets.update(np.ascontiguousarray(offsets).data)

  def Text(self) -> str:
    both = self._tokens.digest() + self._offsets.digest()
    return hashlib.sha256(both).hexdigest()[:16]


def _Fingerprint(tokens: np.ndarray, offsets: np.ndarray) -> str:
  digest = _Digest()
  digest.Add(tokens, offsets)
  return digest.Text()
