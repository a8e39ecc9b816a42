# SPDX-License-Identifier: Apache-2.0
"""The peak activations of a device, in new processes, follow the formula (GPipe, section 2.3)."""

import dataclasses
import json
import sys

import pytest

from tests import processes
from tools import stage_memory as program
from tools.benchmarking import stage_memory

# Narrow layers with many rows take as much memory in a tenth of the time.
_SETTING = stage_memory.Setting(3, 4, 'gpipe', 1, rows=65536, dim=64)
_V = {
  **{'num_stages': 4, 'stages_per_device': 2, 'num_micro_batches': 8},
  **{'remat_policy': 'none', 'num_layers': 1},
}


@pytest.mark.parametrize(
  'changes, predicted',
  [
    # M inputs, and the inner activations of one micro-batch.
    ({}, 4 + 2),
    ({'num_micro_batches': 12}, 12 + 2),
    ({'num_layers': 6}, 4 + 6),
    ({'remat_policy': 'none'}, 4 * (1 + 2)),
    # min(M, K - k) micro-batches.
    ({'schedule': '1f1b'}, 2 + 2),
    ({'schedule': '1f1b', 'num_micro_batches': 12}, 2 + 2),
    ({'schedule': '1f1b', 'stage': 2, 'num_micro_batches': 12}, 1 + 2),
    # Both stages of a device, of two tensors each.
    (_V | {'schedule': 'zb_v'}, 8 * 2),
    (_V | {'schedule': 'v_half'}, 6 * 2),
    (_V | {'schedule': 'v_min'}, 4 * 2),
  ],
)
def testThePredictionFollowsTheFormula(changes, predicted):
  setting = dataclasses.replace(_SETTING, **changes)
  assert setting.mib == 16
  assert stage_memory.Predict(setting) == predicted * 16


def testMeasuredMemoryFollowsTheFormula(forks):
  def Measured(**changes):
    setting = dataclasses.replace(_SETTING, **changes)
    done = processes.Succeeded(forks.Run(stage_memory.__file__, setting.ToJson()))
    return json.loads(done.stdout.splitlines()[-1])

  small = program.Measure(_SETTING)  # In a process that imports TensorFlow, like the program's.
  gpipe = Measured(num_micro_batches=12)
  one_f_one_b = Measured(schedule='1f1b', num_micro_batches=12)
  more_layers = Measured(num_layers=6)
  # Eight more inputs take 128 MiB; TensorFlow takes a few more MiB per micro-batch.
  assert 112 <= gpipe - small <= 208
  # No more inputs are held.
  assert one_f_one_b - small <= 64
  # The inner activations of four more layers take 64 MiB, for one micro-batch and not 256 MiB for
  # four.
  assert 32 <= more_layers - small <= 128


_PROGRAM = str(processes.ROOT / 'tools' / 'stage_memory.py')


@pytest.mark.parametrize(
  'flag, message', [('--stages=3', '--stages'), ('--schedules=x', 'unknown'), ('--xla=1', '--xla')]
)
def testInvalidFlagsAreRejected(forks, flag, message):
  done = forks.Run(_PROGRAM, flag)
  assert done.returncode == 2
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1


def testHelpListsTheFlags(forks):
  text = processes.Succeeded(forks.Run(_PROGRAM, '--help')).stdout
  assert text.startswith('Measures the activation memory of a device')
  assert '  --num_stages: K. (default: ' in text
  # Flags of libraries are omitted.
  assert 'verbosity' not in text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
