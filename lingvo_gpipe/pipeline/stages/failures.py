# SPDX-License-Identifier: Apache-2.0
"""Adds to errors the stage, layer and micro-batch that failed.

An error raised while a stage is traced comes straight through Python. For an error raised while the
step runs, see `failed_step`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, shapes

_LAYER_SCOPE = re.compile(r'\blayer\.(\d+)(?:_\d+)?/')
_LOSS_SCOPE = re.compile(r'\bstage\.loss(?:_\d+)?/')

# The beginnings of the notes that name the place.
_IN_LAYER, _IN_LOSS = 'in layer ', 'in the loss'


def LayerScope(index: int) -> contextlib.AbstractContextManager[Any]:
  """Returns a layer's name scope; by index, because stages of equal structure share a trace."""
  return tf.name_scope(f'layer.{index}')


def LayerOfScope(op_name: str) -> int | None:
  """Returns the index of the layer in whose `LayerScope` an operation was made, if any."""
  match = re.search(r'(?:^|/)layer\.(\d+)(?:_\d+)?/', op_name)
  return int(match[1]) if match else None


def LossScope() -> contextlib.AbstractContextManager[Any]:
  """Returns the name scope of the loss in the last stage."""
  return tf.name_scope('stage.loss')


@contextlib.contextmanager
def NoteLayer(layer: Any, args: Any, giver: Any = None) -> Iterator[None]:
  """Adds to an exception of the enclosed code the layer that it came from.

  Args:
    layer: the layer.
    args: the layer's arguments, whose shapes the note shows.
    giver: the layer that returned the arguments; None for the first of a stage.
  """
  try:
    yield
  except Exception as e:
    by = '' if giver is None else f' by {giver.path}'
    inputs = f'{shapes.FormatNest(args)}{by}'
    e.add_note(f'{_IN_LAYER}{layer.path} ({type(layer).__name__}), given {inputs}')
    raise


@contextlib.contextmanager
def NoteAction(
  stage: str, layers: Sequence[base_layer.BaseLayer], action: str, micro_batch: int
) -> Iterator[None]:
  """Adds to an exception of the enclosed code the action of the schedule that raised it.

  If TensorFlow names the failed operation, the note also names its layer, or the loss if it belongs
  there.

  Args:
    stage: the text of the stage.
    layers: its layers.
    action: the action's text, such as 1F0.
    micro_batch: the index of the micro-batch.
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, tf.errors.OpError):
      if match := _LAYER_SCOPE.search(e.message):
        layer = layers[int(match[1])]
        e.add_note(f'{_IN_LAYER}{layer.path} ({type(layer).__name__})')
      elif _LOSS_SCOPE.search(e.message):
        e.add_note(_IN_LOSS)
    doing = 'running' if tf.executing_eagerly() else 'building'
    e.add_note(f'in {stage}, micro-batch {micro_batch}, while {doing} action {action}')
    raise


def Place(error: Exception) -> str:
  """Returns the note that names the layer or the loss which failed; '' if there is none."""
  return next((note for note in Notes(error) if note.startswith((_IN_LAYER, _IN_LOSS))), '')


def Notes(error: Exception) -> Sequence[str]:
  """Returns the notes that were added to an error."""
  return getattr(error, '__notes__', ())
