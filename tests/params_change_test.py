# SPDX-License-Identifier: Apache-2.0
"""A run goes on with what changes no step, and with what does only where that is allowed."""

import sys

import pytest

from lingvo_gpipe import params_change, params_text, registry
from tests import processes


def _Params(overrides=''):
  params = registry.GetParams(processes.MODEL, 'Train')
  return params.ApplyOverrides(params_text.ParseOverrides(overrides))


@pytest.fixture(scope='module')
def logdir(tmp_path_factory):
  """What a run leaves there."""
  directory = tmp_path_factory.mktemp('run')
  (directory / params_change.FILE_NAME).write_text(_Params().ToText())
  return directory


@pytest.mark.parametrize(
  'overrides',
  [
    '',
    'model:other.Model@other.py:7',
    "task.train.max_steps:7;task.train.eval_datasets:['Dev'];task.train.save_interval_steps:3",
    'task.eval.samples_per_summary:3;task.sampling.temperature:2',
    'task.stack.num_stages:1;task.stack.schedule:1f1b;task.stack.xla:True',
    'task.stack.num_micro_batches:2;task.stack.remat_policy:none;task.stack.splits:[3]',
    'input.num_prefetch:0;input.name:x',
  ],
)
def testHarmlessChangesAreLetThroughAndLogged(logdir, caplog, overrides):
  caplog.set_level('INFO', logger='absl')
  params_change.Check(str(logdir), _Params(overrides), allow=False)
  said = [r.getMessage() for r in caplog.records if 'other Params' in r.getMessage()]
  assert len(said) == overrides.count(':') - overrides.count('py:')
  assert all(r.levelname == 'INFO' for r in caplog.records)


@pytest.mark.parametrize(
  'override, told',
  [
    ('task.train.learner.learning_rate:0.5', '~ task.train.learner.learning_rate : 0.002 -> 0.5'),
    ('input.batch_size:16', '~ input.batch_size : 32 -> 16'),
    ('input.max_bytes:100', '~ input.max_bytes : 0 -> 100'),
    ('input.random_seed:1', '~ input.random_seed : 0 -> 1'),
    ('task.model_dim:64', '~ task.model_dim : 128 -> 64'),
    ('task.residual_dropout_prob:0.1', '~ task.residual_dropout_prob : 0.05 -> 0.1'),
    ('task.train.learner.num_accumulated_mini_batches:2', r'mini_batches : 1 -> 2'),
    ('task.fprop_dtype:bfloat16', "~ task.fprop_dtype : None -> 'bfloat16'"),
  ],
)
def testOthersAreRefusedWithTheDiffUnlessAllowed(logdir, caplog, override, told):
  params = _Params(f'{override};task.train.max_steps:7')
  with pytest.raises(ValueError) as e:
    params_change.Check(str(logdir), params, allow=False)
  message = str(e.value)
  assert told in message and '--allow_params_change' in message and repr(str(logdir)) in message
  assert 'max_steps' not in message and '\n' not in message
  params_change.Check(str(logdir), params, allow=True)
  (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
  assert told in warning


def testManyDifferencesAreCounted(logdir):
  params = _Params()
  params.task.Delete('softmax_tpl')
  with pytest.raises(ValueError, match=r'; - task\.softmax_tpl\.\w+ : .*, and \d+ more\. Give'):
    params_change.Check(str(logdir), params, allow=False)


def testAParamThatTheRunDidNotKnowIsHarmlessAtItsDefault(logdir):
  params = _Params()
  params.task.Define('new', 3, '')
  params.task.train.Define('also_new', _Params().task.eval, '')
  params_change.Check(str(logdir), params, allow=False)
  params.task.train.also_new.samples_per_summary = 5
  with pytest.raises(ValueError, match=r'\+ task\.train\.also_new\.samples_per_summary : 5'):
    params_change.Check(str(logdir), params, allow=False)
  params.task.train.also_new.samples_per_summary = 0
  params.task.new = 4
  with pytest.raises(ValueError, match=r'\+ task\.new : 4'):
    params_change.Check(str(logdir), params, allow=False)


def testEntriesThatTheRunDidNotHaveAreNoDefaults(tmp_path):
  old, new = _Params(), _Params()
  for params, number in ((old, 1), (new, 2)):
    params.task.Define('layers', [old.task.eval.Copy() for _ in range(number)], '')
  (tmp_path / params_change.FILE_NAME).write_text(old.ToText())
  with pytest.raises(ValueError, match=r'\+ task\.layers\[1\]\.samples_per_summary : 0'):
    params_change.Check(str(tmp_path), new, allow=False)


def testWhatCannotBeReadIsNotPassedOver(tmp_path):
  params_change.Check(str(tmp_path), _Params(), allow=False)
  path = tmp_path / params_change.FILE_NAME
  path.write_text('nonsense')
  with pytest.raises(ValueError, match=r'params\.txt.*cannot be read.*key:value.*remove it'):
    params_change.Check(str(tmp_path), _Params(), allow=True)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
