# SPDX-License-Identifier: Apache-2.0
"""Labelled images of TensorFlow Datasets, such as mnist, cifar10 and imagenet2012.

This module never downloads anything: `tfds_builder.PrepareCommand` prepares a data set once.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import image_augmentation, image_input
from lingvo_gpipe.input.records import tf_record_index, tf_records
from lingvo_gpipe.input.tfds import tfds_builder

_OFFLINE = 'image.digits.LeNet5'


class TfdsImageInput(image_input.ImageInput):
  """A split of a data set whose examples have an `image` and a `label`.

  There are two kinds of data sets:

  * With p.in_memory all images have p.image_size. They are read once and kept. p.augment shifts
    them by up to p.max_shift pixels.
  * Without p.in_memory images of any size are read as they are needed, also by workers. The data
    set must be prepared as TFRecord files, the default of TFDS. p.augment crops a random window,
    otherwise the central square is cropped; the crop is scaled to p.image_size.

  p.augment with p.flip mirrors half of the images left to right. Pixels are in -1 ... 1.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a TfdsImageInput."""
    p = super().Params()
    p.Define('dataset', '', 'Name of the data set in TFDS.', tfds_builder.DATASET)
    p.Define('split', 'train', 'Split of the data set, such as train[:90%].')
    p.Define('data_dir', '', 'Directory of the prepared data set; empty: the default of TFDS.')
    tf_records.DefinePolicy(p)
    p.Define(
      'num_classes', 0, 'Number of classes, including the ones that label_offset adds.', domain.SIZE
    )
    p.Define(
      'label_offset',
      0,
      'Added to the labels: 1 keeps class 0 free for the background.',
      domain.COUNT,
    )
    p.Define('in_memory', True, 'Keep all images in memory; all must have image_size then.')
    p.Define(
      'max_shift',
      4,
      'With augment and in_memory: maximum shift of images, in pixels.',
      domain.Int(0, 4096),
    )
    p.Define('flip', True, 'With augment: whether to mirror images left to right at random.')
    p.Define(
      'central_share',
      0.875,
      'Without augment and in_memory: side of the central square / shorter side of the image.',
      domain.Number(above=0, high=1),
    )
    return p

  # ---- the data set ----------------------------------------------------------------------------

  @functools.cached_property
  def _builder(self) -> Any:
    """The prepared builder; ValueError that says how to fix it if there is none."""
    p = self.params
    builder = tfds_builder.LoadPrepared(
      p.dataset,
      p.data_dir,
      self._Context('dataset'),
      offline=f'--model={_OFFLINE} needs no data set, and input.num_fake_examples:1000 trains on '
      'noise, for measuring time',
    )
    if not p.in_memory and not tfds_builder.IsTfRecord(builder):
      raise ValueError(
        f'{self._Context("in_memory")}: False needs TFRecord files, but the data set {p.dataset!r} '
        f'was prepared as {builder.info.file_format.value} in {builder.data_path}; prepare it in '
        f'another directory by `{tfds_builder.PrepareCommand(p.dataset, "DIR")}`, and set data_dir'
      )
    for name, cls in (('image', tfds.features.Image), ('label', tfds.features.ClassLabel)):
      tfds_builder.CheckFeature(builder, name, cls, self._Context('dataset'))
    num_classes = builder.info.features['label'].num_classes
    if num_classes + p.label_offset > p.num_classes:
      raise ValueError(
        f'{self._Context("num_classes")}: {tfds_builder.Name(builder)} has {num_classes} classes, '
        f'and label_offset is {p.label_offset}, got {p.num_classes}'
      )
    return builder

  def _NumImages(self) -> int:
    num_images = self._NumPrepared() - self.NumDamaged()
    if not num_images:
      raise ValueError(
        f'{self._Context("split")}: {tfds_builder.Name(self._builder)} has no intact image in '
        f'{self.params.split!r}'
      )
    return num_images

  def _NumPrepared(self) -> int:
    return tfds_builder.NumExamples(self._builder, self.params.split, self._Context('split'))

  def NumDamaged(self) -> int:
    """See the base class."""
    p = self.params
    if p.damaged_records == 'stop' or p.num_fake_examples:
      return 0
    return self._NumPrepared() - len(self._arrays[1] if p.in_memory else self._records.begins)

  def _NumClasses(self) -> int:
    return self.params.num_classes

  def _FingerprintParts(self) -> list[Any]:
    parts = ['tfds', self._builder.info.full_name, self.params.split]
    if self.params.in_memory:
      parts += [hashlib.sha256(np.ascontiguousarray(a).data).hexdigest() for a in self._arrays]
    elif self.NumDamaged():
      parts.append(hashlib.sha256(self._records.begins.data).hexdigest())
    return parts

  @functools.cached_property
  def _records(self) -> tf_record_index.TfRecordIndex:
    """The examples of the split, in the order of the files."""
    ranges = tfds_builder.FileRanges(self._builder, self.params.split, self._Context('dataset'))
    with tf.init_scope():  # Run now, not in the graph of a pipeline.
      return tf_record_index.TfRecordIndex(
        ranges,
        self._Context('damaged_records'),
        self.params.damaged_records,
      )

  @functools.cached_property
  def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, size, size, channels] and labels int32 [n], in the order of the files."""
    p = self.params
    examples = tfds_builder.Examples(
      self._builder,
      p.split,
      ('image', 'label'),
      self._Context('damaged_records'),
      p.damaged_records,
      decoders={'image': tfds.decode.SkipDecoding()},
    )
    images, labels = [], []
    shape = (p.image_size, p.image_size, p.num_channels)
    with tf.device('/device:CPU:0'):
      for i, (encoded, label) in enumerate(examples):
        image = tf.io.decode_image(encoded, p.num_channels).numpy()
        if image.shape != shape:
          raise ValueError(
            f'{self._Context("image_size")}: image {i} of {tfds_builder.Name(self._builder)} has '
            f'the shape {image.shape}, but in_memory needs {shape}; set image_size and '
            'num_channels, or in_memory to False'
          )
        images.append(image)
        labels.append(label)
    return np.array(images, np.uint8).reshape(-1, *shape), np.array(labels, np.int32)

  def Explain(self, error: Exception) -> Exception:
    """See the base class; names the damaged file and record."""
    if isinstance(error, tf.errors.DataLossError) and not self.params.in_memory:
      return self._records.Explain(error)
    return super().Explain(error)

  # ---- examples --------------------------------------------------------------------------------

  def _Images(self, indices: tf.Tensor, seeds: tf.Tensor) -> nested_map.NestedMap:
    p = self.params
    images, labels = (self._FromMemory if p.in_memory else self._FromFiles)(indices, seeds)
    if p.augment and p.flip:
      images = image_augmentation.RandomFlip(images, seeds)
    return nested_map.NestedMap(
      images=images / 127.5 - 1.0, labels=tf.cast(labels, tf.int32) + p.label_offset
    )

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
    # Created outside the graph of a tf.data pipeline, they are its inputs and not its constants.
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tf.constant(self._arrays[0]), tf.constant(self._arrays[1])

  def _FromMemory(self, indices: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    all_images, all_labels = self._tensors
    images = tf.gather(all_images, indices)
    if self.params.augment:
      images = image_augmentation.RandomShift(images, seeds, self.params.max_shift)
    return tf.cast(images, tf.float32), tf.gather(all_labels, indices)

  def _FromFiles(self, indices: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    size, channels = self.params.image_size, self.params.num_channels
    all_features = self._builder.info.features
    features = tfds.features.FeaturesDict({key: all_features[key] for key in ('image', 'label')})

    def Read(index_and_seed: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
      index, seed = index_and_seed
      example = features.deserialize_example(
        self._records.Read(index), decoders={'image': tfds.decode.SkipDecoding()}
      )
      return self._Decode(example['image'], seed), example['label']

    image_spec = tf.TensorSpec([size, size, channels], tf.float32)
    return tf.map_fn(
      Read, (indices, seeds), fn_output_signature=(image_spec, tf.TensorSpec([], tf.int64))
    )

  def _Decode(self, encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Returns float32 [image_size, image_size, channels] in 0 ... 255."""
    p = self.params
    image = tf.io.decode_image(encoded, p.num_channels, expand_animations=False)
    image.set_shape([None, None, p.num_channels])
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    if p.augment:
      window = image_augmentation.RandomWindow(height, width, seed)
    else:
      window = image_augmentation.CentralWindow(height, width, p.central_share)
    top_edge, left_edge, rows, columns = tf.unstack(window)
    image = image[top_edge : top_edge + rows, left_edge : left_edge + columns]
    return tf.image.resize(tf.cast(image, tf.float32), [p.image_size, p.image_size], antialias=True)
