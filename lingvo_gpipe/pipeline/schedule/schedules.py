# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules by name: the functions that make them, and the look-up.

K devices, S stages, M micro-batches. A new schedule is one registered function, here or in any
module that the program imports. This one runs one micro-batch after the other:

    from lingvo_gpipe import schedules

    Action, Kind = schedules.Action, schedules.Kind

    @schedules.Register('one_by_one')
    def OneByOne(num_stages, num_micro_batches, num_devices):
      rows = []  # For each device its actions, in order.
      for k in range(num_stages):
        row = []
        for m in range(num_micro_batches):
          row += [Action(k, Kind.FORWARD, m), Action(k, Kind.BACKWARD, m)]
        rows.append(row)
      owners = range(num_stages)  # For each stage its device.
      return schedules.Schedule('one_by_one', num_stages, num_micro_batches, rows, owners)

    print(schedules.Get('one_by_one', 2, 2).Picture())

`Get` checks the result (`Schedule.Validate`). `Schedule.FromText` parses a schedule that is written
out by hand.

In the table, idle is the share of a step that a device idles if all stages are equal and
B = 2 F = 2 I = 2 W, and held is `Schedule.PeakActivations`. Formulas: Narayanan et al. 2021 (1F1B,
interleaving), the zero-bubble paper, Qi et al. 2023 (zb_*, interleaved_zb), its sequel on memory,
Qi et al. 2024 (v_*), and DeepSeek-V3 (dualpipe_v).

| name | stages per device | idle | micro-batches held by stage k |
| --- | --- | --- | --- |
| gpipe | 1 | (K-1)/(M+K-1) | M |
| fused_fill_drain | 1 | as gpipe | M, last stage 1 |
| 1f1b | 1 | (K-1)/(M+K-1) | min(M, K-k) |
| 1f1b_fused | 1 | as 1f1b | min(M, K-k), last stage 1 |
| interleaved_1f1b | v >= 2 | (K-1)/(vM+K-1) | device d, of v stages: min(Mv, 2(K-1-d)+(v-1)K+1) |
| looped_bfs | v >= 1 | (K-1)/(vM+K-1), M >= K | M |
| zb_h1 | 1 | (K-1)/(3M+K-1), M >= K | min(M, K-k) until I, up to k more until W: min(M, K) |
| zb_2p | 1 | (K-1)/(3M+K-1), M >= 2K-1 | min(M, 2K-1) |
| interleaved_zb | v >= 2 | (K-1)/(3vM+K-1) | a device: vK |
| zb_v | 2 | (K-1)/(6M+K-1), M >= 2K-1 | a device: 2K |
| dualpipe_v | 2 | (K-1)/(6M+K-1), M >= 2K | a device: 2K+1 |
| v_half | 2 | (3K-4)/(6M+3K-4), M >= K; even K > 2: 1 less | a device: 2(K div 2 + 1) |
| v_min | 2 | (4K-5)/(6M+4K-5), M >= K | a device: 2 ceil((K+2)/3) |
| forward_only | any | (K-1)/(vM+K-1), M >= K | 1 |
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pathlib
import pkgutil
from collections.abc import Callable, Sequence

from lingvo_gpipe.pipeline.schedule import actions, offload, orders
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind
Schedule = schedule_lib.Schedule
WithOffload = offload.WithOffload

# (num_stages, num_micro_batches, num_devices) -> Schedule.
Generator = Callable[[int, int, int], Schedule]
_GENERATORS: dict[str, Generator] = {}

# Schedules that need a multiple of K micro-batches.
IN_ROUNDS = ('interleaved_1f1b', 'interleaved_zb')

MAX_STAGES = 1024
MAX_MICRO_BATCHES = 1 << 16
# A step's graph has a function call for each stage and micro-batch, twice.
_MAX_CALLS = 1 << 18


