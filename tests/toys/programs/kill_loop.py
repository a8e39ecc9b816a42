# SPDX-License-Identifier: Apache-2.0
"""Kills children that save checkpoints of a directory, at random moments."""

import os
import random
import signal
import sys
import time

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer, tensor_bundle

tensor_bundle.GROUP_BYTES = 40000
directory, kills = sys.argv[1], int(sys.argv[2])
rng = random.Random(5)
for _ in range(kills):
  started = os.path.getsize(directory + '.log') if os.path.exists(directory + '.log') else 0
  # TensorFlow is imported once; each child starts its own context.
  child = os.fork()
  if not child:
    variables = {f'v{i}': tf.Variable(tf.zeros([100, 100])) for i in range(4)}
    saver = checkpointer.Checkpointer(directory, max_to_keep=2)
    restored = saver.RestoreLatest(variables)
    step = restored[0].step if restored else 0
    for v in variables.values():
      assert (v.numpy() == step).all(), (step, v.numpy())
    with open(directory + '.log', 'a') as log:
      log.write(f'{step}\n')
    while True:
      step += 1
      for v in variables.values():
        v.assign_add(tf.ones([100, 100]))
      saver.Save(step, variables, {'step': step})
      with open(directory + '.saved', 'w') as f:
        f.write(str(step))
  # Wait until the child has started (the log grows), then let it save for a random time.
  for _ in range(12_000):
    time.sleep(0.005)
    if os.path.exists(directory + '.log') and os.path.getsize(directory + '.log') > started:
      break
  else:
    sys.exit('a child did not start')
  time.sleep(rng.uniform(0, 0.12))
  os.kill(child, signal.SIGKILL)
  if os.waitpid(child, 0)[1] != signal.SIGKILL:
    sys.exit('a child ended by itself')
