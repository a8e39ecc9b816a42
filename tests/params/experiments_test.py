# SPDX-License-Identifier: Apache-2.0
"""Every registered experiment builds, keeps its Params as text, and takes a training step.

A large experiment must have a `Smoke()`: overrides with which it runs in seconds. The checks are
tested on a small project with faulty experiments.
"""

import collections
import functools
import itertools
import math
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.runners import multi_task_runner, task_batches
from tests import naming
from tests.toys import projects

# An experiment above these limits is large.
_MAX_PARAMS = 10_000_000
_MAX_STAGES = 4

_KEYS = registry.ListKeys(('params',))


# Numbers of layers and sizes of layers, the cut, and what acts only in training or is data.
_ONLY_IN_SIZE = re.compile(
  r'^(task\.(num_layers|num_cells|reduction_size|hidden_dim|num_heads'
  r'|stack\.(num_stages|num_micro_batches|remat_policy)'
  r'|(train|eval)\.[\w.]+|.*params_init)|input\.[\w.]+) : .*\n',
  re.MULTILINE,
)


@functools.cache
def _DeepestOfEachKind(packages):
  """Returns the deepest ones of the experiments that differ only in size.

  Tests of tests/params instantiate the layers of each size of the large models.
  """
  deepest = {}
  for key in registry.ListKeys(packages):
    if 'Train' in registry.GetClass(key, packages).DatasetNames():
      text = registry.GetParams(key, 'Train', packages).Set(model='').ToText()
      depths = re.findall(r'^task\.num_(?:layers|cells) : (\d+)$', text, re.MULTILINE)
      kind = _ONLY_IN_SIZE.sub('', text)
      deepest[kind] = max(deepest.get(kind, ([], '')), ([*map(int, depths)], key))
  return {key for _, key in deepest.values()}


def _Smoke(key, packages):
  return registry.GetClass(key, packages)().Smoke()


def _SmokeParams(key, dataset, packages=('params',)):
  """Returns the Params of the model for a data set, with the overrides of Smoke()."""
  p = registry.GetParams(key, dataset, packages)
  smoke = _Smoke(key, packages)
  if isinstance(smoke, str):
    p.FromText(smoke)
  else:
    p.Set(**(smoke or {}))
  return p


def _Instantiate(p):
  """Returns (model, parameters, stages); fails if the model creates a variable."""

  def Refuse(next_creator, **kwargs):
    raise AssertionError(f'a variable was created: {kwargs.get("name")}')

  with tf.variable_creator_scope(Refuse):
    model = p.Instantiate()
    num_params, num_stages = model.NumParams(), multi_task_runner.NumDevices(model)
  assert num_params > 0
  return model, num_params, num_stages


def _CheckParams(key, packages=('params',)):
  """Checks that Params of each data set can be built, overridden by Smoke(), and read as text."""
  names = registry.GetClass(key, packages).DatasetNames()
  assert 'Train' in names, f'{key} has no Train()'
  for name in names:
    p = registry.GetParams(key, name, packages)
    assert p.model.startswith(f'{key}@')
    assert p == registry.GetParams(key, name, packages), f'{key}.{name} differs from call to call'
    smoke = _SmokeParams(key, name, packages)
    for changed in (p, smoke) if name == 'Train' else (p,):  # The task is the same.
      fresh = registry.GetParams(key, name, packages).FromText(changed.ToText())
      assert fresh == changed, f'{key}.{name}: {fresh.TextDiff(changed)}'
    assert p == registry.GetParams(key, name, packages), f'{key}.Smoke() changed the experiment'
  for name in model_lib.FindTrainParams(registry.GetParams(key, 'Train', packages)).eval_datasets:
    assert name in names, f'{key}: task.train.eval_datasets names {name}, of {names}'


def _CheckSize(key, packages=('params',)):
  """Checks that it instantiates without allocating, and that Smoke() makes a large one small."""
  if _Smoke(key, packages) is None:
    _, num_params, num_stages = _Instantiate(registry.GetParams(key, 'Train', packages))
    assert num_params <= _MAX_PARAMS and num_stages <= _MAX_STAGES, (
      f'{key} is large ({num_params:,} parameters in {num_stages} stages) and has no Smoke(): '
      'return overrides with which it runs in seconds'
    )
    return
  if key in _DeepestOfEachKind(packages):
    _Instantiate(registry.GetParams(key, 'Train', packages))
  _, num_params, num_stages = _Instantiate(_SmokeParams(key, 'Train', packages))
  assert num_params <= _MAX_PARAMS and num_stages <= _MAX_STAGES, (
    f'{key}.Smoke() leaves {num_params:,} parameters in {num_stages} stages; '
    f'at most {_MAX_PARAMS:,} in {_MAX_STAGES} run in seconds'
  )


