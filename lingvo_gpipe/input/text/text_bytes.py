# SPDX-License-Identifier: Apache-2.0
"""Language modelling on the bytes of files: a token is a byte, an example is a window of text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain, files, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, file_pattern

VOCAB_SIZE = 256
# Separates two files, and is the context of the first byte of the first file.
SEPARATOR = 0

_COUNTED_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Corpus:
  text_after_separator: tf.Tensor  # uint8 [1 + bytes]: SEPARATOR and the text.
  documents: list[tuple[str, int]]  # Name and size of each file with bytes in the text.


class TextBytesInput(base_input_generator.BaseInputGenerator):
  """Windows of `p.seq_len` bytes from the concatenation of files; every byte is predicted once.

  The text is file, SEPARATOR, file, SEPARATOR, ... file. Window i predicts its bytes [i * seq_len,
  (i + 1) * seq_len), each from the earlier bytes of the window and the byte before the window
  (SEPARATOR for the first). A batch has

  * `ids`, int32 [batch, time]: the bytes to read, 0 ... 255,
  * `labels`, int32 [batch, time]: the bytes to predict: `ids` shifted by one,
  * `weights`, float32 [batch, time]: 1; 0 after the end of the text and in padded rows,
  * `example_weights`, float32 [batch].

  The text is read at the first use and kept in memory once, as a uint8 tensor on the host that the
  tf.data pipeline gathers from.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Glob of the files, or a list of globs; any tf.io.gfile path.',
      domain.STR | domain.STRINGS,
    )
    p.Define('seq_len', 512, 'Number of bytes that an example predicts.', domain.SIZE)
    p.Define(
      'max_bytes', 0, 'Maximum number of bytes to use, from the first on; 0: all.', domain.COUNT
    )
    return p

  def Files(self) -> list[str]:
    """Returns the paths of the files, in the order of their concatenation.

    The default sorts the matches of `p.file_pattern`. Override it for another choice of files.

    Raises:
      ValueError: `p.file_pattern` is not set or matches no file.
    """
    return file_pattern.Files(self.params.file_pattern, self._Context('file_pattern'))

  def DocumentName(self, path: str) -> str:
    """Returns the name of a file for the fingerprint; it must not depend on the machine."""
    return os.path.basename(path)

  def NumExamples(self) -> int:
    return -(-self.NumBytes() // self.params.seq_len)

  def NumBytes(self) -> int:
    """Returns the number of bytes to predict: all bytes of the files and the separators."""
    return self.Text().size

  def Text(self) -> np.ndarray:
    """Returns the text as a uint8 array [bytes], a view that must not be written to."""
    return np.asarray(memoryview(self._corpus.text_after_separator))[1:]

  def ByteEntropy(self) -> float:
    """Returns the order-0 entropy in bits per byte: the loss of guessing by frequency."""
    text = self.Text()
    counts = np.zeros([VOCAB_SIZE], np.int64)
    # In pieces, because bincount converts its argument to 64-bit integers.
    for begin in range(0, text.size, _COUNTED_AT_ONCE):
      counts += np.bincount(text[begin : begin + _COUNTED_AT_ONCE], minlength=VOCAB_SIZE)
    frequencies = counts[counts > 0] / text.size
    return max(0.0, float(-np.sum(frequencies * np.log2(frequencies))))

  @functools.cached_property
  def _corpus(self) -> _Corpus:
    """The text, read once; ValueError if the files are empty."""
    limit = self.params.max_bytes
    separator = bytes([SEPARATOR])
    text_after_separator = bytearray()
    documents = []
    paths = self.Files()
    for path in paths:
      content = files.ReadBytes(path, self._Context('file_pattern'))
      documents.append((self.DocumentName(path), len(content)))
      text_after_separator += separator + content
      if limit and len(text_after_separator) > limit:
        del text_after_separator[1 + limit :]
        break
    if not any(size for _, size in documents):
      raise ValueError(
        f'{type(self).__name__} {self.params.name!r}: the data set is empty: {len(paths)} empty '
        f'files, for example {paths[0]!r}'
      )
    # A tensor created outside the graph is an input of a tf.data pipeline and not a constant in its
    # graph, which avoids the 2 GB limit of protobuf and a copy per batch.
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return _Corpus(tf.constant(np.frombuffer(text_after_separator, np.uint8)), documents)

  def _ExampleSpec(self) -> nested_map.NestedMap:
    shape = [self.params.seq_len]
    return nested_map.NestedMap(
      ids=tf.TensorSpec(shape, tf.int32),
      labels=tf.TensorSpec(shape, tf.int32),
      weights=tf.TensorSpec(shape, tf.float32),
    )

  def _Examples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    seq_len = self.params.seq_len
    text_after_separator = self._corpus.text_after_separator
    num_bytes = self.NumBytes()
    # Offsets in text_after_separator: the label of a byte is one position after the byte.
    offsets = indices[:, tf.newaxis] * seq_len + tf.range(seq_len + 1, dtype=tf.int64)
    in_text = offsets <= num_bytes
    window = tf.gather(text_after_separator, tf.minimum(offsets, num_bytes))
    window = tf.where(in_text, tf.cast(window, tf.int32), SEPARATOR)
    return nested_map.NestedMap(
      ids=window[:, :-1],
      labels=window[:, 1:],
      weights=tf.cast(in_text[:, 1:], tf.float32),
    )

  def _FingerprintParts(self) -> list[Any]:
    text = hashlib.sha256(self.Text().data).hexdigest()
    return ['text_bytes', self.params.seq_len, text, self._corpus.documents]
