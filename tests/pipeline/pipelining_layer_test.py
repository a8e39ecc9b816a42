# SPDX-License-Identifier: Apache-2.0
"""PipeliningLayer: its weights and their devices, predictions, and refusals."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import linear, sequential, skip
from lingvo_gpipe.pipeline import pipelining_layer
from tests import naming
from tests.toys import layers, stacks

_DIM = layers.DIM
_SPEC = tf.TensorSpec([4, _DIM])


def _Stack(*sub, **options):
  options = {'name': 'stack', 'num_micro_batches': 2, 'xla': False, **options}
  return pipelining_layer.PipeliningLayer.Params().Set(sub=list(sub), **options).Instantiate()


def _Linears(num_layers=4):
  return [linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)] * num_layers


def _Fns(*fns):
  return [layers.FnLayer.Params().Set(fn=fn) for fn in fns]


def testPathsAndInitialValuesAreTheSequentialLayers():
  sub = _Linears()
  sub[1] = sub[1].Copy().Set(random_seed=1)  # A layer may have a seed of its own.
  layer = layers.WithVariables(sequential.SequentialLayer.Params().Set(name='stack', sub=sub))
  for num_stages in (1, 2, 4):
    stack = _Stack(*sub, num_stages=num_stages)
    stack.Place(stacks.Devices(), _SPEC)
    variables = stack.VariablesByPath()
    assert variables.keys() == layer.VariablesByPath().keys()
    for path, v in layer.VariablesByPath().items():
      np.testing.assert_array_equal(v, variables[path])
    homes = {v.device for v in stack.layers[0].variables}
    homes |= {v.device for v in stack.layers[-1].variables}
    assert len(homes) == min(num_stages, 2)


def testPredictTakesNone():
  stack = _Stack(*_Fns(*[lambda w, x, extra: (x + 1.0, extra)] * 2), num_stages=2)
  stack.Place(stacks.Devices(), tf.TensorSpec([3]), None)
  y, extra = stack.Predict(np.float32([1, 2, 3]), None)
  assert extra is None
  np.testing.assert_allclose(y, [3.0, 4.0, 5.0])


def testUnequalMicroBatchesCauseNoWarning(recwarn):
  stack = _Stack(*_Fns(*[lambda w, x: 2.0 * x] * 2), num_stages=2, num_micro_batches=4)
  stack.Place(stacks.Devices(), tf.TensorSpec([7]))
  for size in (7, 2):
    np.testing.assert_array_equal(stack.Predict(tf.ones([size])), [4.0] * size)
  assert not recwarn.list


def testFPropMetaCountsLayersWithSkips():
  sub = [
    skip.StashLayer.Params().Set(key='x'),
    linear.LinearLayer.Params().Set(input_dim=4, output_dim=4),
    skip.PopLayer.Params().Set(key='x', combine='concat'),
  ]
  for cls in (pipelining_layer.PipeliningLayer, sequential.SequentialLayer):
    meta = cls.FPropMeta(cls.Params().Set(name='s', sub=sub), tf.TensorSpec([2, 4]))
    assert meta.flops == 2 * 2 * 4 * 4
    assert [s.shape.as_list() for s in meta.out_specs] == [[2, 8]]


# ---- errors ------------------------------------------------------------------------------


class _CustomError(Exception):
  pass


@pytest.mark.parametrize('xla', [False, True])
@pytest.mark.parametrize('method', ['FProp', 'Predict'])
def testAnExceptionKeepsItsTypeAndNamesTheLayer(method, xla):
  def Raise(w, x):
    raise _CustomError('out of cheese')

  raising = layers.SilentLayer.Params().Set(fn=Raise)
  sub = [*_Fns(lambda w, x: x + 1, lambda w, x: x), raising]
  stack = _Stack(*sub, num_stages=2, splits=[1, 3], xla=xla)
  stack.Place(stacks.Devices(), tf.TensorSpec([4, 2]))
  run = stack.Predict if method == 'Predict' else stack
  with pytest.raises(_CustomError, match='out of cheese') as e:
    run(tf.ones([4, 2]))
  notes = '\n'.join(e.value.__notes__)
  assert 'stack.layers[2] (SilentLayer)' in notes
  assert naming.AnyLineNames(notes, '(float32[2, 2]) by stack.layers[1]')
  stage = 'stage 1 (stack.layers[1] to stack.layers[2])'
  assert naming.AnyLineNames(notes, stage, 'micro-batch 0', '1F0')


def testNothingWorksBeforePlace():
  layer = _Stack(*_Linears(), num_stages=2)
  layer.InstantiateVariables()
  for call in (layer, layer.Predict):
    with pytest.raises(ValueError, match=naming.Naming('stack', 'no devices', 'Place')):
      call(tf.ones(_SPEC.shape))


def testTooFewDevicesAreRefused():
  with pytest.raises(ValueError, match=naming.Naming('4 stages', '4 devices', 'got 3')):
    _Stack(*_Linears(), num_stages=4).Place(stacks.Devices()[:3], _SPEC)


@pytest.mark.parametrize(
  'last, spec',
  [
    (lambda w, x: tf.reduce_sum(x), 'float32[]'),
    (lambda w, x: tf.transpose(x), 'float32[4, 2]'),
    (lambda w, x: (x, tf.reshape(x, [-1])), 'float32[8]'),
  ],
)
def testOutputsWithoutTheBatchAreRefused(last, spec):
  stack = _Stack(*_Fns(lambda w, x: x, last), num_micro_batches=3)
  stack.Place(stacks.Devices(), tf.TensorSpec([6, 4]))
  for call in (stack, stack.Predict):
    with pytest.raises(
      ValueError, match=naming.Naming('micro-batch 0', '2 examples', 'dimension 0', f'got {spec}')
    ):
      call(tf.ones([6, 4]))


def testVariablesOnAnotherDeviceAreRefused():
  devices = stacks.Devices()
  layer = _Stack(*_Linears(), num_stages=2)
  layer.InstantiateVariables()
  with pytest.raises(
    ValueError, match=naming.Naming('stack.layers[2].w', 'CPU:0 before', 'on /device:CPU:1')
  ):
    layer.Place(devices, _SPEC)
  layer = _Stack(*_Linears(), num_stages=2)
  layer.Place(devices, _SPEC)
  layer.Place(devices, _SPEC)  # The same place is fine.
  with pytest.raises(
    ValueError, match=naming.Naming('stack.layers[0].w', 'CPU:0 before', 'on /device:CPU:3')
  ):
    layer.Place(devices[::-1], _SPEC)


def testAPipelineWithoutLayersIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('stack', 'sub', 'empty')):
    _Stack()


@pytest.mark.parametrize(
  'options, words',
  [
    ({'schedule': 'gpip'}, ['gpip']),
    ({'partition_by': 'bytes'}, ['bytes', 'flops']),
    ({'num_micro_batches': 0}, ['num_micro_batches', '0']),
    ({'splits': [1, 2, 3, 4]}, ['splits', 'num_stages is 2']),
  ],
)
def testParamsThatMakeNoSenseAreRefusedBeforeAnythingRuns(options, words):
  with pytest.raises((ValueError, LookupError)) as e:
    _Stack(*_Linears(), num_stages=2, **options).Place(stacks.Devices(), _SPEC)
  assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
  'values, names',
  [
    ({'stages_per_device': 0}, ['stages_per_device']),
    ({'num_stages': 0}, ['num_stages']),
    ({'remat_policy': 'foo'}, ['remat_policy', "'stage'", "got 'foo'"]),
    ({'schedule': 'forward_only'}, ["'forward_only'", 'backward']),
    ({'sub': [skip.PopLayer.Params().Set(key='x')]}, ['s.layers[0]', "skip 'x'"]),
  ],
)
def testIllParamsAreRefusedAtOnce(values, names):
  p = pipelining_layer.PipeliningLayer.Params().Set(name='s', sub=_Linears(1)).Set(**values)
  with pytest.raises(ValueError, match=naming.Naming('s', *names)):
    p.Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
