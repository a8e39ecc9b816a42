# SPDX-License-Identifier: Apache-2.0
"""A loss that computes logits in chunks equals the one of whole logits, which never exist."""

import sys

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import naming
from tests.toys import keras_fits, keras_layers

TOP = 9
IDS, CLASSES = keras_fits.PaddedIds(12, top=TOP), keras_fits.Integers(TOP, 12, 6, seed=3)
WEIGHTS = abs(keras_fits.Floats(12, 6, seed=2)) + 0.1


def _Tagger(head=None, **options):
  """Returns a model from ids [6] to masked logits [6, 9]."""
  inputs = keras.Input([6], dtype='int32')
  x = layers.Embedding(TOP, 4, mask_zero=True)(inputs)
  x = layers.Dense(8, activation='tanh')(x)
  x = (head or layers.Dense)(TOP, name='head', **options)(x)
  return keras.Model(inputs, layers.Activation('linear', dtype='float32')(x))


def _Classifier():
  return keras_fits.Mlp(outputs=TOP)


def _Gemma():
  """Returns a causal model with one table of weights at both ends, and capped logits."""
  backbone = keras_hub.models.GemmaBackbone(
    vocabulary_size=TOP,
    num_layers=1,
    num_query_heads=2,
    num_key_value_heads=1,
    hidden_dim=8,
    intermediate_dim=16,
    head_dim=4,
    final_logit_soft_cap=1.0,
  )
  return keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)


def _Compiled(reduction='sum_over_batch_size', **options):
  loss = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction=reduction, **options
  )
  top = keras.metrics.SparseTopKCategoricalAccuracy(k=3)
  return {'loss': loss, 'metrics': ['accuracy'], 'weighted_metrics': [top]}


def _Check(
  make, x, y, compiled=_Compiled, *, chunk_size, bound=1e-5, pipe=(), predicts=True, **options
):
  options = {'batch_size': 6, 'epochs': 1, **options}
  expected = keras_fits.Fit(keras_fits.Seeded(make), x, y, compiled, **options)
  chunked = keras_fits.Pipe(keras_fits.Seeded(make), 2, 2, loss_chunk_size=chunk_size, **dict(pipe))
  keras_fits.CheckEqual(keras_fits.Fit(chunked, x, y, compiled, **options), expected, bound)
  if not predicts:
    return
  plain = keras_fits.Seeded(make)
  plain.set_weights(expected.weights)
  predicted = chunked.predict(x, batch_size=6, verbose=0)
  np.testing.assert_allclose(predicted, plain(x), atol=10 * bound)


def testMasksAndWeightsOfPositions():
  """Chunks of 5 cross the examples of 6 positions, and micro-batches keep different numbers."""
  _Check(
    _Tagger,
    IDS,
    CLASSES,
    lambda: _Compiled('mean_with_sample_weight'),
    chunk_size=5,
    predicts=False,
    sample_weight=WEIGHTS,
    optimizer=lambda: keras.optimizers.SGD(0.01),
  )


def testAnExampleMayHaveOnePosition():
  """The loss is a sum, which has large gradients."""
  _Check(
    _Classifier,
    keras_fits.Floats(12, 5),
    keras_fits.Integers(TOP, 12, 1),
    lambda: _Compiled('sum'),
    chunk_size=2,
    optimizer=lambda: keras.optimizers.SGD(0.01),
  )


def testTiedWeightsAndCappedLogits():
  x = {'token_ids': IDS, 'padding_mask': (IDS > 0).astype('int32')}
  _Check(_Gemma, x, CLASSES, _Sparse, chunk_size=7, bound=1e-4, predicts=False)


def testOperationsMayDropTheMask():
  def Make():
    model = _Tagger()
    return keras.Model(model.input, keras.ops.tanh(model.output))

  _Check(Make, IDS, CLASSES, chunk_size=5)


def testCustomMetricsGetTheMaskAndTheMeanIsWeighted():
  _Check(
    _Tagger,
    IDS,
    CLASSES,
    lambda: {
      **_Compiled('sum'),
      'metrics': [keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0)],
    },
    chunk_size=5,
    predicts=False,
    optimizer=lambda: keras.optimizers.SGD(0.01),
    sample_weight=WEIGHTS,
  )


@pytest.mark.parametrize('dtypes', [('float64', 'float32'), ('float32', 'float64')])
def testTheHeadMayHaveAnotherDtype(dtypes):
  def Make():
    inputs = keras.Input([6], dtype='int32')
    x = layers.Embedding(TOP, 4, dtype=dtypes[0])(inputs)
    return keras.Model(inputs, layers.Dense(TOP, dtype=dtypes[1])(x))

  compiled = {'loss': _Compiled()['loss'], 'metrics': ['accuracy']}
  _Check(Make, IDS, CLASSES, lambda: compiled, chunk_size=5, predicts=False)


def testChunksUnderXlaEqualWholeLogits():
  _Check(_Tagger, IDS, CLASSES, chunk_size=5, pipe={'xla': True}, predicts=False)


