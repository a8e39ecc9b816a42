# SPDX-License-Identifier: Apache-2.0
"""Every family of keras.applications, at a small image size and a hundredth of the classes.

The deep ones have fewer blocks than their published members, because tracing takes most of the
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import applications
from keras.src.applications import densenet, efficientnet, efficientnet_v2, nasnet

from tools.keras_zoo.case import Case

# The function that makes the model, and its smallest image.
_FAMILIES: dict[str, tuple[Callable[..., Any], int]] = {
  'ConvNeXtTiny': (applications.ConvNeXtTiny, 32),
  'DenseNet, 6 blocks': (functools.partial(densenet.DenseNet, [1, 2, 2, 1]), 32),
  'EfficientNet, 7 blocks': (
    functools.partial(efficientnet.EfficientNet, 1.0, 0.1, 224, name='efficientnetb0'),
    32,
  ),
  'EfficientNetV2, 6 blocks': (
    functools.partial(efficientnet_v2.EfficientNetV2, 1.0, 0.1, 224, name='efficientnetv2-b0'),
    32,
  ),
  'InceptionResNetV2': (applications.InceptionResNetV2, 75),
  'InceptionV3': (applications.InceptionV3, 75),
  'MobileNet': (applications.MobileNet, 32),
  'MobileNetV2': (applications.MobileNetV2, 32),
  'MobileNetV3Small': (applications.MobileNetV3Small, 32),
  'NASNet, 3 normal cells': (
    functools.partial(
      nasnet.NASNet, penultimate_filters=192, num_blocks=1, stem_block_filters=8, default_size=224
    ),
    32,
  ),
  'ResNet50': (applications.ResNet50, 32),
  'ResNet50V2': (applications.ResNet50V2, 32),
  'VGG16, no head': (functools.partial(applications.VGG16, include_top=False), 32),
  'Xception': (applications.Xception, 71),
}


def _Make(name: str) -> Any:
  function, size = _FAMILIES[name]
  keras.backend.clear_session()
  return function(weights=None, input_shape=(size, size, 3), classes=10)


def Modules() -> set[str]:
  """Returns the modules of Keras that define the families."""
  return {getattr(f, 'func', f).__module__ for f, _ in _FAMILIES.values()}


def _Case(name: str) -> Case:
  make = functools.partial(_Make, name)
  if name in ('ConvNeXtTiny', 'VGG16, no head'):
    return Case(name, make)
  # The last maps have few values, over which BatchNormalization magnifies float32's rounding: a
  # change of 1e-7 in the inputs changes the loss of plain Keras's MobileNetV2 by 4e-3 in two steps.
  return Case(name, make, num_micro_batches=1, note='M=1: statistics of the batch', dtype='float64')


CASES = [_Case(name) for name in _FAMILIES]
