# SPDX-License-Identifier: Apache-2.0
"""A run resumes with harmless changes of Params, and with others only if they are allowed."""

import functools
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import params_change
from lingvo_gpipe.core import params_text
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.training import inspection
from tests import naming, processes
from tests.toys import training


def _Params(overrides=''):
  params = registry.GetParams(processes.MODEL, 'Train')
  return params.ApplyOverrides(params_text.ParseOverrides(overrides))


def _Checkpoint(text):
  """Returns a stand-in for a checkpoint with these Params."""
  return types.SimpleNamespace(path='run/train/ckpt-7.json', metadata={params_change.KEY: text})


def _CheckLogged(caplog, overrides):
  """Asserts that each change was logged once, at level INFO."""
  messages = [r.getMessage() for r in caplog.records if naming.Names(r.getMessage(), 'Params')]
  assert len(messages) == overrides.count(':') - overrides.count('py:')
  assert all(r.levelname == 'INFO' for r in caplog.records)


@pytest.fixture(scope='module')
def saved():
  return _Checkpoint(_Params().ToText())


@pytest.mark.parametrize(
  'overrides',
  [
    '',
    'model:other.Model@other.py:7',
    "task.train.max_steps:7;task.train.eval_datasets:['Dev'];task.train.save_interval_steps:3",
    'task.eval.samples_per_summary:3;task.sampling.temperature:2',
    'task.stack.num_stages:1;task.stack.schedule:1f1b;task.stack.xla:True',
    'task.stack.num_micro_batches:2;task.stack.offload:0.5;task.stack.splits:[3]',
    'input.num_prefetch:0;input.name:x;input.num_epochs:3',
    'task.train.shard_optimizer_slots:True;task.train.all_reduce:send',
  ],
)
def testHarmlessChangesAreAcceptedAndLogged(saved, caplog, overrides):
  caplog.set_level('INFO', logger='absl')
  params_change.Check(saved, _Params(overrides), allow=False)
  _CheckLogged(caplog, overrides)


_OF_ANOTHER_RUN = [
  ('task.train.learner.learning_rate:0.5', '~ task.train.learner.learning_rate : 0.002 -> 0.5'),
  ('input.batch_size:16', '~ input.batch_size : 32 -> 16'),
  ('input.max_bytes:100', '~ input.max_bytes : 0 -> 100'),
  ('input.random_seed:1', '~ input.random_seed : 0 -> 1'),
  ('task.residual_dropout_prob:0.1', '~ task.residual_dropout_prob : 0.05 -> 0.1'),
  ('task.train.learner.num_accumulated_mini_batches:2', r'mini_batches : 1 -> 2'),
]
_OF_ANOTHER_MODEL = [
  ('task.model_dim:64', '~ task.model_dim : 128 -> 64'),
  ('task.num_heads:8', '~ task.num_heads : 4 -> 8'),
  ('task.fprop_dtype:bfloat16', "~ task.fprop_dtype : None -> 'bfloat16'"),
  ('task.softmax_tpl.logits_abs_max:5.0', '~ task.softmax_tpl.logits_abs_max : '),
]


