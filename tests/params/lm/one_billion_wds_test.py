# SPDX-License-Identifier: Apache-2.0
"""Transformer-L has the layers, stages and parameters of the paper's tables, to the unit."""

import inspect
import re
import sys

import pytest

from lingvo_gpipe.experiment import registry
from tests import processes

# Layers and stages; the counts are 50,358,272 L + 131,104,000.
_MODELS = {
  'Transformer3': (3, 1),
  'Transformer13': (13, 1),
  'Transformer24': (24, 8),
  'Transformer48': (48, 8),
  'Transformer103': (103, 8),
  'Transformer415': (415, 32),
  'Transformer1663': (1663, 128),
}


@pytest.mark.parametrize('name', _MODELS)
def testLayersStagesAndParameters(name):
  num_layers, num_stages = _MODELS[name]
  key = f'lm.one_billion_wds.{name}'
  params = registry.GetParams(key, 'Train')
  p, data = params.task, params.input
  assert (p.num_heads, data.seq_len, data.batch_size, data.vocab_size) == (32, 1024, 32, 32_000)
  assert data.packed and data.count_words
  assert (p.num_layers, p.stack.num_stages) == (num_layers, num_stages)
  expected = 50_358_272 * num_layers + 131_104_000
  count = re.search(r'([\d,]+) parameters', inspect.getdoc(registry.GetClass(key)))[1]
  assert count == f'{expected:,}'
  # All layers are alike, so two of them determine the count.
  one_layer, two_layers = (
    p.Copy().Set(num_layers=n, **{'stack.num_stages': 1}).Instantiate() for n in (1, 2)
  )
  per_layer = two_layers.NumParams() - one_layer.NumParams()
  assert one_layer.NumParams() + (num_layers - 1) * per_layer == expected


def testInspectModelPrintsTheTotalOfALargeModel(forks):
  """Allocates nothing; tests/params/experiments_test.py tests the largest model."""
  model = 'lm.one_billion_wds.Transformer103'
  done = processes.Succeeded(forks.Run('trainer', '--mode=inspect_model', f'--model={model}'))
  assert done.stdout.splitlines()[-1] == f'{50_358_272 * 103 + 131_104_000:,} parameters'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
