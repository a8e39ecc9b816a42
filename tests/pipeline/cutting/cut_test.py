# SPDX-License-Identifier: Apache-2.0
"""The cut of a pipeline: costs of the layers, cuts, and the stage table."""

import itertools
import re
import sys

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe.layers import linear, sequential, transformer
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.cost import partitioner
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import stage_math
from tests import naming
from tests.toys import layers as toy_layers
from tests.toys import timed_layers


def _Layers(flops, num_weights=None):
  num_weights = num_weights or [0] * len(flops)
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [
    timed_layers.Measured.Params().Set(flops=f, num_weights=n)
    for f, n in zip(flops, num_weights, strict=True)
  ]
  return p.Instantiate().layers


_SETTINGS = hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
_SPEC = tf.TensorSpec([4, 8])


def _Make(layers, num_stages, schedule='gpipe', m=4, **options):
  schedule = schedules.Get(schedule, num_stages, m)
  return cut_lib.MakeCut(layers, [_SPEC], schedule=schedule, **options)


@pytest.mark.parametrize('num_stages', [1, 2, 3, 4, 6])
def testTheCutByFlopsIsThePartitioners(num_stages):
  flops = [1, 2, 3, 4, 5, 6]
  cut = _Make(_Layers(flops), num_stages)
  assert list(cut.ends) == list(partitioner.Partition(flops, num_stages))
  assert [s.start for s in cut.stages] == [0, *cut.ends[:-1]]
  assert [s.end for s in cut.stages] == list(cut.ends)
  assert [s.flops for s in cut.stages] == [sum(flops[s.start : s.end]) for s in cut.stages]
  assert sum(s.share for s in cut.stages) == pytest.approx(1)
  assert all(s.end > s.start for s in cut.stages)


def testCutsByParams():
  layers = _Layers([9, 1, 1, 1], num_weights=[1, 1, 1, 9])
  assert _Make(layers, 2).ends == (1, 4)
  by_params = _Make(layers, 2, by='params')
  assert by_params.ends == (3, 4)
  assert [s.num_params for s in by_params.stages] == [3, 9]
  # 4 units of work per weight, but the first layer does not compute the gradient of its input.
  assert [s.share for s in by_params.stages] == pytest.approx([11 / 47, 36 / 47])


def testSplitsOverrideTheSearch():
  cut = _Make(_Layers([1, 1, 1, 97]), 2, splits=[1, 4])
  assert cut.ends == (1, 4)
  assert [s.share for s in cut.stages] == pytest.approx([0.01, 0.99])


@pytest.mark.parametrize(
  'splits, words',
  [
    ([1, 2, 4], ['3 stages', 'num_stages is 2', 'leave splits empty']),
    ([1, 3], ['number of layers, 4', 'leave splits empty']),
    ([0, 4], ['stage 0', 'no layers']),
    ([4, 4], ['stage 1', 'no layers']),
  ],
)
def testBadSplitsAreErrors(splits, words):
  with pytest.raises(ValueError) as e:
    _Make(_Layers([1] * 4), 2, splits=splits)
  assert all(word in str(e.value) for word in words), e.value


def testOutputSpecsThatAreNotATupleAreNamed():
  single = timed_layers.Measured.Params().Set(flops=1, gives_tuple=False)
  p = sequential.SequentialLayer.Params().Set(name='seq', sub=[single] * 2)
  with pytest.raises(ValueError, match=naming.Naming('Measured', 'out_specs')) as e:
    _Make(p.Instantiate().layers, 2)
  assert 'seq.layers[0]' in ' '.join(e.value.__notes__)


def testErrorsNameThePipeline():
  p = pipelining_layer.PipeliningLayer.Params().Set(name='s', num_stages=2)
  p.sub = [timed_layers.Measured.Params().Set(flops=1)] * 2
  for splits, error in (([0, 2], ValueError), ([1, 'x'], TypeError), ([1, 2, 3], ValueError)):
    with pytest.raises(error, match=naming.Naming('s: splits')):
      p.Instantiate().MakeCut(_SPEC, splits=splits)
  with pytest.raises(ValueError, match=naming.Naming('s: memory_limit 1B', 's.layers[0]')):
    p.Copy().Set(memory_limit=1).Instantiate().MakeCut(_SPEC)


