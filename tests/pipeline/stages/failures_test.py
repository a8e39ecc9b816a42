# SPDX-License-Identifier: Apache-2.0
"""An error in a stage ends the step, and names the stage, the layer and the micro-batch."""

import re
import resource
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import batch_norm, linear
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.runners import train_runner
from tests import naming, processes
from tests.toys import decoding_layers, layers, stacks, tasks

_DIM, _BATCH, _M = layers.DIM, 6, 3
_LIMIT = 9.0  # What the layers below cannot take.


def _AssertSmall(x):
  return tf.debugging.assert_less(tf.reduce_max(x), _LIMIT, message='too large')


def _FailsForward(w, x):
  with tf.control_dependencies([_AssertSmall(x)]):
    return x * w


@tf.custom_gradient
def _IdentityThatFails(x):
  def Gradient(dy):
    with tf.control_dependencies([_AssertSmall(x)]):
      return tf.identity(dy)

  return tf.identity(x), Gradient


def _FailsBackward(w, x):
  return _IdentityThatFails(x) * w


def _FailsInPython(w, x):
  def Check(value):
    if value.numpy().max() >= _LIMIT:
      raise ValueError('too large')
    return value

  return tf.ensure_shape(tf.py_function(Check, [x], x.dtype), x.shape) * w


def _Stack(sub, **options):
  options = {'num_stages': 3, 'splits': [1, 2, 4], 'num_micro_batches': _M, **options}
  return stacks.MakeStack(sub, dtype=tf.float32, **options)


def _Sub(place, layer):
  """Four layers in three stages; the one at `place` is `layer`."""
  sub = [layers.SilentLayer.Params() for _ in range(4)]
  sub[place] = layer
  return sub


def _Good():
  return tf.ones([_BATCH, _DIM])


def _Bad():
  """One value that is too large, in micro-batch 1."""
  return tf.tensor_scatter_nd_update(_Good(), [[3, 1]], [2 * _LIMIT])


def _Notes(e):
  return '\n'.join(e.value.__notes__)


# ---- while the step runs -------------------------------------------------------------------------


# Together with the cases of training below, every kind of failure meets every stage, except a
# Python error in the first.
@pytest.mark.parametrize(
  'fails, place, stage',
  [
    (_FailsForward, 0, 0),
    (_FailsForward, 3, 2),
    (_FailsBackward, 1, 1),
    (_FailsBackward, 3, 2),
    (_FailsInPython, 1, 1),
  ],
)
def testAFailureUnderAUsersTapeNamesTheStage(fails, place, stage):
  stack = _Stack(_Sub(place, layers.SilentLayer.Params().Set(fn=fails)))
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))

  def Run(x):
    with tf.GradientTape() as tape, fprop_context.Scope(step=1):
      loss = tf.reduce_sum(stack(x) ** 2)
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, stack.trainable_variables)]

  before = Run(_Good())
  start = time.monotonic()
  with pytest.raises(tf.errors.InvalidArgumentError, match='too large') as e:
    Run(_Bad())
  # Nothing hangs, not even on a busy machine.
  assert time.monotonic() - start < 30.0
  letter = 'B' if fails is _FailsBackward else 'F'
  names = f'stage {stage} (stack.layers[{"2] to stack.layers[3" if stage == 2 else place}])'
  assert naming.AnyLineNames(_Notes(e), names, 'micro-batch 1', f'{stage}{letter}1')
  if letter == 'F':
    assert naming.AnyLineNames(_Notes(e), 'layer', f'stack.layers[{place}] (SilentLayer)')
    with pytest.raises(tf.errors.InvalidArgumentError) as e:
      stack.Predict(_Bad())
    assert naming.AnyLineNames(_Notes(e), f'stage {stage}', 'micro-batch 1', f'{stage}F1')
  for a, b in zip(Run(_Good()), before, strict=True):
    np.testing.assert_array_equal(a, b)


