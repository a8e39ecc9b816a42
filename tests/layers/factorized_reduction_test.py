# SPDX-License-Identifier: Apache-2.0
"""Both paths of the factorised reduction, pixel by pixel."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import factorized_reduction
from tests import naming
from tests.toys import layers


@pytest.mark.parametrize('height, width', [(6, 4), (5, 7)])
def testEachPixelCountsOnce(height, width):
  p = factorized_reduction.FactorizedReductionLayer.Params().Set(
    name='reduction', dtype=tf.float64, input_dim=3, output_dim=4
  )
  layer = layers.WithVariables(p)
  x = np.random.default_rng(0).standard_normal([2, height, width, 3])
  y = layer(tf.constant(x)).numpy() * np.sqrt(1 + 1e-3)  # The moving averages are 0 and 1.
  assert y.shape == (2, -(-height // 2), -(-width // 2), 4)
  relu = np.maximum(x, 0)
  w = [layer.vars.conv[i].w.numpy()[0, 0] for i in range(2)]
  for i in range(y.shape[1]):
    for j in range(y.shape[2]):
      np.testing.assert_allclose(y[:, i, j, :2], relu[:, 2 * i, 2 * j] @ w[0], atol=1e-12)
      inside = 2 * i + 1 < height and 2 * j + 1 < width
      odd = relu[:, 2 * i + 1, 2 * j + 1] if inside else np.zeros([2, 3])
      np.testing.assert_allclose(y[:, i, j, 2:], odd @ w[1], atol=1e-12)


def testOddOutputDimRaises():
  p = factorized_reduction.FactorizedReductionLayer.Params()
  with pytest.raises(
    ValueError, match=naming.Naming("'reduction'", 'output_dim', 'multiple of 2', 3)
  ):
    p.Set(name='reduction', input_dim=3, output_dim=3).Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