def testMoreStagesThanLayersIsAnError():
  with pytest.raises(ValueError, match=naming.Naming('5 stages', '4 layers')):
    _Make(_Layers([1] * 4), 5)
  p = pipelining_layer.PipeliningLayer.Params().Set(name='s', num_stages=3)
  p.sub = [timed_layers.Measured.Params().Set(flops=1)] * 2
  with pytest.raises(ValueError, match=naming.Naming('3 stages', '2 layers')):
    p.Instantiate().MakeCut(_SPEC)


def testAnUnknownCostOrPolicyIsRefused():
  with pytest.raises(ValueError, match=naming.Naming("'bytes'", 'flops', 'params', 'time')):
    _Make(_Layers([1]), 1, by='bytes')
  with pytest.raises(ValueError, match=naming.Naming("'some'", 'stage', 'except_last')):
    _Make(_Layers([1]), 1, remat_policy='some')


def testLayersWithoutCostAreSpreadEvenly():
  cut = _Make(_Layers([0] * 6), 3)
  assert cut.ends == (2, 4, 6)
  assert [s.share for s in cut.stages] == pytest.approx([1 / 3] * 3)
  assert 'balance 100.0%' in cut.Table()


def testEqualLayersAreMeasuredOnce():
  timed_layers.Measured.num_measured = 0
  layers = _Layers([7] * 50 + [8] * 50)
  costs = layer_costs.LayerCosts(layers, [_SPEC]).costs
  assert timed_layers.Measured.num_measured == 2
  assert [c.flops for c in costs] == [7] * 50 + [8] * 50
  assert [c.path for c in costs] == [f'seq.layers[{i}]' for i in range(100)]


def testEqualLayersWithOtherInputsAreMeasuredAgain():
  p = sequential.SequentialLayer.Params().Set(name='seq')
  square = linear.ProjectionLayer.Params().Set(input_dim=8, output_dim=8)
  p.sub = [square, square, linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)]
  costs = layer_costs.LayerCosts(p.Instantiate().layers, [tf.TensorSpec([3, 8])]).costs
  assert costs[0].flops == costs[1].flops
  assert costs[0].flops == costs[2].flops + 3 * 8  # The activation.
  twice = layer_costs.LayerCosts(p.Instantiate().layers, [tf.TensorSpec([6, 8])]).costs
  assert [c.flops for c in twice] == [2 * c.flops for c in costs]


def testFunctionsWithEqualNamesAreDifferentStructures():
  def Adder(number):
    return lambda x: x + number

  first, second = Adder(1), Adder(2)
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [timed_layers.Measured.Params().Set(fn=fn) for fn in (first, second, first)]
  keys = [stage_math.StructureKey(layer) for layer in p.Instantiate().layers]
  assert keys[0] != keys[1]
  assert keys[0] == keys[2]
  assert hash(keys[0]) == hash(keys[2])


def testNamesAreNotPartOfTheStructure():
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [timed_layers.Measured.Params().Set(name=name, flops=3) for name in ('a', 'b')]
  p.sub += [timed_layers.Measured.Params().Set(name='a', flops=4)]
  keys = [stage_math.StructureKey(layer) for layer in p.Instantiate().layers]
  assert keys[0] == keys[1]
  assert keys[0] != keys[2]


def testCuttingAllocatesNothing():
  p = sequential.SequentialLayer.Params().Set(name='seq')
  huge = 1_000_000
  p.sub = [linear.ProjectionLayer.Params().Set(input_dim=huge, output_dim=huge)] * 3
  layer = p.Instantiate()
  spec = tf.TensorSpec([1, huge])
  cut = cut_lib.MakeCut(layer.layers, [spec], schedule=schedules.Get('gpipe', 3, 2))
  assert [s.num_params for s in cut.stages] == [huge * huge] * 3
  with pytest.raises(ValueError, match=naming.Naming('seq', 'InstantiateVariables')):
    _ = layer.vars


def testSeveralStagesPerDeviceAndOtherSchedules():
  layers = _Layers([1, 1, 1, 1])
  cut = cut_lib.MakeCut(layers, [_SPEC], schedule=schedules.Get('interleaved_1f1b', 4, 4, 2))
  # (K - 1) / (v M + K - 1) = 1 / 9.
  assert cut.even_bubble == pytest.approx(1 / 9)
  table = cut.Table(['/device:CPU:0', '/device:CPU:1'])
  assert [line.split()[-1] for line in table.splitlines()[1:5]] == [
    f'device:CPU:{k}' for k in (0, 1, 0, 1)
  ]
  assert naming.AnyLineNames(table, '4 stages', 'K=2', 'M=4', 'interleaved_1f1b')
  # (K - 1) / (3 M + K - 1) with I and W of one unit each.
  assert cut_lib.MakeCut(
    layers, [_SPEC], schedule=schedules.Get('zb_h1', 4, 4)
  ).even_bubble == pytest.approx(3 / 15)


