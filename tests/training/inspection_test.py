# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models as text."""

import os
import re
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import model, task
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.runners import eval_runner
from lingvo_gpipe.training import inspection
from tasks.lm import model as lm_model
from tests import naming
from tests.toys import tasks


def _PlainParams():
  data = synthetic.SyntheticRegressionInput.Params().Set(batch_size=4, input_shape=[4])
  return model.SingleTaskModel.Params().Set(
    task=tasks.WithMean.Params().Set(name='plain'), input=data
  )


def _LmParams(num_stages=2, num_micro_batches=2, batch_size=4):
  p = lm_model.TransformerLm.Params().Set(
    name='lm', vocab_size=11, model_dim=8, hidden_dim=16, num_heads=2, num_layers=4
  )
  p.stack.Set(num_stages=num_stages, num_micro_batches=num_micro_batches, xla=False)
  data = synthetic.SyntheticLmInput.Params().Set(batch_size=batch_size, seq_len=5, vocab_size=11)
  return model.SingleTaskModel.Params().Set(task=p, input=data)


def testModelText():
  text = inspection.ModelText(tasks.WithMean.Params().Set(name='plain').Instantiate())
  lines = [line.split() for line in text.splitlines()]
  assert lines == [
    ['plain.w', '[4,', '2]', 'float32', '8'],
    ['plain.mean', '[2]', 'float64', '2', '(not', 'trained)'],
    ['8', 'parameters,', '2', 'not', 'trained'],
  ]


def testModelTextNamesEveryWeightOnce():
  instance = _LmParams().task.Instantiate()
  lines = inspection.ModelText(instance).splitlines()
  assert [line.split()[0] for line in lines[:-1]] == list(instance.WeightSpecs())
  sizes = [int(line.split()[-1].replace(',', '')) for line in lines[:-1]]
  assert lines[-1] == f'{sum(sizes):,} parameters'
  assert sum(sizes) == instance.NumParams()
  with pytest.raises(ValueError, match=naming.Naming('lm', 'InstantiateVariables()')):
    _ = instance.vars


def testModelTextOfATaskWithoutWeights():
  assert inspection.ModelText(task.BaseTask.Params().Set(name='t').Instantiate()) == '0 parameters'


@pytest.mark.parametrize('num_stages', [1, 2, 4])
def testPartitionText(num_stages):
  text = inspection.PartitionText(_LmParams(num_stages))
  table, picture = text.split('\n\n')
  rows = table.splitlines()
  columns = 'stage layers from to params MFLOPs share idle weights activations device'
  assert rows[0].split() == columns.split()
  assert [row.split()[0] for row in rows[1:-3]] == [str(k) for k in range(num_stages)]
  assert sum(int(row.split()[1]) for row in rows[1:-3]) == 8
  assert naming.Names(rows[-3], f'K={num_stages}', 'M=2')
  assert re.match(r'predicted: bubble \d+\.\d%', rows[-2])
  assert naming.Names(rows[-1], 'gradients', '2 optimizer slots')
  assert max(map(len, rows)) <= 140

  assert len(re.findall(r'^device \d', picture, re.MULTILINE)) == num_stages
  for m in range(2):
    assert picture.count(f'F{m}') == num_stages


def testTheLearnerDeterminesSlotsAndTrainedWeights():
  p = _LmParams()
  p.task.train.learner.optimizer = optimizer.SGD.Params()
  plain = inspection.PartitionText(p)
  assert naming.AnyLineNames(plain, 'gradients', '0 optimizer slots')
  p.task.train.learner.bprop_variable_filter = 'softmax'
  assert inspection.PartitionText(p).splitlines()[1].split()[7] != plain.splitlines()[1].split()[7]


def testAWidePictureIsLeftOut():
  text = inspection.PartitionText(_LmParams(2, 64, batch_size=64))
  assert 'M=64' in text
  assert 'F0' not in text


def testPartitionTextWithoutAPipeline():
  text = inspection.PartitionText(_PlainParams())
  assert 'K=1 stages, M=1 micro-batches' in text
  assert 'plain' in text
  assert 'F0' not in text


def testPartitionTextAsksForAnInput():
  with pytest.raises(ValueError, match=naming.Naming('partition', 'params.input')):
    inspection.PartitionText(_PlainParams().Set(input=None))


def testWriteDescription(tmp_path):
  p = _LmParams()
  instance = model.SingleTaskModel(p)
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  run = eval_runner.EvalRunner(instance.task, devices, instance.input.BatchSpec())
  logdir = os.path.join(tmp_path, 'deep', 'run')
  for _ in range(2):  # Again, over the existing files.
    inspection.WriteDescription(logdir, p, instance, {'': run.cut})
    assert sorted(os.listdir(logdir)) == ['model_analysis.txt', 'params.txt']
  with open(os.path.join(logdir, 'params.txt')) as f:
    assert _LmParams(1, 1).FromText(f.read()) == p
  with open(os.path.join(logdir, 'model_analysis.txt')) as f:
    assert f.read() == f'{inspection.ModelText(instance.task)}\n\n{run.cut.Table()}\n'


def testParamsOfARunAndTheirDifference(tmp_path):
  p = _LmParams().Set(model='lm.X@params/lm/x.py:7')
  text = p.ToText()
  (tmp_path / 'params.txt').write_text(text)
  assert inspection.ReadParams(str(tmp_path)) == text
  assert inspection.ReadParams(str(tmp_path / 'params.txt')) == text
  assert inspection.ReadParams(str(tmp_path / 'other')) is None
  (tmp_path / 'other').mkdir()
  with pytest.raises(ValueError, match=naming.Naming(tmp_path / 'other/params.txt')):
    inspection.ReadParams(str(tmp_path / 'other'))
  p.model = 'lm.X@params/lm/x.py:9'  # Its class is defined two lines further down.
  assert inspection.ParamsDiff(text, p.ToText()) == []
  p.model = 'lm.Y@params/lm/x.py:9'
  p.task.hidden_dim = 32
  assert [line.split(' ')[1] for line in inspection.ParamsDiff(text, p.ToText())] == [
    'model',
    'task.hidden_dim',
  ]


def testThePartitionNeedsOnlyTheBatchSpec():
  """The partition needs no data."""

  class NoData(synthetic.SyntheticLmInput):
    def _Examples(self, indices):
      raise AssertionError('read')

  p = _LmParams()
  p.input = NoData.Params().Set(batch_size=4, seq_len=5, vocab_size=11)
  assert isinstance(p.Instantiate().input.BatchSpec(), nested_map.NestedMap)
  assert 'K=2' in inspection.PartitionText(p)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
