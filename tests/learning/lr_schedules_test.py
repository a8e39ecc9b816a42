# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules against plain Python formulas."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.learning import lr_schedules
from tests import naming

_STEPS = (0, 1, 2, 9, 10, 11, 99, 100, 5000, 10**7, 10**7 + 1, 10**10)


def _Make(cls, **kwargs):
  return cls.Params().Set(**kwargs).Instantiate()


def _Ramp(step, x0, y0, x1, y1):
  return y0 + (y1 - y0) * min(max((step - x0) / (x1 - x0), 0.0), 1.0)


def _Cosine(step, total, first, last):
  return last + (first - last) * (1 + math.cos(math.pi * min(step / total, 1.0))) / 2


# (schedule, its formula as a Python function).
_CASES = {
  'constant': (_Make(lr_schedules.Constant, value=0.25), lambda s: 0.25),
  'piecewise': (
    _Make(lr_schedules.PiecewiseConstantSchedule, boundaries=[10, 100], values=[1.0, 0.1, 0.01]),
    lambda s: 1.0 if s < 10 else 0.1 if s < 100 else 0.01,
  ),
  'piecewise_large': (
    _Make(lr_schedules.PiecewiseConstantSchedule, boundaries=[10**7 + 1], values=[1.0, 0.5]),
    lambda s: 1.0 if s <= 10**7 else 0.5,
  ),
  'piecewise_one': (_Make(lr_schedules.PiecewiseConstantSchedule), lambda s: 1.0),
  'linear': (
    _Make(lr_schedules.LinearSchedule, start=(2, 1.0), limit=(100, 0.1)),
    lambda s: _Ramp(s, 2, 1.0, 100, 0.1),
  ),
  'exponential': (
    _Make(lr_schedules.ExponentialSchedule, start=(2, 1.0), limit=(100, 0.01)),
    lambda s: 0.01 ** _Ramp(s, 2, 0.0, 100, 1.0),
  ),
  'cosine': (
    _Make(lr_schedules.CosineSchedule, total_steps=1000, initial_value=2.0, final_value=0.5),
    lambda s: _Cosine(s, 1000, 2.0, 0.5),
  ),
  'rampup_cosine': (
    _Make(lr_schedules.LinearRampupCosineSchedule, warmup_steps=50, total_steps=10**8),
    lambda s: min(_Ramp(s, 0, 0.0, 50, 1.0), _Cosine(s, 10**8, 1.0, 0.0)),
  ),
  'no_rampup_cosine': (
    _Make(lr_schedules.LinearRampupCosineSchedule, total_steps=100),
    lambda s: _Cosine(s, 100, 1.0, 0.0),
  ),
  'warmup_linear': (
    _Make(
      lr_schedules.PiecewiseSchedule,
      boundaries=[10, 100],
      schedules=[
        lr_schedules.LinearSchedule.Params().Set(start=(0, 0.0), limit=(10, 1.0)),
        lr_schedules.LinearSchedule.Params().Set(start=(0, 1.0), limit=(90, 0.2)),
        lr_schedules.CosineSchedule.Params().Set(initial_value=0.2, total_steps=1000),
      ],
    ),
    lambda s: (
      _Ramp(s, 0, 0.0, 10, 1.0)
      if s < 10
      else _Ramp(s, 10, 1.0, 100, 0.2)
      if s < 100
      else _Cosine(s - 100, 1000, 0.2, 0.0)
    ),
  ),
  'transformer': (
    _Make(lr_schedules.TransformerSchedule, model_dim=64, warmup_steps=100),
    lambda s: 64**-0.5 * min((s + 1) * 100**-1.5, (s + 1) ** -0.5),
  ),
  'transformer_end': (
    _Make(lr_schedules.TransformerSchedule, model_dim=64, warmup_steps=10, decay_end=99),
    lambda s: 64**-0.5 * min((min(s, 99) + 1) * 10**-1.5, (min(s, 99) + 1) ** -0.5),
  ),
}


@pytest.fixture(name='case', params=sorted(_CASES))
def _Case(request):
  return _CASES[request.param]


@pytest.mark.parametrize('jit_compile', [False, True])
def testValuesFollowTheFormula(case, jit_compile):
  schedule, formula = case
  traced = tf.function(
    schedule.Value,
    input_signature=[tf.TensorSpec([], tf.int64)],
    autograph=False,
    jit_compile=jit_compile,
  )
  for step in _STEPS:
    value = traced(tf.constant(step, tf.int64))
    assert value.dtype == tf.float32
    assert value.shape == []
    np.testing.assert_allclose(value, formula(step), rtol=2e-7, atol=1e-12, err_msg=str(step))


