# SPDX-License-Identifier: Apache-2.0
"""Loads and saves a model in several formats, and prints the peak of memory of each as JSON."""

import json
import re
import sys

from lingvo_gpipe.cli import binary  # noqa: F401  # First: it imports TensorFlow in half of the time.

# isort: split
import keras_hub  # noqa: F401
import numpy as np

from lingvo_gpipe import PipelinedModel, cluster
from tests.toys import hugging_face

cluster.Cluster.Create(2)
ids = np.zeros([2, 4], 'int32')
batch = {'token_ids': ids, 'padding_mask': np.ones_like(ids)}
result = {}


def Status(name):
  with open('/proc/self/status') as f:
    return int(re.search(name + r':\s+(\d+)', f.read())[1]) / 1024


def Peak(name, run):
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # The peak is the present size.
  returned = run()
  result[name] = Status('VmHWM') - Status('VmRSS')
  return returned


def Load(directory):
  return PipelinedModel.from_preset(
    directory, 2, example=batch, preset_arguments={'preprocessor': None}, xla=False
  )


directory, vocabulary, dim = sys.argv[1], *map(int, sys.argv[2:4])
hugging_face.Write(directory + '/hf', vocabulary=vocabulary, dim=dim)
pipe = Peak('hugging face', lambda: Load(directory + '/hf'))
Peak('preset', lambda: pipe.save_to_preset(directory + '/preset'))
Peak('weights', lambda: pipe.save_weights(directory + '/x.weights.h5'))
Peak('shards', lambda: pipe.save_weights(directory + '/x.weights.json', max_shard_size=0.1))
Peak('archive', lambda: pipe.save(directory + '/x.keras'))
Peak('from weights', lambda: pipe.load_weights(directory + '/x.weights.h5'))
Peak('from shards', lambda: pipe.load_weights(directory + '/x.weights.json'))
again = Peak('from preset', lambda: Load(directory + '/preset'))
for a, b in zip(pipe.model.weights, again.model.weights, strict=True):
  np.testing.assert_array_equal(a, b)
print(json.dumps(result))