def Register(name: str) -> Callable[[Generator], Generator]:
  """Returns a decorator that registers a function as the schedule `name`.

  Raises:
    ValueError: the name is registered already.
  """

  def Decorate(generator: Generator) -> Generator:
    if name in _GENERATORS:
      raise ValueError(f'Schedule {name!r} is registered already, by {_GENERATORS[name].__name__}')
    _GENERATORS[name] = generator
    return generator

  return Decorate


def Names() -> list[str]:
  """Returns the registered names, sorted."""
  return sorted(_GENERATORS)


def Description(name: str) -> str:
  """Returns the docstring of the function that makes the schedule of this name.

  Raises:
    KeyError: the name is unknown.
  """
  return inspect.getdoc(_Generator(name)) or ''


def Get(
  schedule: str | Schedule,
  num_stages: int,
  num_micro_batches: int,
  num_devices: int | None = None,
) -> Schedule:
  """Returns the valid schedule of this name and size.

  Args:
    schedule: a registered name, or a Schedule, which is checked and returned.
    num_stages: S.
    num_micro_batches: M.
    num_devices: K; by default one device per stage.

  Raises:
    KeyError: the name is unknown; the message suggests the closest names.
    ValueError: the name is `search`, which needs costs; the size is impossible, or the schedule is
      invalid or has another size.
    TypeError: `schedule` is neither a name nor a Schedule, or a registered function returned
      something else.
  """
  sizes = {'num_stages': num_stages, 'num_micro_batches': num_micro_batches}
  if num_devices is not None:
    sizes['num_devices'] = num_devices
  _CheckSizes(sizes)
  advice = (
    'make it for this size, or register a function that makes it for any size '
    f'(schedules.Register) and pass its name; known names: {", ".join(Names())}'
  )
  if isinstance(schedule, str):
    advice = f'the function that is registered as {schedule!r} must make the requested size'
    schedule = _Generator(schedule)(num_stages, num_micro_batches, num_devices or num_stages)
    sizes.pop('num_devices', None)  # A function may put its stages on fewer devices.
  if not isinstance(schedule, Schedule):
    raise TypeError(f'schedule: expected a name or a Schedule, got {schedule!r}')
  for name, value in sizes.items():
    if getattr(schedule, name) != value:
      raise ValueError(
        f'Schedule {schedule.name!r} has {name} {getattr(schedule, name)}, but {name} {value} is '
        f'requested; {advice}'
      )
  return schedule.Validate()


def TakesStagesPerDevice(name: str, count: int) -> bool:
  """Whether the schedule of this name can have `count` stages on each device, of two or more.

  Raises:
    KeyError: the name is unknown.
  """
  generator = _Generator(name)
  try:
    return generator(2 * count, 2, 2).num_devices == 2
  except ValueError:
    return False


def _Generator(name: str) -> Generator:
  """Returns the function registered under this name."""
  if name == 'search':
    raise ValueError(
      "Schedule 'search' depends on the times and bytes of the stages, which a name does not "
      'have: pass the schedule of schedule_search.Search(...), or one of: ' + ', '.join(Names())
    )
  if name not in _GENERATORS:
    close = difflib.get_close_matches(name, Names(), n=3, cutoff=0.5)
    hint = f'did you mean {" or ".join(map(repr, close))}? ' if close else ''
    raise KeyError(f'No schedule {name!r}: {hint}known names: {", ".join(Names())}')
  return _GENERATORS[name]


