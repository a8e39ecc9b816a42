# SPDX-License-Identifier: Apache-2.0
"""Skip connections between stages: random sequences, cuts, schedules and policies."""

import random
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import dropout, linear, sequential, skip
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import stage as stage_lib
from tests import graph_reader, naming
from tests.toys import faulty_layers, layers, random_layer, stacks

pytestmark = pytest.mark.optimized_graphs

_BATCH, _DIM = 4, layers.DIM
_SCHEDULES = ('gpipe', 'fused_fill_drain', '1f1b', '1f1b_fused', 'zb_h1')


def _Square(num_inputs=_DIM, num_outputs=_DIM):
  return layers.MatrixLayer.Params().Set(dims=(num_inputs, num_outputs))


def _MixExtras(x, *extras):
  """Returns x, into which everything else of any structure and dtype is mixed."""
  for extra in tf.nest.flatten(extras):
    if extra is not None:
      extra = tf.cast(extra, x.dtype)
      x += 0.1 * tf.sin(extra if extra.shape.rank == 1 else tf.reduce_sum(extra, -1))[:, None]
  return x


def _Fold():
  return layers.Without(_MixExtras)


def _Random(seed):
  """(Params of layers, cut, options): skips over any distance, each taken any number of times."""
  choose = random.Random(seed)
  sub = [skip.StashLayer.Params().Set(key='ids'), layers.TableLayer.Params().Set(dim=_DIM)]
  dim, known = _DIM, {'ids': None}
  for i in range(choose.randint(6, 9)):
    kind = choose.choice(('square', 'stash', 'pop', 'pop', 'drop', 'fold'))
    if kind == 'square':
      size = choose.choice((_DIM, _DIM, _DIM + 1))
      sub.append(_Square(dim, size))
      dim = size
    elif kind == 'stash':
      sub.append(skip.StashLayer.Params().Set(key=f'skip{i}'))
      known[f'skip{i}'] = dim
    elif kind == 'pop':
      key = choose.choice(sorted(known))
      combine = ['append'] + ['concat'] * (known[key] is not None) + ['add'] * (known[key] == dim)
      combine = choose.choice(combine)
      sub.append(skip.PopLayer.Params().Set(key=key, combine=combine))
      dim += known[key] if combine == 'concat' else 0
    elif kind == 'drop':
      sub.append(dropout.DropoutLayer.Params().Set(keep_prob=0.8))
    else:
      sub.append(_Fold())
  sub += [_Square(dim, _DIM), _Fold()]
  num_stages = choose.randint(2, 4)
  splits = sorted(choose.sample(range(1, len(sub)), num_stages - 1)) + [len(sub)]
  return (
    sub,
    {
      'num_stages': num_stages,
      'splits': splits,
      'schedule': choose.choice(_SCHEDULES),
      'remat_policy': choose.choice(rematerialisation.POLICIES),
    },
  )


def _Ids():
  return tf.constant(np.random.default_rng(3).integers(0, layers.VOCABULARY, [_BATCH]), tf.int32)


def _CheckTraining(sub, inputs, num_micro_batches=2, **options):
  side = stacks.ExampleWeights(_BATCH)
  stack = stacks.MakeStack(sub, num_micro_batches=num_micro_batches, **options)
  actual = stacks.Train(stack, inputs, side)
  expected = stacks.Reference(sub, num_micro_batches, inputs, side)
  stacks.CheckEqual(actual, expected)
  return stack


@pytest.mark.parametrize('seed', range(1, 4))
def testRandomSequencesWithSkipsTrain(seed):
  sub, options = _Random(seed)
  _CheckTraining(sub, (_Ids(),), **options)


def _FarSub():
  """x from the first stage to the second, third and (twice) fourth, y within the fourth."""
  return [
    *(_Square(), layers.Stash('x')),
    *(_Square(), layers.Pop('x', 'append'), _Fold()),
    *(layers.Pop('x', 'concat'), _Square(2 * _DIM, _DIM)),
    *(layers.Pop('x'), layers.Stash('y'), _Square(), layers.Pop('x'), layers.Pop('y')),
  ]


