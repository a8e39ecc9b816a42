# SPDX-License-Identifier: Apache-2.0
"""Says where a step failed: stage, layer, micro-batch.

An error while a stage is traced comes straight through Python. One while the step runs does not:
TensorFlow then cancels what the other devices wait for, and often reports that, "RecvAsync is
cancelled", and not the cause. So a failed step is run again, action by action, where the first
error is the cause and the action under way is known. That is possible because a failed step has
changed no weight, and the next one clears the accumulators.

What XLA has compiled knows no layers. Where that fails, all is run once more without XLA, for the
operation that fails there, if any does, belongs to a layer.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import heartbeat, shapes

# Another try would wait, or fail in another way. CancelledError is none of them: it hides a cause.
_NOT_AGAIN = (
  tf.errors.UnavailableError,
  tf.errors.DeadlineExceededError,
  tf.errors.AbortedError,
)
# What others say when the one fails that is looked for.
_NO_CAUSE = (*_NOT_AGAIN, tf.errors.CancelledError)
_LAYER_SCOPE = re.compile(r'\blayer\.(\d+)(?:_\d+)?/')
_LOSS_SCOPE = re.compile(r'\bstage\.loss(?:_\d+)?/')

# How the notes that tell the place begin.
_IN_LAYER, _IN_LOSS = 'in layer ', 'in the loss'


def LayerScope(index: int) -> contextlib.AbstractContextManager[Any]:
  """The name scope of a stage's layer; relative, for stages of equal structure share a trace."""
  return tf.name_scope(f'layer.{index}')


def LossScope() -> contextlib.AbstractContextManager[Any]:
  """The name scope of the loss in the last stage."""
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
    given = f'{shapes.FormatNest(args)}{by}'
    e.add_note(f'{_IN_LAYER}{layer.path} ({type(layer).__name__}), given {given}')
    raise


class _Stage(Protocol):
  """What a message needs of a stage."""

  @property
  def layers(self) -> Sequence[Any]: ...


class _Engine(Protocol):
  """What runs the stages."""

  @property
  def xla(self) -> bool: ...

  @property
  def sums_statistics(self) -> bool: ...

  def WithoutXla(self) -> contextlib.AbstractContextManager[None]: ...


@contextlib.contextmanager
def NoteAction(s: _Stage, action: str, micro_batch: int) -> Iterator[None]:
  """Adds to an exception of the enclosed code the action of the schedule that raised it.

  Where TensorFlow names the operation that failed, the layer that it belongs to, or that it is of
  the loss, is added too.

  Args:
    s: the stage; its text names it.
    action: the action's text.
    micro_batch: the index of the micro-batch.
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, tf.errors.OpError):
      if found := _LAYER_SCOPE.search(e.message):
        layer = s.layers[int(found[1])]
        e.add_note(f'{_IN_LAYER}{layer.path} ({type(layer).__name__})')
      elif _LOSS_SCOPE.search(e.message):
        e.add_note(_IN_LOSS)
    doing = 'running' if tf.executing_eagerly() else 'building'
    e.add_note(f'in {s}, micro-batch {micro_batch}, while {doing} action {action}')
    raise


@contextlib.contextmanager
def LocateFailure(engine: _Engine, run_again: Callable[[], Any]) -> Iterator[None]:
  """Replaces an error at run time by one that names stage, layer and micro-batch.

  Args:
    engine: runs the stages in the enclosed code and in `run_again`.
    run_again: does eagerly what the enclosed code does in one graph. It is called where that failed
      at run time, and what it raises takes the place of the first error.
  """
  try:
    yield
  except tf.errors.OpError as e:
    if not tf.executing_eagerly() or isinstance(e, _NOT_AGAIN):
      raise
    heartbeat.SuspendTimeout()  # It is no step as others are.
    try:
      run_again()
    except Exception as cause:
      is_in_stage = isinstance(cause, tf.errors.OpError) and not isinstance(cause, _NO_CAUSE)
      if engine.xla and is_in_stage and not _Place(cause):
        # What its frames hold may be all the memory that there is.
        traceback.clear_frames(cause.__traceback__)
        cause.add_note(_WithoutXla(engine, run_again, cause))
      raise cause from None
    e.add_note(
      'run again action by action, no stage failed: it came up outside of them, as in the update '
      'of the weights, or does not come up each time'
    )
    if engine.sums_statistics:
      e.add_note(
        'where a step failed before, TensorFlow may take no more sums over replicas in this '
        'process: start the program again'
      )
    raise


def _Place(error: Exception) -> str:
  """The layer in which the error came up, or the loss, as a note says it; '' where none does."""
  return next((note for note in _Notes(error) if note.startswith((_IN_LAYER, _IN_LOSS))), '')


def _Notes(error: Exception) -> Sequence[str]:
  return getattr(error, '__notes__', ())


def _WithoutXla(engine: _Engine, run_again: Callable[[], Any], error: Exception) -> str:
  """What comes of running again without XLA: a note for the error that came with it."""
  # Told now: without XLA more memory is needed, and where it ends the system may end the process.
  found = '; '.join([_Said(error), *_Notes(error)])
  logging.warning('%s; once more without XLA, to find the layer', found)
  heartbeat.SuspendTimeout()
  try:
    with engine.WithoutXla():
      run_again()
  except Exception as e:
    return f'without XLA it fails {_Place(e) or "outside of layers"}: {_Said(e)}'
  return 'without XLA, which tells no layers, it does not fail'


def _Said(error: Exception) -> str:
  """The line that tells what failed: of graphs that before the operation's name, else the first."""
  message = str(getattr(error, 'message', error))
  found = re.search(r'^(.+)\n\s*\[\[', message, re.MULTILINE)
  return found[1] if found else message.partition('\n')[0]
