# SPDX-License-Identifier: Apache-2.0
"""Measuring layers: each kind once, on copies, in training mode."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import batch_norm, conv, dropout, embedding, flatten, linear, norm, skip
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming
from tests.toys import layers as toy_layers
from tests.toys import timed_layers

_QUICK = layer_profile.Timing(repeats=1, min_seconds=0.0)


def _Unfold(x):
  """Returns x, and a nest of floats, integers, bools and None."""
  values = [tf.sin(x), None, (x > 0,)]
  return x, nested_map.NestedMap(ids=tf.argmax(x, -1), none=None, parts=values)


def _Fold(x, nest):
  """Takes the outputs of _Unfold; integers have to be indices and bools False."""
  (is_positive,) = nest.parts[2]
  y = x + tf.where(is_positive, nest.parts[0], tf.zeros_like(x))
  return tf.gather(y, nest.ids, axis=1, batch_dims=1)


def _Pipeline(sub, **options):
  p = pipelining_layer.PipeliningLayer.Params().Set(name='p', sub=sub, **options)
  return p.Instantiate()


def _Times(layers, *specs, weights=None, xla=False, timing=_QUICK):
  calls = layer_costs.LayerCosts(layers, specs).calls
  return layer_profile.Measure(calls, weights or layer_costs.Weights(), xla=xla, timing=timing)


def _Sleepers(*naps):
  return [timed_layers.Sleeper.Params().Set(forward=f, backward=b) for f, b in naps]


_SPEC = tf.TensorSpec([4, 8])


def testMeasuredTimesAreTheNaps():
  # With a wide margin, because a busy machine makes naps longer.
  layers = _Pipeline(_Sleepers((0.02, 0.4), (0.4, 0.02))).layers
  (f0, b0), (f1, b1) = _Times(layers, _SPEC, timing=layer_profile.Timing(2, 0.0))
  assert f0 >= 0.02 and f1 >= 0.4
  assert b0 > 2 * f0 and f1 > 2 * b1
  assert timed_layers.Sleeper.modes >= {False}


def testACutByTimeBalancesMeasuredTimes():
  sub = _Sleepers((0.05, 0.05), (0.05, 0.05), (0.05, 0.05), (0.3, 0.3))
  layer = _Pipeline(sub, num_stages=2, partition_by='time', xla=False)
  cut = layer.MakeCut(_SPEC)
  assert cut.ends == (3, 4)
  assert cut.by == 'time'
  head, first, *_, last = cut.Table().splitlines()
  assert head.split()[5] == 'ms' and float(first.split()[5]) >= 200
  assert 'measured' in last
  with pytest.raises(ValueError, match=naming.Naming('p', 'InstantiateVariables')):
    _ = layer.vars


def testInputsOfACutByTimeMayDifferInRank():
  """Each layer is measured on inputs of its own shape: images, then vectors."""
  sub = [
    conv.Conv2DLayerNoPadding.Params().Set(filter_shape=(5, 5, 8, 32)),
    flatten.FlattenLayer.Params(),
    linear.LinearLayer.Params().Set(input_dim=16 * 16 * 32, output_dim=1),
  ]
  layer = _Pipeline(sub, num_stages=2, partition_by='time', xla=False)
  cut = layer.MakeCut(tf.TensorSpec([8, 16, 16, 8]))
  # The convolution has 200 times the work of the product, and flattening has little.
  assert (cut.ends, cut.by) == ((1, 3), 'time')


def testACutByHandMeasuresNothing():
  before = timed_layers.Sleeper.naps
  sub = _Sleepers((1.0, 1.0), (1.0, 1.0))
  cut = _Pipeline(sub, num_stages=2, partition_by='time', splits=[1, 2]).MakeCut(_SPEC)
  assert (cut.ends, cut.by, timed_layers.Sleeper.naps) == ((1, 2), 'flops', before)


def testEqualLayersAreMeasuredOnce(monkeypatch):
  measured = []

  def Copy(call, trained, needs_dx, *_):
    measured.append((call.layer.path, sorted(trained), needs_dx))
    return 1.0, 2.0

  monkeypatch.setattr(layer_profile, '_MeasureCopy', Copy)
  sub = [linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)] * 50
  layers = _Pipeline(sub).layers
  assert _Times(layers, _SPEC) == ((1.0, 2.0),) * 50
  # The first layer does not compute the gradient of its input.
  assert measured == [('p.layers[0]', ['.w'], False), ('p.layers[1]', ['.w'], True)]
  del measured[:]
  weights = layer_costs.Weights(is_trained=lambda path: '[9]' in path)
  _Times(layers, _SPEC, weights=weights)
  assert measured == [
    ('p.layers[0]', [], False),
    ('p.layers[9]', ['.w'], False),
    ('p.layers[10]', [], True),
  ]


def testNestsBetweenLayers():
  layers = _Pipeline(
    [toy_layers.Without(_Unfold), *_Sleepers((0.05, 0.05)), toy_layers.Without(_Fold)]
  ).layers
  (_, nest) = layer_costs.LayerCosts(layers, [_SPEC]).costs[1].out_specs
  dtypes = [t and t.dtype for t in tf.nest.flatten(nest)]
  assert dtypes == [tf.int64, None, tf.float32, None, tf.bool]
  first, second, third = _Times(layers, _SPEC)
  assert all(forward > 0 for forward, _ in (first, third))
  assert second[0] >= 0.05


def testLayersAreNotModified():
  """Not even the statistics of BatchNorm, which is measured in training mode."""
  square = linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)
  layer = _Pipeline([square, batch_norm.BatchNormLayer.Params().Set(dim=8), square])
  layer.Place([tf.config.list_logical_devices('CPU')[0].name], _SPEC)
  before = {path: v.numpy() for path, v in layer.VariablesByPath().items()}
  assert len(before) == 6
  ids = {path: id(v) for path, v in layer.VariablesByPath().items()}
  state = tf.random.get_global_generator().state.numpy()
  _Times(layer.layers, _SPEC)
  after = layer.VariablesByPath()
  assert {path: id(v) for path, v in after.items()} == ids
  assert all((v.numpy() == before[path]).all() for path, v in after.items())
  assert (tf.random.get_global_generator().state.numpy() == state).all()


@pytest.mark.parametrize('xla', [False, True])
def testIdsMasksDropoutAndSkips(xla):
  """Integers are valid ids, None stays None, and skips and auxiliary losses are measured too."""
  sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=5, embedding_dim=8),
    skip.StashLayer.Params().Set(key='s'),
    linear.ProjectionLayer.Params().Set(input_dim=8, output_dim=8),
    dropout.DropoutLayer.Params().Set(keep_prob=0.5),
    skip.PopLayer.Params().Set(key='s'),
  ]
  times = _Times(_Pipeline(sub).layers, tf.TensorSpec([3, 4], tf.int32), xla=xla)
  assert len(times) == 5
  assert all(forward > 0 and backward >= 0 for forward, backward in times)


def testLayersBeforeTheFirstTrainedOneHaveNoBackward():
  layers = _Pipeline(_Sleepers((0.0, 0.0), (0.0, 0.1), (0.0, 0.1))).layers
  weights = layer_costs.Weights(is_trained=lambda path: '[1]' in path)
  times = _Times(layers, _SPEC, weights=weights)
  assert times[0][1] == 0
  assert times[1][1] > 0 and times[2][1] > 0


def testAnErrorNamesTheLayerAndKeepsItsType():
  # Its cost is known without a trace.
  sub = [toy_layers.SilentLayer.Params().Set(fn=lambda w, x: 1 / 0)]
  with pytest.raises(ZeroDivisionError) as e:
    _Times(_Pipeline(sub).layers, _SPEC)
  assert any('p.layers[0] (SilentLayer)' in note for note in e.value.__notes__)


def testSlowdownOfDevicesThatDisturbEachOther(monkeypatch):
  (call,) = layer_costs.LayerCosts(_Pipeline(_Sleepers((0.05, 0.05))).layers, [_SPEC]).calls
  devices = [device.name for device in tf.config.list_logical_devices('CPU')[:2]]

  def Slowdown():
    options = {'xla': False, 'timing': layer_profile.Timing(2, 0.0)}
    return layer_profile.MeasureSlowdown(call, layer_costs.Weights(), devices, **options)

  assert Slowdown() >= 1
  monkeypatch.setattr(timed_layers.Sleeper, 'snoring', 5.0)
  assert Slowdown() > 2
  assert timed_layers.Sleeper.napping == 0


def testTheConstantPartOfAnUpdateIsLeftOut(monkeypatch):
  updates = []

  def Maker(device, trained, accumulators):
    assert [a.shape for a in accumulators] == [v.shape for v in trained.values()]
    updates.append(sorted(trained))
    return lambda: None

  monkeypatch.setattr(layer_profile, '_Seconds', lambda *_: 1.0 + 0.5 * len(updates[-1]))
  sub = [linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)] * 3
  layers = _Pipeline([*sub, norm.LayerNorm.Params().Set(input_dim=8)]).layers
  calls = layer_costs.LayerCosts(layers, [_SPEC]).calls
  weights = layer_costs.Weights(is_trained=lambda path: '[1]' not in path)
  assert layer_profile.MeasureUpdates(calls, weights, Maker) == (0.5, 0.0, 0.5, 1.0)
  both = ['p.layers[3].bias', 'p.layers[3].scale']
  assert updates == [['p.layers[0].w'], both, ['p.layers[0].w', *both]]


def testMeasuringInsideAFunctionIsAnError():
  layers = _Pipeline(_Sleepers((0.0, 0.0))).layers
  with pytest.raises(ValueError, match=naming.Naming('layers', 'tf.function')):
    tf.function(lambda: _Times(layers, _SPEC), autograph=False)()


def testALargerProductTakesLonger():
  # 64 times the work: more than noise can hide.
  sub = [
    linear.LinearLayer.Params().Set(input_dim=8, output_dim=1024),
    linear.LinearLayer.Params().Set(input_dim=1024, output_dim=1024),
    linear.LinearLayer.Params().Set(input_dim=1024, output_dim=8),
    linear.LinearLayer.Params().Set(input_dim=8, output_dim=8),
  ]
  cut = cut_lib.MakeCut(
    _Pipeline(sub).layers,
    [tf.TensorSpec([512, 8])],
    schedule=schedules.Get('gpipe', 2, 2),
    by='time',
  )
  heavy, light = cut.work[1], cut.work[3]
  assert heavy.forward > 4 * light.forward
  assert heavy.weight_gradient > 4 * light.weight_gradient


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
