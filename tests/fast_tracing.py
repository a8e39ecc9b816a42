# SPDX-License-Identifier: Apache-2.0
"""Lets TensorFlow trace functions in two thirds of the time, in tests and their programs.

`Forks` of processes.py executes this file by its path: it imports nothing of this repository.
"""

import contextlib
import gc
import os
from unittest import mock

import tensorflow as tf


def Configure():
  """Saves time in this process and its forks."""
  # TensorFlow creates many objects that live long: the default finds little for its time.
  gc.set_threshold(20_000, 20, 20)
  OptimizeGraphs(False)
  _ShareStackTrace()
  _InspectLess()


def OptimizeGraphs(enabled):
  """Turns TensorFlow's optimiser of graphs on or off: a fifth of the time of a test that traces."""
  off = not enabled and not os.environ.get('OPTIMIZE_GRAPHS')
  tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': off})


def _ShareStackTrace():
  """Gives all operations of graphs one stack trace, of this call.

  Each would record its own, below dozens of pytest's frames: an eighth of the time of a test that
  traces. Errors of a graph then do not tell in which line it was traced.
  """
  from tensorflow.python.util import tf_stack

  trace = tf_stack.extract_stack()
  str(trace)  # Computes and keeps the frames, before many threads ask for them, or they are gone.
  tf_stack.extract_stack = lambda stacklevel=1: trace


def _InspectLess():
  """Leaves out inspections that only serve messages: a twentieth of the time of tracing."""
  from tensorflow.python.framework import op_def_library
  from tensorflow.python.util import deprecation, tf_contextlib

  # No call looks for deprecated arguments, and no context of a graph is decorated.
  deprecation._PRINT_DEPRECATION_WARNINGS = False
  tf_contextlib.contextmanager = contextlib.contextmanager
  # The names of the types that an operation takes are listed for an error, not for each input.
  check = op_def_library._SatisfiesTypeConstraint

  def Check(dtype, attr_def, param_name):
    if dtype not in attr_def.allowed_values.list.type:
      check(dtype, attr_def, param_name)

  op_def_library._SatisfiesTypeConstraint = Check


def StopCollectingGraphs():
  """Ends what `tf.summary.trace_on(graph=True)` begins, and `trace_off` and `trace_export` do not.

  Otherwise the graphs of all later tests are collected, and the next export takes ten seconds.
  """
  from tensorflow.python.eager import context

  context.context().disable_graph_collection()


@contextlib.contextmanager
def KernelsKept():
  """Lets TensorFlow keep the kernels of its operations while a seed is set or Keras is cleared.

  It would make all of them again, to reset random operations that have a state. Keras has no such
  operations, and the kernels take a quarter of the time of a test that fits two small models.
  """
  from tensorflow.python import pywrap_tfe

  with mock.patch.object(pywrap_tfe, 'TFE_ContextClearCaches'):
    yield
