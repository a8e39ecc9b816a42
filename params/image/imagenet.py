# SPDX-License-Identifier: Apache-2.0
"""ImageNet 2012 with AmoebaNet: the image models of the GPipe paper (arXiv:1811.06965v5).

Data: imagenet2012 of TFDS (docs/training.md tells how to prepare it; 150 GB), from the archives of
image-net.org, which one has to fetch by hand. Without them
`--model_params_override='input.num_fake_examples:1024'` trains on noise, for measuring time and
memory, and `image.digits.AmoebaNetDGPipe2` runs anywhere.

`trainer --model=image.imagenet.AmoebaNetD18x256 --logdir=runs/imagenet` trains; with
`--mode=inspect_model` it counts the parameters on any machine, with `--mode=inspect_partition` it
shows the cut. None of these experiments has been trained yet.
The paper's figures are given as such; it does not tell the number of micro-batches behind Table 1,
nor the batch of Table 3 and of AmoebaNet-B: those here are ours.

Training is that of Real et al. 2019, which the paper refers to: RMSProp with decay 0.9 and epsilon
0.1, a learning rate of 0.001 that falls by 3 % in two epochs, label smoothing 0.1, an auxiliary
head of weight 0.4, dropout 0.5, drop-path down to 0.7, weight decay of 4e-5 as an L2 loss on what
is no bias and no part of BatchNorm. BatchNorm's decay of 0.9997 and epsilon of 0.001 and the
initialisation are those of the TPU code of these models. AmoebaNet-B is evaluated with averaged
weights, as there; the others are not: an average takes 4 bytes more a parameter.
"""

from __future__ import annotations

import math

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry, weight_params
from params.image import tfds_experiment
from tasks.image import amoebanet

# The last images of train are kept out of it, as development set.
_NUM_DEV = 10_000
_NUM_TRAIN = 1_281_167 - _NUM_DEV