def _Runner(sub, *, loss=None, num_replicas=1, **options):
  p = tasks.StackTask.Params().Set(name='net')
  p.fn = loss or p.fn
  p.stack.Set(sub=sub, num_stages=3, splits=[1, 2, 4], num_micro_batches=_M)
  p.stack.Set(**{'xla': False, **options})
  p.train.learner.Set(optimizer=optimizer.SGD.Params(), skip_nonfinite=False)
  batch_spec = nested_map.NestedMap(x=tf.TensorSpec([_BATCH, _DIM]))
  devices = stacks.Devices()
  return train_runner.TrainRunner(p.Instantiate(), devices, batch_spec, num_replicas=num_replicas)


def _Batch(x):
  return nested_map.NestedMap(x=x)


@pytest.mark.parametrize(
  'place, fails, schedule, policy, action',
  [
    (0, _FailsForward, '1f1b', 'stage', '0F1'),
    (1, _FailsBackward, 'gpipe', 'stage', '1B1'),
    (1, _FailsForward, 'gpipe', 'layer', '1F1'),
    (1, _FailsBackward, 'zb_h1', 'stage', '1I1'),
    (3, _FailsForward, '1f1b_fused', 'none', '2V1'),
    (3, _FailsInPython, '1f1b', 'except_last', '2F1'),
  ],
)
def testAFailedStepOfTrainingChangesNothing(place, fails, schedule, policy, action):
  options = {'schedule': schedule, 'remat_policy': policy}
  run = _Runner(_Sub(place, layers.SilentLayer.Params().Set(fn=fails)), **options)
  run.TrainStep(_Batch(_Good()))
  before = {name: v.numpy() for name, v in run.Variables().items()}
  with pytest.raises(tf.errors.InvalidArgumentError, match='too large') as e:
    run.TrainStep(_Batch(_Bad()))
  assert naming.AnyLineNames(_Notes(e), f'stage {action[0]}', 'micro-batch 1', action)
  if fails is not _FailsBackward:
    assert f'net.stack.layers[{place}] (SilentLayer)' in _Notes(e)
    with pytest.raises(tf.errors.InvalidArgumentError, match='too large') as e:
      run.Evaluate([_Batch(_Bad())])
    assert 'micro-batch 1' in _Notes(e)
  # The next step equals a step from the same weights without a failure before it.
  for name, v in run.Variables().items():
    np.testing.assert_array_equal(v, before[name], err_msg=name)
  values = run.TrainStep(_Batch(_Good()))
  for name, v in run.Variables().items():
    v.assign(before[name])
  assert run.TrainStep(_Batch(_Good())) == values


def PrintFailuresWhereReplicasMeet():
  """Prints the failure of a step in one replica, which the other awaits, and of the next step."""
  norm = batch_norm.BatchNormLayer.Params().Set(dim=_DIM, over_replicas=True)
  sub = [layers.FnLayer.Params().Set(fn=_FailsForward), norm]
  run = _Runner(sub, num_replicas=2, num_stages=1, splits=[2])
  run.TrainStep(_Batch(_Good()))
  for x in (_Bad(), _Good()):
    try:
      run.TrainStep(_Batch(x))
      print('none')
    except tf.errors.OpError as e:
      print(type(e).__name__, *e.__notes__)


def testAFailureWhileReplicasSumStatisticsNamesTheLayer(forks, tmp_path):
  """It runs in a separate process, where TensorFlow may then refuse further sums over replicas."""
  (tmp_path / 'program.py').write_text(
    'from lingvo_gpipe.distributed import cluster\n'
    "cluster.Cluster.Create(2, platform='cpu', threads_per_device=1)\n"
    'from tests.pipeline.stages import failures_test\n'
    'failures_test.PrintFailuresWhereReplicasMeet()\n'
  )
  done = processes.Succeeded(forks.Run(str(tmp_path / 'program.py')))
  failed, after = done.stdout.splitlines()
  layer = 'net.stack.layers[0] (FnLayer)'
  assert failed.startswith('InvalidArgumentError ') and naming.Names(failed, layer, 'stage 0')
  # That depends on whether the other replica was waiting already.
  assert after == 'none' or naming.Names(after, 'replicas', 'restart')