_FAR_SPLITS = [2, 5, 7, 12]


def _X(size=_BATCH):
  return layers.RandomInput(size, _DIM, seed=4)


def _CheckWays(sub, ways, **options):
  side = stacks.ExampleWeights(_BATCH)
  stack = stacks.MakeStack(sub, num_micro_batches=2, **options)
  stacks.CheckWays(stack, (_X(),), side, ways, stacks.Reference(sub, 2, (_X(),), side))
  return stack


def testASkipMayServeSeveralStages():
  # `except_last` has `stage` and `none`; zero bubble without recomputation is among the XLA cases.
  ways = [('gpipe', 'layer'), ('gpipe', 'except_last'), ('zb_h1', 'stage')]
  stack = _CheckWays(_FarSub(), ways, num_stages=4, splits=_FAR_SPLITS)
  stages = stack.engine.stages
  assert [s.exports for s in stages] == [('x',), (), (), ()]
  assert [s.imports for s in stages] == [(), ('x',), ('x',), ('x',)]


def testASkipMayLeadBetweenStagesOfOneDevice():
  options = {'num_stages': 4, 'stages_per_device': 2, 'schedule': 'looped_bfs'}
  ways = [('interleaved_1f1b', 'stage'), ('looped_bfs', 'stage')]
  _CheckWays(_FarSub(), ways, splits=_FAR_SPLITS, **options)


@pytest.mark.parametrize('schedule, policy', [('1f1b_fused', 'stage'), ('zb_h1', 'none')])
def testCompiledByXla(schedule, policy):
  _CheckWays(_FarSub(), [(schedule, policy)], num_stages=4, splits=_FAR_SPLITS, xla=True)


def testALayerMayTakeSkipsInAnyOrder():
  """Not sorted by name, and a name twice; the skips have equal shapes."""
  layer = random_layer.RandomLayer.Params().Set(weights=['w'])
  makes = {name: "('f',)" for name in ('b', 'c', 'a')}
  sub = [layer.Copy().Set(makes=makes), layer, layer.Copy().Set(takes=['c', 'a', 'b', 'a']), layer]
  ways = [('gpipe', policy) for policy in rematerialisation.POLICIES]
  for splits in ([2, 4], [3, 4]):  # From stage to stage, and within a stage.
    _CheckWays(sub, ways, num_stages=2, splits=splits)


def testASkipPassesByTheStagesBetween():
  sub = [layers.Stash('x'), _Square(), _Square(), _Square(), layers.Pop('x')]
  stack = _CheckTraining(sub, (_X(),), num_stages=4, splits=[2, 3, 4, 5])
  stages = stack.engine.stages
  assert [s.imports for s in stages] == [(), (), (), ('x',)]
  assert [s.exports for s in stages] == [('x',), (), (), ()]
  # The two in between take and give what they would without it, and share their functions.
  first, second = (stacks.StageFunctions(stack, s) for s in stages[1:3])
  assert first is second


def testAnIntegerInputMaySkipToAMiddleStage():
  """As docs/own_loop.md says: a tensor stashed at the front does not pass every stage."""
  sub = [layers.Stash('ids'), layers.Without(lambda ids, x: x), _Square()]
  sub += [layers.Pop('ids', 'append'), _Fold(), _Square()]
  stack = _CheckTraining(sub, (_Ids(), _X()), num_stages=3, splits=[3, 5, 6], schedule='1f1b')
  stages = stack.engine.stages
  assert [s.exports for s in stages] == [('ids',), (), ()]
  assert [s.imports for s in stages] == [(), ('ids',), ()]


def _Pack(x):
  """Returns a nest of floats, integers, bools and None."""
  positive = x[:, 0] > 0
  ids = tf.cast(positive, tf.int64) + 1
  return nested_map.NestedMap(flag=positive, ids=ids, none=None, rest=[tf.sin(x), None])


