# SPDX-License-Identifier: Apache-2.0
"""Small models on scikit-learn's handwritten digits; needs no download.

Run `pip install 'lingvo_gpipe[image]'`, then `trainer --model=image.digits.LeNet5
--logdir=runs/digits`.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry
from tasks.image import amoebanet, digits_input, lenet


class _Digits(registry.SingleTaskModelParams):
  """Data and training settings shared by the experiments in this file."""

  BATCH_SIZE = 64
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 1
  MAX_STEPS = 1500
  LEARNING_RATE = 2e-3

  def _Input(self, split: str) -> hyperparams.InstantiableParams:
    return digits_input.DigitsInput.Params().Set(
      name=split, split=split, batch_size=self.BATCH_SIZE
    )

  def Train(self) -> hyperparams.InstantiableParams:
    """About 70 % of the images, slightly shifted, rotated and zoomed."""
    return self._Input('train').Set(augment=True)

  def Dev(self) -> hyperparams.InstantiableParams:
    """About 10 % of the images."""
    return self._Input('dev')

  def Test(self) -> hyperparams.InstantiableParams:
    """About 20 % of the images."""
    return self._Input('test')

  def _Configure(self, p: hyperparams.InstantiableParams) -> hyperparams.InstantiableParams:
    p.Set(
      image_size=digits_input.IMAGE_SIZE,
      num_channels=digits_input.NUM_CHANNELS,
      num_classes=digits_input.NUM_CLASSES,
      label_smoothing=0.1,
    )
    p.batch_norm_tpl.decay = 0.99
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES, xla=False)
    p.train.Set(
      max_steps=self.MAX_STEPS,
      save_interval_steps=500,
      summary_interval_steps=50,
      eval_datasets=['Dev', 'Test'],
    )
    p.train.learner.Set(
      learning_rate=self.LEARNING_RATE,
      optimizer=optimizer.Adam.Params(),
      lr_schedule=lr_schedules.LinearRampupCosineSchedule.Params().Set(
        warmup_steps=50, total_steps=self.MAX_STEPS
      ),
    )
    return p


@registry.RegisterSingleTaskModel
class LeNet5(_Digits):
  """LeNet-5 with 3x3 filters, on one device.

  `trainer --model=image.digits.LeNet5 --logdir=runs/digits`. Measured on two busy CPU cores: 32 s,
  98.64 % accuracy on the test images (98.92 % and 98.64 % with two other seeds).
  """

  def Task(self) -> hyperparams.InstantiableParams:
    """Two convolutions and two projections."""
    p = self._Configure(lenet.LeNet5.Params().Set(name='lenet'))
    return p.Set(filter_size=3, filters=[32, 64], hidden_dim=128, dropout_prob=0.3)


class AmoebaNet(_Digits):
  """A small AmoebaNet-D, without stem cells because the images are small.

  `trainer --model=image.digits.AmoebaNetDGPipe2 --logdir=runs/amoebanet` trains it in two stages.
  Measured accuracy after 1,000 steps: 97.3 % on test (97.4 % on dev) in one stage, 97.8 % on test
  (97.4 % on dev) in two. The losses are equal at first and then diverge by rounding. Trains at
  about 250 examples per second on two busy CPU cores.
  """

  NUM_MICRO_BATCHES = 4
  MAX_STEPS = 1000

  def Task(self) -> hyperparams.InstantiableParams:
    """AmoebaNet-D (3, 16)."""
    p = self._Configure(amoebanet.AmoebaNet.Params().Set(name='amoebanet'))
    return p.Set(
      num_cells=3,
      reduction_size=16,
      stem_filters=16,
      stem_stride=1,
      num_stem_cells=0,
      dropout_prob=0.2,
      drop_path_keep_prob=0.95,
      drop_path_total_steps=self.MAX_STEPS,
    )

  def Smoke(self) -> dict[str, object]:
    """A narrow network and small batches."""
    return {
      'input.batch_size': 4,
      'task.num_cells': 1,
      'task.reduction_size': 4,
      'task.stem_filters': 4,
      'task.stack.num_micro_batches': 2,
    }


@registry.RegisterSingleTaskModel
class AmoebaNetDGPipe1(AmoebaNet):
  """AmoebaNetDGPipe2 on one device, with the same micro-batches and the same losses."""


@registry.RegisterSingleTaskModel
class AmoebaNetDGPipe2(AmoebaNet):
  """AmoebaNet-D (3, 16) in two stages."""

  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class AmoebaNetDGPipe4(AmoebaNet):
  """AmoebaNet-D (3, 16) in four stages: 1 min 38 s on two CPU cores, 97.6 % test accuracy."""

  NUM_STAGES = 4
