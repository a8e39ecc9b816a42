# SPDX-License-Identifier: Apache-2.0
"""Predicted memory: equals the simulator's and GPipe's formula, and is near a process's memory."""

import random
import sys

import pytest

from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_memory
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import processes

_SCHEDULES = [
  ('gpipe', 3, 4, 3),
  ('fused_fill_drain', 3, 4, 3),
  ('1f1b', 3, 5, 3),
  ('1f1b_fused', 2, 3, 2),
  ('zb_h1', 3, 4, 3),
  ('interleaved_1f1b', 4, 4, 2),
  ('gpipe', 1, 2, 1),
]


def _Layers(seed, num_layers=9):
  draw = random.Random(seed).randint
  return [
    stage_memory.LayerBytes(draw(0, 9), draw(0, 9), draw(0, 9), *_SKIPS.get(i, ()))
    for i in range(num_layers)
  ]


# Layer 1 begins a skip that layers 4 and 7 take.
_SKIPS = {1: ({}, ('s',)), 4: ({'s': 5}, ()), 7: ({'s': 5}, ())}


def _Simulated(layers, schedule, policy, ends):
  """Returns the simulator's peaks of the stages, with all layers trained."""
  ranges = partitioner.StageRanges(ends)
  skips = [5 * (a > 1 and (a <= 4 < b or a <= 7 < b)) for a, b in ranges]
  inner = [sum(x.inner for x in layers[a:b]) for a, b in ranges]
  layer_inputs = [sum(x.inputs for x in layers[a + 1 : b]) for a, b in ranges]
  sizes = simulator.ActivationSizes(
    stage_input=[layers[a].inputs + s for (a, _), s in zip(ranges, skips, strict=True)],
    inner=[i + o for i, o in zip(inner, layer_inputs, strict=True)],
    layer_inputs=layer_inputs,
    largest_layer=[max(x.inner for x in layers[a:b]) for a, b in ranges],
  )
  costs = simulator.Costs(1)
  return simulator.Simulate(schedule, costs, remat_policy=policy, sizes=sizes).peak_bytes


@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
@pytest.mark.parametrize('name, stages, m, devices', _SCHEDULES)
def testPeaksEqualTheSimulators(name, stages, m, devices, policy):
  schedule = schedules.Get(name, stages, m, devices)
  for seed in range(5):
    layers = _Layers(seed)
    memory = stage_memory.StageMemory(layers, schedule, policy)
    ends = [*sorted(random.Random(seed).sample(range(1, 9), stages - 1)), 9]
    peaks = [memory.Activations(k, *r) for k, r in enumerate(partitioner.StageRanges(ends))]
    assert tuple(peaks) == _Simulated(layers, schedule, policy, ends)


@pytest.mark.parametrize('seed', range(5))
def testCandidatesForThePeakCoverTheOthers(seed):
  draw = random.Random(seed).randint
  held = list({stage_memory.Held(*(draw(0, 20) for _ in range(4))): None for _ in range(200)})
  expected = [x for x in held if not any(y != x and y.Covers(x) for y in held)]
  assert 1 < len(expected) < len(held)
  assert list(stage_memory.Maximal(held)) == expected


@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
def testRoomsEndAtTheLimit(policy):
  schedule = schedules.Get('1f1b', 3, 4)
  memory = stage_memory.StageMemory(_Layers(1), schedule, policy, first_trained=3)
  for limit in (0, 20, 60, 1000):
    for k, room in enumerate(memory.Rooms(limit)):
      for start, furthest in enumerate(room):
        for end in range(start + 1, 10):
          needs = memory.State(start, end) + memory.Activations(k, start, end)
          assert (needs <= limit) == (end <= furthest)


def testStagesOfOneDeviceShareTheLimit():
  layers = [stage_memory.LayerBytes(10, 0, 0)] * 4
  interleaved = schedules.Get('interleaved_1f1b', 4, 4, 2)
  assert stage_memory.StageMemory(layers, interleaved, 'stage').Rooms(20)[0] == [1, 2, 3, 4]
  assert stage_memory.StageMemory(layers, interleaved, 'stage').Rooms(19)[0] == [0, 1, 2, 3]


def testFollowsTheFormulaOfGpipe():
  # A mini-batch of 64 examples, 10 bytes between layers and 70 inside: N + L/K * N/M.
  for m in (1, 2, 4, 8, 16):
    for k in (1, 2, 4):
      size = 64 // m
      layers = [stage_memory.LayerBytes(0, 10 * size, 70 * size)] * 8
      memory = stage_memory.StageMemory(layers, schedules.Get('gpipe', k, m), 'stage')
      for stage in range(k):
        expected = 64 * 10 + (8 // k) * 64 // m * 70 + (8 // k - 1) * 64 // m * 10
        assert memory.Activations(stage, 0, 8 // k) == expected
      without = stage_memory.StageMemory(layers, schedules.Get('gpipe', k, m), 'none')
      assert without.Activations(0, 0, 8 // k) == 64 * (8 // k) * 80
      # 1F1B holds min(M, K - k) micro-batches.
      early = stage_memory.StageMemory(layers, schedules.Get('1f1b', k, m), 'stage')
      assert early.Activations(k - 1, 0, 1) == 80 * size


def testStagesBeforeTheFirstTrainedLayerHoldNothing():
  layers = [stage_memory.LayerBytes(0, 10, i) for i in (5, 7, 1)]
  schedule = schedules.Get('gpipe', 2, 8)
  memory = stage_memory.StageMemory(layers, schedule, 'stage', first_trained=2)
  assert memory.Activations(0, 0, 2) == 10 + 7
  assert memory.Activations(0, 0, 3) == 8 * 10 + 2 * 10 + 13


def testIsNearTheMemoryOfAFreshProcess(forks):
  """16 layers of 16 MiB results: with and without recomputation, within a factor of 2.5."""
  program = processes.Program('measure_stage_memory')
  done = forks.Run(program, '8', more_environment=processes.OPTIMIZED)
  lines = [x.split() for x in processes.Succeeded(done).stdout.splitlines() if 'RESULT' in x]
  results = {policy: (int(measured), int(predicted)) for _, policy, measured, predicted in lines}
  for measured, predicted in results.values():
    assert measured / 2.5 < predicted < 2.5 * measured, results
  assert results['none'][0] > 3 * results['stage'][0], results


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
