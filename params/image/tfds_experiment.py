# SPDX-License-Identifier: Apache-2.0
"""Base class of image experiments on TFDS data sets."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import hyperparams, registry, tfds_images


class TfdsExperiment(registry.SingleTaskModelParams):
  """Train, Dev and Test inputs from a TFDS data set; subclasses set the data set and the task."""

  DATASET = ''
  TRAIN_SPLIT, DEV_SPLIT, TEST_SPLIT = 'train', '', 'test'
  IMAGE_SIZE = 0
  NUM_CHANNELS = 3
  NUM_CLASSES = 0
  BATCH_SIZE = 128

  def _Input(self, split: str, **values: Any) -> hyperparams.InstantiableParams:
    return tfds_images.TfdsImageInput.Params().Set(
      name=self.DATASET,
      dataset=self.DATASET,
      split=split,
      batch_size=self.BATCH_SIZE,
      image_size=self.IMAGE_SIZE,
      num_channels=self.NUM_CHANNELS,
      num_classes=self.NUM_CLASSES,
      **values,
    )

  def Train(self) -> hyperparams.InstantiableParams:
    """The training images, randomly augmented."""
    return self._Input(self.TRAIN_SPLIT, augment=True)

  def Dev(self) -> hyperparams.InstantiableParams:
    """Images held out from training."""
    return self._Input(self.DEV_SPLIT)

  def Test(self) -> hyperparams.InstantiableParams:
    """The data set's own test images."""
    return self._Input(self.TEST_SPLIT)

  def _SetSizes(self, p: hyperparams.InstantiableParams) -> hyperparams.InstantiableParams:
    return p.Set(
      image_size=self.IMAGE_SIZE, num_channels=self.NUM_CHANNELS, num_classes=self.NUM_CLASSES
    )

  def Smoke(self) -> dict[str, object]:
    """Small batches of noise instead of the data."""
    return {'input.num_fake_examples': 16, 'input.batch_size': 4}
