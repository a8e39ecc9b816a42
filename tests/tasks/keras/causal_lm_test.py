# SPDX-License-Identifier: Apache-2.0
"""KerasHub's language models as tasks: they train as plain Keras does, and begin at a preset."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.runners import eval_runner, train_runner
from tasks.keras import causal_lm
from tests import naming
from tests.toys import keras_fits, stacks

keras_hub = pytest.importorskip('keras_hub')
_BATCH, _TIME, _VOCAB = 4, 6, 20


def _Params(**settings):
  p = causal_lm.KerasCausalLm.Params().Set(
    name='lm',
    vocab_size=_VOCAB,
    random_seed=3,
    keras_class='GPT2CausalLM',
    backbone={
      'num_layers': 2,
      'num_heads': 2,
      'hidden_dim': 8,
      'intermediate_dim': 16,
      'max_sequence_length': _TIME,
      'dropout': 0.0,
    },
  )
  p.stack.Set(num_stages=2, num_micro_batches=2, xla=False)
  return p.Set(**settings)


def _Batch():
  """Returns a batch whose micro-batches have different numbers of tokens that count."""
  weights = np.float32(keras_fits.Integers(2, _BATCH, _TIME, seed=2))
  weights[0] = 1.0
  return nested_map.NestedMap(
    ids=tf.constant(keras_fits.Integers(_VOCAB, _BATCH, _TIME)),
    labels=tf.constant(keras_fits.Integers(_VOCAB, _BATCH, _TIME, seed=1)),
    weights=tf.constant(weights),
  )


def _Run(p, runner=eval_runner.EvalRunner):
  return runner(p.Instantiate(), stacks.Devices(), stacks.Specs(_Batch()))


def _Logits(run):
  """Returns the logits of the pipeline, after checking them against the plain model."""
  ids = _Batch().ids
  (logits,) = run.task.pipeline.Predict(*run.task.PipelineInputs(_Batch()))
  plain = run.task.keras_model({'token_ids': ids, 'padding_mask': tf.ones_like(ids)})
  np.testing.assert_allclose(logits, plain, rtol=1e-4, atol=1e-5)
  return logits.numpy()


def testAFloat16PolicyIsNotTrained():
  p = _Params()
  p.backbone['dtype'] = 'mixed_float16'
  with pytest.raises(ValueError, match=naming.Naming('float16', 'lm.stack.layers[0]')):
    _Run(p, train_runner.TrainRunner)


def testLossAndGradientsEqualKeras():
  run, batch = _Run(_Params(), train_runner.TrainRunner), _Batch()
  model = run.task.keras_model
  with tf.GradientTape() as tape:
    inputs = {'token_ids': batch.ids, 'padding_mask': tf.ones_like(batch.ids)}
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, model(inputs))
    loss = tf.reduce_sum(losses * batch.weights) / tf.reduce_sum(batch.weights)
  variables = [v.value for v in model.trainable_variables]
  expected = dict(zip(map(id, variables), tape.gradient(loss, variables), strict=True))
  values = run.TrainStep(batch)
  assert values['loss'] == pytest.approx(float(loss), rel=1e-5)
  gradients = run.Gradients(values['loss_weight'])
  assert len(gradients) == len(expected)
  for path, v in run.engine.trained.items():
    dense = tf.convert_to_tensor(expected[id(v)])
    np.testing.assert_allclose(gradients[path], dense, rtol=1e-4, atol=1e-6, err_msg=path)


def testConstructionAllocatesNoVariables():
  def Refuse(next_creator, **kwargs):
    raise AssertionError(f'a variable was created: {kwargs.get("name")}')

  with tf.variable_creator_scope(Refuse):
    task = _Params(lora_rank=2).Instantiate()
    trained = task.keras_model.trainable_weights
    assert task.NumParams() == sum(np.prod(v.shape) for v in trained)


def testInitialValuesFollowFromTheSeed():
  a, b, c = (_Logits(_Run(_Params(random_seed=seed))) for seed in (3, 3, 4))
  np.testing.assert_array_equal(a, b)
  assert np.max(np.abs(a - c)) > 1e-4


def testParamsAreKeptAsText():
  p = _Params(preset='runs/preset', lora_rank=4)
  fresh = causal_lm.KerasCausalLm.Params().Set(name='lm').FromText(p.ToText())
  assert fresh == p


def testTheTaskBeginsAtAPreset(tmp_path):
  path = str(tmp_path / 'preset')
  run = _Run(_Params())
  for v in run.task.keras_model.weights:
    v.assign(v + keras_fits.Floats(*v.shape))
  run.task.keras_model.save_to_preset(path)
  for lora_rank in (0, 2):
    again = _Run(_Params(backbone={}, preset=path, lora_rank=lora_rank, random_seed=9))
    np.testing.assert_allclose(_Logits(again), _Logits(run), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['GPT9CausalLM', 'GPT2Backbone', '__init__'])
def testTheClassMustBeACausalLm(name):
  with pytest.raises(ValueError, match=naming.Naming('keras_class', name)):
    _Params(keras_class=name).Instantiate()


@pytest.mark.parametrize(('backbone', 'named'), [({1: 2}, 1), ({'num_layers': 2}, 'num_heads')])
def testArgumentsThatTheBackboneDoesNotTakeAreRefused(backbone, named):
  with pytest.raises(ValueError, match=naming.Naming('backbone', named)):
    _Params(backbone=backbone).Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
