# SPDX-License-Identifier: Apache-2.0
"""`verify` agrees with the real engine, and names the values that are wrong."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map, weight_params
from lingvo_gpipe.layers import dropout, embedding, transformer
from lingvo_gpipe.pipeline import pipelining_layer, verify
from lingvo_gpipe.pipeline.stages import stage_math
from tests import naming
from tests.toys import faulty_layers, layers, stacks

_BATCH, _TIME, _DIM, _VOCAB = 6, 5, 8, 11


def _IsAfterTwo(layer, x):
  """Drops the first two examples of whatever batch it is given."""
  return tf.reshape(tf.range(x.shape[0]) >= 2, [-1, 1, 1])


def _PathNumber(layer, x):
  """Returns a constant that differs between equal layers, which share one trace."""
  return 1.0 + sum(map(ord, layer.path)) % 7


def _Product(**params):
  """Returns Params of x w, times a factor that is 1 unless `params` say otherwise."""
  return faulty_layers.FactorLayer.Params().Set(dim=_DIM, **params)


def _Block():
  return transformer.TransformerLayer.Params().Set(
    input_dim=_DIM, hidden_dim=12, num_heads=2, is_causal=True, residual_dropout_prob=0.1
  )


def _Loss(theta, outputs, side):
  """NaN if the weights are zero, as in the last of three micro-batches."""
  del theta
  xent = embedding.XentLossFromLogits(outputs[0], side.labels)
  total = tf.reduce_sum(tf.cast(side.weights, xent.dtype))
  loss = tf.reduce_sum(xent * tf.cast(side.weights, xent.dtype)) / total
  return {'loss': (loss, total)}


def _NumTokens(side):
  return tf.reduce_sum(side.weights)


def _Verify(*middle, loss_weight=_NumTokens, dtype=tf.float64, **options):
  layer = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    num_stages=3,
    num_micro_batches=2,
    splits=[2, 3, 5],
    dtype=dtype,
    random_seed=5,
    params_init=weight_params.WeightInit.Gaussian(0.2),
    sub=[
      embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
      *(middle or (_Product(), _Block(), dropout.DropoutLayer.Params().Set(keep_prob=0.9))),
      embedding.SimpleFullSoftmax.Params().Set(input_dim=_DIM, num_classes=_VOCAB),
    ],
  )
  layer = layer.Set(**options).Instantiate()
  rng = np.random.default_rng(0)
  ids, labels = (tf.constant(rng.integers(0, _VOCAB, [_BATCH, _TIME]), tf.int32) for _ in '12')
  weights = tf.constant(rng.uniform(size=[_BATCH, _TIME]) * [[1], [0.1], [0.2], [1], [0], [0]])
  side = nested_map.NestedMap(labels=labels, weights=tf.cast(weights, dtype))
  layer.Place(stacks.Devices(), tf.TensorSpec([_BATCH, _TIME], tf.int32), loss_fn=_Loss)
  before = {path: v.numpy() for path, v in layer.VariablesByPath().items()}
  report = verify.Verify(layer, (ids,), side, loss_fn=_Loss, loss_weight=loss_weight, step=3)
  for path, variable in layer.VariablesByPath().items():
    np.testing.assert_array_equal(variable, before[path])
  assert {v.path for v in report.variables} == before.keys()
  return report


@pytest.mark.parametrize(
  'options',
  [
    {
      **{'xla': False, 'schedule': 'zb_h1', 'remat_policy': 'none', 'num_micro_batches': 3},
      'dtype': tf.float32,
    },
    {'xla': True, 'schedule': '1f1b_fused', 'splits': [3, 4, 5]},
    {'xla': False, 'loss_weight': lambda side: tf.cast(_NumTokens(side), tf.float32)},
  ],
)
def testACorrectModelIsEqual(options):
  report = _Verify(**options)
  assert report.Failures() == []
  assert report.dtype == options.get('dtype', tf.float64).name
  assert report.global_norm > 0
  text = report.Text(num_worst=2)
  assert 'EQUAL: ' in text and 'DIFFERENT' not in text
  assert text.count('stack.layers[') == 4
  assert report.losses['pipelined'] != report.losses['whole batch']  # Dropout.


def testTiedWeights():
  tied = embedding.SharedSoftmaxLayer.Params().Set(input_dim=_DIM, num_classes=_VOCAB)
  sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    *[_Product()] * 3,
    tied,
  ]
  # Micro-batches of two sizes, which take twice the traces.
  options = {'num_micro_batches': 4, 'ties': [['layers[4].emb', 'layers[0].emb']]}
  report = _Verify(sub=sub, xla=False, **options)
  assert report.Failures() == []
  assert 'stack.layers[0].emb' in {v.path for v in report.variables}


def _OnlyFailures(report, *patterns):
  """Checks that the failures of the report begin with exactly these texts."""
  failures = report.Failures()
  assert len(failures) == len(patterns), failures
  for line, pattern in zip(failures, patterns, strict=True):
    assert line.startswith(pattern), failures
  assert report.Text().count('DIFFERENT: ') == len(patterns)


def testALayerThatDependsOnThePositionInTheBatchFails():
  # Each of the micro-batches alone is right.
  report = _Verify(*[_Product(factor=_IsAfterTwo)] * 3, xla=False)
  _OnlyFailures(report, 'loss: micro-batches and whole batch')


def testALayerThatDependsOnItsPathFails():
  middle = [_Product(), _Product(factor=_PathNumber), _Product(factor=_PathNumber)]
  assert _Verify(*middle, xla=False, splits=[2, 3, 5]).Failures() == []
  # Now the two are stages of their own, with one trace.
  report = _Verify(*middle, xla=False, num_stages=4, splits=[2, 3, 4, 5])
  _OnlyFailures(report, 'loss: pipelined and reference', 'gradients: ')


def testAWrongLossWeightFails():
  report = _Verify(xla=False, loss_weight=lambda side: tf.constant(1.0, tf.float64))
  _OnlyFailures(report, 'loss weight: 2 ', 'gradients: 19 of 20')


@pytest.mark.parametrize('dtype, factor', [(tf.float64, 1 + 1e-7), (tf.float32, 1 + 1e-3)])
def testAnEngineThatAccumulatesWronglyFails(monkeypatch, dtype, factor):
  right = stage_math.Accumulate

  def Wrong(accumulators, grads):
    right(accumulators, [g * factor if isinstance(g, tf.Tensor) else g for g in grads])

  monkeypatch.setattr(stage_math, 'Accumulate', Wrong)
  report = _Verify(*[_Product()] * 3, xla=False, dtype=dtype)
  _OnlyFailures(report, 'gradients: ')
  worst = max(report.variables, key=report.Error)
  assert worst.relative == pytest.approx(factor - 1, rel=0.1)
  assert f'absolute {worst.absolute:.1e}' in report.Text(num_worst=1)


def testNanIsTheWorstError():
  report = verify.Report(
    dtype='float64',
    losses=dict.fromkeys(['pipelined', 'reference', 'micro-batches', 'whole batch'], 1.0),
    loss_weights={'announced': 1.0, 'returned': 1.0},
    global_norm=1.0,
    variables=tuple(
      verify._Error(path, np.array([value]), np.array([1.0]), 1.0)
      for path, value in (('a', 2.0), ('b', np.nan), ('c', 1.0))
    ),
  )
  _OnlyFailures(report, 'gradients: 2 of 3')
  assert '  b  absolute inf' in report.Text(num_worst=1)


def testLowPrecisionIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('bfloat16', 'dtype', 'fprop_dtype')):
    _Verify(xla=False, dtype=tf.float32, fprop_dtype=tf.bfloat16)


def _FailsWhileRunning(x, paddings):
  return tf.debugging.check_numerics(x / 0.0, 'out of cheese'), paddings


@pytest.mark.parametrize('xla', [False, True])  # XLA compiles no checks.
def testAFailedStepNamesTheLayer(xla):
  with pytest.raises(tf.errors.InvalidArgumentError, match='out of cheese') as e:
    _Verify(layers.NoWeightsLayer.Params().Set(fn=_FailsWhileRunning), splits=[1, 2, 3], xla=xla)
  assert any('stack.layers[1]' in note for note in e.value.__notes__)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
