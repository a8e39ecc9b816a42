# SPDX-License-Identifier: Apache-2.0
"""Images of TFDS, from small data sets that the test prepares."""

import functools
import os
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe.input import batches, image_augmentation
from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.tfds import tfds_images
from lingvo_gpipe.runners import batch_placement
from tests import naming

NUM_TRAIN, NUM_TEST, NUM_CLASSES, SIZE = 12, 5, 4, 6


_THREE_FILES = tfds.download.DownloadConfig(num_shards=3)


def _Pixels(split, i, height=SIZE, width=SIZE):
  rng = np.random.default_rng([len(split), i])
  return rng.integers(0, 256, [height, width, 3], dtype=np.uint8)


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version('1.0.0')
  NUM_TRAIN = NUM_TRAIN

  def _info(self):
    features = {
      'image': tfds.features.Image(shape=(None, None, 3), encoding_format='png'),
      'label': tfds.features.ClassLabel(num_classes=NUM_CLASSES),
      'id': tfds.features.Text(),
    }
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    return {
      'train': self._generate_examples('train', self.NUM_TRAIN),
      'test': self._generate_examples('test', NUM_TEST),
    }

  def _generate_examples(self, split, count):
    for i in range(count):
      yield i, {'image': self._Image(split, i), 'label': i % NUM_CLASSES, 'id': f'{split}_{i}'}


class LgFixedImages(_Builder):
  def _Image(self, split, i):
    return _Pixels(split, i)


class LgManyImages(LgFixedImages):
  """Three files, which TFDS interleaves by default, 16 examples of each at a time."""

  NUM_TRAIN = 60


class LgWideImages(_Builder):
  """Uniform images, of which any crop has a known value."""

  def _Image(self, split, i):
    return np.full([9 + i, 14, 3], 10 * i, np.uint8)


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  directory = str(tmp_path_factory.mktemp('tfds'))
  for cls in (LgFixedImages, LgWideImages):
    cls(data_dir=directory).download_and_prepare()
  LgManyImages(data_dir=directory).download_and_prepare(download_config=_THREE_FILES)
  return directory


@pytest.fixture(scope='module')
def array_record_dir(tmp_path_factory):
  directory = str(tmp_path_factory.mktemp('array_record'))
  LgManyImages(data_dir=directory, file_format='array_record').download_and_prepare(
    download_config=_THREE_FILES
  )
  return directory


def _Input(data_dir, dataset='lg_fixed_images', **values):
  p = tfds_images.TfdsImageInput.Params().Set(
    name='Train',
    dataset=dataset,
    data_dir=data_dir,
    batch_size=4,
    image_size=SIZE,
    num_classes=NUM_CLASSES,
    in_memory=dataset != 'lg_wide_images',
  )
  return p.Set(**values).Instantiate()


