# SPDX-License-Identifier: Apache-2.0
"""Evaluations of data sets: their extent, signals, samples, and values without any weight."""

import json
import math
import os
import signal
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import dataset_pass
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.reporting import progress
from lingvo_gpipe.runners import eval_runner
from tests import naming, processes
from tests.toys import training


class _Unweighted(synthetic.SyntheticRegressionInput):
  """Examples of weight 0."""

  def _Examples(self, indices):
    weights = tf.zeros(tf.shape(indices), tf.float32)
    return nested_map.NestedMap(super()._Examples(indices), example_weights=weights)


def _Evaluation(logdir, kind, source):
  task = kind.Params().Set(name='toy').Instantiate()
  p = source.Params().Set(batch_size=4, num_examples=6, input_shape=[4], num_targets=2)
  devices = cluster.Cluster.Create(1, platform='cpu').devices
  runner = eval_runner.EvalRunner(task, devices, p.Instantiate().BatchSpec())
  return dataset_pass.Evaluation(runner, p, 'Dev', str(logdir), stop_request.StopRequest())


def testADataSetWithoutWeightIsAnError(tmp_path, capsys):
  done = _Evaluation(tmp_path, training.Regression, _Unweighted)
  with pytest.raises(ValueError, match=naming.Naming('Dev', 'loss', 'weight')):
    done.Run(7)
  assert capsys.readouterr().out == '' and os.listdir(tmp_path) == []


def testAMetricWithoutWeightIsNan(tmp_path, capsys):
  done = _Evaluation(tmp_path, training.WithRecall, synthetic.SyntheticRegressionInput)
  values = done.Run(7)
  done.Close()
  assert values['loss'] > 0.0 and math.isnan(values['recall'])
  folder = tmp_path / 'eval_dev'
  assert 'recall: nan\n' in (folder / 'score-00000007.txt').read_text()
  assert math.isnan(processes.Scalars(folder)['recall'][0][1])
  assert progress.FormatMetrics(values) in capsys.readouterr().out


def testAMetricWithoutWeightIsNeverTheBest(tmp_path):
  p = training.Params(eval_datasets=['Dev'], eval_interval_steps=2, max_steps=4)
  p.task = training.WithRecall.Params().Set(name='toy', train=p.task.train)
  p.task.train.early_stop.Set(metric='recall', minimize=True)
  training.Train(tmp_path, p, job='train_and_eval')
  # Without the constants NaN and Infinity, which JSON does not have.
  report = json.loads((tmp_path / 'report.json').read_text(), parse_constant=pytest.fail)
  assert report['best'] is None and report['passes']['eval_dev']['values']['recall'] is None
  lines = map(json.loads, (tmp_path / 'metrics.jsonl').read_text().splitlines())
  recalls = [line['values']['recall'] for line in lines if line['split'] == 'eval_dev']
  assert recalls == [None, None]
  # A run that continues reads the values of its checkpoint.
  p.task.train.max_steps = 5
  training.Train(tmp_path, p, job='train_and_eval')
  assert training.Evaluator(tmp_path, p).Run() == 0


class _Numbers:
  """An input of 10 batches of one example."""

  @classmethod
  def Params(cls):
    params = types.SimpleNamespace(batch_size=1)
    params.Copy = lambda: params
    params.Set = lambda **unused: params
    params.Instantiate = lambda: cls(params)
    return params

  def __init__(self, params):
    self.params = params

  def BatchSpecs(self):
    return []

  def CheckComplete(self):
    pass

  def Dataset(self, start=0):
    return tf.data.Dataset.range(10).batch(1).map(lambda i: nested_map.NestedMap(i=i))


class _Runner:
  """Counts batches; sends a signal at batch `at`."""

  def __init__(self, stop=None, at=-1, limit=0, decoded=None):
    self.seen = []
    self._stop, self._at = stop, at
    self.task = types.SimpleNamespace(
      params=types.SimpleNamespace(eval=task_lib.EvalParams().Set(samples_per_summary=limit)),
      Report=lambda values, input_generator: '',
    )
    self.Decode = lambda batch, input_generator: decoded or {}
    self.engine = types.SimpleNamespace(replicas=[])  # No batches are read on workers.

  def ExpectBatches(self, batch_specs):
    assert not batch_specs

  def Evaluate(self, batches):
    for batch in batches:
      self.seen.append(int(batch.i[0]))
      if self.seen[-1] == self._at:
        self._stop.signal = signal.SIGINT
    return {'loss': (1.5, len(self.seen))}


@pytest.mark.parametrize('limit, count', [(0, 10), (3, 3)])
def testEvaluatesTheWholeDataSetOrItsBeginning(tmp_path, limit, count):
  runner = _Runner(limit=limit)
  done = dataset_pass.Evaluation(
    runner, _Numbers.Params(), 'Dev', str(tmp_path), stop_request.StopRequest()
  )
  assert done.Run(7) == {'loss': 1.5}
  assert runner.seen == list(range(count))
  assert (tmp_path / 'eval_dev' / 'score-00000007.txt').read_text() == 'loss: 1.5\n'


def testASignalEndsAnEvaluationBetweenBatches(tmp_path, capsys):
  stop = stop_request.StopRequest()
  runner = _Runner(stop, at=3)
  done = dataset_pass.Evaluation(runner, _Numbers.Params(), 'Test', str(tmp_path), stop)
  assert done.Run(7) is None
  assert runner.seen == [0, 1, 2, 3]
  (line,) = capsys.readouterr().out.splitlines()
  assert naming.Names(line, 'Test', 'step 7', 'SIGINT')
  assert os.listdir(tmp_path) == []


def testASampleCannotControlTheTerminal(tmp_path, capsys):
  runner = _Runner(decoded={'continuation': ['a\x1b[2Jb\x07\n\tc\x00é\r\ufffd']})
  done = dataset_pass.Evaluation(
    runner, _Numbers.Params(), 'Test', str(tmp_path), stop_request.StopRequest()
  )
  done.WriteSample(7)
  assert capsys.readouterr().out == ''
  done.PrintSample()
  done.PrintSample()
  printed = capsys.readouterr().out
  assert printed == '--- continuation\na\ufffd[2Jb\ufffd\n\tc\ufffdé\ufffd\ufffd\n'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
