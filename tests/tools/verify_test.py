# SPDX-License-Identifier: Apache-2.0
"""The program `tools.verify`: its exit status tells a correct pipeline from a wrong one."""

import re
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import model, task
from lingvo_gpipe.input import base_input_generator
from lingvo_gpipe.layers import dropout, linear
from lingvo_gpipe.pipeline import pipelining_layer
from tests import processes
from tests.toys import stacks
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


_PROJECT_TASK = '''
"""A language model with a wrong loss weight."""
import tensorflow as tf

from lingvo_gpipe import linear, pipelining_layer, task


class WrongTask(task.BaseTask):
  def __init__(self, params):
    super().__init__(params)
    layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4, activation='TANH')
    stack = pipelining_layer.PipeliningLayer.Params().Set(
      num_stages=2, num_micro_batches=2, xla=False, sub=[layer, layer]
    )
    self.CreateChild('stack', stack)

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def LossWeight(self, input_batch):
    return tf.constant(1.0)  # It should be the sum of w.

  def ComputeLoss(self, theta, predictions, input_batch):
    squares = tf.reduce_sum(predictions**2, axis=1)
    total = tf.reduce_sum(input_batch.w)
    return {'loss': (tf.reduce_sum(squares * input_batch.w) / total, total)}, {}
'''

_PROJECT_PARAMS = '''
"""The experiment."""
import tensorflow as tf

from lingvo_gpipe import base_input_generator, nested_map, registry
from tasks import wrong


class Numbers(base_input_generator.BaseInputGenerator):
  def NumExamples(self):
    return 64

  def _Examples(self, indices):
    i = tf.cast(indices, tf.float32)
    return nested_map.NestedMap(x=tf.sin(i[:, None] + tf.range(4.0)), w=1.0 + i)


@registry.RegisterSingleTaskModel
class Wrong(registry.SingleTaskModelParams):
  def Train(self):
    return Numbers.Params().Set(name='numbers', batch_size=8)

  def Task(self):
    return wrong.WrongTask.Params().Set(name='task')
'''


def testAWrongLossWeightIsReported(forks, tmp_path):
  for name, text in (('tasks', _PROJECT_TASK), ('params', _PROJECT_PARAMS)):
    (tmp_path / name).mkdir()
    (tmp_path / name / '__init__.py').touch()
    (tmp_path / name / 'wrong.py').write_text(text)
  done = forks.Run(_PROGRAM, '--model=wrong.Wrong', cwd=tmp_path)
  assert done.returncode == 1, done.stderr
  assert re.search(r'^DIFFERENT: loss weight: 2 was announced', done.stdout, re.MULTILINE)
  assert re.search(r'^DIFFERENT: gradients: 2 of 2', done.stdout, re.MULTILINE)


class _TimeMajor(task.BaseTask):
  """A task whose pipeline takes [time, batch, dim], and whose loss takes the batch unchanged."""

  def __init__(self, params):
    super().__init__(params)
    layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4, activation='TANH')
    drop = dropout.DropoutLayer.Params().Set(keep_prob=0.8)
    stack = pipelining_layer.PipeliningLayer.Params().Set(
      num_stages=2, num_micro_batches=2, xla=False, batch_dim=1, sub=[layer, drop, layer]
    )
    self.CreateChild('stack', stack)

  def PipelineInputs(self, input_batch):
    return (tf.transpose(input_batch.x, [1, 0, 2]),)

  def LossWeight(self, input_batch):
    return tf.reduce_sum(input_batch.w)

  def ComputeLoss(self, theta, predictions, input_batch):
    squares = tf.reduce_mean(predictions**2, axis=[0, 2])
    total = tf.reduce_sum(input_batch.w)
    return {'loss': (tf.reduce_sum(squares * input_batch.w) / total, total)}, {}


class _Sequences(base_input_generator.BaseInputGenerator):
  """Example i: x [time, dim] and its weight."""

  def NumExamples(self):
    return 20

  def _Examples(self, indices):
    i = tf.cast(indices, tf.float64)
    x = tf.sin(i[:, None, None] + tf.reshape(tf.range(12.0, dtype=i.dtype), [3, 4]))
    return nested_map.NestedMap(x=x, w=1.0 + i)


def testABatchAtAnotherDimension(monkeypatch, capsys):
  """5 examples of 3 time steps are cut into micro-batches of 3 and 2, also for the loss."""
  params = model.SingleTaskModel.Params().Set(
    task=_TimeMajor.Params(), input=_Sequences.Params().Set(batch_size=5)
  )
  flag_values = types.SimpleNamespace(model='test', dtype='float64', step=2, num_worst=1)
  monkeypatch.setattr(verify, 'FLAGS', flag_values)
  monkeypatch.setattr(binary, 'ModelParams', lambda dataset: params)
  devices = types.SimpleNamespace(devices=stacks.Devices(), num_replicas=1)
  monkeypatch.setattr(device_flags, 'Devices', lambda num: devices)
  assert verify._Verify() == 0
  out = capsys.readouterr().out
  assert 'K=2 stages, M=2 micro-batches' in out and 'gradients of 2 variables' in out
  assert re.search(r'^EQUAL: float64', out, re.MULTILINE)


def testErrorsAreOneLine(forks):
  done = forks.Run(
    _PROGRAM,
    f'--model={processes.MODEL}',
    f'--model_params_override={processes.TINY};task.fprop_dtype:bfloat16',
  )
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert 'compute in bfloat16' in line


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