def _Unpack(x, *extras):
  """Returns floats that depend on the last of the nests."""
  nest = extras[0] if extras else x
  y = tf.where(nest.flag[:, None], nest.rest[0], 0.5 * nest.rest[0])
  return y * tf.cast(nest.ids, y.dtype)[:, None]


def testASkipMayHaveAnyStructure():
  pack, unpack = layers.Without(_Pack), layers.Without(_Unpack)
  sub = [
    _Square(),
    pack,
    layers.Stash('nest'),
    unpack,
    _Square(),
    layers.Pop('nest', 'append'),
    unpack,
  ]
  sub.append(_Square())
  ways = [('1f1b', 'layer'), ('zb_h1', 'except_last')]
  _CheckWays(sub, ways, num_stages=3, splits=[3, 5, 8])


@pytest.mark.parametrize(
  'splits, policy',
  [
    ([4], 'stage'),
    ([3, 4], 'none'),
    ([2, 4], 'except_last'),  # It has `none` too.
    ([1, 2, 4], 'stage'),
    ([1, 2, 3, 4], 'except_last'),
  ],
)
def testASkipTrainsUnderEveryCut(splits, policy):
  sub = [layers.Stash('x'), _Square(), layers.Pop('x', 'concat'), _Square(2 * _DIM, _DIM)]
  stack = _CheckTraining(sub, (_X(),), num_stages=len(splits), splits=splits, remat_policy=policy)
  is_within = splits[0] > 2
  assert any(s.exports for s in stack.engine.stages) != is_within


def testASkipMayBeNoneOrUnused():
  swap = layers.Without(lambda a, b: (b, a))  # A StashLayer takes the first argument.
  sub = [layers.Stash('unused'), _Square(), swap, layers.Stash('none'), swap, _Square()]
  sub.append(layers.Pop('none', 'append'))
  stack = stacks.MakeStack(sub, num_stages=2, splits=[5, 7], num_micro_batches=2)
  stack.Place(stacks.Devices(), *stacks.Specs((_X(), None)))
  y, none, popped = stack.Predict(_X(), None)
  assert none is None and popped is None
  w = [stack.layers[i].vars.w for i in (1, 5)]
  np.testing.assert_allclose(y, tf.tanh(tf.tanh(_X() @ w[0]) @ w[1]), rtol=1e-12)
  assert [s.exports for s in stack.engine.stages] == [('none',), ()]


def _FarSkip(pops=1, **options):
  """A skip from the first of four stages to the last, placed with a loss."""
  sub = [_Square(), layers.Stash('x'), _Square(), _Square(), *[layers.Pop('x')] * pops, _Square()]
  stack = stacks.MakeStack(
    sub, num_stages=4, splits=[2, 3, 4, len(sub)], num_micro_batches=2, **options
  )
  loss_fn = stacks.SquareLoss
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)), loss_fn=loss_fn)
  return stack


def _TrainGraphs(stack, tmp_path):
  """Returns the graphs that a training step executes."""
  args = (_X(),), tf.ones([_BATCH], tf.float64), tf.constant(1, tf.int64)
  step = stacks.StepFunction(stack)
  return graph_reader.ExecutedGraphs(lambda: step(*args), tmp_path)


def testASkipIsSentOnceAndStraight(tmp_path):
  """Also if two layers of the last stage take it; the tests below have one."""
  graphs = _TrainGraphs(_FarSkip(pops=2), tmp_path)
  ways = [('0F', 0, 1), ('0F', 0, 3), ('1F', 1, 2), ('2F', 2, 3)]
  ways += [('1B', 1, 0), ('2B', 2, 1), ('3B', 3, 0), ('3B', 3, 2)]
  assert graph_reader.Sends(graphs) == sorted((f'{a}{m}', i, j) for a, i, j in ways for m in (0, 1))
  # Freed at its last use: nobody but the forward and backward that need it has it.
  takers = graph_reader.Takers(graphs)
  assert takers['0F1', 0, 3] == [['3B1', '3F1']]
  assert takers['3B1', 3, 0] == [['0B1']]