def _All(generator, count):
  all_batches = list(generator.Dataset().take(-(-count // 4)))
  images = np.concatenate([b.images for b in all_batches])[:count]
  return images, np.concatenate([b.labels for b in all_batches])[:count]


def testAllImagesOfASplitComeOnce(data_dir):
  images, labels = _All(_Input(data_dir, split='test', shuffle=False, num_epochs=1), NUM_TEST)
  # TFDS shuffles as it writes, so images are identified by label and pixels.
  expected = {tuple(_Pixels('test', i).ravel()): i % NUM_CLASSES for i in range(NUM_TEST)}
  labels_of_images = {
    tuple(np.round((image + 1) * 127.5).astype(int).ravel()): label
    for image, label in zip(images, labels, strict=True)
  }
  assert labels_of_images == expected


def testSplitsAreSlicesOfOneOrder(data_dir):
  def Labels(split, count):
    return _All(_Input(data_dir, split=split, shuffle=False), count)[0].tolist()

  whole = Labels('train', NUM_TRAIN)
  assert Labels('train[:9]', 9) + Labels('train[9:]', 3) == whole


def testAugmentedImagesAreShiftedAndFlipped(data_dir):
  plain, _ = _All(_Input(data_dir, shuffle=False), NUM_TRAIN)
  augmented = _Input(data_dir, shuffle=False, augment=True, max_shift=1)
  first, _ = _All(augmented, 2 * NUM_TRAIN)
  assert not np.array_equal(first[:NUM_TRAIN], plain)
  assert not np.array_equal(first[:NUM_TRAIN], first[NUM_TRAIN:])
  assert np.array_equal(first, _All(augmented, 2 * NUM_TRAIN)[0])
  flipped = _Input(data_dir, shuffle=False, augment=True, max_shift=0)
  for before, after in zip(plain, _All(flipped, NUM_TRAIN)[0], strict=True):
    assert np.array_equal(after, before) or np.array_equal(after, before[:, ::-1])
  unflipped = _Input(data_dir, shuffle=False, augment=True, max_shift=0, flip=False)
  assert np.array_equal(_All(unflipped, NUM_TRAIN)[0], plain)
  far, _ = _All(_Input(data_dir, shuffle=False, augment=True, max_shift=3), NUM_TRAIN)
  assert np.max(np.sum(np.all(far == -1, axis=(2, 3)), axis=1)) == 3  # Rows of zeros.


def testFormatsHaveTheSameImages(data_dir, array_record_dir):
  expected = _All(_Input(data_dir, 'lg_many_images'), 60)
  actual = _All(_Input(array_record_dir, 'lg_many_images'), 60)
  assert np.array_equal(actual[0], expected[0]) and np.array_equal(actual[1], expected[1])
  with pytest.raises(
    ValueError,
    match=naming.Naming(
      'in_memory', 'TFRecord', 'array_record', 'tfds.builder("lg_many_images", data_dir="DIR")'
    ),
  ):
    _Input(array_record_dir, 'lg_many_images', in_memory=False).NumExamples()


@pytest.mark.parametrize('split', ['train', 'train[2:9]', 'test+train[5:]'])
def testImagesFromFilesEqualImagesInMemory(data_dir, split):
  name = 'lg_many_images'
  expected = _All(_Input(data_dir, name, split=split), 20)
  options = {'split': split, 'in_memory': False, 'central_share': 1.0}
  images, labels = _All(_Input(data_dir, name, **options), 20)
  np.testing.assert_allclose(images, expected[0], atol=1e-6)
  assert np.array_equal(labels, expected[1])


@pytest.mark.parametrize('in_memory', [False, True])
def testWorkersCanReadTheImages(data_dir, in_memory):
  assert batch_placement.WhyNotOnWorkers(_Input(data_dir, in_memory=in_memory)) is None


@pytest.mark.parametrize('augment', [False, True])
def testImagesOfAnySizeAreReadByIndex(data_dir, augment):
  generator = _Input(
    data_dir, 'lg_wide_images', augment=augment, label_offset=1, num_classes=NUM_CLASSES + 1
  )
  images, labels = _All(generator, NUM_TRAIN)
  which = np.round((images[:, 0, 0, 0] + 1) * 12.75).astype(int)
  assert sorted(which) == list(range(NUM_TRAIN))
  assert np.array_equal(labels, which % NUM_CLASSES + 1)
  np.testing.assert_allclose(images, images[:, :1, :1, :1] * np.ones([SIZE, SIZE, 3]), atol=1e-5)


def testImagesAreCroppedAndScaled():
  """Evaluation crops the central square, training a random window; both are scaled by averaging."""
  image = _Pixels('train', 0, height=16, width=24)
  seed = tf.constant(5, tf.int64)
  top_edge, left_edge, rows, columns = image_augmentation.RandomWindow(16, 24, seed).numpy()
  assert top_edge != left_edge and rows != columns
  window = image[top_edge : top_edge + rows, left_edge : left_edge + columns]
  for augment, expected in ((False, image[2:14, 6:18]), (True, window)):
    generator = _Input('unused', in_memory=False, augment=augment, image_size=3, central_share=0.75)
    actual = generator._Decode(tf.io.encode_png(image), seed)
    np.testing.assert_allclose(actual, tf.image.resize(expected, [3, 3], antialias=True), rtol=1e-5)


def testRandomWindowsAreExactAfterARestart(data_dir):
  generator = _Input(data_dir, 'lg_wide_images', augment=True, image_size=3)
  whole = [b.images.numpy() for b in generator.Dataset().take(5)]
  for batch, expected in zip(generator.Dataset(start=8).take(3), whole[2:], strict=True):
    assert np.array_equal(batch.images, expected)


def testFingerprintDependsOnTheData(data_dir):
  names = [
    _Input(data_dir).Fingerprint(),
    _Input(data_dir, split='test').Fingerprint(),
    _Input(data_dir, 'lg_wide_images').Fingerprint(),
  ]
  assert len(set(names)) == 3
  assert _Input(data_dir, batch_size=3, augment=True).Fingerprint() == names[0]


# ---- missing and damaged data --------------------------------------------------------------------


def testSpecNeedsNoData():
  generator = _Input('/nowhere', 'mnist')
  assert generator.BatchSpec().images.shape == [4, SIZE, SIZE, 3]


def testMissingDataSetGetsAdvice(tmp_path):
  generator = _Input(str(tmp_path), 'lg_fixed_images')
  with pytest.raises(ValueError) as caught:
    generator.Fingerprint()
  message = str(caught.value)
  assert f'in {tmp_path}/lg_fixed_images: run `python -c' in message
  assert 'image.digits.LeNet5' in message


def testAdvisedCommandPreparesTheDataSet(tmp_path):
  """Runs its code in this process, which knows our builder, after splitting it as a shell does."""
  data_dir = str(tmp_path / "an 'odd' place")
  with pytest.raises(ValueError) as caught:
    _Input(data_dir).Fingerprint()
  (arguments,) = re.findall('`python( -c .*)`', str(caught.value))
  option, code = shlex.split(arguments)
  assert option == '-c'
  exec(code, {'__name__': '__main__'})
  assert _Input(data_dir).NumExamples() == NUM_TRAIN


def testManualDownloadIsMentioned(tmp_path):
  generator = _Input(str(tmp_path), 'imagenet2012', num_classes=1000, in_memory=False)
  with pytest.raises(ValueError, match=naming.Naming("'imagenet2012'", 'by hand')):
    generator.NumExamples()


@pytest.mark.parametrize(
  'values, names',
  [
    ({'dataset': ''}, ('dataset', 'cifar10')),
    ({'dataset': 'minst'}, ('param dataset', "'minst'", 'mnist')),
    ({'num_classes': 3}, ('num_classes', '4 classes', 'label_offset is 0', 3)),
    ({'label_offset': 1}, ('num_classes', '4 classes', 'label_offset is 1')),
    ({'image_size': 8}, ('image_size', '(6, 6, 3)', 'in_memory', '(8, 8, 3)')),
    ({'central_share': 0.0}, ('central_share', '0.0')),
    ({'num_classes': 0}, ('num_classes', 0)),
    ({'damaged_records': 'skp'}, ('damaged_records', "'stop'", "'skip'", "'skp'")),
  ],
)
def testInvalidParamsAreNamed(data_dir, values, names):
  with pytest.raises(ValueError, match=naming.Naming("'Train'", *names)):
    _Input(data_dir, **values).Fingerprint()


def testMissingSplitIsNamed(data_dir):
  for dataset in ('lg_fixed_images', 'lg_wide_images'):
    with pytest.raises(
      ValueError, match=naming.Naming('param split', "['train', 'test']", "'dev'")
    ):
      _Input(data_dir, dataset, split='dev').NumExamples()


@pytest.mark.parametrize('name', ['image', 'label'])
def testMissingFeatureIsNamed(data_dir, monkeypatch, name):
  features = LgFixedImages(data_dir=data_dir).info.features
  without = tfds.features.FeaturesDict({k: v for k, v in features.items() if k != name})
  info = functools.partial(tfds.core.DatasetInfo, features=without)
  monkeypatch.setattr(LgFixedImages, '_info', lambda self: info(builder=self))
  folder = os.path.join(data_dir, 'lg_fixed_images')
  with pytest.raises(ValueError, match=naming.Naming('param dataset', folder, name)):
    _Input(data_dir).Fingerprint()


def testTensorsAreNotConstantsOfTheGraph(data_dir):
  generator = _Input(data_dir)
  traced = tf.function(
    lambda i, s: generator._Images(i, s).images, autograph=False
  ).get_concrete_function(tf.TensorSpec([4], tf.int64), tf.TensorSpec([4], tf.int64))
  large = [op for op in traced.graph.get_operations() if op.type == 'Const']
  assert all(np.prod(op.outputs[0].shape) < 100 for op in large)


def testDamagedRecordIsNamed(data_dir, tmp_path):
  """Images on disk: a damaged record when it is read, a truncated file at the start."""
  copied = shutil.copytree(data_dir, tmp_path / 'data')
  (path,) = copied.rglob('lg_wide_images-train*')
  data = path.read_bytes()
  offset = data.index(b'\x89PNG')
  path.write_bytes(data[:offset] + b'X' + data[offset + 1 :])
  generator = _Input(str(copied), 'lg_wide_images', shuffle=False, batch_size=1, num_epochs=1)
  rest_of_batches = batches.Batches(generator, start=1)
  assert len(list(rest_of_batches)) == NUM_TRAIN - 1
  with pytest.raises(ValueError, match=naming.Naming(path.name, 'record 1', 'byte 0', 'corrupted')):
    next(batches.Batches(generator))
  path.write_bytes(data[:-5])
  with pytest.raises(ValueError, match=naming.Naming(path.name, 'record 12', 'truncated')):
    _Input(str(copied), 'lg_wide_images').Dataset()


@pytest.mark.parametrize('in_memory', [False, True])
def testDamagedRecordsAreLeftOutAndCounted(data_dir, tmp_path, in_memory):
  copied = shutil.copytree(data_dir, tmp_path / 'data')
  (path,) = copied.rglob('lg_fixed_images-train*')
  intact = path.read_bytes()
  begins = tf_records.RecordOffsets(str(path))

  options = {'split': 'train[2:9]', 'shuffle': False, 'in_memory': in_memory, 'num_epochs': 1}

  def Reads(offset, **values):
    data = bytearray(intact)
    data[offset] ^= 1
    path.write_bytes(data)
    return _Input(str(copied), **{**options, **values})

  whole = _Input(data_dir, split='train[2:9]', shuffle=False, in_memory=in_memory, num_epochs=1)
  images, labels = _All(whole, 7)
  with pytest.raises(ValueError, match=naming.Naming('record 6', 'damaged_records', 'skip')):
    next(batches.Batches(Reads(begins[5] + 20, batch_size=7)))
  prints = {whole.Fingerprint()}
  remaining = {
    begins[0] + 20: range(7),  # Not in the split,
    begins[5] + 20: [0, 1, 2, 4, 5, 6],  # in it,
    begins[6]: [0, 1, 2, 3],  # and a length: no later record can be found.
  }
  for offset, which in remaining.items():
    generator = Reads(offset, damaged_records='skip')
    actual = _All(generator, len(which))
    assert np.array_equal(actual[0], images[which]) and np.array_equal(actual[1], labels[which])
    assert (generator.NumExamples(), generator.NumDamaged()) == (len(which), 7 - len(which))
    prints.add(generator.Fingerprint())
  other = Reads(begins[6] + 20, damaged_records='skip')  # Other images, but the same number.
  assert len(prints | {other.Fingerprint()}) == 4
  path.write_bytes(b'')
  with pytest.raises(ValueError, match=naming.Naming(copied, "'train[2:9]'")):
    next(batches.Batches(_Input(str(copied), **options, damaged_records='skip')))
  assert naming.Names(generator.Describe(), '4 examples', '3 damaged records')
  assert _Input(data_dir, damaged_records='skip').Fingerprint() == _Input(data_dir).Fingerprint()
  noise = _Input('/nowhere', damaged_records='skip', num_fake_examples=3)
  assert (noise.NumExamples(), noise.NumDamaged()) == (3, 0)


@pytest.mark.parametrize('in_memory', [False, True])
@pytest.mark.parametrize('num_bytes', [4, 0])
def testTruncatedFileIsNamed(data_dir, tmp_path, in_memory, num_bytes):
  """To tf.data a file ends within the header of a record as it does between two records."""
  copied = shutil.copytree(data_dir, tmp_path / 'data')
  path = sorted(copied.rglob('lg_many_images-train*'))[1]
  os.truncate(path, tf_records.RecordOffsets(str(path))[-2] + num_bytes)
  names = ('record 20', 'truncated') if num_bytes else ('19 records', 20)
  with pytest.raises(ValueError, match=naming.Naming(path.name, *names)):
    _Input(str(copied), 'lg_many_images', in_memory=in_memory).Dataset()
  skipping = _Input(str(copied), 'lg_many_images', in_memory=in_memory, damaged_records='skip')
  assert (skipping.NumExamples(), skipping.NumDamaged()) == (59, 1)


def testOnlyTfRecordsCanBeSkipped(array_record_dir, tmp_path):
  with pytest.raises(ValueError, match=naming.Naming('damaged_records', 'array_record', 'stop')):
    _Input(array_record_dir, 'lg_many_images', damaged_records='skip').NumExamples()
  copied = shutil.copytree(array_record_dir, tmp_path / 'data')
  path = sorted(copied.rglob('*train.array_record*'))[1]
  data = path.read_bytes()
  offset = data.index(b'PNG')
  path.write_bytes(data[:offset] + bytes(3) + data[offset + 3 :])
  with pytest.raises(ValueError, match=naming.Naming(path.name, 'example', "'train'", 'Corrupted')):
    _Input(str(copied), 'lg_many_images').Fingerprint()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
