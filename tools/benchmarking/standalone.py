# SPDX-License-Identifier: Apache-2.0
"""Times each action of a step in isolation, and predicts the time of a step without overhead.

Each action runs by itself on its device with the inputs of a step. It is timed on one core, and on
all cores of the process, as in a step while the other devices are idle. The simulator then applies
these times to the schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map, pipeline_element
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import leaves, shared_functions, stage_math
from lingvo_gpipe.pipeline.stages import stage as stage_lib

# Minimum duration of one measurement, which repeats short actions.
_SECONDS = 0.1
_MAX_CALLS = 16

# Stop measuring an action, on one core or on all, after this many seconds.
_MAX_SECONDS = 2.0

# {letter: for each stage, the times of its repeated measurements}.
_ActionTimes = dict[str, list[list[float]]]


@dataclasses.dataclass
class Times:
  """Seconds of all parts of a step.

  Attributes:
    actions: {letter: for each stage, the times of its repeated measurements} on one core; 0 if the
      stage has no such action. Actions recompute as the policy says. If the policy of a stage is
      `except_last`, `b`, `i` and `w` are the actions B, I and W without recomputation.
    except_last: for each stage whether its policy is `except_last`.
    alone: like `actions`, on all cores.
    update: for each device, the times to update and to clear its accumulators, on one core.
  """

  actions: _ActionTimes
  alone: _ActionTimes
  update: list[list[float]]
  except_last: list[bool]

  def Simulate(
    self,
    schedule: schedules.Schedule,
    choose: Callable[[Sequence[float]], float],
    *,
    share_cores: bool = False,
  ) -> float:
    """Returns the seconds of a step without overhead.

    Args:
      schedule: the schedule.
      choose: reduces repeated measurements to one, for example `min`.
      share_cores: whether idle devices leave their cores to the other devices; otherwise each
        device has one core.
    """
    result = simulator.Simulate(
      schedule,
      self._Costs(self.actions, choose, schedule.num_stages),
      alone=self._Costs(self.alone, choose, schedule.num_stages) if share_cores else None,
      remat_policy=['except_last' if x else 'stage' for x in self.except_last],
      # The update waits for all devices: it needs the global gradient norm.
      update_barrier=True,
    )
    return result.makespan

  def _Costs(
    self, actions: _ActionTimes, choose: Callable[[Sequence[float]], float], num_stages: int
  ) -> simulator.Costs:
    picked = {kind: [choose(t) for t in stages] for kind, stages in actions.items()}
    # Letters without a measurement do not occur in the schedule. B, I and W are measured with their
    # recomputation unless the last micro-batch differs. Without an I, W recomputes.
    recompute = nothing = [0.0] * num_stages
    for kind in 'BIW':
      if pure := picked.get(kind.lower()):
        times = zip(recompute, picked[kind], pure, strict=True)
        recompute = [more + max(whole - least, 0.0) for more, whole, least in times]
        picked[kind] = pure
    return simulator.Costs(
      forward=picked.get('F', nothing),
      recompute=recompute,
      input_gradient=picked.get('I', nothing),
      weight_gradient=picked.get('W', nothing),
      backward=picked.get('B', nothing),
      fused=picked.get('V', nothing),
      update=[choose(t) for t in self.update],
    )

  def Summary(self) -> dict[str, Any]:
    """Returns {letter: for each stage, the median time} on one core, and on all under `alone`."""
    on_one, on_all = (
      {kind: [statistics.median(t) for t in each] for kind, each in times.items()}
      for times in (self.actions, self.alone)
    )
    return {**on_one, 'update': [statistics.median(t) for t in self.update], 'alone': on_all}


def Measure(
  engine: engine_lib.PipelineEngine,
  inputs: tuple[Any, ...],
  side: Any,
  loss_weight: tf.Tensor,
  schedule: schedules.Schedule,
  learner: Any,
  repeats: int,
) -> Times:
  """Times all actions that occur in the schedule, and the update.

  Args:
    engine: an engine whose layers have no skip connections; its accumulators exist.
    inputs: the arguments of the first layer for one micro-batch.
    side: the inputs of the loss for the micro-batch.
    loss_weight: the loss weight of the micro-batch.
    schedule: the schedule whose actions are timed.
    learner: Params of the learner that updates the weights.
    repeats: number of measurements of each action; fewer if they take long.
  """
  kinds = {action.kind.value for row in schedule.actions for action in row}
  actions = _Actions(engine, inputs, side, loss_weight, kinds, repeats)
  devices = [
    [s for s in engine.stages if engine.stage_to_device[s.index] == d]
    for d in range(schedule.num_devices)
  ]
  update = [
    _Time(_Update(stages, learner), stages[0].device, repeats, max_calls=1)[0] for stages in devices
  ]
  on_one, on_all = ({kind: [t[i] for t in actions[kind]] for kind in actions} for i in (0, 1))
  policies = [rematerialisation.OfStage(engine.remat_policy, s.index) for s in engine.stages]
  return Times(on_one, on_all, update, [policy == 'except_last' for policy in policies])


def _Actions(
  engine: engine_lib.PipelineEngine,
  inputs: tuple[Any, ...],
  side: Any,
  loss_weight: tf.Tensor,
  kinds: Collection[str],
  repeats: int,
) -> dict[str, list[tuple[list[float], list[float]]]]:
  """Returns {letter: for each stage, the result of `_Time`}."""
  x = nested_map.NestedMap(args=inputs, skips=nested_map.NestedMap())
  calls: list[_Calls] = []
  for s in engine.stages:
    last = s is engine.stages[-1]
    calls.append(_Calls(engine, s, x, side if last else None, loss_weight, 'B' in kinds))
    if not last:
      y = _RunOnce(calls[-1], 'F')[0]
      x = nested_map.NestedMap(args=pipeline_element.AsTuple(y.args), skips=y.skips)
  times: dict[str, list[tuple[list[float], list[float]]]] = {}
  dy = None
  for c in reversed(calls):
    c.dy = dy
    is_fused = 'V' in kinds and c is calls[-1]
    for kind in _MeasuredKinds(engine, kinds):
      samples = ([0.0], [0.0])
      if (kind == 'V') == is_fused and c.stage.HasAction(schedules.Kind(kind.upper())):
        samples = _Time(functools.partial(c.Run, kind), c.stage.device, repeats)
      times.setdefault(kind, []).insert(0, samples)
    if c.stage.needs_dx:
      backward = next(kind for kind in 'VBI' if kind in kinds and (kind != 'V' or is_fused))
      dy = _RunOnce(c, backward)[0]
  return times


def _MeasuredKinds(engine: engine_lib.PipelineEngine, kinds: Collection[str]) -> list[str]:
  letters = sorted(kinds)
  policies = [rematerialisation.OfStage(engine.remat_policy, s.index) for s in engine.stages]
  if 'except_last' in policies:
    letters += [kind.lower() for kind in 'BIW' if kind in kinds]
  return letters


class _Calls:
  """The calls of one stage for one micro-batch, without `dy` if the stage has the loss."""

  def __init__(
    self,
    engine: engine_lib.PipelineEngine,
    s: stage_lib.Stage,
    x: nested_map.NestedMap,
    side: Any,
    loss_weight: tf.Tensor,
    is_whole: bool,
  ) -> None:
    self.stage = s
    self.dy: list[tf.Tensor] | None = None
    self._accumulators = s.accumulators
    self._functions = _Functions(engine, s, rematerialisation.Recompute.STAGE)
    self._split = self._keeper = _Functions(engine, s, rematerialisation.Recompute.NOTHING)
    policy = rematerialisation.OfStage(engine.remat_policy, s.index)
    kind = schedules.Kind.BACKWARD if is_whole else schedules.Kind.INPUT_GRADIENT
    # The one micro-batch is the last one, which `except_last` keeps: b, i and w measure that.
    actions = [[schedules.Action(s.index, kind, 0)]]
    recompute = rematerialisation.ByMicroBatch(actions, policy)[s.index, 0]
    self._keeps = policy != 'except_last' and recompute is not rematerialisation.Recompute.STAGE
    if self._keeps:
      self._keeper = _Functions(engine, s, recompute)
    if self._keeps and not is_whole:
      self._split = self._keeper
    with tf.device(s.device):
      seeds = stage_math.SeedTensor(s.seed_hashes, tf.zeros([2], tf.int64))
    context = stage_math.Context(seeds, loss_weight)
    self._call = stage_math.StageCall(s.variables, x, side, context)
    self._kept: Any = None
    self._for_weights: dict[str, list[tf.Tensor]] = {}

  def Run(self, kind: str) -> Any:
    """Runs one action: F, B, V, I or W; b, i or w without recomputation."""
    with tf.device(self.stage.device):
      return self._Run(kind)

  def _Run(self, kind: str) -> Any:
    call, accumulators = self._call, self._accumulators
    if kind == 'F':
      return (self._keeper if self._keeps else self._functions).Forward(call)
    if kind == 'V':
      return self._functions.ForwardBackward(call, accumulators)
    residuals = self._Residuals() if self._keeps or kind.islower() else None
    if kind in 'Bb':
      functions = self._functions if residuals is None else self._keeper
      return functions.Backward(call, accumulators, residuals, self.dy)
    if kind in 'Ii':
      return self._split.InputGradient(call, residuals, self.dy)
    for_weights = self._WeightResiduals('i' if kind == 'w' else 'I')
    return self._split.WeightGradient(call, accumulators, residuals, self.dy, for_weights)

  def _WeightResiduals(self, kind: str) -> list[tf.Tensor]:
    """Returns the result of I or i that W needs, computed once and not timed."""
    if kind not in self._for_weights:
      with tf.init_scope():
        self._for_weights[kind] = _RunOnce(self, kind)[1] if self.stage.needs_dx else []
    return self._for_weights[kind]

  def _Residuals(self) -> Any:
    """Returns the residuals of a forward, computed once and not timed."""
    if self._kept is None:
      with tf.init_scope(), tf.device(self.stage.device):
        keep = tf.function(lambda: self._keeper.Forward(self._call), autograph=False)
        self._kept = keep()[2]
    return self._kept


def _Functions(
  engine: engine_lib.PipelineEngine, s: stage_lib.Stage, recompute: shared_functions.Recompute
) -> Any:
  return engine.functions.For(s, recompute, do_eval=False, with_loss=True)


def _RunOnce(calls: _Calls, kind: str) -> Any:
  """Returns the results of one action, run in a graph so that XLA does not compile it again."""
  return tf.function(lambda: calls.Run(kind), autograph=False)()


def _Update(stages: list[stage_lib.Stage], params: Any) -> Callable[[], Any]:
  learner = multi_learner.MultiLearner(params)
  learner.Build(stages)

  def Run() -> Any:
    result = learner.Apply(tf.constant(0, tf.int64), tf.constant(1.0))
    with tf.control_dependencies([result['grad_norm']]):
      for accumulator in itertools.chain(*(s.accumulators for s in stages)):
        accumulator.assign(tf.zeros_like(accumulator))
      return tf.identity(result['grad_norm'])

  return Run


def _Time(
  call: Callable[[], Any], device: str, repeats: int, max_calls: int = _MAX_CALLS
) -> tuple[list[float], list[float]]:
  """Returns the seconds of one call on one core, and on all, up to `repeats` times each.

  One measurement runs short calls several times.
  """
  number, run = 1, _Repeat(call, device, 1)
  run()
  if (once := _Seconds(run)) < _SECONDS and max_calls > 1:
    number = min(max_calls, max(2, round(_SECONDS / once)))
    run = _Repeat(call, device, number)
    run()

  def Samples() -> list[float]:
    samples: list[float] = []
    while len(samples) < repeats and number * sum(samples) < _MAX_SECONDS:
      samples.append(_Seconds(run) / number)
    return samples

  with _OneCore():
    on_one = Samples()
  return on_one, Samples() if len(os.sched_getaffinity(0)) > 1 else on_one


def _Repeat(call: Callable[[], Any], device: str, number: int) -> Callable[[], Any]:
  """Returns a function that makes the call `number` times, one after another."""

  @tf.function(autograph=False)
  def Run() -> Any:
    # Return all results, because TensorFlow prunes operations whose outputs are unused.
    results: list[tf.Tensor] = []
    for _ in range(number):
      with tf.device(device), tf.control_dependencies(results[-1:]):
        results += leaves.Tensors(call())
    return results

  return Run


def _Seconds(run: Callable[[], Any]) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


@contextlib.contextmanager
def _OneCore() -> Iterator[None]:
  """Context in which all threads of this process run on one of its cores."""
  cores = os.sched_getaffinity(0)
  _PinAllThreads({min(cores)})
  try:
    yield
  finally:
    _PinAllThreads(cores)


def _PinAllThreads(cores: Collection[int]) -> None:
  for thread in os.listdir('/proc/self/task'):
    try:
      os.sched_setaffinity(int(thread), cores)
    except ProcessLookupError:
      pass  # The thread has ended.
