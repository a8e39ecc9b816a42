# SPDX-License-Identifier: Apache-2.0
"""Tests of initial values: distributions, fans, and dependence on seed and path alone."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import weight_params
from tests import naming

WeightInit = weight_params.WeightInit
WeightParams = weight_params.WeightParams

SHAPE = (5, 40, 60)  # Receptive field 5, fan in 200, fan out 300.


def _Draw(init, shape=SHAPE, seed=0, path='a.w', dtype=tf.float32):
  weight = WeightParams(shape, init, dtype)
  return weight_params.InitialValue(weight, seed, path).numpy()


# (method, half-width of its uniform distribution).
UNIFORM = [
  (WeightInit.Uniform(0.3), 0.3),
  (WeightInit.Xavier(2.0), 2 * math.sqrt(6 / 500)),
  (WeightInit.GeoMeanXavier(2.0), 2 * math.sqrt(3 / math.sqrt(200 * 300))),
  (WeightInit.XavierWithFixupParams(2.0, 16, 2), 2 * 16 ** (-1 / 4) * math.sqrt(6 / 500)),
  (WeightInit.UniformSqrtDim(2.0), 2 / math.sqrt(5)),
  (WeightInit.UniformUnitScaling(2.0), 2 * math.sqrt(3 / 5)),
  (WeightInit.UniformUnitScalingFanAvg(2.0), 2 * math.sqrt(6 / 500)),
  (WeightInit.KaimingUniformFanInRelu(2.0), 2 * math.sqrt(6 / 200)),
  (WeightInit.KaimingUniformFanInLeakyRelu(), math.sqrt(6 / (6 * 200))),
]

# (method, standard deviation of its normal distribution).
NORMAL = [
  (WeightInit.Gaussian(0.3), 0.3),
  (WeightInit.GaussianSqrtDim(2.0), 2 / math.sqrt(5)),
  (WeightInit.GaussianSqrtFanIn(2.0), 2 / math.sqrt(200)),
  (WeightInit.GaussianSqrtFanOut(2.0), 2 / math.sqrt(300)),
  (WeightInit.GaussianSqrtFanAvg(2.0), 2 * math.sqrt(2 / 500)),
]

TRUNCATED = [
  (WeightInit.TruncatedGaussian(0.3), 0.3),
  (WeightInit.TruncatedGaussianSqrtDim(2.0), 2 / math.sqrt(5)),
  (WeightInit.TruncatedGaussianSqrtFanIn(2.0), 2 / math.sqrt(200)),
  (WeightInit.TruncatedGaussianSqrtFanOut(2.0), 2 / math.sqrt(300)),
]


def _Name(value):
  return value.method if isinstance(value, WeightInit) else ''


@pytest.mark.parametrize(('init', 'limit'), UNIFORM, ids=_Name)
def testUniform(init, limit):
  x = _Draw(init) / limit
  assert -1 <= x.min() < -0.99 and 0.99 < x.max() <= 1
  assert abs(x.mean()) < 0.03 and abs(x.std() - math.sqrt(1 / 3)) < 0.02


@pytest.mark.parametrize(('init', 'sigma'), NORMAL, ids=_Name)
def testNormal(init, sigma):
  x = _Draw(init) / sigma
  assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.03 and 3 < np.abs(x).max() < 6


@pytest.mark.parametrize(('init', 'sigma'), TRUNCATED, ids=_Name)
def testTruncated(init, sigma):
  x = _Draw(init) / sigma
  assert 1.9 < np.abs(x).max() <= 2
  # The standard deviation of a normal distribution truncated at 2.
  assert abs(x.std() - 0.8796) < 0.03


def testUniformPositiveAndConstant():
  x = _Draw(WeightInit.UniformPositive(0.3))
  assert 0 <= x.min() < 0.01 and 0.29 < x.max() <= 0.3
  np.testing.assert_array_equal(_Draw(WeightInit.Constant(-2.5)), np.full(SHAPE, np.float32(-2.5)))
  assert (_Draw(WeightInit.Constant()) == 1).all()
  assert _Draw(WeightInit.Constant(3), (2,), dtype=tf.int32).tolist() == [3, 3]


def testEveryMethodIsTested():
  seen = {init.method for init, _ in [*UNIFORM, *NORMAL, *TRUNCATED]}
  factories = [
    getattr(WeightInit, name)()
    for name in dir(WeightInit)
    if name[0].isupper() and not name.startswith('Custom') and callable(getattr(WeightInit, name))
  ]
  tested_elsewhere = {'uniform_positive', 'constant', 'category', 'delta_orthogonal'}
  assert {init.method for init in factories} == seen | tested_elsewhere


def testValueDependsOnSeedAndPathOnly():
  init = WeightInit.Xavier()
  first = _Draw(init)
  tf.random.set_seed(123)
  np.random.seed(5)
  _Draw(init, path='b.w')
  np.testing.assert_array_equal(_Draw(init), first)
  with tf.device('CPU:1'):
    np.testing.assert_array_equal(_Draw(init), first)
  for other in ({'seed': 1}, {'path': 'b.w'}, {'path': 'a.w2'}):
    assert abs(np.corrcoef(first.ravel(), _Draw(init, **other).ravel())[0, 1]) < 0.05


def testHashesNeverChange():
  # Every existing checkpoint depends on these numbers; they must not change.
  assert weight_params.Hash64('lm.w') == 8028239399228135097
  assert weight_params.Hash64(0, 'lm') == 5094060181749437108
  assert weight_params.Hash64('a', 'b') != weight_params.Hash64('ab')
  assert weight_params.Hash64(1, 'a') != weight_params.Hash64('a', 1)


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.bfloat16, tf.float16], ids=str)
def testDtypes(dtype):
  x = _Draw(WeightInit.Xavier(), dtype=dtype)
  assert tf.as_dtype(x.dtype) == dtype
  if dtype != tf.float64:
    np.testing.assert_array_equal(x, tf.cast(_Draw(WeightInit.Xavier()), dtype).numpy())


@pytest.mark.parametrize(
  ('shape', 'fans'),
  [((), (1, 1)), ((7,), (7, 7)), ((3, 4), (3, 4)), ((2, 3, 4), (6, 8)), ((2, 2, 3, 4), (12, 16))],
)
def testFans(shape, fans):
  assert weight_params.FanInFanOut(shape) == fans


def testScalarsAndVectorsHaveValues():
  for init, _ in [*UNIFORM, *NORMAL, *TRUNCATED]:
    assert np.isfinite(_Draw(init, ()))
    assert np.isfinite(_Draw(init, (3,))).all()


def testWeightParamsAllocateNothing():
  weight = WeightParams([10**6, 10**6], WeightInit.Xavier())
  assert weight.num_elements == 10**12
  assert weight.shape == (10**6, 10**6)
  assert weight == WeightParams((10**6, 10**6), WeightInit.Xavier())
  assert WeightParams([]).num_elements == 1


@pytest.mark.parametrize(
  ('make', 'names'),
  [
    (lambda: WeightInit('normal'), ["'normal'", 'gaussian', 'xavier']),
    (lambda: WeightInit.Gaussian(-1.0), ['scale', 'gaussian', -1.0]),
    (lambda: WeightInit.Xavier(math.nan), ['scale', 'xavier', 'nan']),
    (lambda: WeightInit.Category(2.5), ['scale', 'category', 2.5]),
    (lambda: _Draw(WeightInit.Constant(1e300)), ['a.w', '1e+300', 'float32']),
    (lambda: _Draw(WeightInit.Constant('x')), ['a.w', "'x'", 'float32']),
    (lambda: WeightInit.Uniform('x'), ['scale', 'uniform', 'x']),
    (lambda: WeightInit.XavierWithFixupParams(depth=0), ['depth', 'positive', 'got 0']),
    (lambda: WeightParams([3, 0]), ['positive', [3, 0]]),
    (lambda: _Draw(None), ['a.w', 'init']),
    (lambda: _Draw(WeightInit.Xavier(), dtype=tf.int32), ['a.w', 'int32', 'WeightInit.Constant']),
  ],
)
def testErrorsNameTheInvalidValue(make, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    make()


def testWeightInitAndWeightParamsAreImmutable():
  with pytest.raises(AttributeError):
    WeightInit.Xavier().scale = 2
  with pytest.raises(AttributeError):
    WeightParams([2]).shape = (3,)


def testCategoriesAreAllIntegersOfTheirRange():
  weight = weight_params.WeightParams([500], weight_params.WeightInit.Category(3), tf.int32)
  value = weight_params.InitialValue(weight, 1, 'lm.w').numpy()
  assert value.dtype == np.int32
  assert set(value) == {0, 1, 2}


@pytest.mark.parametrize('shape', [[3, 3, 4, 7], [3, 3, 7, 4], [5, 6, 6]])
def testDeltaOrthogonalIsOrthonormalInTheCentreAndZeroElsewhere(shape):
  init = weight_params.WeightInit.ScaledDeltaOrthogonal(2.0)
  value = weight_params.InitialValue(weight_params.WeightParams(shape, init, tf.float64), 1, 'lm.w')
  value = value.numpy()
  centre = value[tuple(size // 2 for size in shape[:-2])] / 2.0
  gram = centre @ centre.T if shape[-2] <= shape[-1] else centre.T @ centre
  np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)
  assert np.count_nonzero(value) <= shape[-2] * shape[-1]


def testCustomInitsTakeAFunctionOrValuesAndCheckTheirShape():
  def Ramp(shape, dtype, seed):
    assert seed.shape == [2]
    return tf.cast(tf.reshape(tf.range(shape[0] * shape[1]), shape), dtype)

  by_function = weight_params.WeightInit.CustomVarInit(Ramp)
  by_values = weight_params.WeightInit.CustomConstantVarInit([[0, 1, 2], [3, 4, 5]])
  for init in (by_function, by_values):
    weight = weight_params.WeightParams([2, 3], init, tf.float32)
    value = weight_params.InitialValue(weight, 1, 'lm.w').numpy()
    np.testing.assert_array_equal(value, [[0, 1, 2], [3, 4, 5]])
  with pytest.raises(ValueError, match=naming.Naming('lm.w', 'value of (3, 2)', 'got (2, 3)')):
    weight_params.InitialValue(weight_params.WeightParams([3, 2], by_values, tf.float32), 1, 'lm.w')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
