# SPDX-License-Identifier: Apache-2.0
"""Adds to errors the stage, layer and micro-batch that failed.

An error raised while a stage is traced comes straight through Python. An error raised while the
step runs does not: TensorFlow cancels everything that the other devices wait for, and often
reports the cancellation, "RecvAsync is cancelled", instead of the cause. A failed step therefore
runs again, action by action, so that the first error is the cause and the current action is known.
That is possible because a failed step changes no weight, and the next step clears the accumulators.

Functions compiled by XLA have no layers. If one fails, the step runs once more without XLA: an
operation that fails then belongs to a layer.
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

# After these, another run would wait or fail in another way. CancelledError is not among them: it
# hides the cause.
_NOT_AGAIN = (
  tf.errors.UnavailableError,
  tf.errors.DeadlineExceededError,
  tf.errors.AbortedError,
)
# Errors of the other devices, which hide the cause.
_NO_CAUSE = (*_NOT_AGAIN, tf.errors.CancelledError)
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


class _Stage(Protocol):
  """The part of a stage that messages need."""

  @property
  def layers(self) -> Sequence[Any]: ...


class _Engine(Protocol):
  """The part of an engine that running a step again needs."""

  @property
  def xla(self) -> bool: ...

  @property
  def sums_statistics(self) -> bool: ...

  def WithoutXla(self) -> contextlib.AbstractContextManager[None]: ...


@contextlib.contextmanager
def NoteAction(s: _Stage, action: str, micro_batch: int) -> Iterator[None]:
  """Adds to an exception of the enclosed code the action of the schedule that raised it.

  If TensorFlow names the failed operation, its layer is added too, or that it belongs to the loss.

  Args:
    s: the stage, named by its text.
    action: the action's text, such as 1F0.
    micro_batch: the index of the micro-batch.
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, tf.errors.OpError):
      if match := _LAYER_SCOPE.search(e.message):
        layer = s.layers[int(match[1])]
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
    engine: the engine that runs the stages in the enclosed code and in `run_again`.
    run_again: does eagerly what the enclosed code does in one graph. It is called if the enclosed
      code fails at run time, and its error replaces the first one.
  """
  try:
    yield
  except tf.errors.OpError as e:
    if not tf.executing_eagerly() or isinstance(e, _NOT_AGAIN):
      raise
    heartbeat.SuspendTimeout()  # Running again is slower than a normal step: suspend the timeout.
    try:
      run_again()
    except Exception as cause:
      is_in_stage = isinstance(cause, tf.errors.OpError) and not isinstance(cause, _NO_CAUSE)
      if engine.xla and is_in_stage and not _Place(cause):
        # Free the tensors that its frames hold: they may take all the memory.
        traceback.clear_frames(cause.__traceback__)
        cause.add_note(_WithoutXla(engine, run_again, cause))
      raise cause from None
    e.add_note(
      'run again action by action, no stage failed: the error came from outside the stages, such '
      'as the update of the weights, or does not occur each time'
    )
    if engine.sums_statistics:
      e.add_note(
        'after a failed step TensorFlow may take no more sums over replicas in this process: '
        'restart the program'
      )
    raise


def _Place(error: Exception) -> str:
  """Returns the note that names the layer or the loss which failed; '' if there is none."""
  return next((note for note in _Notes(error) if note.startswith((_IN_LAYER, _IN_LOSS))), '')


def _Notes(error: Exception) -> Sequence[str]:
  return getattr(error, '__notes__', ())


def _WithoutXla(engine: _Engine, run_again: Callable[[], Any], error: Exception) -> str:
  """Runs again without XLA; returns a note with the outcome for the error under XLA."""
  # Logged first: more memory is needed without XLA, and the system may kill the process.
  text = '; '.join([_FirstLine(error), *_Notes(error)])
  logging.warning('%s; running once more without XLA, to find the layer', text)
  heartbeat.SuspendTimeout()
  try:
    with engine.WithoutXla():
      run_again()
  except Exception as e:
    return f'without XLA it fails {_Place(e) or "outside of layers"}: {_FirstLine(e)}'
  return 'without XLA it does not fail, so the layer is unknown'


def _FirstLine(error: Exception) -> str:
  """Returns the line of a message with the cause: in graphs it precedes the operation's name."""
  message = str(getattr(error, 'message', error))
  match = re.search(r'^(.+)\n\s*\[\[', message, re.MULTILINE)
  return match[1] if match else message.partition('\n')[0]
