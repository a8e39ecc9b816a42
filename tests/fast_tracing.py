# SPDX-License-Identifier: Apache-2.0
"""Lets TensorFlow trace functions in two thirds of the time, in tests and their programs.

`Forks` of processes.py executes this file by its path: it imports nothing of this repository.
"""

import gc
import os
import weakref

import tensorflow as tf


def Configure():
  """Saves time in this process and its forks."""
  # TensorFlow creates many objects that live long: the default finds little for its time.
  gc.set_threshold(20_000, 20, 20)
  OptimizeGraphs(False)
  _ShareStackTrace()
  _KeepKernels()


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


def _KeepKernels():
  """Lets TensorFlow keep the kernels of its operations when a seed is set or Keras is cleared.

  It would make all of them again, which resets random operations that have a state. That takes up
  to a quarter of the time of a test that trains a model by plain Keras and as a pipeline. Here it
  does so only if there are such operations; Keras's own random numbers have no state.
  """
  from tensorflow.python import pywrap_tfe
  from tensorflow.python.framework import random_seed

  clear, seeds_of_operation = pywrap_tfe.TFE_ContextClearCaches, random_seed.get_seed
  has_eager = True  # Whether random operations have run since the last time.
  graphs = weakref.WeakSet()  # Graphs with random operations, which may run again.

  def SeedsOfOperation(op_seed):
    nonlocal has_eager
    if tf.executing_eagerly():
      has_eager = True
    else:
      graph = tf.compat.v1.get_default_graph()
      while graph is not None:
        graphs.add(graph)
        graph = getattr(graph, 'outer_graph', None)
    return seeds_of_operation(op_seed)

  def Clear(context):
    nonlocal has_eager
    if has_eager or graphs:
      clear(context)
    has_eager = False

  pywrap_tfe.TFE_ContextClearCaches = Clear
  random_seed.get_seed = SeedsOfOperation
