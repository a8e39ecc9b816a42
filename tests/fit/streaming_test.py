# SPDX-License-Identifier: Apache-2.0
"""While weights move between files and stages, a process holds one layer beside its stages' own."""

import json
import sys

import pytest

from tests import processes

pytest.importorskip('keras_hub')
pytest.importorskip('safetensors')

# Half of the weights are in one table, which the first stage owns and the last has a copy of.
VOCABULARY, DIM = 32_768, 512
LAYER = VOCABULARY * DIM * 4 / 2**20
# MiB for slices of a table that are on their way, and TensorFlow's graphs and buffers.
ALLOWANCE = 48

PROGRAM = f"""
import json, re, sys

from lingvo_gpipe.cli import binary  # First: it imports TensorFlow in half of the time.
import keras_hub, numpy as np

from lingvo_gpipe import PipelinedModel, cluster
from tests.toys import hugging_face

cluster.Cluster.Create(2)
ids = np.zeros([2, 4], 'int32')
batch = {{'token_ids': ids, 'padding_mask': np.ones_like(ids)}}
result = {{}}


def Status(name):
  with open('/proc/self/status') as f:
    return int(re.search(name + r':\\s+(\\d+)', f.read())[1]) / 1024


def Peak(name, run):
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # The peak is the present size.
  returned = run()
  result[name] = Status('VmHWM') - Status('VmRSS')
  return returned


def Load(directory):
  return PipelinedModel.from_preset(
    directory, 2, example=batch, preset_arguments={{'preprocessor': None}}, xla=False
  )


directory = sys.argv[1]
hugging_face.Write(directory + '/hf', vocabulary={VOCABULARY}, dim={DIM})
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
"""


def testAProcessHoldsOneLayerMoreThanItsStages(tmp_path):
  done = processes.Run(
    '', '-c', PROGRAM, str(tmp_path), command=[sys.executable], timeout=170,
    more_environment={
      'TF_ENABLE_ONEDNN_OPTS': '0',  # No pool of memory, so that its size is its use.
      'MALLOC_MMAP_THRESHOLD_': str(2**20),
    },
  )  # fmt: skip
  processes.Succeeded(done)
  peaks = json.loads(done.stdout.splitlines()[-1])
  assert len(peaks) == 8
  assert max(peaks.values()) < LAYER + ALLOWANCE, peaks
  assert min(peaks.values()) > LAYER / 2, peaks  # The measurement sees a copy of a table.


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
