# SPDX-License-Identifier: Apache-2.0
"""Evaluations of data sets, or metrics, without any weight."""

import json
import math
import os
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import dataset_pass
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


class _Rare(training.Regression):
  """Has a metric of a class that does not occur: its mean over nothing is not 0."""

  def ComputeLoss(self, theta, predictions, input_batch):
    metrics, per_example = super().ComputeLoss(theta, predictions, input_batch)
    metrics['recall'] = (tf.constant(0.0), tf.constant(0.0))
    return metrics, per_example


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
  done = _Evaluation(tmp_path, _Rare, synthetic.SyntheticRegressionInput)
  values = done.Run(7)
  done.Close()
  assert values['loss'] > 0.0 and math.isnan(values['recall'])
  folder = tmp_path / 'eval_dev'
  assert 'recall: nan\n' in (folder / 'score-00000007.txt').read_text()
  assert math.isnan(processes.Scalars(folder)['recall'][0][1])
  assert progress.FormatMetrics(values) in capsys.readouterr().out


def testAMetricWithoutWeightIsNeverTheBest(tmp_path):
  p = training.Params(eval_datasets=['Dev'], eval_interval_steps=2, max_steps=4)
  p.task = _Rare.Params().Set(name='toy', train=p.task.train)
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


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
