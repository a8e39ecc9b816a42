# SPDX-License-Identifier: Apache-2.0
"""The ImageNet experiments have the sizes, stages, parameters and settings of the paper."""

import inspect
import re
import sys

import pytest

from lingvo_gpipe.experiment import registry

# Variant, L, D, image size, stages, and parameters without the auxiliary head.
_MODELS = {
  'AmoebaNetD18x208': ('D', 18, 208, 224, 1, 81_140_766),
  'AmoebaNetD18x416': ('D', 18, 416, 224, 1, 317_548_353),
  'AmoebaNetD18x544': ('D', 18, 544, 224, 2, 540_204_945),
  'AmoebaNetD36x544': ('D', 36, 544, 224, 4, 1_053_302_481),
  'AmoebaNetD72x512': ('D', 72, 512, 224, 8, 1_842_618_441),
  'AmoebaNetD18x256': ('D', 18, 256, 224, 8, 121_915_113),
  'AmoebaNetD18x128': ('D', 18, 128, 224, 8, 31_557_433),
  'AmoebaNetB18x512': ('B', 18, 512, 480, 4, 557_299_209),
}


@pytest.mark.parametrize('name', _MODELS)
def testSizesStagesAndParameters(name):
  key = f'image.imagenet.{name}'
  train, test = (registry.GetParams(key, split) for split in ('Train', 'Test'))
  p = train.task
  sizes = (p.variant, p.num_cells, p.reduction_size, p.image_size, p.stack.num_stages)
  assert (*sizes, p.Copy().Set(aux_loss_weight=0.0).Instantiate().NumParams()) == _MODELS[name]
  count = re.search(r'([\d,]+) parameters without', inspect.getdoc(registry.GetClass(key)))[1]
  assert count == f'{_MODELS[name][-1]:,}'
  # Labels begin at 1.
  for data in (train.input, test.input):
    assert (data.image_size, data.num_classes, data.label_offset) == (p.image_size, 1001, 1)


@pytest.mark.parametrize('name', _MODELS)
def testTrainingFollowsRealEtAl(name):
  key = f'image.imagenet.{name}'
  p = registry.GetParams(key, 'Train').task
  assert (p.label_smoothing, p.aux_loss_weight, p.dropout_prob) == (0.1, 0.4, 0.5)
  assert (p.drop_path_keep_prob, p.drop_path_total_steps) == (0.7, p.train.max_steps)
  learner = p.train.learner
  rmsprop = learner.optimizer
  assert (learner.learning_rate, rmsprop.rho, rmsprop.epsilon) == (1e-3, 0.9, 0.1)
  # One slot per weight: with weight and gradient, the 12 bytes of Table 1.
  assert learner.Instantiate().SlotsPerWeight() == 1
  epoch = (1_281_167 - 10_000) / 128
  schedule = learner.lr_schedule.Instantiate()
  for num_epochs in (2, 50, 100):
    value = float(schedule.Value(round(num_epochs * epoch)))
    assert value == pytest.approx(0.97 ** (num_epochs / 2), rel=1e-4)
  assert p.train.max_steps == round(100 * epoch)
  assert p.train.ema_decay == (0.9999 if 'NetB' in name else 0.0)


def testWeightDecayAppliesToConvolutionsAndProjections():
  p = registry.GetParams('image.imagenet.AmoebaNetB18x512', 'Train').task
  assert p.train.learner.l2_regularizer_weight == 4e-5
  excluded = re.compile(p.train.learner.lp_regularizer_exclusion)
  task = p.Copy().Set(num_cells=3, reduction_size=16).Instantiate()
  for path, (weight, trainable) in task.WeightSpecs().items():
    if trainable:
      assert bool(excluded.search(path)) == (len(weight.shape) == 1), path


def testDataSets():
  inputs = {
    name: registry.GetParams('image.imagenet.AmoebaNetD18x256', name).input
    for name in ('Train', 'Dev', 'Test')
  }
  assert {name: (p.split, p.augment) for name, p in inputs.items()} == {
    'Train': ('train[:-10000]', True),
    'Dev': ('train[-10000:]', False),
    'Test': ('validation', False),
  }
  # Images have any size: training takes a random window, evaluation the central square.
  assert not any(p.in_memory for p in inputs.values()) and inputs['Train'].flip


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
