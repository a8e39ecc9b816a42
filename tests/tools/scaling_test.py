# SPDX-License-Identifier: Apache-2.0
"""The program `tools.scaling`: the tables of a simple model agree with theory."""

import itertools
import sys

import pytest

from lingvo_gpipe.planner import model_costs
from tools import scaling

_LAYER = model_costs.LayerWeights(num_bytes=10**8, gradient_bytes=10**8, trained_bytes=10**8)
_SAMPLE = model_costs.LayerSample(flops=1e12, inputs=1e6, outputs=1e6, inner=1e7)


def _Costs(num_layers):
  """Returns costs of equal layers that compute much longer than their transfers take."""
  return model_costs.ModelCosts([_LAYER] * num_layers, {1: [_SAMPLE] * num_layers})


def _Rows(table, num_rows):
  """Returns the first rows below the two header lines, as numbers by column name."""
  _, head, *rows = itertools.islice(table, 2 + num_rows)
  return [dict(zip(head.split(), _Numbers(row), strict=True)) for row in rows]


def _Numbers(row):
  return [float(cell.strip('%')) if cell[-1] in '%0123456789' else cell for cell in row.split()]


def testBubblesGrowWithTheNumberOfEqualStages():
  one_stage, eight_stages = _Rows(scaling.Depth(_Costs(3)), 2)
  assert (one_stage['K'], one_stage['M'], eight_stages['K'], eight_stages['M']) == (1, 32, 8, 32)
  assert (one_stage['L'], eight_stages['L']) == (13, 8 * 13 - 1)
  # (K - 1) / (M + K - 1) of the step without its update; one device has one layer less.
  assert one_stage['bubble'] == 0 and eight_stages['bubble'] == pytest.approx(100 * 7 / 39, rel=0.1)


def testLinksTakeMoreOfAStepWithMoreReplicas():
  rows = _Rows(scaling.Replicas('toy', _Costs(16), 1, 8192), 6)
  assert [row['hosts'] for row in rows] == [row['R'] for row in rows] == [1, 4, 16, 64, 256, 1024]
  assert all(row['batch'] == 32 * row['R'] and row['M'] == 32 for row in rows)
  links = [row['links'] for row in rows]
  assert links == sorted(links) and links[0] < links[-1]


@pytest.mark.parametrize('name', ['h100', 'tpu_v3'])
def testOffloadCostsLittleIfLayersAreLarge(name):
  _, _, *rows = scaling.Offload(name)
  cells = []
  for row in rows:
    texts = [cell.replace('%', '').split(',') for cell in row.split('|')[2:-1]]
    cells.append([(float(seconds), float(gib)) for seconds, gib in texts])
  for plain, half, offloaded, two_ahead, recomputed in cells:
    assert plain[0] == 0 and half[0] <= offloaded[0] and two_ahead[0] <= offloaded[0]
    assert plain[1] > half[1] > offloaded[1] and offloaded[1] < two_ahead[1]
    assert recomputed[0] > 30
  # The last rows are of the largest layers.
  assert all(offloaded[0] <= 5 for _, _, offloaded, _, _ in cells[-3:])


def testADeeperModelRepeatsOneLayer():
  costs = _Costs(4)
  deep = scaling.Deeper(costs, 2, 5)
  assert deep.num_layers == 9 and deep.weights == (_LAYER,) * 9
  assert [len(row) for row in deep.samples.values()] == [9]
  assert scaling.Devices('h100', 24).num_devices == 24


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