class AmoebaNet(tfds_experiment.TfdsExperiment):
  """AmoebaNet (NUM_CELLS, REDUCTION_SIZE) in NUM_STAGES stages."""

  DATASET = 'imagenet2012'
  TRAIN_SPLIT = f'train[:-{_NUM_DEV}]'
  DEV_SPLIT = f'train[-{_NUM_DEV}:]'
  TEST_SPLIT = 'validation'
  IMAGE_SIZE = 224
  # Class 0 is the background, which no image has.
  NUM_CLASSES = 1001
  BATCH_SIZE = 128
  NUM_EPOCHS = 100
  VARIANT = 'D'
  NUM_CELLS = 18
  REDUCTION_SIZE = 256
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 32

  def _Input(self, split: str, **values: object) -> hyperparams.InstantiableParams:
    return super()._Input(split, in_memory=False, label_offset=1, num_parallel_calls=-1, **values)

  def Task(self) -> hyperparams.InstantiableParams:
    """The network and its training."""
    epoch = _NUM_TRAIN / self.BATCH_SIZE
    max_steps = round(self.NUM_EPOCHS * epoch)
    p = self._SetSizes(amoebanet.AmoebaNet.Params().Set(name='amoebanet'))
    p.Set(
      variant=self.VARIANT,
      num_cells=self.NUM_CELLS,
      reduction_size=self.REDUCTION_SIZE,
      label_smoothing=0.1,
      aux_loss_weight=0.4,
      dropout_prob=0.5,
      drop_path_keep_prob=0.7,
      drop_path_total_steps=max_steps,
      # A variance of 2 / fan_out is left of it by the truncation.
      params_init=weight_params.WeightInit.TruncatedGaussianSqrtFanOut(math.sqrt(2.6)),
    )
    p.batch_norm_tpl.Set(decay=0.9997, epsilon=1e-3)
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES)
    p.train.Set(max_steps=max_steps, save_interval_steps=5000, eval_datasets=['Dev', 'Test'])
    p.train.learner.Set(
      learning_rate=1e-3,
      l2_regularizer_weight=4e-5,
      lp_regularizer_exclusion=r'\.(b|beta|gamma)$',
      # One slot a weight: with the weight and its gradient the 12 bytes of the paper's Table 1.
      optimizer=optimizer.RMSprop.Params().Set(rho=0.9, epsilon=0.1),
      lr_schedule=lr_schedules.ExponentialSchedule.Params().Set(
        start=(0, 1.0), limit=(max_steps, 0.97 ** (self.NUM_EPOCHS / 2))
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """Two narrow cells on small images of noise, in one stage."""
    return {
      **super().Smoke(),
      'input.image_size': 16,
      'input.num_parallel_calls': 1,
      'task.image_size': 16,
      'task.num_cells': 1,
      'task.reduction_size': 4,
      'task.stem_filters': 4,
      'task.num_stem_cells': 0,
      'task.aux_loss_weight': 0.0,
      'task.drop_path_keep_prob': 1.0,
      'task.stack.num_stages': 1,
      'task.stack.num_micro_batches': 1,
      'task.stack.xla': False,
    }


@registry.RegisterSingleTaskModel
class AmoebaNetD18x208(AmoebaNet):
  """Table 1, Naive-1: what one accelerator of 8 GB trains without GPipe.

  81,140,766 parameters without the auxiliary head. The paper reports 82M, 1.05 GB of parameter
  memory (12 bytes each) and 6.26 GB of activations at a batch of 128, on an 8 GB Cloud TPUv2.
  """

  REDUCTION_SIZE = 208
  NUM_MICRO_BATCHES = 1

  def Task(self) -> hyperparams.InstantiableParams:
    """As the others', without re-materialisation."""
    p = super().Task()
    p.stack.remat_policy = 'none'
    return p


@registry.RegisterSingleTaskModel
class AmoebaNetD18x416(AmoebaNet):
  """Table 1, Pipeline-1: one accelerator, micro-batches and re-materialisation.

  317,548,353 parameters without the auxiliary head. The paper reports 318M, 3.8 GB of parameter
  memory and 3.46 GB of activations at a batch of 128.
  """

  REDUCTION_SIZE = 416


@registry.RegisterSingleTaskModel
class AmoebaNetD18x544(AmoebaNet):
  """Table 1, Pipeline-2: two stages on two accelerators of 8 GB.

  540,204,945 parameters without the auxiliary head. The paper reports 542M, 6.45 GB of parameter
  memory and 8.11 GB of activations, both on two accelerators together.
  """

  REDUCTION_SIZE = 544
  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class AmoebaNetD36x544(AmoebaNet):
  """Table 1, Pipeline-4: four stages on four accelerators of 8 GB.

  1,053,302,481 parameters without the auxiliary head. The paper reports 1.05B, 12.53 GB of
  parameter memory and 15.21 GB of activations, both on four accelerators together.
  """

  NUM_CELLS = 36
  REDUCTION_SIZE = 544
  NUM_STAGES = 4


@registry.RegisterSingleTaskModel
class AmoebaNetD72x512(AmoebaNet):
  """Table 1, Pipeline-8: eight stages on eight accelerators of 8 GB.

  1,842,618,441 parameters without the auxiliary head. The paper reports 1.8B, 24.62 GB of parameter
  memory and 26.24 GB of activations, both on eight accelerators together.
  """

  NUM_CELLS = 72
  REDUCTION_SIZE = 512
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class AmoebaNetD18x256(AmoebaNet):
  """Table 2: throughput on TPUs; `task.stack.num_stages` 2, 4 and 8, `num_micro_batches` 1, 4, 32.

  121,915,113 parameters without the auxiliary head. The paper reports, relative to K=2, M=1 and
  with batches "adjusted to fit memory": 1.07, 1.26, 1.72 at M=4 and 1.21, 1.84, 3.48 at M=32 for
  K=2, 4, 8.
  """

  REDUCTION_SIZE = 256
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class AmoebaNetD18x128(AmoebaNet):
  """Table 3: throughput on P100 GPUs without fast links; `task.stack.num_stages` 2, 4 and 8.

  31,557,433 parameters without the auxiliary head. The paper reports 1, 1.7 and 2.7 for K=2, 4, 8
  at M=32.
  """

  REDUCTION_SIZE = 128
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class AmoebaNetB18x512(AmoebaNet):
  """The paper's Table 4: 557M parameters, images of 480x480, four stages.

  557,299,209 parameters without the auxiliary head. The paper reports 84.4 % top-1 and 97 % top-5
  accuracy of a single crop of the validation images.
  """

  VARIANT = 'B'
  REDUCTION_SIZE = 512
  IMAGE_SIZE = 480
  NUM_STAGES = 4

  def Task(self) -> hyperparams.InstantiableParams:
    """As the others', and averages of the weights."""
    p = super().Task()
    p.train.ema_decay = 0.9999
    return p
