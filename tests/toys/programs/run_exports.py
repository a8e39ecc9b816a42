# SPDX-License-Identifier: Apache-2.0
"""Runs exported functions without lingvo_gpipe, and prints the devices and operations of each."""

import gc
import importlib
import json
import sys

# TensorFlow is imported in half of the time without these two.
gc.disable()
sys.modules['matplotlib'] = None
sys.modules['lingvo_gpipe'] = None
try:
  importlib.import_module('lingvo_gpipe')
except ImportError:
  print('none')
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

tf.config.set_soft_device_placement(False)
for directory, calls in json.load(open('calls.json')):
  loaded = tf.saved_model.load(directory)
  for file, signature in calls:
    function = loaded.signatures[signature]
    inputs = {name: tf.constant(x) for name, x in np.load(file + '.npz').items()}
    np.savez(file + '.out.npz', **{name: x.numpy() for name, x in function(**inputs).items()})
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert len(nodes) > 10
    print(json.dumps([sorted({n.device for n in nodes}), sorted({n.op for n in nodes})]))