def testStagesMayBeOnAnyDevices():
  """A custom schedule may put stages on any devices: in a V, or unequal numbers per device."""
  vee = schedules.Schedule.FromText('0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0', 'v')
  cut = cut_lib.MakeCut(_Layers([1] * 4, num_weights=[1] * 4), [_SPEC], schedule=vee)
  table = cut.Table(['/device:CPU:0', '/device:CPU:1'])
  assert [line.split()[-1] for line in table.splitlines()[1:5]] == [
    f'device:CPU:{k}' for k in (0, 1, 1, 0)
  ]
  assert naming.AnyLineNames(table, '4 stages', 'K=2', 'M=1', 'v')
  # One device works at a time. A layer has F, R, I and W, but the first layer has no I.
  assert cut.simulated.busy == (7, 8)
  assert cut.bubble == pytest.approx(0.5)
  assert cut.speed_up == pytest.approx(1)


def testStagesOfOneDeviceShareTheMemoryLimit():
  uneven = schedules.Schedule.FromText('0F0,0B0\n1F0,2F0,2B0,1B0', 'uneven')
  layers = _Wide(4)

  def Cut(limit, **options):
    return cut_lib.MakeCut(layers, [_WIDE_SPEC], schedule=uneven, memory_limit=limit, **options)

  single, double = (
    cut_lib.MakeCut(layers[:n], [_WIDE_SPEC], schedule=schedules.Get('gpipe', 1, 1)) for n in (1, 2)
  )
  # The first stage has a device to itself and so room for two layers; the others share a device.
  assert double.memory[0].total <= 2 * single.memory[0].total
  cut = Cut(2 * single.memory[0].total)
  assert cut.ends == (2, 3, 4)
  assert [m.total for m in cut.memory] == [double.memory[0].total] + [single.memory[0].total] * 2
  with pytest.raises(
    ValueError, match=naming.Naming('2 stages of the device', 'stage 1 of splits')
  ):
    Cut(2 * single.memory[0].total, splits=[1, 3, 4])


def testTheTableShowsEveryStage():
  layers = _Layers([1_000_000, 2_000_000, 3_000_000], num_weights=[10, 1000, 100_000])
  cut = _Make(layers, 2, m=4)
  assert cut.ends == (2, 3)
  devices = [f'/job:localhost/replica:0/task:0/device:CPU:{i}' for i in range(2)]
  table = cut.Table(devices)
  head, first, second, summary, times, memory = table.splitlines()
  columns = 'stage layers from to params MFLOPs share idle weights activations device'
  assert head.split() == columns.split()
  cells = dict(zip(head.split(), first.split(), strict=True))
  # F, R, I and W, but the first layer has no I: 3 + 4 * 2 of 3 + 4 * 2 + 4 * 3 units per
  # micro-batch. Each weight has a gradient and two slots.
  assert cells == {
    'stage': '0',
    'layers': '2',
    'from': 'seq.layers[0]',
    'to': 'seq.layers[1]',
    'params': '1,010',
    'MFLOPs': '3.0',
    'share': f'{11 / 23:.1%}',
    'idle': f'{1 - 44 / (3 + 48 + 8):.1%}',
    'weights': '15.8KiB',
    'activations': '640B',  # Four times the input of 4 * 8 floats, and the second layer's.
    'device': 'device:CPU:0',
  }
  assert second.split()[:7] == '1 1 seq.layers[2] seq.layers[2] 100,000 3.0 52.2%'.split()
  assert second.split()[8:] == '1.5MiB 512B device:CPU:1'.split()
  # (K - 1) / (M + K - 1) = 1 / 5.
  assert cut.even_bubble == pytest.approx(0.2)
  assert cut.bubble == pytest.approx(1 - (44 + 48) / 2 / 59)
  assert cut.speed_up == pytest.approx((44 + 48) / 59)
  for text in ('K=2', 'M=4', 'remat_policy stage', 'balance 95.8% (by flops)', '101,010 param'):
    assert text in summary
  assert naming.Names(times, 'predicted', 'bubble 22.0%', '20.0%', 'equal', '1.56 times')
  assert naming.Names(memory, '2 optimizer slots')
  assert all(line == line.rstrip() for line in table.splitlines())
  assert cut.Table().splitlines()[1].split()[-1] == '-'