@pytest.mark.parametrize(
  'schedule, policy',
  [
    *(('gpipe', 'layer'), ('zb_h1', 'stage'), ('1f1b_fused', 'except_last')),
  ],
)
def testASkipIsSentOnceUnderOtherSchedulesAndPolicies(schedule, policy, tmp_path):
  stack = _FarSkip(schedule=schedule, remat_policy=policy)
  graphs = _TrainGraphs(stack, tmp_path)
  sends = graph_reader.Sends(graphs)
  assert [way for way in sends if way[1:] == (0, 3)] == [('0F0', 0, 3), ('0F1', 0, 3)]
  # Its gradient too; the end of the last weight gradient is only waited for.
  assert len([way for way in sends if way[1:] == (3, 0) and way[0][1] != 'W']) == 2
  # Freed at its last use: only actions of its own micro-batch have it.
  (takers,) = graph_reader.Takers(graphs)['0F1', 0, 3]
  assert takers and all(name[0] == '3' and name[-1] == '1' for name in takers)


def testEvaluationFreesASkipAfterItsLastForward(tmp_path):
  """There is no backward that would hold it longer, under any policy of recomputation."""
  stack = _FarSkip(schedule='1f1b', remat_policy='none')
  args = (_X(),), tf.ones([_BATCH], tf.float64)
  step = tf.function(lambda *args: stacks.Evaluate(stack, *args), autograph=False)
  graphs = graph_reader.ExecutedGraphs(lambda: step(*args), tmp_path)
  ways = [('0F', 0, 1), ('0F', 0, 3), ('1F', 1, 2), ('2F', 2, 3)]
  assert graph_reader.Sends(graphs) == sorted((f'{a}{m}', i, j) for a, i, j in ways for m in (0, 1))
  takers = graph_reader.Takers(graphs)
  assert [takers[f'0F{m}', 0, 3] for m in (0, 1)] == [[['3F0']], [['3F1']]]


# ---- the other entrances -----------------------------------------------------------------


@pytest.mark.parametrize('seed', [None, 1])
def testGradientsOfSkipsUnderAUsersTapeAreEqual(seed):
  sub, options = (_FarSub(), {'num_stages': 4, 'splits': _FAR_SPLITS})
  x = _X(4)
  if seed is not None:
    sub, options = _Random(seed)
    options.update(schedule='gpipe', remat_policy='stage')
    x = _Ids()[:4]
  stack = stacks.MakeStack(sub, num_micro_batches=1, **options)
  stack.Place(stacks.Devices(), *stacks.Specs((x,)))
  p = sequential.SequentialLayer.Params().Set(name='stack', sub=sub, dtype=tf.float64)
  reference = layers.WithVariables(p.Set(random_seed=stacks.SEED))
  results = []
  for layer in (stack, reference):
    with tf.GradientTape() as tape, fprop_context.Scope(step=3):
      if x.dtype.is_floating:
        tape.watch(x)
      y = layer(x)
      loss = tf.reduce_sum(y**2)
    variables = layer.VariablesByPath()
    grads = tape.gradient(loss, (variables, x), unconnected_gradients='zero')
    results.append((y, *tf.nest.flatten(grads)))
  for a, b in zip(*results, strict=True):
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def testPredictAndEvaluate():
  sub = _FarSub()
  stack = stacks.MakeStack(sub, num_stages=4, num_micro_batches=2, splits=_FAR_SPLITS)
  x, side = _X(), stacks.ExampleWeights(_BATCH)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs((x,)),
    loss_fn=stacks.SquareLoss,
  )
  p = sequential.SequentialLayer.Params().Set(name='stack', sub=sub, dtype=tf.float64)
  reference = layers.WithVariables(p.Set(random_seed=stacks.SEED))
  y = reference(x)
  np.testing.assert_allclose(stack.Predict(x), y, rtol=1e-12)
  loss = stacks.SquareLoss(None, (y,), side)['loss'][0]
  sums = stacks.Evaluate(stack, (x,), side)['loss']
  np.testing.assert_allclose(sums[0] / sums[1], loss, rtol=1e-12)


