# SPDX-License-Identifier: Apache-2.0
"""The standard library as a corpus: the real library, and small fakes."""

import pathlib
import sys
import sysconfig

import numpy as np
import pytest

from tasks.lm import stdlib_input
from tests import naming

_SPLITS = ('train', 'dev', 'test')


def _Input(**kwargs):
  return stdlib_input.StdlibInput.Params().Set(batch_size=4, **kwargs).Instantiate()


@pytest.fixture(scope='module')
def real():
  return {split: _Input(split=split) for split in _SPLITS}


@pytest.fixture
def fake_root(tmp_path):
  for i in range(200):
    path = tmp_path / f'package{i % 7}' / f'module{i}.py'
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'VALUE = {i}\n')
  return tmp_path


def testSplitsAreDisjointAndCoverTheSources(real):
  files = {split: generator.Files() for split, generator in real.items()}
  together = sum(files.values(), [])
  assert len(set(together)) == len(together)
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  skipped = ('site-packages', 'dist-packages', '__pycache__')
  expected = {
    str(path)
    for path in root.rglob('*.py')
    if path.is_file() and not any(part in skipped for part in path.relative_to(root).parts)
  }
  assert set(together) == expected
  for split in _SPLITS:
    names = [real[split].DocumentName(path) for path in files[split]]
    assert names == sorted(names) and len(names) > 5
    assert all(stdlib_input.GetSplit(name) == split for name in names)
  share = len(files['train']) / len(together)
  assert 0.85 < share < 0.95


def testSizesAndEntropyArePlausible(real):
  # A stripped library (a slim image, say, without its tests) is smaller than a full one's 30 MB.
  assert 3e6 < real['train'].NumBytes() < 2e8
  for split in ('dev', 'test'):
    assert 0.005 < real[split].NumBytes() / real['train'].NumBytes() < 0.25
  for generator in real.values():
    assert 3.0 < generator.ByteEntropy() < 6.0


def testBatchesHoldSourceText(real):
  generator = _Input(split='dev', shuffle=False, num_epochs=1, seq_len=256)
  batch = next(generator.Dataset().as_numpy_iterator())
  text = real['dev'].Text()[: 4 * 256]
  np.testing.assert_array_equal(batch.labels.ravel(), text)
  first = pathlib.Path(generator.Files()[0]).read_bytes()[:1024]
  assert text[: len(first)].tobytes() == first


def testFingerprintsDiffer(real):
  fingerprints = {generator.Fingerprint() for generator in real.values()}
  assert len(fingerprints) == 3
  assert _Input(split='dev').Fingerprint() == real['dev'].Fingerprint()


def testSplitDependsOnTheNameOnly():
  # Pinned: a file that changed its split would leak held-out text into a later training run.
  names = ('abc.py', 'json/decoder.py', 'ast.py')
  assert [stdlib_input.GetSplit(name) for name in names] == ['train', 'dev', 'test']
  counts = {split: 0 for split in _SPLITS}
  for i in range(4000):
    counts[stdlib_input.GetSplit(f'package/module{i}.py')] += 1
  assert counts == {'train': 3604, 'dev': 196, 'test': 200}


def testPackagesAndCachesAreSkipped(fake_root):
  def Names():
    return [_Input(split=s, root=str(fake_root)).Files() for s in _SPLITS]

  before = Names()
  for directory in ('site-packages', 'dist-packages/x', 'package1/__pycache__'):
    (fake_root / directory).mkdir(parents=True)
    for i in range(40):
      (fake_root / directory / f'other{i}.py').write_text('x')
  (fake_root / 'notes.txt').write_text('x')
  (fake_root / 'directory.py').mkdir()
  (fake_root / 'dangling.py').symlink_to(fake_root / 'nowhere')
  assert Names() == before


def testFingerprintDoesNotDependOnTheRoot(fake_root, tmp_path_factory):
  copy = tmp_path_factory.mktemp('copy') / 'lib'
  fingerprint = _Input(root=str(fake_root)).Fingerprint()
  fake_root.rename(copy)
  assert _Input(root=str(copy)).Fingerprint() == fingerprint
  path = _Input(root=str(copy)).Files()[3]
  pathlib.Path(path).write_text('VALUE = None\n')
  assert _Input(root=str(copy)).Fingerprint() != fingerprint


def testTokensOfFilesThatAreNotInUtf8(fake_root):
  """The real library has a few such files, which are documents too."""
  generator = stdlib_input.StdlibTokensInput.Params().Set(root=str(fake_root), batch_size=1)
  generator = generator.Instantiate()
  texts = list(generator.VocabularyTexts())
  pathlib.Path(generator.Files()[2]).write_bytes(b"NAME = '\xe4'\n")
  assert list(generator.VocabularyTexts()) == [*texts[:2], "NAME = '\ufffd'\n", *texts[3:]]


def testErrors(tmp_path, fake_root):
  empty = tmp_path / 'python311.zip'
  with pytest.raises(ValueError, match=naming.Naming('.py', empty, 'zip archive')):
    _Input(root=str(empty)).Dataset()
  (tmp_path / 'one').mkdir()
  (tmp_path / 'one' / 'only.py').write_text('x')
  other = 'dev' if stdlib_input.GetSplit('only.py') == 'train' else 'train'
  with pytest.raises(ValueError, match=naming.Naming('split', '1 files', f"'{other}'")):
    _Input(root=str(tmp_path / 'one'), split=other).Dataset()
  with pytest.raises(
    ValueError, match=naming.Naming('split', "'train'", "'dev'", "'test'", "'Test'")
  ):
    _Input(split='Test')
  with pytest.raises(ValueError, match=naming.Naming('param file_pattern', "'*.txt'")):
    _Input(file_pattern='*.txt')


def testMaxBytesMakesASmallCorpus():
  generator = _Input(max_bytes=10_000)
  assert generator.NumBytes() == 10_000


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
