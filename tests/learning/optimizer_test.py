# SPDX-License-Identifier: Apache-2.0
"""Optimizers: Params as text, slots by path on their device, and complete state."""

import inspect
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import optimizer
from tests import naming

# Every optimizer, with settings that give it more slots.
_CASES = {
  'SGD': (optimizer.SGD, {}),
  'Momentum': (optimizer.SGD, {'momentum': 0.9}),
  'Nesterov': (optimizer.SGD, {'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.01}),
  'Adam': (optimizer.Adam, {'beta_1': 0.8}),
  'AMSGrad': (optimizer.Adam, {'amsgrad': True}),
  'AdamW': (optimizer.AdamW, {'weight_decay': 0.02}),
  'Adafactor': (optimizer.Adafactor, {}),
  'RMSprop': (optimizer.RMSprop, {}),
  'RMSpropMomentum': (optimizer.RMSprop, {'momentum': 0.9, 'centered': True}),
  'Adagrad': (optimizer.Adagrad, {'initial_accumulator_value': 0.2}),
  'Adadelta': (optimizer.Adadelta, {'rho': 0.9}),
  'Adamax': (optimizer.Adamax, {}),
  'Lamb': (optimizer.Lamb, {}),
  'Lion': (optimizer.Lion, {}),
  'Nadam': (optimizer.Nadam, {'weight_decay': 0.01}),
  'Ftrl': (optimizer.Ftrl, {'l1_regularization_strength': 0.01, 'beta': 0.1}),
  'Muon': (optimizer.Muon, {'exclude_layers': ['w2']}),
  'ScheduleFreeAdamW': (optimizer.ScheduleFreeAdamW, {'warmup_steps': 2}),
}
_SLOTS = {
  'SGD': set(),
  'Momentum': {'momentum'},
  'Nesterov': {'momentum'},
  'Adam': {'momentum', 'velocity'},
  'AMSGrad': {'momentum', 'velocity', 'velocity_hat'},
  'AdamW': {'momentum', 'velocity'},
  'Adafactor': {'velocity', 'row', 'column'},
  'RMSprop': {'velocity'},
  'RMSpropMomentum': {'velocity', 'momentum', 'average_gradient'},
  'Adagrad': {'accumulator'},
  'Adadelta': {'accumulated_grad', 'accumulated_delta_var'},
  'Adamax': {'momentum', 'norm'},
  'Lamb': {'momentum', 'velocity'},
  'Lion': {'momentum'},
  'Nadam': {'momentum', 'velocity'},
  'Ftrl': {'accumulator', 'linear'},
  'Muon': {'momentum', 'velocity'},
  'ScheduleFreeAdamW': {'momentum', 'velocity'},
}
# State other than slots.
_SHARED = {'Nadam': {'u_product'}}
_ALL = pytest.mark.parametrize('case', _CASES)
_SHAPES = {'m.w': [3, 4], 'm.b': [4], 'm.k': [2, 3, 2], 'm.w2': [3, 4], 'm.s': []}


def _Device():
  return tf.config.list_logical_devices('CPU')[1].name


def _Params(case):
  cls, settings = _CASES[case]
  return cls.Params().Set(**settings)


def _Variables(device=None, name=None):
  """Returns weights of several ranks; all variables have the same name if `name` is given."""
  rng = np.random.default_rng(0)
  with tf.device(device or _Device()):
    return {
      path: tf.Variable(rng.normal(size=shape), dtype=tf.float32, name=name or path)
      for path, shape in _SHAPES.items()
    }


def _Grads(step):
  rng = np.random.default_rng(100 + step)
  return [tf.constant(rng.normal(size=shape), tf.float32) for shape in _SHAPES.values()]


def _Step(built, steps):
  for step in steps:
    built.Apply(_Grads(step), tf.constant(0.03 / (1 + step)))


def _Arrays(variables):
  return {path: v.numpy() for path, v in variables.items()}


def _AssertBitEqual(actual, expected):
  assert actual.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_array_equal(actual[path], value, err_msg=path)


def testEveryOptimizerIsTestedHere():
  defined = {
    cls
    for _, cls in inspect.getmembers(optimizer, inspect.isclass)
    if issubclass(cls, optimizer.KerasOptimizer) and cls is not optimizer.KerasOptimizer
  }
  assert defined == {cls for cls, _ in _CASES.values()}


def testEveryOptimizerOfKerasIsHere():
  keras_names = {
    name
    for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(cls, keras.optimizers.Optimizer) and cls is not keras.optimizers.Optimizer
  }
  containers = {'LossScaleOptimizer', 'MultiOptimizer', 'OptimizerMap'}
  assert {cls.__name__ for cls, _ in _CASES.values()} == keras_names - containers


@pytest.mark.parametrize(
  'name, hints',
  [
    ('LossScaleOptimizer', ['float32', 'bfloat16', 'loss scaling']),
    ('MultiOptimizer', ['train.learner', 'list of learners']),
    ('AdamX', ['Adam', 'AdamW', 'Adamax']),
  ],
)
def testOtherNamesAreRejectedWithAHint(name, hints):
  with pytest.raises(AttributeError, match=naming.Naming(name, *hints)):
    getattr(optimizer, name)


def testAContainerIsRejectedUnderAnotherName():
  class Mine(optimizer.KerasOptimizer):
    keras_class = keras.optimizers.LossScaleOptimizer

  with pytest.raises(
    ValueError, match=naming.Naming('keras.optimizers.LossScaleOptimizer', 'loss scaling')
  ):
    Mine.Params()


@pytest.mark.parametrize(
  'name, hints',
  [
    ('global_clipnorm', ['clip_gradient_norm_to_value', 'learner']),
    ('clipnorm', ['clip_gradient_single_norm_to_value', 'learner']),
    ('clipvalue', ['clip_gradient_value_to', 'learner']),
    ('gradient_accumulation_steps', ['num_accumulated_mini_batches', 'learner']),
    ('use_ema', ['train.ema_decay']),
    ('loss_scale_factor', ['loss scaling']),
    ('learning_rate', ['lr_schedule', 'learner']),
  ],
)
def testArgumentsOfTheLearnerAreRejectedWithAHint(name, hints):
  p = optimizer.Adam.Params()
  with pytest.raises(AttributeError, match=naming.Naming(f'{name} is not defined', *hints)):
    setattr(p, name, 1)
  outer = hyperparams.Params()
  outer.Define('optimizer', p.Copy(), 'Nested.')
  with pytest.raises(
    AttributeError, match=naming.Naming(f'optimizer.{name} is not defined', *hints)
  ):
    outer.FromText(f'optimizer.{name}:1')


@_ALL
def testParamsAreTheHyperparametersOfKeras(case):
  cls, _ = _CASES[case]
  p = cls.Params()
  assert p.cls is cls
  arguments = inspect.signature(cls.keras_class.__init__).parameters
  for name, value in p.IterParams():
    if name != 'cls':
      assert value == arguments[name].default
      assert p.GetDescription(name)
  assert 'learning_rate' not in p and 'global_clipnorm' not in p and 'use_ema' not in p


@_ALL
def testParamsTextRoundTrip(case):
  p = _Params(case)
  fresh = _CASES[case][0].Params().FromText(p.ToText())
  assert fresh == p
  assert fresh.ToText() == p.ToText()


def testOverridesReachKeras():
  p = optimizer.Adam.Params().FromText('beta_1:0.5;amsgrad:true;weight_decay:0.1')
  assert (p.beta_1, p.amsgrad, p.weight_decay) == (0.5, True, 0.1)
  built = p.Instantiate().Build(_Device(), _Variables())
  assert (built._keras.beta_1, built._keras.weight_decay) == (0.5, 0.1)
  assert optimizer.SGD.Params().FromText('momentum:1').momentum == 1.0
  with pytest.raises(AttributeError, match='beta_1'):
    optimizer.Adam.Params().FromText('beta1:0.5')
  with pytest.raises(ValueError):
    optimizer.Adam.Params().FromText('beta_1:high')


@pytest.mark.parametrize(
  'name, value',
  [
    ('weight_decay', 'abc'),
    ('weight_decay', -0.1),
    ('beta_1', None),
    ('beta_1', 2.0),
    ('beta_2', 1.0),
    ('epsilon', math.nan),
    ('epsilon', -1.0),
    ('amsgrad', 'no'),
  ],
)
def testParamsHaveDomains(name, value):
  with pytest.raises(ValueError, match=naming.Naming('Adam', name, repr(value))):
    optimizer.Adam.Params().Set(**{name: value}).Instantiate()
  p = optimizer.Adam.Params()
  with pytest.raises(ValueError, match=naming.Naming(name)):
    p.FromText(f'{name}:{value}')
  assert p == optimizer.Adam.Params()


def testParamsAreCopied():
  p = optimizer.Adam.Params()
  built = p.Instantiate()
  p.beta_1 = 0.5
  assert built.params.beta_1 == 0.9
  assert isinstance(p, hyperparams.InstantiableParams)


@_ALL
def testSlotsAreNamedByPathAndLieOnTheDevice(case):
  variables = _Variables()
  built = _Params(case).Instantiate().Build(_Device(), variables)
  expected = {f'{path}/{name}' for path in variables for name in _SLOTS[case]}
  # Adam does not update the matrix that is not excluded.
  assert set(built.slots) == expected - ({'m.w/velocity'} if case == 'Muon' else set())
  assert set(built.shared) == _SHARED.get(case, set())
  assert len({id(v) for v in built.slots.values()}) == len(built.slots)
  for slot in [*built.slots.values(), *built.shared.values(), built.iterations]:
    assert slot.device.endswith(_Device())
  for key, slot in built.slots.items():
    assert not slot.trainable
    path, name = key.split('/')
    if name not in ('row', 'column'):
      assert slot.shape == variables[path].shape
  assert built.iterations.dtype == tf.int64


@_ALL
def testNamesOfVariablesDoNotMatter(case):
  """Slots belong to the path of a variable, even if variables have the same name and shape."""
  results = []
  for name in (None, 'kernel'):
    variables = _Variables(name=name)
    built = _Params(case).Instantiate().Build(_Device(), variables)
    _Step(built, range(2))
    results.append(_Arrays({**variables, **built.slots}))
  _AssertBitEqual(results[1], results[0])


@_ALL
def testUpdatesEqualKeras(case):
  cls, settings = _CASES[case]
  variables = _Variables()
  built = _Params(case).Instantiate().Build(_Device(), variables)
  # Muon needs the paths of Keras variables.
  reference = {path: keras.Variable(v, name=path) for path, v in _Variables().items()}
  plain = cls.keras_class(learning_rate=0.5, **settings)
  plain.build(list(reference.values()))
  before = _Arrays(variables)
  for step in range(4):
    rate = 0.03 / (1 + step)
    plain.learning_rate.assign(rate)
    plain.apply(_Grads(step), list(reference.values()))
    built.Apply(_Grads(step), tf.constant(rate))
  _AssertBitEqual(_Arrays(variables), _Arrays(reference))
  assert int(built.iterations) == 4
  for path, value in _Arrays(variables).items():
    assert not np.array_equal(value, before[path]), path


@_ALL
def testSavedStateIsComplete(case):
  """Copying the state into a new optimizer after n steps does not change the next n steps."""
  straight = _Variables()
  whole = _Params(case).Instantiate().Build(_Device(), straight)
  _Step(whole, range(3))
  second_variables = _Variables(name='other')
  second = _Params(case).Instantiate().Build(_Device(), second_variables)
  for old, new in (
    (straight, second_variables),
    (whole.slots, second.slots),
    (whole.shared, second.shared),
    ({'n': whole.iterations}, {'n': second.iterations}),
  ):
    assert old.keys() == new.keys()
    for key, variable in old.items():
      new[key].assign(variable)
  for built in (whole, second):
    _Step(built, range(3, 6))

  _AssertBitEqual(_Arrays(second_variables), _Arrays(straight))
  _AssertBitEqual(_Arrays(second.slots), _Arrays(whole.slots))
  assert int(second.iterations) == int(whole.iterations) == 6


def testInsideAFunctionTheRateIsReadEachTime():
  variables = _Variables()
  built = optimizer.SGD.Params().Instantiate().Build(_Device(), variables)

  @tf.function(autograph=False)
  def Step(rate):
    built.Apply([tf.ones_like(v) for v in variables.values()], rate)

  before = _Arrays(variables)
  Step(tf.constant(0.5))
  Step(tf.constant(0.25))
  for path, value in before.items():
    np.testing.assert_allclose(variables[path].numpy(), value - 0.75, atol=1e-6)


@pytest.mark.parametrize('dtype', [tf.float64, tf.bfloat16])
def testSlotsHaveTheDtypeOfTheirVariable(dtype):
  with tf.device(_Device()):
    variables = {'m.w': tf.Variable(tf.ones([2, 2], dtype))}
  for case in _CASES:
    if case == 'Muon':
      with pytest.raises(ValueError, match=naming.Naming('Muon', 'float32', 'm.w', dtype.name)):
        _Params(case).Instantiate().Build(_Device(), variables)
      continue
    built = _Params(case).Instantiate().Build(_Device(), variables)
    assert {slot.dtype for slot in built.slots.values()} <= {dtype}, case
    built.Apply([tf.ones([2, 2], dtype)], tf.constant(0.1))


def _Decayed(cls, **settings):
  """Returns {path: whether a zero gradient moves the weight} if `.b` and `.s` are exempt."""
  variables = _Variables()
  p = cls.Params().Set(weight_decay=0.1, **settings)
  built = p.Instantiate().Build(_Device(), variables, lambda path: path[-2:] not in ('.b', '.s'))
  before = _Arrays(variables)
  built.Apply([tf.zeros_like(v) for v in variables.values()], tf.constant(0.5))
  for path, v in variables.items():
    if path[-2:] not in ('.b', '.s'):
      np.testing.assert_allclose(v.numpy(), before[path] * (1 - 0.5 * 0.1), rtol=1e-6)
  return {path: not np.array_equal(v, before[path]) for path, v in _Arrays(variables).items()}


@pytest.mark.parametrize(
  'cls, settings',
  [(optimizer.SGD, {}), (optimizer.AdamW, {}), (optimizer.Muon, {'adam_weight_decay': 0.1})],
)
def testWeightDecayByRule(cls, settings):
  moved = {path: path[-2:] not in ('.b', '.s') for path in _SHAPES}
  assert _Decayed(cls, **settings) == moved


def testSlotsMayStartAtTheirWeight():
  variables = _Variables()
  built = optimizer.ScheduleFreeAdamW.Params().Instantiate().Build(_Device(), variables)
  variables['m.w'].assign_add(tf.ones([3, 4]))
  np.testing.assert_array_equal(built.slots['m.w/momentum'] + 1.0, variables['m.w'])
  built.BeginAtWeights()
  for path, v in variables.items():
    np.testing.assert_array_equal(built.slots[f'{path}/momentum'], v)
    assert not built.slots[f'{path}/velocity'].numpy().any()


def testStagesCopyTheStateOfTheFirst():
  """After a restart all stages use Nadam's product of the saved stage."""
  first = optimizer.Nadam.Params().Instantiate().Build(_Device(), _Variables())
  _Step(first, range(2))
  other = optimizer.Nadam.Params().Instantiate().Build(_Device(), _Variables())
  other.Follow(first)
  assert int(other.iterations) == 2
  assert float(other.shared['u_product']) == float(first.shared['u_product']) != 1.0


def testWithoutVariablesApplyDoesNothing():
  built = optimizer.Adam.Params().Instantiate().Build(_Device(), {})
  built.Apply([], tf.constant(0.1))
  assert built.slots == {}


def testHiddenStateIsRejected():
  """Nadam also keeps a product of momenta, without which a resumed run would differ."""

  class Nadam(optimizer.KerasOptimizer):
    keras_class = keras.optimizers.Nadam

  with pytest.raises(ValueError, match=naming.Naming('keras.optimizers.Nadam', 'slots')) as e:
    Nadam.Params().Instantiate().Build(_Device(), _Variables())
  assert '\n' not in str(e.value)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
