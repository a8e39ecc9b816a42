# SPDX-License-Identifier: Apache-2.0
"""ImageNet 2012 with AmoebaNet: the image models of the GPipe paper (arXiv:1811.06965v5).

Data: imagenet2012 of TFDS (150 GB; docs/datasets.md describes how to prepare it), from archives
that must be downloaded by hand from image-net.org. Without the data,
`--model_params_override='input.num_fake_examples:1024'` trains on noise, to measure time and
memory, and `image.digits.AmoebaNetDGPipe2` runs anywhere.

`trainer --model=image.imagenet.AmoebaNetD18x256 --logdir=runs/imagenet` trains. On any machine,
`--mode=inspect_model` counts the parameters and `--mode=inspect_partition` shows the cut. None of
these experiments has been trained yet. The paper does not report the number of micro-batches for
Table 1, nor the batch size for Table 3 and AmoebaNet-B; the numbers in this file are our choice.

Training follows Real et al. 2019, to which the paper refers: RMSProp with decay 0.9 and epsilon
0.1, a learning rate of 0.001 that falls by 3 % every two epochs, label smoothing 0.1, an auxiliary
head of weight 0.4, dropout 0.5, drop-path down to 0.7, and a weight decay of 4e-5 as an L2 loss on
all weights except biases and BatchNorm. The initialisation and BatchNorm's decay of 0.9997 and
epsilon of 0.001 follow the TPU code of these models. As in that code, AmoebaNet-B is evaluated with
averaged weights. The other models are not, because averages take another 4 bytes per parameter.
"""

from __future__ import annotations

import math

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry, weight_params
from params.image import tfds_experiment
from tasks.image import amoebanet

# Number of training images that are held out as the development set.
_NUM_DEV = 10_000
_NUM_TRAIN = 1_281_167 - _NUM_DEV


class AmoebaNet(tfds_experiment.TfdsExperiment):
  """AmoebaNet (NUM_CELLS, REDUCTION_SIZE) in NUM_STAGES stages."""

  DATASET = 'imagenet2012'
  TRAIN_SPLIT = f'train[:-{_NUM_DEV}]'
  DEV_SPLIT = f'train[-{_NUM_DEV}:]'
  TEST_SPLIT = 'validation'
  IMAGE_SIZE = 224
  # Class 0 is the background, and no image has this label.
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
      # The truncation reduces the variance to 2 / fan_out.
      params_init=weight_params.WeightInit.TruncatedGaussianSqrtFanOut(math.sqrt(2.6)),
    )
    p.batch_norm_tpl.Set(decay=0.9997, epsilon=1e-3)
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES)
    p.train.Set(max_steps=max_steps, save_interval_steps=5000, eval_datasets=['Dev', 'Test'])
    p.train.learner.Set(
      learning_rate=1e-3,
      l2_regularizer_weight=4e-5,
      lp_regularizer_exclusion=r'\.(b|beta|gamma)$',
      # One slot per weight; with weight and gradient, these are the 12 bytes of the paper's Table
      # 1.
      optimizer=optimizer.RMSprop.Params().Set(rho=0.9, epsilon=0.1),
      lr_schedule=lr_schedules.ExponentialSchedule.Params().Set(
        start=(0, 1.0), limit=(max_steps, 0.97 ** (self.NUM_EPOCHS / 2))
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """A narrow network on small images of noise, in one stage."""
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
  """Table 1, Naive-1: the largest model for one accelerator of 8 GB without GPipe.

  81,140,766 parameters without the auxiliary head. The paper reports 82M, 1.05 GB of parameter
  memory (12 bytes each) and 6.26 GB of activations at a batch of 128, on an 8 GB Cloud TPUv2.
  """

  REDUCTION_SIZE = 208
  NUM_MICRO_BATCHES = 1

  def Task(self) -> hyperparams.InstantiableParams:
    """The network and its training, without re-materialisation."""
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
  """Table 4: 557M parameters, images of 480x480 pixels, four stages.

  557,299,209 parameters without the auxiliary head. The paper reports 84.4 % top-1 and 97 % top-5
  accuracy on single crops of the validation images.
  """

  VARIANT = 'B'
  REDUCTION_SIZE = 512
  IMAGE_SIZE = 480
  NUM_STAGES = 4

  def Task(self) -> hyperparams.InstantiableParams:
    """The network and its training, with averages of the weights."""
    p = super().Task()
    p.train.ema_decay = 0.9999
    return p
