# SPDX-License-Identifier: Apache-2.0
"""Connects to workers with another version of TensorFlow, and prints the error."""

import sys

import tensorflow as tf

from lingvo_gpipe.distributed import cluster, cluster_spec

tf.__version__ = '2.0.0'
try:
  cluster.Cluster.Connect(cluster_spec.FromText(open(sys.argv[1]).read(), ''))
except ValueError as e:
  print(e)
