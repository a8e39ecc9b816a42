# SPDX-License-Identifier: Apache-2.0
"""Generation through stages: equal tokens, caches on the devices of their layers."""

import sys

import keras
import numpy as np
import pytest

from lingvo_gpipe import PipelinedModel
from tests.toys import keras_fits

keras_hub = pytest.importorskip('keras_hub')
MODELS = keras_hub.models
SAMPLERS = keras_hub.samplers

WORDS = [*'abcdefghij', 'Ġ', 'ab', '<|endoftext|>']


def _Preprocessor():
  """Returns a preprocessor whose tokens are letters."""
  tokenizer = MODELS.GPT2Tokenizer(vocabulary={w: i for i, w in enumerate(WORDS)}, merges=['a b'])
  return MODELS.GPT2CausalLMPreprocessor(tokenizer, sequence_length=10)


def _Model(preprocessor=None, num_layers=2):
  """Returns a model of some blocks whose tokens do not repeat."""
  backbone = MODELS.GPT2Backbone(
    vocabulary_size=len(WORDS),
    num_layers=num_layers,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
    max_sequence_length=10,
    dropout=0.0,
  )
  model = MODELS.GPT2CausalLM(backbone, preprocessor=preprocessor)
  for i, v in enumerate(model.weights):
    v.assign_add(0.4 * keras_fits.Floats(*v.shape, seed=i))
  return model


def _Prompts():
  """Returns prompts of two and three tokens, with room for five and more."""
  mask = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], 'int32')
  return {'token_ids': keras_fits.Integers(11, 2, 8) * mask, 'padding_mask': mask}


def _Generate(model, sampler, prompts=None):
  # Tracing plain Keras takes longer than these few tokens.
  is_plain = not isinstance(model, PipelinedModel)
  model.compile(sampler=sampler, jit_compile=False, run_eagerly=is_plain)
  return model.generate(prompts or _Prompts(), stop_token_ids=None)['token_ids']


@pytest.mark.parametrize(
  'make_sampler, num_layers',
  [
    (lambda: SAMPLERS.BeamSampler(num_beams=3), 2),
    (lambda: SAMPLERS.ContrastiveSampler(k=3, alpha=0.3), 1),
    (lambda: SAMPLERS.TopKSampler(k=4, seed=2), 1),
  ],
  ids=['beam', 'contrastive', 'top_k'],
)
def testTokensEqualThePlainModels(make_sampler, num_layers):
  def Make():
    return keras_fits.Seeded(lambda: _Model(num_layers=num_layers))

  expected = _Generate(Make(), make_sampler())
  pipe = keras_fits.Pipe(Make(), 2, 4)
  np.testing.assert_array_equal(_Generate(pipe, make_sampler()), expected)
  assert len({v.value.device for v in pipe.model.weights}) == 2


class _DevicesOfCache(SAMPLERS.GreedySampler):
  """A greedy sampler that remembers the devices of the cache."""

  def __call__(self, next, prompt, cache, **kwargs):  # noqa: A002
    self.devices = [t.backing_device for t in keras.tree.flatten(cache)]

    def Next(prompt, cache, index):
      logits, hidden_states, cache = next(prompt, cache, index)
      assert [t.backing_device for t in keras.tree.flatten(cache)] == self.devices
      return logits, hidden_states, cache

    return super().__call__(next=Next, prompt=prompt, cache=cache, **kwargs)


def testEachLayersCacheStaysOnTheDeviceOfTheLayer():
  def Make():
    return keras_fits.Seeded(lambda: _Model(num_layers=3))

  pipe = keras_fits.Pipe(Make(), 3)
  sampler = _DevicesOfCache()
  np.testing.assert_array_equal(_Generate(pipe, sampler), _Generate(Make(), 'greedy'))
  blocks = [x.weights[0].value.device for x in pipe.model.backbone.transformer_layers]
  assert sampler.devices == blocks
  assert len(set(blocks)) > 1


def testTextIsGeneratedBeforeAndAfterTrainingAndByAnotherPipeline():
  def Make():
    return keras_fits.Seeded(lambda: _Model(_Preprocessor(), num_layers=1))

  def Compiled(model, **options):
    optimizer = keras.optimizers.SGD(0.5)
    model.compile(optimizer=optimizer, sampler='greedy', jit_compile=False, **options)
    return model

  plain, model = Compiled(Make(), run_eagerly=True), Make()
  pipe = Compiled(keras_fits.Pipe(model, 2, 2))
  prompts = ['ab c', 'd']
  before = plain.generate(prompts, max_length=7)
  assert pipe.generate(prompts, max_length=7) == before
  texts = np.array(['abc abc', 'ghi'])
  options = {'batch_size': 2, 'epochs': 1, 'verbose': 0}
  # A data set would trace the tokenizer once more.
  x, y, weights = plain.preprocessor(texts.tolist())
  expected = keras.Model.fit(plain, x, y, sample_weight=weights, **options)
  history = pipe.fit(texts, **options)
  for name, values in expected.history.items():
    np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
  after = plain.generate(prompts, max_length=7)
  assert after != before
  assert pipe.generate(prompts, max_length=7) == after
  assert Compiled(keras_fits.Pipe(model, 3)).generate(prompts, max_length=7) == after
  assert pipe.generate(prompts, max_length=7) == after


class _AddsToTheCache(MODELS.GPT2CausalLM):
  """Uses its cache as one tensor."""

  def call_with_cache(self, token_ids, cache, cache_update_index):
    cache = cache + keras.ops.ones([cache.shape[1], *[1] * (len(cache.shape) - 2)])
    return super().call_with_cache(token_ids, cache, cache_update_index)


def testAModelMayUseTheWholeCache():
  def Model():
    plain = _Model()
    return _AddsToTheCache(plain.backbone, preprocessor=None)

  expected = _Generate(keras_fits.Seeded(Model), 'greedy')
  assert not np.array_equal(expected, _Generate(keras_fits.Seeded(_Model), 'greedy'))
  pipe = keras_fits.Pipe(keras_fits.Seeded(Model), 2)
  np.testing.assert_array_equal(_Generate(pipe, 'greedy'), expected)


def testOtherModelsAreRefused():
  pipe = keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp))
  with pytest.raises(ValueError, match='generate_step'):
    pipe.generate(keras_fits.Floats(2, 5))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
