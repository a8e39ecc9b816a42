# SPDX-License-Identifier: Apache-2.0
"""The translation experiments have the sizes, stages and settings of the paper."""

import inspect
import math
import sys

import pytest

from lingvo_gpipe.experiment import registry
from tasks.mt import cldr_names

# L, H, A, stages, and the entries of the layers' matrices.
_MODELS = {
  'T6x8192x16': (6, 8192, 16, 1, 276_824_064),
  'T24x8192x16': (24, 8192, 16, 4, 1_107_296_256),
  'T12x16384x32': (12, 16384, 32, 2, 1_107_296_256),
  'T32x16384x32': (32, 16384, 32, 8, 2_952_790_016),
  'T64x16384x32': (64, 16384, 32, 16, 5_905_580_032),
}


def _Counts(p):
  """Returns (entries of matrices, all parameters) of a task, extrapolated from few layers."""
  counts = []
  for num_layers in (1, 2):
    shallow = p.Copy().Set(num_layers=num_layers)
    shallow.stack.num_stages = 1
    specs = shallow.Instantiate().WeightSpecs().values()
    matrices = sum(w.num_elements for w, _ in specs if len(w.shape) > 1)
    counts.append((matrices, sum(w.num_elements for w, _ in specs)))
  return [a + (p.num_layers - 1) * (b - a) for a, b in zip(*counts, strict=True)]


@pytest.mark.parametrize('name', _MODELS)
def testSizesStagesAndParameters(name):
  *sizes, stack = _MODELS[name]
  key = f'mt.multilingual.{name}'
  p = registry.GetParams(key, 'Train').task
  assert [p.num_layers, p.hidden_dim, p.num_heads, p.stack.num_stages] == sizes
  assert (p.model_dim, p.dim_per_head, p.vocab_size, p.softmax_tpl.logits_abs_max) == (
    1024,
    64,
    64_000,
    30.0,
  )
  matrices, total = _Counts(p)
  tables = 2 * 64_000 * 1024
  assert matrices == stack + tables
  doc = inspect.getdoc(registry.GetClass(key))
  assert f'{stack:,}' in doc and f'{matrices:,}' in doc
  # Biases and norms, as docs/translation.md has them; A heads of 64.
  w, h, d = 64 * p.num_heads, p.hidden_dim, 1024
  vectors = p.num_layers * (9 * w + 2 * h + 5 * d + 10 * d) + 4 * d + 64_000
  assert total == matrices + vectors
  if name == 'T6x8192x16':
    assert f'{vectors:,}' in doc


def testDeepModelsStartSmaller():
  """Encoder and decoder layers are scaled by depth^-1/2, by Lingvo's rule."""
  p = registry.GetParams('mt.multilingual.T24x8192x16', 'Train').task
  for tpl in (p.encoder_tpl, p.decoder_tpl):
    init = tpl.tr_fflayer_tpl.fflayer_tpl.params_init
    assert init.scale == pytest.approx(1 / math.sqrt(24))


def testBaselineHasThePapersSize():
  _, total = _Counts(registry.GetParams('mt.wmt14.TransformerBigDeEn', 'Train').task)
  assert round(total / 1e6) == 343


def testDataSets():
  inputs = {
    name: registry.GetParams('mt.multilingual.T6x8192x16', name).input
    for name in ('Train', 'Dev', 'Test')
  }
  assert [p.split for p in inputs.values()] == ['train', 'validation', 'test']
  assert inputs['Train'].sampling_temperature == 5.0 and len(inputs['Train'].datasets) == 14
  # The experiment does not use splits that TFDS lacks.
  assert set(inputs['Train'].datasets) - set(inputs['Test'].datasets) == {
    'wmt19_translate/gu-en',
    'wmt19_translate/kk-en',
    'wmt19_translate/lt-en',
  }


def testStudyComparesModelsOfEqualSize():
  def Task(name):
    return registry.GetParams(f'mt.cldr.{name}', 'Train').task

  def OfLayers(p):
    embeddings = 2 * p.vocab_size * p.model_dim
    return _Counts(p)[0] - embeddings

  assert _Counts(Task('Multilingual')) == _Counts(Task('Bilingual'))
  assert OfLayers(Task('MultilingualDeep')) == OfLayers(Task('MultilingualWide'))
  assert Task('MultilingualDeep').num_layers > Task('MultilingualWide').num_layers
  assert len(cldr_names.STUDIED) == 12
  for name, languages in (('Multilingual', list(cldr_names.STUDIED)), ('Bilingual', ['de'])):
    train, dev, test = (
      registry.GetParams(f'mt.cldr.{name}', split).input for split in ('Train', 'Dev', 'Test')
    )
    assert [p.split for p in (train, dev, test)] == ['train', 'dev', 'test']
    assert train.max_names == dict(cldr_names.STUDIED) and train.sampling_temperature == 5.0
    assert dev.languages == test.languages == languages and not (dev.max_names or test.max_names)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
