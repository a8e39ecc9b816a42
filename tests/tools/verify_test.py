# SPDX-License-Identifier: Apache-2.0
"""The program `tools.verify`: its exit status tells a correct pipeline from a wrong one."""

import re
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import model
from lingvo_gpipe.input import base_input_generator
from tests import naming, processes
from tests.toys import projects, stacks, tasks
from tools import verify

_PROGRAM = str(processes.ROOT / 'tools' / 'verify.py')


def _Run(*args, **options):
  return processes.Run('verify', *args, command=[sys.executable, _PROGRAM], **options)


def testACorrectExperimentPasses():
  done = _Run(
    f'--model={processes.MODEL}', '--dtype=float64', '--step=3', '--num_worst=2',
    f'--model_params_override={processes.TINY};task.atten_dropout_prob:0.1',
  )  # fmt: skip
  out = processes.Succeeded(done).stdout
  assert 'K=2 stages, M=2 micro-batches' in out
  assert re.search(r'^EQUAL: float64', out, re.MULTILINE)
  assert out.count('relative ') == 5  # Two lines for each scale, and one heading.
  assert processes.Messages(done.stderr) == []


def testAWrongLossWeightIsReported(forks, tmp_path):
  name = 'wrong_weight'
  projects.Write(tmp_path, projects.Experiments(name), module=name, task=name)
  for folder in ('params', 'tasks'):
    (tmp_path / folder / '__init__.py').touch()  # Not to be hidden by this repository's.
  done = forks.Run(_PROGRAM, f'--model={name}.Wrong', cwd=tmp_path)
  assert done.returncode == 1, done.stderr
  assert re.search(r'^DIFFERENT: loss weight: 2\b', done.stdout, re.MULTILINE)
  assert re.search(r'^DIFFERENT: gradients: 2 of 2', done.stdout, re.MULTILINE)


class _Sequences(base_input_generator.BaseInputGenerator):
  """Example i: x [time, dim] and its weight."""

  def NumExamples(self):
    return 20

  def _Examples(self, indices):
    i = tf.cast(indices, tf.float64)
    x = tf.sin(i[:, None, None] + tf.reshape(tf.range(12.0, dtype=i.dtype), [3, 4]))
    return nested_map.NestedMap(x=x, w=1.0 + i)


def testTheBatchMayBeAtAnotherDimension(monkeypatch, capsys):
  """5 examples of 3 time steps are cut into micro-batches of 3 and 2, also for the loss."""
  params = model.SingleTaskModel.Params().Set(
    task=tasks.TimeMajor.Params(), input=_Sequences.Params().Set(batch_size=5)
  )
  flag_values = types.SimpleNamespace(model='test', dtype='float64', step=2, num_worst=1)
  monkeypatch.setattr(verify, 'FLAGS', flag_values)
  monkeypatch.setattr(binary, 'ModelParams', lambda dataset: params)
  devices = types.SimpleNamespace(devices=stacks.Devices(), num_replicas=1)
  monkeypatch.setattr(device_flags, 'Devices', lambda num: devices)
  assert verify._Verify() == 0
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'K=2', 'M=2')
  assert naming.AnyLineNames(out, 'gradients', '2 variables')
  assert re.search(r'^EQUAL: float64', out, re.MULTILINE)


def testErrorsAreOneLine(forks):
  done = forks.Run(
    _PROGRAM,
    f'--model={processes.MODEL}',
    f'--model_params_override={processes.TINY};task.fprop_dtype:bfloat16',
  )
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, 'bfloat16', 'float32')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