def testAFailureInTheLossNamesTheStage():
  run = _Runner(_Sub(0, layers.SilentLayer.Params()), loss=_FailsForward)
  with pytest.raises(tf.errors.InvalidArgumentError, match='too large') as e:
    run.TrainStep(_Batch(_Bad()))
  place, action = e.value.__notes__[:2]
  assert naming.Names(place, 'loss')
  stage = 'stage 2 (net.stack.layers[2] to net.stack.layers[3])'
  assert naming.Names(action, stage, 'micro-batch 1', '2F1')


def _TakesTooMuch(w, x):
  """Four terabytes."""
  tall = tf.tile(x, [1 << 19, 1])
  return x * w + tf.matmul(tf.matmul(tall, tall, transpose_b=True), tall)[:2]


def PrintFailureWithoutMemory():
  """Prints the failure of a stage of XLA that asks for too much, and whether XLA is on after it."""
  # Some systems would give four terabytes.
  resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
  run = _Runner(_Sub(3, layers.SilentLayer.Params().Set(fn=_TakesTooMuch)), xla=True)
  try:
    run.TrainStep(_Batch(_Good()))
  except tf.errors.ResourceExhaustedError as e:
    print(e, *e.__notes__, run.engine.xla, sep='\n')


def testALayerThatRunsOutOfMemoryUnderXlaIsNamed():
  """It runs in a process without oneDNN, whose allocator waits ten seconds each time."""
  program = (
    'from lingvo_gpipe.cli import binary\n'  # First: it imports TensorFlow in half of the time.
    'from lingvo_gpipe.distributed import cluster\n'
    "cluster.Cluster.Create(3, platform='cpu', threads_per_device=1)\n"
    'from tests.pipeline.stages import failures_test\n'
    'failures_test.PrintFailureWithoutMemory()\n'
  )
  done = processes.Run(
    '', command=[sys.executable, '-c', program], more_environment={'TF_ENABLE_ONEDNN_OPTS': '0'}
  )
  error, *notes, layer, xla = processes.Succeeded(done).stdout.splitlines()
  assert naming.Names(error, 'memory')
  assert any(naming.Names(note, 'stage 2', 'micro-batch 0', '2F0') for note in notes)
  assert naming.Names(layer, 'without XLA', 'net.stack.layers[3] (SilentLayer)', 'OOM')
  assert naming.AnyLineNames(done.stderr, '2F0', 'without XLA')
  # The stages are compiled as before.
  assert xla == 'True'


def testStagesBeforeTheFailedStageStop():
  ran = []

  def Slow(w, x):
    def Count(value):
      ran.append(1)
      time.sleep(0.1)
      return value

    return tf.ensure_shape(tf.py_function(Count, [x], x.dtype), x.shape) * w

  sub = [layers.SilentLayer.Params().Set(fn=fn) for fn in (Slow, _FailsForward)]
  stack = _Stack(sub, num_stages=2, splits=[1, 2], num_micro_batches=12)
  stack.Place(stacks.Devices(), tf.TensorSpec([12, _DIM]))
  inputs = [(x,) for x in stack.SplitBatch(tf.fill([12, _DIM], _LIMIT))]
  run = tf.function(lambda inputs: stack.engine.Forward(inputs).Outputs(), autograph=False)
  with pytest.raises(tf.errors.OpError):
    run(inputs)
  # The first one fails the next stage at once; a few more may be under way by then.
  assert 1 <= len(ran) < 10


def testALayerThatXlaCannotCompileIsNamed():
  stack = _Stack(_Sub(1, layers.SilentLayer.Params().Set(fn=_FailsInPython)), xla=True)
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  with pytest.raises(tf.errors.InvalidArgumentError, match='EagerPyFunc') as e:
    stack.Predict(_Good())
  assert naming.AnyLineNames(_Notes(e), 'stage 1 (stack.layers[1])', 'micro-batch 0', 'running')
  assert naming.AnyLineNames(_Notes(e), 'layer', 'stack.layers[1] (SilentLayer)')