def _Sparse():
  return {'loss': _Compiled()['loss'], 'metrics': ['accuracy']}


class _MeanLogit(keras.metrics.Mean):
  """A metric of a user, which needs the predictions of the whole batch."""

  def __init__(self):
    super().__init__(name='mean_logit')

  def update_state(self, y_true, y_pred, sample_weight=None):
    super().update_state(y_pred)


def testASharedVocabularyWithMasksAndWeights():
  options = {'sample_weight': WEIGHTS, 'optimizer': lambda: keras.optimizers.SGD(0.01)}
  pipe = {'vocabulary': 'shared'}
  _Check(_Tagger, IDS, CLASSES, _Sparse, chunk_size=0, pipe=pipe, predicts=False, **options)


def testASharedVocabularyWithTiedWeights():
  x = {'token_ids': IDS, 'padding_mask': (IDS > 0).astype('int32')}
  _Check(_Gemma, x, CLASSES, _Sparse, chunk_size=0, bound=1e-4, pipe={'vocabulary': 'shared'})


@pytest.mark.parametrize(
  'compiled, name',
  [
    (_Compiled, 'sparse_top_k_categorical_accuracy'),  # Whole logits.
    (lambda: {'loss': _Compiled()['loss'], 'metrics': [_MeanLogit()]}, 'mean_logit'),
    (lambda: {'loss': 'sparse_categorical_crossentropy'}, 'sparse_categorical_crossentropy'),
  ],
)
def testASharedVocabularyNeedsALossOfSlices(compiled, name):
  pipe = keras_fits.Pipe(_Tagger(), vocabulary='shared')
  pipe.compile('sgd', **compiled())
  with pytest.raises(ValueError, match=naming.Naming("vocabulary='shared'", name)):
    pipe.train_on_batch(IDS, CLASSES)


def testAHeadThatCannotBeSharedIsRefused():
  with pytest.raises(ValueError, match='vocabulary'):
    _Build(_Tagger(keras_layers.BlendsPositions), num_stages=2, vocabulary='shared')


@pytest.mark.parametrize('chunk_size', [0, 5])
def testOnlyChunksOfLogitsExist(chunk_size, monkeypatch):
  shapes, call = [], layers.Dense.call

  def Recorded(self, inputs, training=None):
    if self.name == 'head':
      shapes.append(tuple(inputs.shape))
    return call(self, inputs, training)

  monkeypatch.setattr(layers.Dense, 'call', Recorded)
  pipe = keras_fits.Pipe(_Tagger(), loss_chunk_size=chunk_size)
  pipe.compile('sgd', _Compiled()['loss'], metrics=['accuracy'])
  pipe.train_on_batch(IDS, CLASSES)
  # The first traces are the model's own, and the one that counts operations for the cut.
  steps = shapes[shapes.index((12, 6, 8)) + 1 :]
  if chunk_size:  # And calls without examples, which tell the mask and the dtype.
    assert {shape for shape in steps if shape[0]} == {(5, 1, 8)}
  else:
    assert set(steps) == {(12, 6, 8)}


def _HiddenAndLogits():
  inputs = keras.Input([4])
  hidden = layers.Dense(4)(layers.Dense(4)(inputs))
  return keras.Model(inputs, [hidden, layers.Dense(TOP)(hidden)])


def _Build(model, **options):
  keras_fits.Pipe(model, **options).predict(tf.zeros([4, *model.input_shape[1:]]), verbose=0)


@pytest.mark.parametrize(
  'make',
  [
    lambda: _Tagger(keras_layers.BlendsPositions),
    lambda: _Tagger(activation='softmax'),
    lambda: _Tagger(kernel_regularizer='l2'),
    lambda: keras.Sequential([keras.Input([6, 4]), layers.Dense(4), layers.Conv1D(TOP, 3)]),
    keras_fits.TwoOutputs,
    _HiddenAndLogits,
    lambda: keras.Sequential([keras.Input([6], dtype='int32'), layers.ReversibleEmbedding(TOP, 4)]),
  ],
)
def testOtherHeadsAreRefused(make):
  model = make()
  num_stages = min(2, len(model.layers))
  with pytest.raises(ValueError, match='loss_chunk_size'):
    _Build(model, num_stages=num_stages, loss_chunk_size=5)


@pytest.mark.parametrize(
  'loss',
  [
    'sparse_categorical_crossentropy',
    keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    keras.losses.CategoricalCrossentropy(from_logits=True),
  ],
)
def testOtherLossesAreRefused(loss):
  pipe = keras_fits.Pipe(_Tagger(), loss_chunk_size=5)
  pipe.compile('sgd', loss)
  y = np.eye(TOP)[CLASSES] if isinstance(loss, keras.losses.CategoricalCrossentropy) else CLASSES
  with pytest.raises(ValueError, match='loss_chunk_size'):
    pipe.train_on_batch(IDS, y)


def testChunksOfNegativeSizeAreRefused():
  with pytest.raises(ValueError, match='chunk_size'):
    _Build(_Tagger(), loss_chunk_size=-1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