def testValuesDependOnTheStepOnly(case):
  schedule, _ = case
  step = tf.Variable(11, dtype=tf.int32)
  values = [schedule.Value(x) for x in (11, np.int64(11), tf.constant(11), step)]
  assert len({x.numpy() for x in values}) == 1
  graph = tf.function(schedule.Value).get_concrete_function(tf.TensorSpec([], tf.int64)).graph
  assert not graph.variables
  assert not [x.type for x in graph.get_operations() if x.op_def.is_stateful]


def testNegativeStepsAreZero(case):
  schedule, _ = case
  assert schedule.Value(-1).numpy() == schedule.Value(0).numpy()


def testConsecutiveLargeStepsDiffer():
  """In float32 the steps 2^24 and 2^24 + 1 would be equal."""
  schedule = _Make(lr_schedules.LinearSchedule, start=(2**24, 0.0), limit=(2**24 + 4, 1.0))
  assert [schedule.Value(2**24 + i).numpy() for i in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def testEndsAreExact():
  linear = _Make(lr_schedules.LinearSchedule, start=(0, 0.1), limit=(7, 0.3))
  assert linear.Value(0).numpy() == np.float32(0.1)
  assert linear.Value(7).numpy() == np.float32(0.3)
  cosine = _Make(lr_schedules.CosineSchedule, total_steps=7, final_value=0.1)
  assert cosine.Value(7).numpy() == np.float32(0.1)


@pytest.mark.parametrize(
  ('cls', 'kwargs', 'names'),
  [
    ('PiecewiseConstantSchedule', {'boundaries': [5]}, ['values', '2 numbers', [1.0]]),
    (
      'PiecewiseConstantSchedule',
      {'boundaries': [5, 5], 'values': [1, 2, 3]},
      ['boundaries', 'increasing', [5, 5]],
    ),
    ('PiecewiseConstantSchedule', {'values': [-1.0]}, ['values', 'at least 0', [-1.0]]),
    ('Constant', {'value': -1.0}, ['value', 'at least 0', -1.0]),
    ('Constant', {'value': math.nan}, ['value', 'number', 'nan']),
    ('Constant', {'value': 'x'}, ['value', 'number', "'x'"]),
    ('PiecewiseSchedule', {'boundaries': [5]}, ['schedules', '2 Params', 'got 1']),
    ('PiecewiseSchedule', {'boundaries': [0]}, ['boundaries', 'above 0', [0]]),
    ('LinearSchedule', {'start': (5, 1.0), 'limit': (5, 0.0)}, ['limit', 'step after 5', (5, 0.0)]),
    ('LinearSchedule', {'start': (5,)}, ['start', 'pair', (5,)]),
    ('LinearSchedule', {'start': (0, -1.0)}, ['start', 'at least 0', (0, -1.0)]),
    ('LinearSchedule', {'limit': (5, -1.0)}, ['limit', 'at least 0', (5, -1.0)]),
    ('ExponentialSchedule', {'limit': (5, 0.0)}, ['limit', 'above 0', (5, 0.0)]),
    ('ExponentialSchedule', {'start': (0, -1.0)}, ['start', 'above 0', (0, -1.0)]),
    ('CosineSchedule', {}, ['total_steps', 'above 0', 'got 0']),
    (
      'CosineSchedule',
      {'total_steps': 5, 'initial_value': None},
      ['initial_value', 'number', 'None'],
    ),
    (
      'CosineSchedule',
      {'total_steps': 5, 'final_value': math.nan},
      ['final_value', 'number', 'nan'],
    ),
    (
      'LinearRampupCosineSchedule',
      {'total_steps': 5, 'warmup_steps': 5},
      ['warmup_steps', 'total_steps'],
    ),
    (
      'LinearRampupCosineSchedule',
      {'total_steps': 5, 'warmup_init': 2.0},
      ['warmup_init', 'initial_value', 2.0],
    ),
    (
      'LinearRampupCosineSchedule',
      {'total_steps': 5, 'warmup_init': -1.0},
      ['warmup_init', 'at least 0', -1.0],
    ),
    ('TransformerSchedule', {'warmup_steps': 0}, ['warmup_steps', 'above 0', 'got 0']),
    ('TransformerSchedule', {'model_dim': 0}, ['model_dim', 'above 0', 'got 0']),
    ('TransformerSchedule', {'decay_end': -1}, ['decay_end', 'at least 0', -1]),
  ],
)
def testInvalidParamsAreRejected(cls, kwargs, names):
  with pytest.raises(ValueError, match=naming.Naming(cls, *names)):
    _Make(getattr(lr_schedules, cls), **kwargs)


def testAStepMustBeAnInteger(case):
  schedule, _ = case
  with pytest.raises(TypeError, match=naming.Naming('Value', 'integer', 'float32')):
    schedule.Value(tf.constant(1.0))


def testParamsAreCopied():
  p = lr_schedules.CosineSchedule.Params().Set(total_steps=10)
  schedule = p.Instantiate()
  p.total_steps = 20
  assert schedule.Value(10).numpy() == 0.0
  assert lr_schedules.CosineSchedule.Params().total_steps == 0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
