# SPDX-License-Identifier: Apache-2.0
"""The cut of models whose vocabulary is shared out; numbers of docs/schedules.md."""

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
}
# {model: {K: (balance with the softmax in the last stage, times that sharing is as fast)}}.
_EXPECTED = {
  'Llama 3.2 1B': {4: (0.990, 1.03), 8: (0.652, 1.47), 16: (0.326, 2.74)},
  'Gemma 3 1B': {4: (0.918, 1.11), 8: (0.459, 2.02), 16: (0.229, 3.85)},
  'Qwen 3 0.6B': {4: (0.957, 1.05), 8: (0.668, 1.40), 16: (0.334, 2.61)},
}


def _Work(name):
  """Returns the work of the embedding, the blocks, the last norm and the softmax, in FLOPs."""
  num_blocks, dim, num_classes, hidden_dim, heads, pairs, head_dim = _MODELS[name]
  weights = dim * head_dim * 2 * (heads + pairs) + 3 * dim * hidden_dim
  block = 2 * _TIME * weights + 2 * _TIME * _TIME * heads * head_dim  # Under a causal mask.
  flops = [0, *[block] * num_blocks, 0, 2 * _TIME * dim * num_classes]
  return stage_work.FromForward(flops, [True] * len(flops))


def _Step(work, ends, schedule):
  """Returns (balance of the devices, time of the step)."""
  busy = [0.0] * schedule.num_devices
  costs = stage_work.StageCosts(work, ends, schedule, 'stage')
  for device, cost in zip(schedule.stage_to_device, costs, strict=True):
    busy[device] += float(cost)
  result = simulator.Simulate(schedule, stage_work.SimulatorCosts(work, ends), remat_policy='stage')
  return sum(busy) / max(busy) / len(busy), result.makespan


@pytest.mark.parametrize('name', _MODELS)
@pytest.mark.parametrize('num_devices', [4, 8, 16])
def testModelsOfTodayAreBalanced(name, num_devices):
  work = _Work(name)
  schedule = schedules.Get('1f1b', num_devices, 4 * num_devices)
  ends = partitioner.PartitionStages(stage_work.CutCosts(work, schedule, 'stage'))
  balance_of_one, time_of_one = _Step(work, ends, schedule)
  schedule = shared_vocabulary.Share(schedule)
  ends, sizes = vocabulary_cut.Cut(work, None, schedule, 'stage', _MODELS[name][2])
  with_slices = vocabulary_cut.WithSlices(work, sizes)
  all_ends = [*ends[:-1], *range(ends[-1] - 1, ends[-1] + num_devices)]
  balance, time = _Step(with_slices, all_ends, schedule)
  assert balance > 0.999
  _, of_shards = vocabulary_cut.Cut(work, None, schedule, 'stage', 128)
  assert _Step(vocabulary_cut.WithSlices(work, of_shards), all_ends, schedule)[0] > 0.965
  assert (balance_of_one, time_of_one / time) == pytest.approx(
    _EXPECTED[name][num_devices], abs=0.006
  )


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
