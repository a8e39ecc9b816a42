# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10: 32x32 images of ten classes. docs/datasets.md describes how to get the data.

`trainer --model=image.cifar10.AmoebaNetDGPipe2 --logdir=runs/cifar10`. Without a network, use
`image.digits.AmoebaNetDGPipe2`.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry
from params.image import tfds_experiment
from tasks.image import amoebanet


class AmoebaNet(tfds_experiment.TfdsExperiment):
  """AmoebaNet-D (6, 32) without stem cells, 100 epochs."""

  DATASET = 'cifar10'
  TRAIN_SPLIT, DEV_SPLIT, TEST_SPLIT = 'train[:45000]', 'train[45000:]', 'test'
  IMAGE_SIZE = 32
  NUM_CLASSES = 10
  NUM_STAGES = 1
  MAX_STEPS = 100 * 45_000 // 128

  def Task(self) -> hyperparams.InstantiableParams:
    """The network and its training."""
    p = self._SetSizes(amoebanet.AmoebaNet.Params().Set(name='amoebanet'))
    p.Set(
      num_cells=6,
      reduction_size=32,
      stem_stride=1,
      num_stem_cells=0,
      label_smoothing=0.1,
      aux_loss_weight=0.4,
      dropout_prob=0.2,
      drop_path_keep_prob=0.8,
      drop_path_total_steps=self.MAX_STEPS,
    )
    p.batch_norm_tpl.decay = 0.99
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=4, xla=False)
    p.train.Set(max_steps=self.MAX_STEPS, eval_datasets=['Dev', 'Test'])
    p.train.learner.Set(
      learning_rate=2e-3,
      optimizer=optimizer.AdamW.Params().Set(weight_decay=0.05),
      clip_gradient_norm_to_value=5.0,
      lr_schedule=lr_schedules.LinearRampupCosineSchedule.Params().Set(
        warmup_steps=500, total_steps=self.MAX_STEPS
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """Few narrow cells, on noise instead of the data."""
    return {
      **super().Smoke(),
      'task.num_cells': 1,
      'task.reduction_size': 4,
      'task.stem_filters': 4,
      'task.aux_loss_weight': 0.0,
      'task.stack.num_micro_batches': 2,
    }


@registry.RegisterSingleTaskModel
class AmoebaNetDGPipe1(AmoebaNet):
  """AmoebaNetDGPipe2 on one device, with the same micro-batches. Not measured yet."""


@registry.RegisterSingleTaskModel
class AmoebaNetDGPipe2(AmoebaNet):
  """AmoebaNet-D (6, 32) in two stages, for two CPU cores or accelerators. Not measured yet."""

  NUM_STAGES = 2
