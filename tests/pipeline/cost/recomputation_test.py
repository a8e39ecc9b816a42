# SPDX-License-Identifier: Apache-2.0
"""The choice of what each stage recomputes, against all choices that there are."""

import fractions
import itertools
import random
import sys

import pytest

from lingvo_gpipe.pipeline.cost import partitioner, recomputation, stage_memory, stage_work
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules

_LAYERS, _M = 4, 3


def _Case(seed, schedule='1f1b', num_stages=2):
  """Random layers with the options of a layer that has one part, and their work."""
  rng = random.Random(seed)
  layers, work = [], []
  for i in range(_LAYERS):
    inner, part = rng.randint(10, 90), rng.randint(1, 9)
    options = (
      stage_memory.Option(None, 0, fractions.Fraction(1), inner),
      stage_memory.Option(frozenset(), 20 + part, fractions.Fraction(0), 0),
      stage_memory.Option(frozenset({'part'}), 20, fractions.Fraction(rng.randint(0, 3), 10), part),
    )
    inputs, state = rng.randint(1, 9), rng.randint(0, 50)
    layers.append(stage_memory.LayerBytes(state, inputs, inner, options=options))
    forward = rng.randint(1, 9)
    work.append(stage_work.LayerWork(forward, forward if i else 0, forward, True))
  return layers, work, schedules.Get(schedule, num_stages, _M)


def _All(layers, work, schedule, stage, start, end):
  """Yields (policy, recomputed work, activations) of all policies of a stage."""
  count = sum(a.stage == stage and a.kind in 'BI' for row in schedule.actions for a in row)
  forward = sum(w.forward for w in work[start:end])
  for policy in rematerialisation.POLICIES:
    memory = stage_memory.StageMemory(layers, schedule, policy)
    again = {'none': 0, 'except_last': count - bool(count)}.get(policy, count) * forward
    yield policy, again, memory.Activations(stage, start, end)
  memory = stage_memory.StageMemory(layers, schedule, rematerialisation.ByLayer(()))
  if count:
    for options in itertools.product(*(layer.options for layer in layers[start:end])):
      parts = zip(options, work[start:end], strict=True)
      again = count * sum(option.again * w.forward for option, w in parts)
      num_bytes = memory.Activations(
        stage,
        start,
        end,
        kept_bytes=sum(option.kept_bytes for option in options),
        working=max(option.working for option in options),
      )
      yield rematerialisation.ByLayer(tuple(x.recomputed for x in options)), again, num_bytes


def _Best(layers, work, schedule, limit, stage, start, end):
  """Returns the least recomputed work within the limit; None if nothing fits."""
  room = limit - sum(layer.state for layer in layers[start:end])
  choices = _All(layers, work, schedule, stage, start, end)
  return min((again for _, again, num_bytes in choices if num_bytes <= room), default=None)


@pytest.mark.parametrize('schedule', ['1f1b', 'gpipe', '1f1b_fused', 'zb_h1'])
@pytest.mark.parametrize('seed', range(3))
def testTheChoiceIsTheBestOfAll(seed, schedule):
  layers, work, schedule = _Case(seed, schedule)
  limits = [100, 150, 200, 300, 500, 900]
  for limit, stage in itertools.product(limits, range(2)):
    chooser = recomputation.Chooser(layers, work, limit, schedule)
    for start, end in ((0, _LAYERS), (1, 3), (2, _LAYERS)):
      choice = chooser.Choose(stage, start, end)
      best = _Best(layers, work, schedule, limit, stage, start, end)
      assert (choice is None) == (best is None)
      if choice is None:
        continue
      assert choice.again * chooser.unit == best
      room = limit - sum(layer.state for layer in layers[start:end])
      assert choice.activations <= room
      least = [
        num_bytes
        for policy, again, num_bytes in _All(layers, work, schedule, stage, start, end)
        if again == best and num_bytes <= room
      ]
      assert choice.activations in least


@pytest.mark.parametrize('seed', range(5))
def testTheCutIsTheBestOfAll(seed):
  layers, work, schedule = _Case(100 + seed)
  for limit in (150, 250, 400, 800):
    chooser = recomputation.Chooser(layers, work, limit, schedule)
    ends = chooser.Partition()
    costs = []
    for end in range(1, _LAYERS):
      spans = enumerate(partitioner.StageRanges([end, _LAYERS]))
      stages = [(span, _Best(layers, work, schedule, limit, k, *span)) for k, span in spans]
      if all(again is not None for _, again in stages):
        costs.append(
          max(
            again + _M * sum(w.forward + w.input_gradient + w.weight_gradient for w in work[a:b])
            for (a, b), again in stages
          )
        )
    assert (ends is None) == (not costs)
    if ends is not None:
      spans = enumerate(partitioner.StageRanges(ends))
      assert max(chooser.Cost(k, *span) for k, span in spans) * chooser.unit == min(costs)


def testMoreMemoryIsNeverMoreWork():
  layers, work, schedule = _Case(7, 'gpipe')
  last = None
  for limit in range(100, 1200, 25):
    chooser = recomputation.Chooser(layers, work, limit, schedule)
    choice = chooser.Choose(0, 0, _LAYERS)
    again = None if choice is None else choice.again * chooser.unit
    assert last is None or (again is not None and again <= last)
    last = again
  assert last == 0


def testManyDifferentLayersAreChosenNearTheBest():
  """With thinned fronts the choice may recompute a little more, but keeps the limit."""
  rng = random.Random(3)
  layers, work = [], []
  for i in range(40):
    inner = rng.randint(10**4, 10**5)
    options = (
      stage_memory.Option(None, 0, fractions.Fraction(1), inner),
      stage_memory.Option(frozenset(), rng.randint(10**4, 10**5), fractions.Fraction(0), 0),
    )
    layers.append(stage_memory.LayerBytes(0, 100, inner, options=options))
    work.append(stage_work.LayerWork(rng.randint(10**4, 10**5), int(i > 0), 1, True))
  limit = 8 * 10**5
  chooser = recomputation.Chooser(layers, work, limit, schedules.Get('1f1b', 1, 2))
  choice = chooser.Choose(0, 0, 40)
  assert choice.activations <= limit
  # By fractions of layers, those first of which a byte saves the most: with the same bytes for what
  # is computed again no choice can be better.
  room, again = limit - 40 * 2 * 100 - choice.working, sum(w.forward for w in work)
  ratios = sorted(
    zip(work, layers, strict=True), key=lambda x: -x[0].forward / x[1].options[1].kept_bytes
  )
  for w, x in ratios:
    share = min(1, room / x.options[1].kept_bytes)
    again -= share * w.forward
    room -= share * x.options[1].kept_bytes
  assert 2 * again <= choice.again * chooser.unit <= 2 * again * 1.05


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
