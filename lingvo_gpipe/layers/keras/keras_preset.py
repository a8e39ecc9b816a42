# SPDX-License-Identifier: Apache-2.0
"""Models of KerasHub that are made without values and filled when they are in place.

    model = keras_preset.Model(keras_hub.models.CausalLM, preset)    # No memory for weights.
    ...                                                              # Place its stages.
    keras_preset.LoadWeights(model, preset)                          # One weight after another.

A preset is a name or a directory of KerasHub, or a directory of Hugging Face with safetensors.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain, files
from lingvo_gpipe.layers.keras import keras_variables

# Keys with the number of layers in the configurations of KerasHub and Hugging Face.
_LAYERS = re.compile(r'(n|num)_(\w+_)?layers?|\w+_layers')
# Errors that say nothing about the files.
_DEVICE_ERRORS = (
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
  tf.errors.InternalError,
  tf.errors.ResourceExhaustedError,
  tf.errors.UnavailableError,
)


def Model(keras_class: Any, preset: str, **kwargs: Any) -> Any:
  """Returns a task of KerasHub from a preset, whose variables have no values yet.

  Args:
    keras_class: a class of keras_hub.models with `from_preset`, such as CausalLM.
    preset: the preset.
    **kwargs: arguments of `from_preset`, such as `preprocessor=None` or `dtype`.

  Raises:
    ValueError: the preset cannot be read.
  """
  with _Reading(preset), keras_variables.WithoutValues():  # An optimizer would have values.
    _CheckLayers(_Loader(preset).config)
    return keras_class.from_preset(preset, load_weights=False, compile=False, **kwargs)


def New(keras_class: Any, backbone: dict[str, Any], **kwargs: Any) -> Any:
  """Returns a new task of KerasHub, whose variables have no values yet.

  Args:
    keras_class: a class of keras_hub.models, such as GPT2CausalLM.
    backbone: arguments of the class of its backbone.
    **kwargs: arguments of the class, such as `preprocessor=None`.
  """
  with keras_variables.WithoutValues():
    return keras_class(backbone=keras_class.backbone_cls(**backbone), compile=False, **kwargs)


def EnableLora(model: Any, rank: int) -> None:
  """Adds LoRA's weights without values to the backbone of a task, and freezes the others."""
  with keras_variables.WithoutValues():
    model.backbone.enable_lora(rank)


def GiveValues(model: Any) -> None:
  """Gives the variables that are in no stage their initial values."""
  keras_variables.GiveValues(model)


def LoadWeights(model: Any, preset: str) -> None:
  """Fills the variables of a task, wherever they are, one after another.

  Variables that the preset lacks, as LoRA's or the head of another task, keep their values.

  Raises:
    ValueError: the preset cannot be read.
  """
  with _Reading(preset), keras_variables.Streaming(), _ReadingInSlices():
    loader = _Loader(preset)
    lora = {id(v): v.numpy() for v in model.variables if '/lora_' in v.path}
    if hasattr(loader, '_load_backbone_weights'):  # A preset of KerasHub.
      _LoadTaskWeights(model, preset)
      loader._load_backbone_weights(model.backbone)
    else:
      loader.load_backbone(lambda **_: model.backbone, True)
    for v in model.variables:
      if id(v) in lora:
        v.assign(lora[id(v)])


def _LoadTaskWeights(model: Any, preset: str) -> None:
  """Fills the parts of a task besides its backbone, if the preset is of that class."""
  from keras_hub.src.utils import preset_utils

  names = preset_utils.TASK_CONFIG_FILE, preset_utils.TASK_WEIGHTS_FILE
  if not all(preset_utils.check_file_exists(preset, name) for name in names):
    return
  task_class = preset_utils.check_config_class(preset_utils.load_json(preset, names[0]))
  if isinstance(model, task_class):
    model.load_task_weights(preset_utils.get_file(preset, names[1]))


@contextlib.contextmanager
def _ReadingInSlices() -> Iterator[None]:
  """Lets KerasHub hold a tensor of safetensors only once."""
  from keras_hub.src.utils.transformers import safetensor_utils

  library = safetensor_utils.safetensors
  with keras_variables.ReplaceAttributes(
    safetensor_utils, safetensors=types.SimpleNamespace(safe_open=functools.partial(_File, library))
  ):
    yield


class _File:
  """A file of safetensors that is open for one slice of a tensor at a time.

  An open file is mapped, so the parts that were read stay in memory.
  """

  def __init__(self, library: Any, path: str, framework: str) -> None:
    self._open = functools.partial(library.safe_open, path, framework=framework)

  def __enter__(self) -> _File:
    with self._open() as f:
      self._names = list(f.keys())
    return self

  def __exit__(self, *args: object) -> None:
    pass

  def keys(self) -> list[str]:
    return self._names

  def get_tensor(self, name: str) -> Any:
    with self._open() as f:
      shape = f.get_slice(name).get_shape()
      if not shape:
        return f.get_tensor(name)
      dtype = f.get_slice(name)[:1].dtype
    result = np.empty(shape, dtype)
    for rows in keras_variables.Slices(result.shape, dtype.itemsize):
      with self._open() as f:
        result[rows] = f.get_slice(name)[rows]
    return result


def _Loader(preset: str) -> Any:
  """Returns KerasHub's loader of a preset; raises ValueError in one line if there is none."""
  from keras_hub.src.utils import preset_utils  # The public way makes a model of its own.

  try:
    return preset_utils.get_preset_loader(preset)
  except ValueError as e:
    raise ValueError(str(e).partition('.')[0]) from None


def _CheckLayers(config: Any) -> None:
  """Raises ValueError if a configuration asks for more layers than Keras could make in minutes."""
  for key, value in config.items() if isinstance(config, dict) else ():
    is_number = _LAYERS.fullmatch(str(key)) and isinstance(value, int)
    if is_number and value > domain.MAX_LAYERS:
      raise ValueError(f'{key} is {value}, more than {domain.MAX_LAYERS}')
    _CheckLayers(value)


@contextlib.contextmanager
def _Reading(preset: str) -> Iterator[None]:
  """Turns every error by which KerasHub and its libraries reject files into one line.

  For damaged files they raise errors of many kinds, such as KeyError and SafetensorError, which do
  not name the preset. Errors of devices, of imports and of too little memory stay as they are.
  """
  try:
    yield
  except (MemoryError, ImportError, *_DEVICE_ERRORS):
    raise
  except Exception as e:
    kind = '' if type(e) is ValueError else f'{type(e).__name__}: '
    raise ValueError(f'cannot read the preset {preset!r}: {kind}{files.OneLine(e)}') from e
