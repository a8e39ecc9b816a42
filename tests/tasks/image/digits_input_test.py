# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's digits: splits, values, and the error if scikit-learn is missing."""

import sys

import numpy as np
import pytest

from tasks.image import digits_input
from tests import naming


def _Input(**values):
  return digits_input.DigitsInput.Params().Set(batch_size=8, **values).Instantiate()


def _Epoch(**values):
  batches = list(_Input(shuffle=False, num_epochs=1, **values).Dataset())
  is_real = np.concatenate([b.example_weights for b in batches]) > 0
  images = np.concatenate([b.images for b in batches])[is_real]
  return images, np.concatenate([b.labels for b in batches])[is_real]


def testSplitsPartitionTheImages():
  from sklearn import datasets

  digits = datasets.load_digits()
  splits = {split: _Epoch(split=split) for split in ('train', 'dev', 'test')}
  sizes = {split: len(labels) for split, (_, labels) in splits.items()}
  # Experiments report results on these splits.
  assert sizes == {'train': 1239, 'dev': 189, 'test': 369}
  images = np.concatenate([images for images, _ in splits.values()])
  assert sorted(map(bytes, np.round(images * 6 + 5).astype(np.uint8))) == sorted(
    map(bytes, digits.images[..., np.newaxis].astype(np.uint8))
  )
  for _, labels in splits.values():
    assert set(labels) == set(range(10))


def testPixelsAreNearlyNormalised():
  images, _ = _Epoch(split='train')
  assert images.shape[1:] == (8, 8, 1)
  assert abs(images.mean()) < 0.1 and abs(images.std() - 1) < 0.1


def testAugmentedImagesChangeFromEpochToEpoch():
  plain, _ = _Epoch(split='dev')
  generator = _Input(split='dev', augment=True, shuffle=False, num_epochs=2)
  images = np.concatenate([b.images for b in generator.Dataset()])[: 2 * len(plain)]
  first, second = images[: len(plain)], images[len(plain) :]
  assert not np.array_equal(first, second)
  # The images still show the same digits.
  for changed in (first, second):
    correlation = np.corrcoef(changed.ravel(), plain.ravel())[0, 1]
    assert 0.5 < correlation < 0.95


@pytest.mark.parametrize('name, value', [('max_shift', 1), ('max_degrees', 9.0), ('max_zoom', 0.2)])
def testEachAugmentation(name, value):
  none = {'split': 'dev', 'augment': True, 'max_shift': 0, 'max_degrees': 0.0, 'max_zoom': 0.0}
  plain, _ = _Epoch(split='dev')
  np.testing.assert_allclose(_Epoch(**none)[0], plain, atol=1e-5)
  changed, _ = _Epoch(**{**none, name: value})
  assert np.mean(np.any(np.abs(changed - plain) > 1e-3, axis=(1, 2, 3))) > 0.8


def testFingerprints():
  prints = {split: _Input(split=split).Fingerprint() for split in ('train', 'dev', 'test')}
  assert len(set(prints.values())) == 3
  assert _Input(split='dev', augment=True).Fingerprint() == prints['dev']


def testMissingScikitLearnRaises(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  digits_input._LoadDigits.cache_clear()
  generator = _Input()
  assert generator.BatchSpec().images.shape == [8, 8, 8, 1]
  with pytest.raises(ValueError, match=r"pip install 'lingvo_gpipe\[image\]'"):
    generator.NumExamples()
  digits_input._LoadDigits.cache_clear()


def testParityLabels():
  images, digits = _Epoch(split='dev')
  same, parities = _Epoch(split='dev', target='parity')
  np.testing.assert_array_equal(same, images)
  np.testing.assert_array_equal(parities, digits % 2)
  assert _Input(target='parity').Fingerprint() != _Input().Fingerprint()


@pytest.mark.parametrize(
  'values, names',
  [
    ({'split': 'valid'}, ('split', "'valid'")),
    ({'image_size': 9}, ('image_size', '8x8', 9)),
    ({'max_zoom': 1.0}, ('max_zoom', 'below 1', '1.0')),
    ({'max_degrees': float('nan')}, ('max_degrees', 'nan')),
    ({'target': 'parities'}, ('target', "'digit'", "'parity'", "'parities'")),
  ],
)
def testWrongParamsRaise(values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Input(**values)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
