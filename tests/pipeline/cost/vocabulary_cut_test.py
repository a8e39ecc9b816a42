# SPDX-License-Identifier: Apache-2.0
"""The cut of models whose vocabulary is shared out; numbers of docs/schedules.md."""

import functools
import itertools
import random
import sys

import pytest

from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_work, vocabulary_cut
from lingvo_gpipe.pipeline.schedule import schedules, shared_vocabulary

_TIME = 4096
# {model: (blocks, dim, classes, feed-forward dim, heads, key and value heads, dim of a head)}.
_MODELS = {
  'Llama 3.2 1B': (16, 2048, 128_256, 8192, 32, 8, 64),
  'Gemma 3 1B': (26, 1152, 262_144, 6912, 4, 1, 256),
  'Qwen 3 0.6B': (28, 1024, 151_936, 3072, 16, 8, 128),
  'Qwen 3 1.7B': (28, 2048, 151_936, 6144, 16, 8, 128),
  'Qwen 3 4B': (36, 2560, 151_936, 9728, 32, 8, 128),
  'Qwen 3 8B': (36, 4096, 151_936, 12_288, 32, 8, 128),
}
# {(model, layers of a block): {K: (balance with the softmax in the last stage, with a shared one,
# times that the latter is as fast as the former with blocks of one layer)}}.
_EXPECTED = {
  ('Llama 3.2 1B', 1): {4: (0.990, 1, 1.03), 8: (0.652, 1, 1.47), 16: (0.326, 1, 2.74)},
  ('Gemma 3 1B', 1): {4: (0.918, 1, 1.11), 8: (0.459, 1, 2.02), 16: (0.229, 1, 3.85)},
  ('Qwen 3 0.6B', 1): {4: (0.957, 1, 1.05), 8: (0.668, 1, 1.40), 16: (0.334, 1, 2.61)},
  ('Qwen 3 1.7B', 1): {4: (0.925, 1, 1.07), 8: (0.785, 1, 1.20), 16: (0.393, 1, 2.19)},
  ('Qwen 3 4B', 1): {4: (0.983, 1, 0.97), 8: (0.983, 0.983, 0.94), 16: (0.743, 0.819, 1.08)},
  ('Qwen 3 4B', 2): {4: (0.983, 1, 0.97), 8: (0.983, 1, 0.97), 16: (0.743, 0.932, 1.18)},
  ('Qwen 3 4B', 3): {4: (0.983, 1, 0.97), 8: (0.983, 1, 0.96), 16: (0.743, 1, 1.23)},
  ('Qwen 3 8B', 1): {4: (0.974, 1, 0.97), 8: (0.974, 0.974, 0.95), 16: (0.812, 0.812, 1.00)},
  ('Qwen 3 8B', 2): {4: (0.974, 1, 0.97), 8: (0.974, 1, 0.98), 16: (0.821, 0.895, 1.08)},
  ('Qwen 3 8B', 3): {4: (0.977, 1, 0.97), 8: (0.974, 1, 0.96), 16: (0.821, 0.982, 1.13)},
}


