# SPDX-License-Identifier: Apache-2.0
"""Computes on a worker, and prints whether an error of this process is a failure of a worker."""

import sys

import tensorflow as tf

from lingvo_gpipe.distributed import cluster, cluster_spec, worker_connection

devices = cluster.Cluster.Connect(cluster_spec.FromText(open(sys.argv[1]).read(), '')).devices
with tf.device(devices[0]):
  tf.linalg.matmul(tf.eye(3), tf.eye(3)).numpy()
print(worker_connection.IsFailure(tf.errors.InternalError(None, None, 'of its own')))