def _CheckTraining(key, packages=('params',)):
  """Takes two training steps: the learning rate of the first may be 0."""
  model, _, _ = _Instantiate(_SmokeParams(key, 'Train', packages))
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  run = multi_task_runner.Make(model, devices)
  weights = {path: v for task in model.tasks.values() for path, v in task.VariablesByPath().items()}
  before = {path: v.numpy() for path, v in weights.items()}
  for batch in itertools.islice(task_batches.Batches(model, 0, lambda task: 0), 2):
    values = run.TrainStep(batch)
    assert math.isfinite(values['loss']), f'{key}: the loss is {values["loss"]}'
    assert values['is_finite'], f'{key}: a gradient is not finite'
  assert int(run.global_step) == 2
  changed = [path for path, value in before.items() if not np.array_equal(weights[path], value)]
  assert changed, f'{key}: no weight changed in two steps'


def testThereAreExperiments():
  assert 'lm.stdlib.ByteTransformerGPipe2' in _KEYS


@pytest.mark.parametrize('key', _KEYS)
def testParams(key):
  _CheckParams(key)


@pytest.mark.parametrize('key', _KEYS)
def testSize(key):
  _CheckSize(key)


# Differences that do not change the code of a step. Tests of the engine, of stateful layers and of
# the tasks prove that no cut, M or recomputation changes a result; `testDataFitTheTask` looks at
# the sizes that data and task share.
_ONLY_IN_NUMBERS = re.compile(
  r'^task\.(stack\.(num_stages|num_micro_batches|remat_policy)'
  r'|.*(max_steps|_steps|params_init|learning_rate)) : .*\n'
  r'|^(task|input)\.(image_size|num_channels|num_classes) : .*\n'
  r'|(?<=dropout_prob : )0\.\d*[1-9]\d*|(?<=drop_path_keep_prob : )0\.\d+',
  re.MULTILINE,
)
# What noise takes the place of: no code reads these settings then. Noise is of one language.
_ONLY_IN_DATA = re.compile(
  r'^input\.(datasets|languages|vocab_filepath|sampling_temperature) : .*\n', re.MULTILINE
)
_FOR_ANY_TASK = ('input.', 'task.train.learner.optimizer.')
_IS_NOISE = re.compile(r'^input\.num_fake_examples : [1-9]', re.MULTILINE)


@functools.cache
def _SmokeTasks(key):
  """Returns ({name: Params of a task}, text of all Params) for training, with Smoke()."""
  p = _SmokeParams(key, 'Train').Set(model='')
  return model_lib.FindTaskParams(p), p.ToText()


@functools.cache
def _TaskClasses(key):
  return tuple(t.cls for t in _SmokeTasks(key)[0].values())


@functools.cache
def _Settings():
  """Returns {key: each value of each parameter that changes a step, with the tasks}.

  Parameters of data and of optimizers are without the tasks, which do not see them.
  """
  settings = {}
  for key in _KEYS:
    text = _ONLY_IN_NUMBERS.sub('', _SmokeTasks(key)[1])
    if _IS_NOISE.search(text):
      text = _ONLY_IN_DATA.sub('', text)
    settings[key] = {
      (None if line.startswith(_FOR_ANY_TASK) else _TaskClasses(key), line)
      for line in text.splitlines()
    }
  return settings


@functools.cache
def _KeysThatTakeSteps():
  """Returns experiments, preferably with many stages, whose steps have all `_Settings`."""
  settings = dict(_Settings())
  count = collections.Counter(itertools.chain(*settings.values()))

  def NumStages(key):
    return max(task.stack.num_stages for task in _SmokeTasks(key)[0].values())

  for key in sorted(_KEYS, key=lambda key: (NumStages(key), key)):
    if all(count[setting] > 1 for setting in settings[key]):
      count.subtract(settings.pop(key))
  return set(settings)