def testTheTableHasAtMost140Columns():
  p = linear.LinearLayer.Params().Set(input_dim=20_000, output_dim=20_000)
  q = sequential.SequentialLayer.Params().Set(name='a_rather_long_name_of_a_task', sub=[p] * 400)
  layers = q.Instantiate().layers
  cut = cut_lib.MakeCut(
    layers, [tf.TensorSpec([64, 20_000])], schedule=schedules.Get('1f1b', 4, 64)
  )
  table = cut.Table(['/job:localhost/replica:0/task:0/device:GPU:0'] * 4)
  assert max(map(len, table.splitlines())) <= 140
  assert table.splitlines()[1].split()[2] == '...' + layers[0].path[-17:]


def testAFusedLastStageTakesMoreLayers():
  # 4 units per layer, 3 in the fused stage: 12 and 16 layers have 48 units each.
  layers = _Layers([1] * 28, num_weights=[1] * 28)
  assert _Make(layers, 2, schedule='gpipe').ends == (14, 28)
  assert _Make(layers, 2, schedule='fused_fill_drain').ends == (12, 28)
  assert _Make(layers, 2, schedule='fused_fill_drain', remat_policy='none').ends == (14, 28)


def testFrozenLayersAreCheaper():
  layers = _Layers([1] * 9, num_weights=[1] * 9)
  # Layers before layer 6 have no backward: 6 units, then F, R, W and twice F, R, I, W.
  weights = layer_costs.Weights(is_trained=lambda path: path[-4] in '678')
  cut = _Make(layers, 2, weights=weights)
  assert cut.ends == (6, 9)
  assert [s.share for s in cut.stages] == pytest.approx([6 / 17, 11 / 17])
  assert _Make(layers, 2).ends == (5, 9)


def _Wide(num_layers, width=256):
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [linear.LinearLayer.Params().Set(input_dim=width, output_dim=width)] * num_layers
  return p.Instantiate().layers


_WIDE_SPEC = tf.TensorSpec([64, 256])


def _MakeWide(layers, num_stages, schedule='gpipe', m=4, spec=_WIDE_SPEC, **options):
  schedule = schedules.Get(schedule, num_stages, m)
  return cut_lib.MakeCut(layers, [spec], schedule=schedule, **options)


def testPredictedMemoryOfStages():
  cut = _MakeWide(_Wide(4), 2)
  weight, activation = 256 * 256 * 4, 64 * 256 * 4
  # Weight, accumulator and two slots; four stage inputs, the second layer's input, no inner ones.
  assert cut.memory == (cut_lib.StageBytes(2 * 4 * weight, 5 * activation),) * 2
  assert [m.total for m in cut.memory] == [8 * weight + 5 * activation] * 2
  frozen = layer_costs.Weights(is_trained=lambda path: '[3]' in path, slots_per_weight=1)
  cut = _MakeWide(_Wide(4), 2, weights=frozen)
  assert cut.ends == (3, 4)
  assert [m.state for m in cut.memory] == [3 * weight, 3 * weight]
  assert [m.activations for m in cut.memory] == [activation, 4 * activation]


def testAMemoryLimitMovesTheCut():
  layers = _Wide(6)
  free = _MakeWide(layers, 3, schedule='1f1b')
  needs = [m.total for m in free.memory]
  assert free.ends == (2, 4, 6)
  assert _MakeWide(layers, 3, schedule='1f1b', memory_limit=max(needs)).ends == (2, 4, 6)
  # Later stages hold fewer micro-batches (3, 2, 1), so layers that do not fit move to them.
  options = dict(schedule='1f1b', remat_policy='none', spec=tf.TensorSpec([4096, 256]))
  free = _MakeWide(layers, 3, **options)
  limit = free.memory[0].total - 1
  cut = _MakeWide(layers, 3, memory_limit=limit, **options)
  assert (free.ends, cut.ends) == ((2, 4, 6), (1, 3, 6))
  assert all(m.total <= limit for m in cut.memory)


