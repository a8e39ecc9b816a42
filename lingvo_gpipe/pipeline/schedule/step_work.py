# SPDX-License-Identifier: Apache-2.0
"""What the actions of a schedule come to in a run: which are empty, which repeat a forward pass.

A schedule is made for stages that are all alike. The engine leaves out what frozen stages and the
first trained one need not do, and the policy says what is recomputed; the simulator prices that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lingvo_gpipe.pipeline.schedule import actions, rematerialisation
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind


class StepWork:
  """The work of one step of a schedule, under a policy and with some stages trained.

  Attributes:
    schedule: the schedule.
    remat_policy: the policy.
    trained: for each stage whether it has weights that are trained; None: see `__init__`.
  """

  def __init__(
    self,
    schedule: schedule_lib.Schedule,
    remat_policy: str = 'none',
    trained: Sequence[bool] | None = None,
  ) -> None:
    """Checks the arguments.

    Args:
      schedule: a valid schedule.
      remat_policy: one of `rematerialisation.POLICIES`.
      trained: for each stage whether it has weights that are trained; None: all have, and the first
        stage has an input gradient to compute, too.

    Raises:
      ValueError: an unknown policy, or flags for another number of stages.
    """
    rematerialisation.CheckPolicy(remat_policy)
    if trained is not None and len(trained) != schedule.num_stages:
      raise ValueError(
        f'trained: expected {schedule.num_stages} flags, one a stage; got {len(trained)}'
      )
    self.schedule = schedule
    self.remat_policy = remat_policy
    self.trained = None if trained is None else [bool(t) for t in trained]

  def IsTrained(self, stage: int) -> bool:
    """Whether the stage has weight gradients to compute."""
    return self.trained is None or self.trained[stage]

  def NeedsDx(self, stage: int) -> bool:
    """Whether it has an input gradient to compute, for stages before."""
    return self.trained is None or any(self.trained[:stage])

  def Exists(self, action: Action) -> bool:
    """Whether there is anything to do."""
    stage = action.stage
    return actions.HasWork(
      action.kind, needs_dx=self.NeedsDx(stage), is_trained=self.IsTrained(stage)
    )

  def HasBackward(self, stage: int) -> bool:
    """Whether the stage does anything backward."""
    return not self.schedule.forward_only and (self.NeedsDx(stage) or self.IsTrained(stage))

  def IsWholeBackward(self, action: Action) -> bool:
    """Whether it computes all gradients of a stage, apart from its forward pass."""
    if action.kind is Kind.WEIGHT_GRADIENT:
      return self.IsTrained(action.stage) and not self.NeedsDx(action.stage)
    return action.kind is Kind.BACKWARD

  def Dependencies(self, action: Action) -> tuple[Action, ...]:
    """As the schedule's; of a W whose I is empty those of I."""
    if action.kind is Kind.WEIGHT_GRADIENT and self.IsWholeBackward(action):
      action = Action(action.stage, Kind.INPUT_GRADIENT, action.micro_batch)
    return self.schedule.Dependencies(action)

  def RunsAgain(self, stage: int, micro_batch: int) -> bool:
    """Whether the backward of a micro-batch repeats its forward pass."""
    is_last = micro_batch == self.schedule.num_micro_batches - 1
    fused = Action(stage, Kind.FORWARD_BACKWARD, micro_batch) in self._actions
    return not fused and rematerialisation.RunsAgain(self.remat_policy, is_last)

  def Repeats(self, action: Action) -> bool:
    """Whether a forward pass is repeated within the action."""
    if not (self.IsWholeBackward(action) or action.kind is Kind.INPUT_GRADIENT):
      return False
    return self.Exists(action) and self.RunsAgain(action.stage, action.micro_batch)

  def GoesByLayer(self, stage: int, micro_batch: int) -> bool:
    """Whether the policy `layer` holds: not where the schedule splits the backward."""
    return (
      self.remat_policy == 'layer' and Action(stage, Kind.BACKWARD, micro_batch) in self._actions
    )

  @functools.cached_property
  def _actions(self) -> frozenset[Action]:
    return frozenset(action for row in self.schedule.actions for action in row)