# ---- plans -------------------------------------------------------------------------------


@pytest.mark.parametrize('seed', range(6))
def testPlansKnowTheShapes(seed):
  sub, options = _Random(seed)
  stack = stacks.MakeStack(sub, num_micro_batches=1, **options)
  cut = stack.MakeCut(tf.TensorSpec([_BATCH], tf.int32))
  layer = sequential.SequentialLayer.Params().Set(name='stack', sub=sub, dtype=tf.float64)
  layer = layers.WithVariables(layer.Set(random_seed=1))
  args, skips = (_Ids(),), nested_map.NestedMap()
  for child, cost in zip(layer.layers, cut.layers, strict=True):
    outputs, stashed = child.FPropSkips(child.theta, skips, *args)
    skips.update(stashed)
    args = outputs if isinstance(outputs, tuple) else (outputs,)
    tf.nest.assert_same_structure(args, cost.out_specs)
    for tensor, spec in zip(tf.nest.flatten(args), tf.nest.flatten(cost.out_specs), strict=True):
      assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype), cost.path


def testSkipsTrainWithAnAutomaticCut():
  square = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  sub = [
    square,
    layers.Stash('a'),
    square,
    square,
    layers.Pop('a'),
    square,
    layers.Pop('a', 'concat'),
  ]
  stack = _CheckTraining(sub, (_X(),), num_stages=3, schedule='1f1b')
  assert len(stack.engine.stages) == 3


# ---- errors ------------------------------------------------------------------------------


def _Place(sub, **options):
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=1, splits=[2, len(sub)], **options)
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))
  return stack


def _Layers(*sub):
  return stacks.MakeStack(list(sub)).layers


def testAPopWithoutAStashIsRefused():
  names = naming.Naming('stack.layers[2]', "skip 'right'", 'left')
  with pytest.raises(ValueError, match=names):
    stage_lib.Skips(_Layers(layers.Stash('left'), _Square(), layers.Pop('right')), [3])
  with pytest.raises((KeyError, ValueError), match="'right'"):
    _Place([layers.Stash('left'), _Square(), layers.Pop('right')])


@pytest.mark.parametrize('last', [layers.Pop('a'), _Square()])
def testAnAnnouncedSkipThatFPropDoesNotReturnIsRefused(last):
  announces = faulty_layers.AnnouncesASkip.Params()
  names = naming.Naming('stack.layers[0]', 'skips_out', ['a'], [])
  with pytest.raises(ValueError, match=names) as e:
    _Place([announces, _Square(), last])
  assert 'stack.layers[0]' in ' '.join([str(e.value), *getattr(e.value, '__notes__', [])])


def testAPopBeforeItsStashIsRefused():
  names = naming.Naming('stack.layers[0]', "skip 'a'", 'none')
  with pytest.raises(ValueError, match=names):
    stage_lib.Skips(_Layers(layers.Pop('a'), _Square(), layers.Stash('a')), [1, 3])


def testTwoStashesOfOneKeyAreRefused():
  for second in (1, 3):
    sub = [layers.Stash('a'), _Square(), _Square(), _Square(), layers.Pop('a')]
    sub[second] = layers.Stash('a')
    names = naming.Naming(f'stack.layers[{second}]', 'stack.layers[0]', "skip 'a'")
    with pytest.raises(ValueError, match=names):
      _Place(sub)


def testASkipOfAnotherShapeIsRefused():
  sub = [layers.Stash('a'), _Square(_DIM, _DIM + 1), layers.Pop('a')]
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', 'skip', (4, 3), (4, 4))):
    _Place(sub).Predict(_X())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