def GetForBatch(
  schedule: str | Schedule, num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
  """Like `Get`, but for a batch that may be small, such as the last batch of an epoch.

  `looped_bfs` replaces the schedules that need whole rounds of K micro-batches. It has the same
  stages on the same devices, so the result is equal.
  """
  if schedule in IN_ROUNDS and num_micro_batches % num_devices:
    schedule = 'looped_bfs'
  return Get(schedule, num_stages, num_micro_batches, num_devices)


def ForwardOnlyOn(stage_to_device: Sequence[int], num_micro_batches: int) -> Schedule:
  """Returns `forward_only` for stages on any devices.

  Args:
    stage_to_device: for each stage its device; each device from 0 to the last has a stage.
    num_micro_batches: M.
  """
  rows: list[list[Action]] = [[] for _ in range(max(stage_to_device) + 1)]
  for stage, device in enumerate(stage_to_device):
    rows[device] += orders.Series(stage, Kind.FORWARD, range(num_micro_batches))
  return Schedule('forward_only', len(stage_to_device), num_micro_batches, rows, stage_to_device)


def BubbleBound(num_stages: int, num_micro_batches: int) -> float:
  """Returns the idle share of a step of K equal stages, (K-1)/(M+K-1) (GPipe section 2.3)."""
  _CheckSizes({'num_stages': num_stages, 'num_micro_batches': num_micro_batches})
  return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def _CheckSizes(sizes: dict[str, int]) -> None:
  for name, value in sizes.items():
    if not schedule_lib.IsPositiveInteger(value):
      raise ValueError(f'{name}: expected a positive integer, got {value!r}')
  if sizes['num_stages'] * sizes['num_micro_batches'] > _MAX_CALLS:
    raise ValueError(
      f'num_stages * num_micro_batches must be at most {_MAX_CALLS}, got {sizes["num_stages"]} * '
      f'{sizes["num_micro_batches"]}: use fewer micro-batches'
    )


# One stage per device.


@Register('gpipe')
def GPipe(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """Forwards 0..M-1, then backwards M-1..0 (GPipe, figure 2c): fill and drain."""
  orders.CheckOneStageADevice('gpipe', num_stages, num_devices)
  rows = [
    orders.Series(stage, Kind.FORWARD, range(num_micro_batches))
    + orders.Series(stage, Kind.BACKWARD, reversed(range(num_micro_batches)))
    for stage in range(num_stages)
  ]
  return Schedule('gpipe', num_stages, num_micro_batches, rows, range(num_stages))


@Register('fused_fill_drain')
def FusedFillDrain(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """Forwards 0..M-1, then backwards 0..M-1; the last stage runs V as micro-batches arrive.

  V recomputes nothing, so with re-materialisation a layer costs 3 units in the last stage and 4 in
  the other stages.
  """
  orders.CheckOneStageADevice('fused_fill_drain', num_stages, num_devices)
  rows = [
    orders.Series(stage, Kind.FORWARD, range(num_micro_batches))
    + orders.Series(stage, Kind.BACKWARD, range(num_micro_batches))
    for stage in range(num_stages - 1)
  ]
  rows.append(orders.Series(num_stages - 1, Kind.FORWARD_BACKWARD, range(num_micro_batches)))
  return Schedule('fused_fill_drain', num_stages, num_micro_batches, rows, range(num_stages))


@Register('1f1b')
def OneForwardOneBackward(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """K-1-k forwards at stage k, then one F and one B in turn (PipeDream-Flush, DAPPLE)."""
  orders.CheckOneStageADevice('1f1b', num_stages, num_devices)
  rows = [
    _OneForwardOneBackward(stage, Kind.BACKWARD, num_stages, num_micro_batches)
    for stage in range(num_stages)
  ]
  return Schedule('1f1b', num_stages, num_micro_batches, rows, range(num_stages))


@Register('1f1b_fused')
def FusedOneForwardOneBackward(
  num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
  """1F1B with V in the last stage, in which each B directly follows its F anyway."""
  orders.CheckOneStageADevice('1f1b_fused', num_stages, num_devices)
  rows = [
    _OneForwardOneBackward(stage, Kind.BACKWARD, num_stages, num_micro_batches)
    for stage in range(num_stages - 1)
  ]
  rows.append(orders.Series(num_stages - 1, Kind.FORWARD_BACKWARD, range(num_micro_batches)))
  return Schedule('1f1b_fused', num_stages, num_micro_batches, rows, range(num_stages))


@Register('zb_h1')
def ZeroBubbleH1(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """1F1B with a split backward: stage k runs the W of micro-batch j right after the I of j+k.

  Earlier stages get their gradient without waiting for W, and W fills the idle time at the end.
  """
  orders.CheckOneStageADevice('zb_h1', num_stages, num_devices)
  rows = []
  for stage in range(num_stages):
    row = _OneForwardOneBackward(stage, Kind.INPUT_GRADIENT, num_stages, num_micro_batches)
    rows.append(orders.DelayWeightGradients(row, stage))
  return Schedule('zb_h1', num_stages, num_micro_batches, rows, range(num_stages))


def _OneForwardOneBackward(
  stage: int, backward: Kind, num_stages: int, num_micro_batches: int
) -> list[Action]:
  forwards, backwards = (
    orders.Series(stage, kind, range(num_micro_batches)) for kind in (Kind.FORWARD, backward)
  )
  return orders.Alternate(forwards, backwards, num_stages - 1 - stage)


# Several stages per device: stage k is on device k mod K.


@Register('interleaved_1f1b')
def InterleavedOneForwardOneBackward(
  num_stages: int, num_micro_batches: int, num_devices: int
) -> Schedule:
  """1F1B in rounds of K micro-batches, each round through all stages of a device (Megatron-LM)."""
  orders.CheckLoops('interleaved_1f1b', num_stages, num_devices, at_least=2)
  orders.CheckRounds('interleaved_1f1b', num_micro_batches, num_devices)
  rows = []
  for device in range(num_devices):
    stages = range(device, num_stages, num_devices)
    warm_up = 2 * (num_devices - 1 - device) + (len(stages) - 1) * num_devices
    forwards = orders.Rounds(Kind.FORWARD, stages, num_micro_batches, num_devices)
    backwards = orders.Rounds(Kind.BACKWARD, stages[::-1], num_micro_batches, num_devices)
    rows.append(orders.Alternate(forwards, backwards, warm_up))
  owners = orders.LoopOwners(num_stages, num_devices)
  return Schedule('interleaved_1f1b', num_stages, num_micro_batches, rows, owners)


@Register('looped_bfs')
def LoopedBreadthFirst(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """All forwards, stage after stage, then all backwards in the reverse order.

  With one stage per device this is gpipe (Lamy-Poirier 2022, "Breadth-First Pipeline
  Parallelism").
  """
  orders.CheckLoops('looped_bfs', num_stages, num_devices, at_least=1)
  rows = []
  for device in range(num_devices):
    stages = range(device, num_stages, num_devices)
    row = [a for k in stages for a in orders.Series(k, Kind.FORWARD, range(num_micro_batches))]
    for stage in reversed(stages):
      row += orders.Series(stage, Kind.BACKWARD, reversed(range(num_micro_batches)))
    rows.append(row)
  owners = orders.LoopOwners(num_stages, num_devices)
  return Schedule('looped_bfs', num_stages, num_micro_batches, rows, owners)


@Register('forward_only')
def ForwardOnly(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """Forwards 0..M-1, for evaluation and inference.

  All micro-batches pass through a device's first stage before its second stage, so that for M >= K
  a device idles K-1 ticks only, however many stages it has.
  """
  if num_devices > num_stages:
    raise ValueError(
      f"Schedule 'forward_only' needs at least one stage for each device, got {num_stages} stages "
      f'for {num_devices} devices; use no more than {num_stages} devices'
    )
  return ForwardOnlyOn(orders.LoopOwners(num_stages, num_devices), num_micro_batches)


# The other modules of this folder register their schedules when they are imported.
for _module in pkgutil.iter_modules([str(pathlib.Path(__file__).parent)]):
  importlib.import_module(f'{__package__}.{_module.name}')