def testAFailureInAUsersFunctionIsNamedWhenItRunsEagerly():
  """The advice of docs/own_loop.md for an error that reports only a cancellation."""
  stack = _Stack(_Sub(1, layers.SilentLayer.Params().Set(fn=_FailsForward)))
  stack.Place(
    stacks.Devices(),
    *stacks.Specs((_Good(),)),
    loss_fn=stacks.SquareLoss,
  )
  run = stacks.StepFunction(stack)
  with pytest.raises(tf.errors.OpError):
    run((_Bad(),), tf.ones([_BATCH]), tf.constant(1, tf.int64))
  tf.config.run_functions_eagerly(True)
  try:
    with pytest.raises(tf.errors.InvalidArgumentError, match='too large') as e:
      run((_Bad(),), tf.ones([_BATCH]), tf.constant(1, tf.int64))
  finally:
    tf.config.run_functions_eagerly(False)
  assert naming.AnyLineNames(_Notes(e), 'stack.layers[1] (SilentLayer)', '(float32[2, 3])')
  assert naming.AnyLineNames(_Notes(e), 'stage 1 (stack.layers[1])', 'micro-batch 1')


def testAnErrorThatDoesNotRecurNamesNoStage():
  failing = [True]

  def Once(w, x):
    def Check(value):
      if failing:
        failing.clear()
        raise ValueError('once')
      return value

    return tf.ensure_shape(tf.py_function(Check, [x], x.dtype), x.shape) * w

  stack = _Stack(_Sub(1, layers.SilentLayer.Params().Set(fn=Once)))
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  with pytest.raises(tf.errors.OpError) as e:
    stack.Predict(_Good())
  assert naming.AnyLineNames(_Notes(e), 'no stage', 'each time')
  np.testing.assert_array_equal(stack.Predict(_Good()), _Good())


def testAFailedUpdateNamesNoStage(monkeypatch):
  run = _Runner(_Sub(0, layers.SilentLayer.Params()))
  apply = run.learner.Apply

  def Fails(step, loss_weight, squares):
    with tf.control_dependencies([tf.debugging.assert_less(step, step, message='no update')]):
      return apply(step, loss_weight, squares)

  monkeypatch.setattr(run.learner, 'Apply', Fails)
  with pytest.raises(tf.errors.InvalidArgumentError, match='no update') as e:
    run.TrainStep(_Batch(_Good()))
  assert naming.AnyLineNames(_Notes(e), 'no stage', 'update')


# ---- while the step is planned and built ---------------------------------------------------------


class _Mine(Exception):
  pass


def _Raise(w, x):
  raise _Mine('out of cheese')


@pytest.mark.parametrize(
  'fn, error, place, words',
  [
    (lambda w, x: tf.concat([x, x], -1), ValueError, 2, ['float32[2, 6]', '6 and 3']),
    (lambda w, x: tf.cast(x, tf.int32), TypeError, 2, ['int32[2, 3]', 'float32']),
    (lambda w, x: None, ValueError, 2, ['given (None)']),
    (lambda w, x: (x, x), TypeError, 2, ['given (float32[2, 3], float32[2, 3])']),
    (lambda w, x, y: x, TypeError, 1, ["'y'", 'given (float32[2, 3])']),
    (_Raise, _Mine, 1, ['out of cheese', 'given (float32[2, 3])']),
  ],
)
def testTheCutNamesALayerThatDoesNotFit(fn, error, place, words):
  sub = [layers.FnLayer.Params() for _ in range(4)]
  sub[1].fn = fn
  with pytest.raises(error) as e:
    _Stack(sub).MakeCut(tf.TensorSpec([_BATCH, _DIM]))
  text = f'{e.value}\n{_Notes(e)}'
  before = f'by stack.layers[{place - 1}] (FnLayer)'
  layer = f'layer stack.layers[{place}] (FnLayer)'
  assert naming.AnyLineNames(text, layer, 'one micro-batch', before), text
  for word in words:
    assert word in text, text


