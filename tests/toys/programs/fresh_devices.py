# SPDX-License-Identifier: Apache-2.0
"""Creates logical devices in a process where TensorFlow has not started."""

import os

import tensorflow as tf

from lingvo_gpipe import cluster

c = cluster.Cluster.Create(2, max_devices=3, platform='cpu')
cores = len(os.sched_getaffinity(0))
for i in range(3):
  with tf.device(c.devices[i]):
    v = tf.Variable(tf.ones([2]))
  assert v.device == c.devices[i] == f'/job:localhost/replica:0/task:0/device:CPU:{i}', v.device
assert len(tf.config.list_logical_devices('CPU')) == 3
per_device = max(1, cores // 3)
expected = 1 if per_device == 1 else 3 * per_device
assert tf.config.threading.get_intra_op_parallelism_threads() == expected
assert cluster.Cluster.Create(2, max_devices=3, platform='cpu') == c
try:
  cluster.Cluster.Create(4, platform='cpu')
except ValueError as e:
  print(e)
core = 'core' if cores == 1 else 'cores'
print(c.Describe() == f'3 logical CPU devices on {cores} {core} (no GPU found)')
