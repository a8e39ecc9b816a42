# SPDX-License-Identifier: Apache-2.0
"""SingleTaskModel: creates a task and an input from Params."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.experiment import model
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.layers import linear
from tests import naming
from tests.toys import tasks


def testCreatesTaskAndInput():
  data = synthetic.SyntheticLmInput.Params().Set(batch_size=2)
  instance = model.SingleTaskModel.Params().Set(task=tasks.Huge.Params(), input=data).Instantiate()
  assert isinstance(instance.task, tasks.Huge)
  assert isinstance(instance.input, synthetic.SyntheticLmInput)
  # The weights would take 4 TB, so none were allocated.
  assert instance.task.NumParams() == 10**12


def testTheTaskNameIsTheRootOfEveryPath():
  p = model.SingleTaskModel.Params().Set(task=tasks.Huge.Params())
  assert list(p.Instantiate().task.WeightSpecs()) == ['task.w']
  p.task.name = 'lm'
  assert list(p.Instantiate().task.WeightSpecs()) == ['lm.w']


def testParamsAreCopied():
  p = model.SingleTaskModel.Params().Set(task=tasks.Huge.Params())
  instance = p.Instantiate()
  p.task.train.max_steps = 7
  assert instance.params.task.train.max_steps == instance.task.params.train.max_steps != 7
  assert p.task.name == ''


def testTheInputIsOptional():
  assert model.SingleTaskModel.Params().Set(task=tasks.Huge.Params()).Instantiate().input is None


def testATaskIsRequired():
  with pytest.raises(ValueError, match=naming.Naming('SingleTaskModel.Params().Set(task=...)')):
    model.SingleTaskModel.Params().Instantiate()


def testTaskParamsMustDescribeATask():
  layer = linear.LinearLayer.Params().Set(input_dim=2, output_dim=2)
  with pytest.raises(ValueError, match=naming.Naming('task', 'BaseTask', 'LinearLayer')):
    model.SingleTaskModel.Params().Set(task=layer).Instantiate()


def testParamsTextRoundTrip():
  data = synthetic.SyntheticLmInput.Params()
  p = model.SingleTaskModel.Params().Set(task=tasks.Huge.Params(), input=data.Copy())
  p.FromText('task.train.max_steps:7; input.batch_size:3; task.dtype:bfloat16')
  assert p.task.dtype == tf.bfloat16
  fresh = model.SingleTaskModel.Params().Set(task=tasks.Huge.Params(), input=data.Copy())
  assert fresh.FromText(p.ToText()) == p


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