def testOptimizerSlotsMoveTheCut():
  """With SGD the balanced cut fits into memory; with Adam a layer has to move."""
  layers = _Layers([1] * 4, num_weights=[3000, 1000, 1000, 1000])

  def Cut(optimizer_class, **options):
    slots = optimizer_class.Params().Instantiate().SlotsPerWeight()
    return _Make(layers, 2, weights=layer_costs.Weights(slots_per_weight=slots), **options)

  free = Cut(optimizer.Adam)
  limit = free.memory[0].total - 1
  assert (free.ends, Cut(optimizer.SGD, memory_limit=limit).ends) == ((2, 4), (2, 4))
  assert Cut(optimizer.Adam, memory_limit=limit).ends == (1, 4)


def testAMemoryLimitThatNoCutKeepsIsAnError():
  needs = _MakeWide(_Wide(6), 3).memory[0].total
  with pytest.raises(ValueError) as e:
    _MakeWide(_Wide(6), 3, memory_limit=needs - 1)
  for words in ('no cut into 3 stages', 'stage 0', 'seq.layers[0] to seq.layers[1]', f'{needs:,}'):
    assert words in str(e.value)
  for words in ('more stages', 'micro-batches', 'remat_policy', '2.0MiB of weights'):
    assert words in str(e.value)
  with pytest.raises(
    ValueError, match=naming.Naming('stage 2 of splits', 'seq.layers[2]', 'seq.layers[5]')
  ):
    _MakeWide(_Wide(6), 3, splits=[1, 2, 6], memory_limit=needs)
  assert _MakeWide(_Wide(6), 3, splits=[2, 4, 6], memory_limit=needs).ends == (2, 4, 6)


@_SETTINGS
@hypothesis.given(st.data())
def testCutsUnderALimitEqualBruteForce(data):
  """With shapes that change along the layers, frozen layers and a fused last stage."""
  num_layers = data.draw(st.integers(2, 5))
  widths = data.draw(
    st.lists(st.sampled_from([1, 2, 16]), min_size=num_layers + 1, max_size=num_layers + 1)
  )
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [
    linear.LinearLayer.Params().Set(input_dim=a, output_dim=b)
    for a, b in itertools.pairwise(widths)
  ]
  layers = p.Instantiate().layers
  frozen = data.draw(st.sets(st.integers(0, num_layers - 1)))
  num_stages = data.draw(st.integers(1, min(3, num_layers)))
  name = data.draw(st.sampled_from(['gpipe', 'fused_fill_drain', '1f1b']))
  options = dict(
    schedule=schedules.Get(name, num_stages, 3),
    remat_policy=data.draw(st.sampled_from(rematerialisation.POLICIES)),
    weights=layer_costs.Weights(is_trained=lambda path: int(path[11]) not in frozen),
  )
  specs = [tf.TensorSpec([8, widths[0]])]

  def Cut(**more):
    return cut_lib.MakeCut(layers, specs, **options, **more)

  def Slowest(cut):
    return max(cut.simulated.busy)

  ends = itertools.combinations(range(1, num_layers), num_stages - 1)
  cuts = [Cut(splits=[*e, num_layers]) for e in ends]
  limit = data.draw(st.sampled_from(sorted({max(m.total for m in c.memory) for c in cuts})))
  fitting = [c for c in cuts if max(m.total for m in c.memory) <= limit]
  cut = Cut(memory_limit=limit)
  assert max(m.total for m in cut.memory) <= limit
  assert Slowest(cut) == min(map(Slowest, fitting))


def testABrokenLayerIsNamedAndItsErrorKeepsItsType():
  p = sequential.SequentialLayer.Params().Set(name='seq')
  p.sub = [
    timed_layers.Measured.Params(),
    toy_layers.Without(lambda x: 1 / 0),
  ]
  with pytest.raises(ZeroDivisionError) as e:
    layer_costs.LayerCosts(p.Instantiate().layers, [_SPEC])
  assert any('seq.layers[1] (NoWeightsLayer)' in note for note in e.value.__notes__), (
    e.value.__notes__
  )


