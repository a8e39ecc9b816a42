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


def testAProcessHoldsOneLayerMoreThanItsStages(tmp_path):
  done = processes.Run(
    '', '-m', 'tests.toys.programs.stream_weights', str(tmp_path), str(VOCABULARY), str(DIM),
    command=[sys.executable], timeout=170,
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