def testAPlanNamesTheStageOfSplits():
  """The first line names the layer by its path, the expected and the actual input."""
  linears = [linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=4)] * 3
  for splits, stages in (([1, 3], ['stage 1']), ([2, 3], ['stage 0']), ([], [])):
    with pytest.raises(ValueError) as e:
      _Stack(linears, num_stages=2, splits=splits).MakeCut(tf.TensorSpec([_BATCH, _DIM]))
    assert naming.Names(str(e.value), 'stack.layers[1]', 3, '[2, 4]')
    note = e.value.__notes__[0]
    assert naming.Names(note, *stages, 'stack.layers[1] (LinearLayer)', 'one micro-batch')
    assert naming.Names(note, '(float32[2, 4]) by stack.layers[0]')
    assert re.findall(r'stage \d', note) == stages


def testAnExceptionInTheLossNamesTheOutputs():
  run = _Runner(_Sub(0, layers.SilentLayer.Params()), loss=_Raise)
  for call in (run.TrainStep, lambda batch: run.Evaluate([batch])):
    with pytest.raises(_Mine, match='out of cheese') as e:
      call(_Batch(_Good()))
    loss, stage = e.value.__notes__
    assert naming.Names(loss, 'loss', 'stage 2', 'outputs (float32[2, 3])')
    assert naming.Names(loss, 'side {x: float32[2, 3]}')
    layers_of_stage = '(net.stack.layers[2] to net.stack.layers[3])'
    assert naming.Names(stage, f'stage 2 {layers_of_stage}', 'micro-batch 0')


def testALayerThatReturnsAnObjectIsNamed():
  sub = _Sub(1, layers.SilentLayer.Params().Set(fn=lambda w, x: object()))
  stack = _Stack(sub)
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  names = naming.Naming('stack.layers[1]', 'FProp', 'object')
  with pytest.raises(TypeError, match=names) as e:
    stack.Predict(_Good())
  assert naming.AnyLineNames(_Notes(e), 'stage 1', 'micro-batch 0', 'building', '1F0')


def testALayerThatReturnsASparseTensorIsNamed():
  stack = _Stack(_Sub(1, layers.SilentLayer.Params().Set(fn=lambda w, x: tf.sparse.from_dense(x))))
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  names = naming.Naming('stack.layers[1]', 'FProp', 'SparseTensor')
  with pytest.raises(TypeError, match=names):
    stack.Predict(_Good())


def testNumbersAndArraysBecomeTensors():
  sub = [
    layers.FnLayer.Params().Set(fn=lambda w, x: (x * w, 2, np.float32(0.5))),
    layers.FnLayer.Params().Set(fn=lambda w, x, i, f: x * w * tf.cast(i, x.dtype) * f),
  ]
  stack = _Stack(sub, num_stages=2, splits=[1, 2])
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  np.testing.assert_array_equal(stack.Predict(_Good()), _Good())


@pytest.mark.parametrize(
  'args, error, names',
  [
    ((_Good(), None), ValueError, ['expected (float32[6, 3])', 'got (float32[6, 3], None)']),
    ((None,), ValueError, ['arguments[0]', 'expected float32[6, 3]', 'got None']),
    (
      (tf.ones([_BATCH]),),
      ValueError,
      ['arguments[0]', 'expected float32[6, 3]', 'got float32[6]'],
    ),
    (
      (tf.ones([_BATCH, _DIM], tf.int32),),
      TypeError,
      ['arguments[0]', 'expected float32[6, 3]', 'got int32[6, 3]'],
    ),
    ((42,), ValueError, ['arguments[0]', 'expected float32[6, 3]', 'got int32[]']),
  ],
)
def testArgumentsUnlikeTheSpecsOfPlaceAreRefused(args, error, names):
  stack = _Stack(_Sub(0, layers.SilentLayer.Params()))
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  for call in (stack, stack.Predict):
    with pytest.raises(error, match=naming.Naming('stack', *names)):
      call(*args)