def testPartitionSequentialLayersReturnsSplits():
  p = sequential.SequentialLayer.Params().Set(name='seq', repeat=2)
  p.sub = [timed_layers.Measured.Params().Set(flops=f) for f in (1, 2, 3)]
  splits = pipelining_layer.PartitionSequentialLayers(p, 2, _SPEC)
  assert splits == [3, 6]
  flat = [timed_layers.Measured.Params().Set(flops=f) for f in (1, 2, 3, 4, 5, 6)]
  assert pipelining_layer.PartitionSequentialLayers(flat, 2, _SPEC) == [4, 6]
  q = pipelining_layer.PipeliningLayer.Params().Set(name='s', num_stages=2, sub=[p], splits=splits)
  assert q.Instantiate().MakeCut(_SPEC).ends == (3, 6)


def testPartitionSequentialLayersOfTransformers():
  block = transformer.TransformerLayer.Params().Set(input_dim=8, hidden_dim=16, num_heads=2)
  p = sequential.SequentialLayer.Params().Set(name='seq', sub=[block], repeat=8)
  spec = tf.TensorSpec([2, 4, 8])
  assert pipelining_layer.PartitionSequentialLayers(p, 4, spec) == [2, 4, 6, 8]
  # Paddings as a second argument.
  assert pipelining_layer.PartitionSequentialLayers(p, 2, spec, tf.TensorSpec([2, 4])) == [4, 8]


@pytest.mark.parametrize('batch_dim', [0, 1])
def testTheCutIsForTheLargestMicroBatch(batch_dim):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='s', num_micro_batches=4, batch_dim=batch_dim
  )
  p.sub = [linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)]
  shape = [7, 3, 8] if batch_dim == 0 else [3, 7, 8]
  cut = p.Instantiate().MakeCut(tf.TensorSpec(shape))
  assert cut.layers[0].flops == 2 * 2 * 3 * 8 * 8
  assert cut.num_micro_batches == 4
  assert re.search(r'M=4', cut.Table())


# ---- recomputation within a memory limit ---------------------------------------------------------


def _Blocks(num_layers=6):
  block = transformer.TransformerLayer.Params().Set(
    input_dim=8, hidden_dim=16, num_heads=2, is_causal=True
  )
  return pipelining_layer.PipeliningLayer.Params().Set(
    name='net', sub=[block] * num_layers, num_stages=2, num_micro_batches=4, xla=False
  )


def _AutoCut(limit=0, **options):
  p = _Blocks().Set(remat_policy='auto', memory_limit=limit, **options)
  return p.Instantiate().MakeCut(tf.TensorSpec([8, 16, 8]))


def testEachStageRecomputesTheLeastThatKeepsTheLimit():
  fixed = {
    policy: _Blocks().Set(remat_policy=policy).Instantiate().MakeCut(tf.TensorSpec([8, 16, 8]))
    for policy in rematerialisation.POLICIES
  }
  low = max(m.total for m in fixed['layer'].memory)
  high = max(m.total for m in fixed['none'].memory)
  cuts, times = [], []
  for limit in (low, *(low + (high - low) * i // 20 for i in (1, 2, 3)), high):
    cut = _AutoCut(limit)
    cuts.append(cut)
    assert max(m.total for m in cut.memory) <= limit
    times.append(cut.simulated.makespan)
    for other in fixed.values():
      if max(m.total for m in other.memory) <= limit:
        assert times[-1] <= other.simulated.makespan
  assert times == sorted(times, reverse=True)
  assert len(set(times)) > 3 and times[-1] == fixed['none'].simulated.makespan
  middle = cuts[2]
  assert any(isinstance(policy, rematerialisation.ByLayer) for policy in middle.policy)
  head, first = middle.Table().splitlines()[:2]
  assert head.endswith('recomputes') and str(middle.policy[0]) in first


def testWithoutALimitNothingIsRecomputed():
  cut = _AutoCut()
  assert cut.policy == cut.remat_policy == 'none' and 'recomputes' not in cut.Table()


@pytest.mark.parametrize('splits, stage', [([], 'stage 0'), ([2, 6], 'stage 1')])
def testALimitThatNoChoiceKeepsNamesTheStage(splits, stage):
  with pytest.raises(ValueError, match=naming.Naming('net', 'memory_limit 1000B', stage)):
    _AutoCut(1000, splits=splits)


def testAChoiceForACutByHandKeepsIt():
  free = _AutoCut(10**9, splits=[2, 6])
  cut = _AutoCut(max(m.total for m in free.memory) - 8192, splits=[2, 6])
  assert cut.ends == (2, 6) and 'none' in cut.policy and len({*map(str, cut.policy)}) == 2


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
