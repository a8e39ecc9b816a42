# SPDX-License-Identifier: Apache-2.0
"""The program that writes the Keras model of a run as a preset."""

import sys

import numpy as np
import pytest

from tests import naming, processes

keras_hub = pytest.importorskip('keras_hub')

_PROGRAM = str(processes.ROOT / 'tools' / 'write_preset.py')
_MODEL = 'lm.keras_hub.ByteGPT2'
_OVERRIDES = (
  "task.backbone:{'num_layers': 1, 'num_heads': 2, 'hidden_dim': 16, 'intermediate_dim': 32, "
  "'max_sequence_length': 16};input.batch_size:4;input.seq_len:16;input.max_bytes:4096;"
  'task.train.eval_datasets:[];task.stack.num_micro_batches:2'
)


def testAPresetHasTheWeightsOfTheRun(tmp_path, forks):
  logdir, preset = tmp_path / 'run', tmp_path / 'preset'
  args = [f'--model={_MODEL}', f'--logdir={logdir}', f'--model_params_override={_OVERRIDES}']
  processes.Succeeded(forks.Run('trainer', *args, '--max_steps=2'))
  done = processes.Succeeded(forks.Run(_PROGRAM, *args, f'--preset={preset}'))
  (line,) = done.stdout.splitlines()
  assert naming.Names(line, 'step 2', preset)
  model = keras_hub.models.CausalLM.from_preset(str(preset), preprocessor=None)
  tensors = processes.Tensors(logdir, 2).values()
  for v in model.weights:
    assert any(np.array_equal(v, t) for t in tensors), v.path
  # It does not overwrite a preset.
  done = forks.Run(_PROGRAM, *args, f'--preset={preset}')
  assert done.returncode == 2
  assert str(preset) in done.stderr


def testRunsWithoutAKerasModelAreRefused(tmp_path, forks):
  args = [f'--model={processes.MODEL}', f'--logdir={tmp_path}', f'--preset={tmp_path / "preset"}']
  done = forks.Run(_PROGRAM, *args)
  assert done.returncode == 2
  assert processes.MODEL in done.stderr
  done = forks.Run(_PROGRAM, *args[:2])
  assert done.returncode == 2
  assert '--preset' in done.stderr


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
