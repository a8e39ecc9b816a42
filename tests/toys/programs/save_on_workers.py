# SPDX-License-Identifier: Apache-2.0
"""Saves and restores variables of workers, and prints the number of bytes that were sent for it."""

import contextlib
import os
import socket
import struct
import sys

import tensorflow as tf

from lingvo_gpipe.checkpoint import background_saver, checkpointer
from lingvo_gpipe.distributed import cluster, cluster_spec

devices = cluster.Cluster.Connect(cluster_spec.FromText(open(sys.argv[1]).read(), ''), 2).devices
variables = {}
for i in range(8):
  with tf.device(devices[i % 2]):
    variables[f'v{i}'] = tf.Variable(tf.random.stateless_normal([256, 1024], [1, 2]))


def NumBytes():
  # Bytes that this process has sent and received: the kernel counts them for each connection.
  total = 0
  for name in os.listdir('/proc/self/fd'):
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as s:
      info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
      total += sum(struct.unpack_from('QQ', info, 120))
  return total


store = checkpointer.Checkpointer(sys.argv[2])
store.CheckWritable()
if sys.argv[3]:
  store.LetWorkersWrite(devices)
before = NumBytes()
for in_background in (True, False):
  saver = background_saver.BackgroundSaver(store, in_background=in_background)
  saver.Save(int(in_background), variables, {})
  for variable in variables.values():
    variable.assign_add(tf.ones([256, 1024]))
  saver.Wait()
  store.RestoreLatest(variables)
for variable in variables.values():
  with tf.device(variable.device):
    tf.reduce_sum(variable).numpy()  # When all was assigned.
print(NumBytes() - before)