@pytest.mark.parametrize(
  'check, override, diff',
  [
    *((params_change.Check, *case) for case in (*_OF_ANOTHER_RUN, *_OF_ANOTHER_MODEL)),
    *((params_change.CheckEvaluated, *case) for case in _OF_ANOTHER_MODEL),
  ],
)
def testOtherChangesAreAnErrorUnlessAllowed(saved, caplog, check, override, diff):
  params = _Params(f'{override};task.train.max_steps:7')
  with pytest.raises(ValueError) as e:
    check(saved, params, allow=False)
  message = str(e.value)
  assert diff in message and '--allow_params_change' in message and 'ckpt-7.json' in message
  assert 'max_steps' not in message and '\n' not in message
  check(saved, params, allow=True)
  (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
  assert diff in warning


@pytest.mark.parametrize(
  'before, now, change',
  [
    ('', 'ema_decay:0.9', ['task.train.ema_decay', '0.0', '0.9', 'no averages']),
    ('ema_decay:0.9', '', ['task.train.ema_decay', '0.9', '0.0', 'holds averages']),
    (
      'ema_decay:0.9',
      'ema_decay:0.9;task.train.ema_decay_moving_vars:True',
      ['task.train.ema_decay_moving_vars', 'False', 'True', 'no averages'],
    ),
  ],
)
@pytest.mark.parametrize('allow', [False, True])
def testAveragesCannotBeSwitchedOnOrOffWithinARun(before, now, change, allow):
  before, now = (_Params(f'task.train.{text}' if text else '') for text in (before, now))
  info = _Checkpoint(before.ToText())
  with pytest.raises(ValueError, match=naming.Naming(*change, '--logdir')) as e:
    params_change.Check(info, now, allow)
  assert '--allow_params_change' not in str(e.value)
  # An evaluation uses averages if the checkpoint has them.
  params_change.CheckEvaluated(info, now, allow=False)


def testAnotherDecayOfTheAveragesCanBeAllowed():
  info = _Checkpoint(_Params('task.train.ema_decay:0.9').ToText())
  params_change.Check(info, _Params('task.train.ema_decay:0.99'), allow=True)


@pytest.mark.parametrize(
  'overrides',
  [
    'task.train.max_steps:7;task.train.learner.learning_rate:0.5;task.train.ema_decay:0.9',
    'task.residual_dropout_prob:0.5;task.random_seed:3;task.stack.num_stages:1',
    'task.eval.samples_per_summary:3;model:other.Model@other.py:7',
  ],
)
def testChangesThatAffectOnlyTrainingAreHarmlessToAnEvaluation(saved, caplog, overrides):
  caplog.set_level('INFO', logger='absl')
  params = _Params(overrides)
  text = params_change.CheckEvaluated(saved, params, allow=False)
  assert text == saved.metadata[params_change.KEY]
  # Params that were compared before are not logged again.
  params_change.CheckEvaluated(saved, params, allow=False, checked=text)
  _CheckLogged(caplog, overrides)


@pytest.mark.parametrize(
  'override, diff',
  [
    ('task.eval.samples_per_summary:3', '~ task.eval.samples_per_summary : 0 -> 3'),
    ('task.sampling.temperature:2', 'task.sampling.temperature'),
    *_OF_ANOTHER_MODEL,
  ],
)
def testATrainerDoesNotEvaluateWithAnotherTask(override, diff):
  with pytest.raises(ValueError) as e:
    params_change.CheckEvaluatedByTrainer('Test', _Params(override), _Params())
  message = str(e.value)
  assert diff in message and '--split=Test' in message and '\n' not in message


def testATrainerEvaluatesWithATaskThatHasTheSameResults():
  params = _Params(
    'task.train.max_steps:7;task.train.learner.learning_rate:0.5;task.residual_dropout_prob:0.5;'
    'task.stack.num_stages:1;task.eval.max_seconds_without_trainer:9;input.batch_size:3'
  )
  params_change.CheckEvaluatedByTrainer('Test', params, _Params())


def testTheRulesApplyToEachOfSeveralTasks():
  def Params(overrides=''):
    params = registry.GetParams('image.digits_tasks.DigitAndParity', 'Train')
    return params.ApplyOverrides(params_text.ParseOverrides(overrides))

  info = _Checkpoint(Params().ToText())
  harmless = Params(
    'train.max_steps:7;train.all_reduce:send;task_params.parity.stack.num_stages:2;'
    'task_params.digit.eval.samples_per_summary:3;input.parity.num_prefetch:0;'
    'input.digit.num_epochs:3'
  )
  params_change.Check(info, harmless, allow=False)
  for grave in (
    'task_params.parity.train.learner.learning_rate:0.5',
    'task_probs.parity:3.0',
    'task_name:parity',
    'input.parity.batch_size:3',
  ):
    with pytest.raises(ValueError, match=naming.Naming('~ ' + grave.partition(':')[0])):
      params_change.Check(info, Params(grave), allow=False)
    params_change.CheckEvaluated(info, Params(grave), allow=False)
  averaged = Params('task_params.parity.train.ema_decay:0.9')
  with pytest.raises(ValueError, match=naming.Naming('task_params.parity.train.ema_decay', '0.9')):
    params_change.Check(info, averaged, allow=True)
  params_change.CheckEvaluated(info, averaged, allow=False)
  for other_model in ('task_params.digit.hidden_dim:64', 'variable_renaming_rules:[]'):
    with pytest.raises(ValueError, match=naming.Naming('~ ' + other_model.partition(':')[0])):
      params_change.CheckEvaluated(info, Params(other_model), allow=False)


def testAnEvaluationMayReadOtherData(saved, caplog):
  caplog.set_level('INFO', logger='absl')
  params = registry.GetParams(processes.MODEL, 'Test')
  params.input.batch_size = 2
  params_change.CheckEvaluated(saved, params, allow=False)
  assert not [r for r in caplog.records if naming.Names(r.getMessage(), 'Params')]


def testManyDifferencesAreCounted(saved):
  params = _Params()
  params.task.Delete('softmax_tpl')
  with pytest.raises(ValueError, match=r'; - task\.softmax_tpl\.\w+ : .*, and \d+ more'):
    params_change.Check(saved, params, allow=False)


def testANewParamIsHarmlessAtItsDefault(saved):
  params = _Params()
  params.task.Define('new', 3, '')
  params.task.train.Define('also_new', _Params().task.eval, '')
  params_change.Check(saved, params, allow=False)
  params.task.train.also_new.samples_per_summary = 5
  with pytest.raises(
    ValueError, match=naming.Naming('+ task.train.also_new.samples_per_summary : 5')
  ):
    params_change.Check(saved, params, allow=False)
  params.task.train.also_new.samples_per_summary = 0
  params.task.new = 4
  with pytest.raises(ValueError, match=naming.Naming('+ task.new : 4')):
    params_change.Check(saved, params, allow=False)


def testNewEntriesOfAListAreNotHarmless(tmp_path):
  old, new = _Params(), _Params()
  for params, number in ((old, 1), (new, 2)):
    params.task.Define('layers', [old.task.eval.Copy() for _ in range(number)], '')
  with pytest.raises(ValueError, match=naming.Naming('+ task.layers[1].samples_per_summary : 0')):
    params_change.Check(_Checkpoint(old.ToText()), new, allow=False)


class _Scale:
  """A function of which Params record only the class."""

  def __init__(self, scale):
    self.scale = scale


@pytest.mark.parametrize('check', [params_change.Check, params_change.CheckEvaluated])
@pytest.mark.parametrize(
  'old, new',
  [
    (np.array([1.0]), np.array([50.0])),
    (tf.constant([1.0]), tf.constant([50.0])),
    ({1}, {50}),
    (functools.partial(max, 1), functools.partial(max, 50)),
    (lambda x: x, lambda x: x * 50),
  ],
)
def testValuesWithoutALiteralAreCompared(check, old, new, caplog):
  before, same, now = (_Params() for _ in range(3))
  for params, value in ((before, old), (same, old), (now, new)):
    params.task.Define('scale', value, '')
  info = _Checkpoint(before.ToText())
  check(info, same, allow=False)
  assert not [r for r in caplog.records if r.levelname == 'WARNING']
  with pytest.raises(ValueError, match=naming.Naming('task.scale', '--allow_params_change')):
    check(info, now, allow=False)


def testValuesThatCannotBeComparedAreNamed(caplog):
  params = _Params()
  params.task.Define('scale', [_Scale(1)], '')
  params.task.eval.Define('scale', _Scale(1), '')
  info = _Checkpoint(params.ToText())
  for check in (params_change.Check, params_change.CheckEvaluated):
    caplog.clear()
    check(info, params, allow=False)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert re.search(naming.Naming('task.scale', f'{__name__}._Scale'), warning)


def testChangesOfDamagedRecordsAndWordCountsAreHarmless():
  old, new = _Params(), _Params()
  for params, policy, counts in ((old, 'stop', False), (new, 'skip', True)):
    params.input.Define('damaged_records', policy, '')
    params.input.Define('count_words', counts, '')
  params_change.Check(_Checkpoint(old.ToText()), new, allow=False)


def testUnreadableParamsAreAnErrorUnlessAllowed(caplog):
  silent = types.SimpleNamespace(metadata={})
  params_change.Check(silent, _Params(), allow=False)
  assert params_change.CheckEvaluated(silent, _Params(), allow=False) is None
  for check in (params_change.Check, params_change.CheckEvaluated):
    caplog.clear()
    pattern = naming.Naming('ckpt-7.json', "'nonsense'", 'key:value', '--allow_params_change')
    with pytest.raises(ValueError, match=pattern):
      check(_Checkpoint('nonsense'), _Params(), allow=False)
    check(_Checkpoint('nonsense'), _Params(), allow=True)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert naming.Names(warning, 'ckpt-7.json', "'nonsense'", 'key:value')


def testParamsAreComparedWithTheNewestReadableCheckpoint(tmp_path, monkeypatch):
  """Also after a run with other Params died before it saved, and if the newest is damaged."""
  faster = 'task.train.learner.learning_rate:0.02'

  def Run(more, max_steps, allow=False):
    params = training.Params(more, max_steps=max_steps)
    training.Train(tmp_path, params, allow_params_change=allow)

  Run('', 1)
  with monkeypatch.context() as m, pytest.raises(RuntimeError, match='killed'):
    m.setattr('lingvo_gpipe.runners.train_runner.TrainRunner.TrainStep', _Die)
    Run(faster, 2, allow=True)
  assert 'learning_rate : 0.02' in (tmp_path / 'params.txt').read_text()
  assert 'learning_rate : 0.01' in inspection.ReadParams(str(tmp_path))
  with pytest.raises(
    ValueError, match=naming.Naming('ckpt-00000001.json', 'learning_rate : 0.01 -> 0.02')
  ):
    Run(faster, 2)
  Run('', 2)
  Run(faster, 3, allow=True)
  with pytest.raises(
    ValueError, match=naming.Naming('ckpt-00000003.json', 'learning_rate : 0.02 -> 0.01')
  ):
    Run('', 4)
  for folder in (tmp_path / 'train').glob('ckpt-00000003-*'):
    for path in folder.glob('*.data-*'):
      path.write_bytes(b'')
  with pytest.raises(
    ValueError, match=naming.Naming('ckpt-00000002.json', 'learning_rate : 0.01 -> 0.02')
  ):
    Run(faster, 4)


def _Die(*args):
  raise RuntimeError('killed')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
