# SPDX-License-Identifier: Apache-2.0
"""MNIST: images of handwritten digits, 28x28. docs/datasets.md describes how to get the data.

`trainer --model=image.mnist.LeNet5 --logdir=runs/mnist`. Without a network, use
`image.digits.LeNet5`.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, registry
from params.image import tfds_experiment
from tasks.image import lenet


@registry.RegisterSingleTaskModel
class LeNet5(tfds_experiment.TfdsExperiment):
  """LeNet-5 on one device, such as a CPU, for 20 epochs. Not measured yet."""

  DATASET = 'mnist'
  TRAIN_SPLIT, DEV_SPLIT, TEST_SPLIT = 'train[:55000]', 'train[55000:]', 'test'
  IMAGE_SIZE = 28
  NUM_CHANNELS = 1
  NUM_CLASSES = 10
  MAX_STEPS = 20 * 55_000 // 128

  def Train(self) -> hyperparams.InstantiableParams:
    """55,000 images, shifted by up to two pixels and not flipped."""
    return super().Train().Set(max_shift=2, flip=False)

  def Task(self) -> hyperparams.InstantiableParams:
    """Two convolutions and two projections."""
    p = self._SetSizes(lenet.LeNet5.Params().Set(name='lenet', dropout_prob=0.3))
    p.batch_norm_tpl.decay = 0.99
    p.stack.xla = False
    p.train.Set(max_steps=self.MAX_STEPS, eval_datasets=['Dev', 'Test'])
    p.train.learner.Set(
      learning_rate=1e-3,
      lr_schedule=lr_schedules.LinearRampupCosineSchedule.Params().Set(
        warmup_steps=200, total_steps=self.MAX_STEPS
      ),
    )
    return p
