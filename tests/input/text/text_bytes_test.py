# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: every byte of the files is predicted once, from the bytes before it."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.input.text import text_bytes
from tests import naming

_FILES = {
  'b.txt': b'second file\n',
  'a.txt': b'the first \xff\xfe one\n',
  'c.txt': b'',
  'd.txt': b'x',
}
_TEXT = b'the first \xff\xfe one\n' + b'\0second file\n' + b'\0' + b'\0x'


@pytest.fixture
def pattern(tmp_path):
  for name, content in _FILES.items():
    (tmp_path / name).write_bytes(content)
  return str(tmp_path / '*.txt')


def _Input(pattern, **kwargs):
  p = text_bytes.TextBytesInput.Params().Set(file_pattern=pattern, batch_size=3, seq_len=8)
  return p.Set(**kwargs).Instantiate()


def testSeparatorsAreBetweenTheFiles(pattern):
  generator = _Input(pattern)
  assert generator.Text().tobytes() == _TEXT
  assert generator.NumBytes() == len(_TEXT)
  assert generator.NumExamples() == -(-len(_TEXT) // 8)


@pytest.mark.parametrize('seq_len', [1, 2, 5, 8, len(_TEXT) - 1, len(_TEXT), 100])
def testEveryByteIsPredictedOnceFromThePreviousOne(pattern, seq_len):
  generator = _Input(pattern, seq_len=seq_len, shuffle=False, num_epochs=1)
  batches = list(generator.Dataset().as_numpy_iterator())
  ids, labels, weights = (
    np.concatenate([b[key].ravel() for b in batches]) for key in ('ids', 'labels', 'weights')
  )
  assert weights.sum() == len(_TEXT)
  assert bytes(labels[weights == 1].astype(np.uint8)) == _TEXT
  assert bytes(ids[weights == 1].astype(np.uint8)) == b'\0' + _TEXT[:-1]
  for batch in batches:
    assert batch.ids.shape == batch.labels.shape == batch.weights.shape == (3, seq_len)
    assert batch.ids.dtype == batch.labels.dtype == np.int32
    assert batch.ids.min() >= 0 and batch.labels.max() < text_bytes.VOCAB_SIZE
    np.testing.assert_array_equal(batch.ids[:, 1:], batch.labels[:, :-1])


def testSpecNeedsNoData(tmp_path):
  spec = _Input(str(tmp_path / 'missing')).BatchSpec()
  assert spec.ids == spec.labels == tf.TensorSpec([3, 8], tf.int32)
  assert spec.weights == tf.TensorSpec([3, 8], tf.float32)


def testRestartIsExact(pattern):
  whole = list(_Input(pattern).Dataset().take(9).as_numpy_iterator())
  tail = list(_Input(pattern).Dataset(4 * 3).take(5).as_numpy_iterator())
  for batch, expected in zip(tail, whole[4:], strict=True):
    tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


def testByteEntropyFollowsFrequencies(tmp_path, pattern):
  counts = np.bincount(np.frombuffer(_TEXT, np.uint8))
  expected = -sum(c / len(_TEXT) * math.log2(c / len(_TEXT)) for c in counts if c)
  assert _Input(pattern).ByteEntropy() == pytest.approx(expected, rel=1e-12)
  (tmp_path / 'uniform').write_bytes(bytes(range(256)) * 5000)
  assert _Input(str(tmp_path / 'uniform')).ByteEntropy() == pytest.approx(8.0, rel=1e-12)
  (tmp_path / 'constant').write_bytes(b'aaaa')
  assert _Input(str(tmp_path / 'constant')).ByteEntropy() == 0.0


@pytest.mark.parametrize('max_bytes', [1, 5, 17, 18, 19, len(_TEXT), 1000])
def testMaxBytesLimitsTheText(pattern, max_bytes):
  assert _Input(pattern, max_bytes=max_bytes).Text().tobytes() == _TEXT[:max_bytes]


def testMaxBytesReadsNoMoreFilesThanNeeded(pattern):
  class Counting(text_bytes.TextBytesInput):
    def DocumentName(self, path):
      read.append(path)
      return super().DocumentName(path)

  read = []
  p = Counting.Params().Set(file_pattern=pattern, batch_size=1, max_bytes=5)
  assert p.Instantiate().NumBytes() == 5
  assert len(read) == 1


def testFingerprintDependsOnNamesContentsAndWindows(tmp_path, pattern):
  fingerprint = _Input(pattern).Fingerprint()
  assert _Input(pattern, batch_size=2).Fingerprint() == fingerprint
  assert _Input(pattern, seq_len=9).Fingerprint() != fingerprint
  assert _Input(pattern, max_bytes=12).Fingerprint() != fingerprint
  (tmp_path / 'd.txt').write_bytes(b'y')
  changed = _Input(pattern).Fingerprint()
  assert changed != fingerprint
  (tmp_path / 'd.txt').rename(tmp_path / 'e.txt')
  assert _Input(pattern).Fingerprint() not in (changed, fingerprint)


def testFingerprintDoesNotDependOnTheDirectory(tmp_path, pattern):
  copy = tmp_path / 'copy'
  copy.mkdir()
  for name, content in _FILES.items():
    (copy / name).write_bytes(content)
  assert _Input(str(copy / '*.txt')).Fingerprint() == _Input(pattern).Fingerprint()


def testPatternsMatchFilesOnly(tmp_path, pattern):
  (tmp_path / 'z.txt').mkdir()  # Directories are skipped.
  names = [path.rsplit('/', 1)[-1] for path in _Input(pattern).Files()]
  assert names == ['a.txt', 'b.txt', 'c.txt', 'd.txt']
  several = [str(tmp_path / 'd.txt'), str(tmp_path / '[ab].txt'), str(tmp_path / 'a.*')]
  names = [path.rsplit('/', 1)[-1] for path in _Input(several).Files()]
  assert names == ['a.txt', 'b.txt', 'd.txt']


def testInvalidParamsAndFilesAreNamed(tmp_path, pattern):
  with pytest.raises(
    ValueError, match=naming.Naming('TextBytesInput', 'param file_pattern', 'glob')
  ):
    _Input('').Dataset()
  with pytest.raises(ValueError, match=naming.Naming('param file_pattern', 'nothing*')):
    _Input(str(tmp_path / 'nothing*')).Dataset()
  with pytest.raises(ValueError, match=naming.Naming('empty', 'c.txt')):
    _Input(str(tmp_path / 'c.txt')).Dataset()
  with pytest.raises(ValueError, match='seq_len'):
    _Input(pattern, seq_len=0)
  with pytest.raises(ValueError, match='max_bytes'):
    _Input(pattern, max_bytes=-1)


def testTextIsNotAConstantOfTheGraph(tmp_path):
  content = b'0123456789abcdef' * 4096
  (tmp_path / 'big').write_bytes(content)
  generator = _Input(str(tmp_path / 'big'))
  examples = tf.function(generator._Examples, autograph=False)
  graph = examples.get_concrete_function(tf.TensorSpec([3], tf.int64)).graph
  assert graph.as_graph_def().ByteSize() < 20_000
  assert any(tensor.shape[0] == 1 + len(content) for tensor, _ in graph.captures)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
