# SPDX-License-Identifier: Apache-2.0
"""Prints the measured and the predicted memory of a stage, with and without recomputation."""

import re
import sys

import tensorflow as tf

from lingvo_gpipe import linear, pipelining_layer
from lingvo_gpipe.pipeline.stages import micro_batch

num_micro_batches, batch = int(sys.argv[1]), 1 << 16
x = tf.zeros([batch, 64])


def Peak():
  # The peak that getrusage returns includes the parent's.
  with open('/proc/self/status') as f:
    return int(re.search(r'VmHWM:\s*([0-9]+) kB', f.read())[1]) * 1024


def Loss(theta, y, side):
  return {'loss': (tf.reduce_mean(y[0]), tf.constant(1.0))}


def Prepared(policy):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='p', num_micro_batches=num_micro_batches, remat_policy=policy, xla=False
  )
  p.sub = [linear.ProjectionLayer.Params().Set(input_dim=64, output_dim=64, activation='TANH')] * 16
  layer = p.Instantiate()

  def Step(x):
    parts = tf.split(x, num_micro_batches)
    pieces = [micro_batch.MicroBatch((part,), None, tf.constant(1.0)) for part in parts]
    return layer.engine.Accumulate(pieces, tf.constant(0)).metrics

  cut = layer.Place(['/device:CPU:0'], tf.TensorSpec([batch, 64]), loss_fn=Loss)
  layer.engine.MakeAccumulators()
  step = tf.function(Step, autograph=False)
  step(tf.zeros([num_micro_batches, 64]))
  step.get_concrete_function(tf.TensorSpec([batch, 64]))
  return step, cut.memory[0].activations


steps = {policy: Prepared(policy) for policy in ('stage', 'none')}
before = Peak()
# The one that takes less memory is the first, for the peak never falls.
for policy, (step, predicted) in steps.items():
  step(x)
  print('RESULT', policy, Peak() - before, predicted)