@pytest.mark.parametrize('key', _KEYS)
def testDocstringsHaveTheCommandAndTheMeasuredResult(key):
  """Looks at the docstrings of the class, of its bases, and of the file together."""
  cls = registry.GetClass(key)
  assert cls.__dict__.get('__doc__'), f'{key} has no docstring'
  classes = [base for base in cls.__mro__ if base.__module__.startswith('params.')]
  text = ' '.join(x.__doc__ for x in (*classes, sys.modules[cls.__module__]) if x.__doc__)
  text = ' '.join(text.split())
  commands = re.findall(r'trainer (?:--mode=\w+ )?--model=([\w.]+)', text)
  assert not set(commands) - set(_KEYS), (
    f'{key}: its docstrings name another experiment: {commands}'
  )
  family = key.rpartition('.')[0]
  assert any(c.startswith(family) for c in commands), f'{key}: no docstring says `trainer --model=`'
  assert re.search('[Mm]easured|been trained', text), (
    f'{key}: no docstring says what was measured: "Not measured" where nothing was'
  )


@pytest.mark.parametrize('key', _KEYS)
def testTakesTrainingSteps(key):
  if key in _KeysThatTakeSteps():
    _CheckTraining(key)


@pytest.mark.parametrize('key', _KEYS)
def testDataFitTheTask(key):
  for p in (registry.GetParams(key, 'Train'), _SmokeParams(key, 'Train')):
    for name, task in model_lib.FindTaskParams(p).items():
      data = p.input if name == 'task' else p.input.Get(name.removeprefix('task_params.'))
      for size in {'image_size', 'num_channels', 'num_classes', 'vocab_size'} & {*data.GetKeys()}:
        assert task.Get(size) == data.Get(size), f'{key}: {size}'


def testEverySettingOfEveryTaskTakesSteps():
  keys = _KeysThatTakeSteps()
  assert set(map(_TaskClasses, keys)) == set(map(_TaskClasses, _KEYS))
  assert set().union(*map(_Settings().get, keys)) == set().union(*_Settings().values())


# ---- the checks themselves -----------------------------------------------------------------------


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  """Yields the name of a package of experiments."""
  root = tmp_path_factory.mktemp('project')
  folder = root / 'experiments_test_params'
  folder.mkdir()
  (folder / '__init__.py').write_text('')
  (folder / 'net.py').write_text(projects.Experiments('faulty'))
  sys.path.insert(0, str(root))
  yield ('experiments_test_params',)
  sys.path.remove(str(root))


@pytest.mark.parametrize('name', ['Good', 'WideWithSmoke', 'DeepWithSmoke'])
def testCorrectExperimentsPass(project, name):
  key = f'net.{name}'
  assert key in registry.ListKeys(project)
  _CheckParams(key, project)
  _CheckSize(key, project)
  _CheckTraining(key, project)


@pytest.mark.parametrize(
  'check, name, error, names',
  [
    (_CheckSize, 'Wide', AssertionError, ('32,000,000 parameters', '1 stages', 'Smoke()')),
    (_CheckSize, 'Deep', AssertionError, ('128 parameters', '8 stages', 'Smoke()')),
    (_CheckSize, 'SmokeDoesNotHelp', AssertionError, ('Smoke()', '16,000,000 parameters')),
    (_CheckSize, 'Eager', AssertionError, ('variable',)),
    (_CheckParams, 'SmokeNamesNothing', AttributeError, ('task.width',)),
    (_CheckParams, 'NoData', AssertionError, ('net.NoData', 'Train()')),
    (
      _CheckParams,
      'NoSuchEvaluation',
      AssertionError,
      ('net.NoSuchEvaluation', 'task.train.eval_datasets', 'Test'),
    ),
    (_CheckParams, 'Unsteady', AssertionError, ('net.Unsteady.Train', 'differs')),
    (_CheckTraining, 'Diverges', AssertionError, ('net.Diverges', 'loss', 'nan')),
    (_CheckTraining, 'LearnsNothing', AssertionError, ('net.LearnsNothing', 'no weight')),
  ],
  ids=lambda value: value if isinstance(value, str) and value.isidentifier() else '',
)
def testFaultyExperimentsFail(project, check, name, error, names):
  with pytest.raises(error, match=naming.Naming(*names)):
    check(f'net.{name}', project)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
