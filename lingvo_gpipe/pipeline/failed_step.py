# SPDX-License-Identifier: Apache-2.0
"""Runs a failed step again, to find the stage, layer and micro-batch.

An error that is raised while a step runs does not come through Python. TensorFlow cancels
everything that the other devices wait for, and often reports the cancellation, "RecvAsync is
cancelled", instead of the cause. A failed step therefore runs again, action by action, so that the
first error is the cause and the current action is known. A failed step changes no weight, and the
next step clears the accumulators.

Functions compiled by XLA have no layers. If one fails, the step runs once more without XLA: an
operation that fails then belongs to a layer.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline.stages import failures

# After these errors, another run would wait or fail in another way. CancelledError is not among
# them: it hides the cause.
_NOT_AGAIN = (
  tf.errors.UnavailableError,
  tf.errors.DeadlineExceededError,
  tf.errors.AbortedError,
)
# Errors of the other devices, which hide the cause.
_NO_CAUSE = (*_NOT_AGAIN, tf.errors.CancelledError)


@contextlib.contextmanager
def Locate(engine: engine_lib.PipelineEngine, run_again: Callable[[], Any]) -> Iterator[None]:
  """Replaces an error at run time by one that names stage, layer and micro-batch.

  Args:
    engine: the engine that runs the stages in the enclosed code and in `run_again`.
    run_again: runs the enclosed code's work eagerly instead of in one graph. It is called if the
      enclosed code fails at run time, and its error replaces the first one.
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
      if engine.xla and is_in_stage and not failures.Place(cause):
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


def _WithoutXla(
  engine: engine_lib.PipelineEngine, run_again: Callable[[], Any], error: Exception
) -> str:
  """Runs again without XLA; returns a note with the outcome for the error under XLA."""
  # Logged first: more memory is needed without XLA, and the system may kill the process.
  text = '; '.join([_FirstLine(error), *failures.Notes(error)])
  logging.warning('%s; running once more without XLA, to find the layer', text)
  heartbeat.SuspendTimeout()
  try:
    with engine.WithoutXla():
      run_again()
  except Exception as e:
    return f'without XLA it fails {failures.Place(e) or "outside of layers"}: {_FirstLine(e)}'
  return 'without XLA it does not fail, so the layer is unknown'


def _FirstLine(error: Exception) -> str:
  """Returns the line of a message with the cause: in graphs it precedes the operation's name."""
  message = str(getattr(error, 'message', error))
  match = re.search(r'^(.+)\n\s*\[\[', message, re.MULTILINE)
  return match[1] if match else message.partition('\n')[0]
