# SPDX-License-Identifier: Apache-2.0
"""Tests of metrics averaged by weight."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gpipe.reporting import weighted_means
from tests import naming

_PAIRS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), max_size=30)


@given(_PAIRS)
def testTheValueIsTheMeanByWeight(pairs):
  metric = weighted_means.AverageMetric()
  for value, weight in pairs:
    metric.Update(value, weight)
  total = sum(w for _, w in pairs)
  assert metric.total_weight == total
  expected = math.fsum(v * w for v, w in pairs) / total if total else math.nan
  assert metric.value == pytest.approx(expected, rel=1e-12, abs=1e-6, nan_ok=True)


@given(_PAIRS, st.integers(0, 30))
def testPartsAverageToTheWhole(pairs, cut):
  """The result of a part has the form of a report, so averages of averages are exact."""
  whole = weighted_means.MetricsAccumulator()
  joined = weighted_means.MetricsAccumulator()
  for part in (pairs[:cut], pairs[cut:]):
    accumulator = weighted_means.MetricsAccumulator()
    for pair in part:
      whole.Update({'loss': pair})
      accumulator.Update({'loss': pair})
    joined.Update(accumulator.Result())
  for name, (value, weight) in whole.Result().items():
    expected = pytest.approx(value, rel=1e-12, abs=1e-6, nan_ok=True)
    assert joined.Result()[name] == (expected, weight)


def testWithoutWeightTheValueIsNanAndNanIsIgnored():
  metric = weighted_means.AverageMetric()
  assert math.isnan(metric.value) and metric.total_weight == 0.0
  metric.Update(math.nan, 0.0)
  metric.Update(1.0, 0.0)
  assert math.isnan(metric.value) and metric.total_weight == 0.0
  metric.Update(3.0, 2.0)
  assert metric.value == 3.0
  metric.Update(math.nan, 1.0)
  assert math.isnan(metric.value)


@pytest.mark.parametrize('weight', [-1, -1e-9, math.nan, math.inf])
def testInvalidWeightsAreAnError(weight):
  with pytest.raises(ValueError, match=naming.Naming('weight', float(weight))):
    weighted_means.AverageMetric().Update(1.0, weight)


def testSumsAreFloat64():
  metric = weighted_means.AverageMetric()
  metric.Update(np.float32(1.0), np.float32(2**24))
  for _ in range(1000):
    metric.Update(np.float32(3.0), np.float32(1.0))
  assert metric.total_weight == 2**24 + 1000
  assert metric.value == pytest.approx((2**24 + 3000) / (2**24 + 1000), rel=1e-15)


@pytest.mark.parametrize('dtype', [tf.float32, tf.bfloat16, tf.float64, tf.int32])
def testAcceptsTensors(dtype):
  metric = weighted_means.AverageMetric()
  metric.Update(tf.constant(3, dtype), tf.constant(2, dtype))
  metric.Update(tf.constant(6, dtype), 4)
  assert (metric.value, metric.total_weight) == (5.0, 6.0)


def testTheAccumulatorAveragesEachName():
  accumulator = weighted_means.MetricsAccumulator()
  accumulator.Update({'loss': (2.0, 1), 'accuracy': (0.5, 8)})
  accumulator.Update({'loss': (4.0, 3)})
  assert accumulator.Result() == {'loss': (3.5, 4.0), 'accuracy': (0.5, 8.0)}
  assert list(accumulator.Result()) == ['loss', 'accuracy']


@pytest.mark.parametrize(
  'entry', [1.0, (1.0,), (1.0, 2.0, 3.0), (1.0, -2.0), ([1.0, 2.0], 1.0), (1.0, [1.0])]
)
def testTheAccumulatorNamesTheInvalidMetric(entry):
  accumulator = weighted_means.MetricsAccumulator()
  with pytest.raises(ValueError, match="Metric 'bad'"):
    accumulator.Update({'loss': (1.0, 1.0), 'bad': entry})
  assert accumulator.Result() == {}


def testDoesNotImportTensorFlow():
  code = 'import sys, lingvo_gpipe.reporting.weighted_means; sys.exit("tensorflow" in sys.modules)'
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  assert subprocess.run([sys.executable, '-c', code], check=False, env=env).returncode == 0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