@pytest.mark.parametrize(
  'batch, error, names',
  [
    (
      {'y': _Good()},
      ValueError,
      ['batch', 'expected {x: float32[6, 3]}', 'got {y: float32[6, 3]}'],
    ),
    (
      {'x': tf.cast(_Good(), tf.float64)},
      TypeError,
      ['batch.x', 'expected float32[6, 3]', 'got float64[6, 3]'],
    ),
    ({'x': _Good()[0]}, ValueError, ['batch.x', 'expected float32[6, 3]', 'got float32[3]']),
  ],
)
def testABatchUnlikeTheSpecOfTheTaskIsRefused(batch, error, names):
  run = _Runner(_Sub(0, layers.SilentLayer.Params()))
  for call in (run.TrainStep, lambda b: run.Evaluate([b])):
    with pytest.raises(error, match=naming.Naming('net', *names)):
      call(nested_map.NestedMap(batch))


def testTheErrorNamesTheFailingStageAmongEqualStages():
  """The stages share their functions; the third gets an input that the layer cannot take."""

  def Double(w, x):
    if x.shape[-1] > 2 * _DIM:
      raise _Mine(f'{x.shape[-1]} columns')
    return tf.concat([x, x], -1)

  for layer, error, cause in (
    (layers.SilentLayer.Params().Set(fn=Double), _Mine, '12 columns'),
    (decoding_layers.DoublingLayer.Params(), ValueError, 'stack.layers[2]'),
  ):
    stack = _Stack([layer] * 4, num_stages=4, splits=[1, 2, 3, 4])
    stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
    with pytest.raises(error) as e:
      stack.Predict(_Good())
    assert cause in str(e.value)
    assert f'stack.layers[2] ({layer.cls.__name__}), given (float32[2, 12])' in _Notes(e)
    assert naming.AnyLineNames(_Notes(e), 'stage 2 (stack.layers[2])')


# ---- compiled over and over ----------------------------------------------------------------------


def testShapesThatChangeAreLogged(monkeypatch):
  lines = []
  for level in ('info', 'warning'):
    monkeypatch.setattr(
      logging, level, lambda text, *args, level=level: lines.append(f'{level}: {text % args}')
    )
  stack = _Stack(
    [layers.FnLayer.Params().Set(fn=lambda w, x: tf.reduce_sum(x, -1, keepdims=True) * w)] * 4
  )
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  stack.Predict(_Good())
  stack.Predict(_Good())
  assert lines == []
  stack.Predict(tf.ones([5, _DIM]))  # Micro-batches of 2, 2 and 1.
  # The stages of one layer share their functions.
  assert [line.split(' of ')[1].split(' is ')[0] for line in lines] == [
    'stack.layers[0] to stack.layers[0]',
    'stack.layers[2] to stack.layers[3]',
  ]
  for line in lines:
    assert line.startswith('info: ')
    assert re.search(r'x\.args\[0\] .*float32\[2, 3\] .*float32\[1, 3\]$', line)
  lines.clear()
  stack.Predict(tf.ones([9, _DIM]))
  assert len(lines) == 2
  for line in lines:
    assert line.startswith('warning: ') and naming.Names(line, 'shape', 'number 3')
    assert re.search(r'x\.args\[0\] .*float32\[1, 3\] .*float32\[3, 3\]', line)
  lines.clear()
  stack.Predict(tf.ones([9, _DIM]))
  assert lines == []


def testActionsAreNamedInTheGraph():
  stack = _Stack(_Sub(0, layers.SilentLayer.Params()))
  stack.Place(stacks.Devices(), *stacks.Specs((_Good(),)))
  inputs = [(x,) for x in stack.SplitBatch(_Good())]
  run = tf.function(lambda inputs: stack.engine.Forward(inputs).Outputs(), autograph=False)
  graph = run.get_concrete_function(inputs)
  scopes = {op.name.split('/')[0] for op in graph.graph.get_operations()}
  assert {f'action_{k}F{m}' for k in range(3) for m in range(_M)} <= scopes
  assert str(stack.engine.stages[2]) == 'stage 2 (stack.layers[2] to stack.layers[3])'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