def _Work(name, layers_per_block):
  """Returns the work of the embedding, the blocks, the last norm and the softmax, in FLOPs."""
  num_blocks, dim, num_classes, hidden_dim, heads, pairs, head_dim = _MODELS[name]
  projections = 2 * _TIME * dim * head_dim * 2 * (heads + pairs)
  attention = projections + 2 * _TIME * _TIME * heads * head_dim  # Under a causal mask.
  feed_forward = 2 * _TIME * 3 * dim * hidden_dim
  block = {
    1: [attention + feed_forward],
    2: [attention, feed_forward],
    # The gate and the projection to the hidden layer; the projection from it.
    3: [attention, feed_forward * 2 // 3, feed_forward // 3],
  }[layers_per_block]
  flops = [0, *block * num_blocks, 0, 2 * _TIME * dim * num_classes]
  return stage_work.FromForward(flops, [True] * len(flops))


def _Balance(work, ends, schedule):
  busy = [0.0] * schedule.num_devices
  costs = stage_work.StageCosts(work, ends, schedule, 'stage')
  for device, cost in zip(schedule.stage_to_device, costs, strict=True):
    busy[device] += float(cost)
  return sum(busy) / max(busy) / len(busy)


def _StepTime(work, ends, schedule):
  costs = stage_work.SimulatorCosts(work, ends)
  return simulator.Simulate(schedule, costs, remat_policy='stage').makespan


@functools.cache
def _Schedule(num_devices, is_shared):
  schedule = schedules.Get('1f1b', num_devices, 4 * num_devices)
  return shared_vocabulary.Share(schedule) if is_shared else schedule


def _CutOfOne(name, layers_per_block, num_devices):
  """Returns (work, ends, schedule) with the softmax in the last stage."""
  work, schedule = _Work(name, layers_per_block), _Schedule(num_devices, False)
  ends = partitioner.PartitionStages(stage_work.CutCosts(work, schedule, 'stage'))
  return work, ends, schedule


@functools.cache
def _TimeOfBlocks(name, num_devices):
  return _StepTime(*_CutOfOne(name, 1, num_devices))


@pytest.mark.parametrize(('name', 'layers_per_block'), _EXPECTED)
@pytest.mark.parametrize('num_devices', [4, 8, 16])
def testModelsOfTodayAreBalanced(name, layers_per_block, num_devices):
  work = _Work(name, layers_per_block)
  schedule = _Schedule(num_devices, True)
  ends, sizes = vocabulary_cut.Cut(work, None, schedule, 'stage', _MODELS[name][2])
  with_slices = vocabulary_cut.WithSlices(work, sizes)
  all_ends = [*ends[:-1], *range(ends[-1] - 1, ends[-1] + num_devices)]
  balance = _Balance(with_slices, all_ends, schedule)
  _, of_shards = vocabulary_cut.Cut(work, None, schedule, 'stage', 128)
  with_shards = vocabulary_cut.WithSlices(work, of_shards)
  assert _Balance(with_shards, all_ends, schedule) > 0.965 * balance
  balance_of_one = _Balance(*_CutOfOne(name, layers_per_block, num_devices))
  times_as_fast = _TimeOfBlocks(name, num_devices) / _StepTime(with_slices, all_ends, schedule)
  *balances, speed = _EXPECTED[name, layers_per_block][num_devices]
  assert [balance_of_one, balance] == pytest.approx(balances, abs=0.0006)
  assert times_as_fast == pytest.approx(speed, abs=0.006)


def testSlicesFillUpTheDevices():
  assert vocabulary_cut.SliceSizes([4, 4, 3, 3], 11, 1100) == [225, 225, 325, 325]
  assert vocabulary_cut.SliceSizes([9, 1, 2], 3, 300) == [1, 199, 100]
  assert vocabulary_cut.SliceSizes([0, 0, 0], 0, 8) == [3, 2, 3]
  assert vocabulary_cut.SliceSizes([5], 1, 7) == [7]
  # Slices of about the same size have the same, so that they share their traces.
  assert vocabulary_cut.SliceSizes([1.0001, 1, 2], 5, 3000) == [1200, 1200, 600]


def testNoOtherSizesMakeTheBusiestDeviceLessBusy():
  rng = random.Random(1)
  for _ in range(50):
    loads = [rng.randint(0, 6) for _ in range(3)]
    work, num_classes = rng.randint(1, 9), 12

    def Busiest(sizes, loads=loads, work=work, num_classes=num_classes):
      return max(a + work * n / num_classes for a, n in zip(loads, sizes, strict=True))

    sizes = vocabulary_cut.SliceSizes(loads, work, num_classes)
    assert sum(sizes) == num_classes and min(sizes) > 0
    triples = itertools.product(range(1, num_classes), repeat=3)
    best = min(Busiest(s) for s in triples if sum(s) == num_classes)
    assert Busiest(sizes) <= best + work / num_classes + (work + sum(loads)) / 3000


def testACutByHandIsKept():
  work = stage_work.FromForward([1, 1, 1, 1, 4], [True] * 5)
  schedule = shared_vocabulary.Share(schedules.Get('gpipe', 2, 2))
  assert vocabulary_cut.Cut(work, [1, 5], schedule, 'none', 40) == ([1, 5], [31, 9])


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
