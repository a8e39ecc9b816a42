# SPDX-License-Identifier: Apache-2.0
"""Every family of keras.applications, at a small image size and a tenth of the classes."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tools.keras_zoo.case import Case

_SMALLEST = {
  'ConvNeXtTiny': 32,
  'DenseNet121': 32,
  'EfficientNetB0': 32,
  'EfficientNetV2B0': 32,
  'InceptionResNetV2': 75,
  'InceptionV3': 75,
  'MobileNet': 32,
  'MobileNetV2': 32,
  'MobileNetV3Small': 32,
  'NASNetMobile': 32,
  'ResNet50': 32,
  'ResNet50V2': 32,
  'VGG16': 32,
  'Xception': 71,
}


def _Make(name: str) -> Any:
  size = _SMALLEST[name]
  keras.backend.clear_session()
  function = getattr(keras.applications, name)
  return function(weights=None, input_shape=(size, size, 3), classes=10)


CASES = [
  Case(
    name,
    functools.partial(_Make, name),
    num_micro_batches=2 if name in ('VGG16', 'ConvNeXtTiny') else 1,
    note='' if name in ('VGG16', 'ConvNeXtTiny') else 'M=1: statistics of the batch',
  )
  for name in _SMALLEST
]
