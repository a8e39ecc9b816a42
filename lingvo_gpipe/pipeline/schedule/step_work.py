# SPDX-License-Identifier: Apache-2.0
"""The work of a schedule's actions in a run: which are empty, and which repeat a forward pass.

Schedules treat all stages alike. In a run, frozen stages and the first trained stage skip the
gradients that nobody needs, and the re-materialisation policy decides which actions recompute. The
engine and the simulator both follow this module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from lingvo_gpipe.pipeline.schedule import actions, rematerialisation
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind


class StepWork:
  """The work of one step of a schedule, under a policy, if some stages are trained.

  Attributes:
    schedule: the schedule.
    remat_policy: the re-materialisation policy.
    trained: for each stage whether it has trained weights; None: see `__init__`.
  """

  def __init__(
    self,
    schedule: schedule_lib.Schedule,
    remat_policy: rematerialisation.Policy = 'none',
    trained: Sequence[bool] | None = None,
  ) -> None:
    """Checks the arguments.

    Args:
      schedule: a valid schedule.
      remat_policy: the policy of all stages, or of each.
      trained: for each stage whether it has trained weights; None: all stages have, and even the
        first stage computes the gradient of its input.

    Raises:
      ValueError: an unknown policy, or the number of flags is not the number of stages.
    """
    rematerialisation.CheckPolicy(remat_policy)
    if trained is not None and len(trained) != schedule.num_stages:
      raise ValueError(
        f'trained: expected {schedule.num_stages} flags, one per stage; got {len(trained)}'
      )
    self.schedule = schedule
    self.remat_policy = remat_policy
    self.trained = None if trained is None else [bool(t) for t in trained]

  def IsTrained(self, stage: int) -> bool:
    """Whether the stage computes gradients of its weights."""
    return self.trained is None or self.trained[stage]

  def NeedsDx(self, stage: int) -> bool:
    """Whether the stage computes the gradient of its input, for earlier stages."""
    before = min(stage, self.schedule.num_layer_stages)
    return self.trained is None or any(self.trained[:before])

  def Exists(self, action: Action) -> bool:
    """Whether the action computes anything."""
    stage = action.stage
    return actions.HasWork(
      action.kind, needs_dx=self.NeedsDx(stage), is_trained=self.IsTrained(stage)
    )

  def HasBackward(self, stage: int) -> bool:
    """Whether the stage computes any gradient."""
    return not self.schedule.forward_only and (self.NeedsDx(stage) or self.IsTrained(stage))

  def IsWholeBackward(self, action: Action) -> bool:
    """Whether the action computes all gradients of its stage, and no forward pass of its own."""
    if action.kind is Kind.WEIGHT_GRADIENT:
      return self.IsTrained(action.stage) and not self.NeedsDx(action.stage)
    return action.kind is Kind.BACKWARD

  def Dependencies(self, action: Action) -> tuple[Action, ...]:
    """Returns the actions whose results this one needs; a W whose I is empty takes over I's."""
    if action.kind is Kind.WEIGHT_GRADIENT and self.IsWholeBackward(action):
      action = Action(action.stage, Kind.INPUT_GRADIENT, action.micro_batch)
    return self.schedule.Dependencies(action)

  def RunsAgain(self, stage: int, micro_batch: int) -> bool:
    """Whether the backward of a micro-batch repeats the forward pass."""
    return self._Recompute(stage, micro_batch) is not rematerialisation.Recompute.NOTHING

  def Repeats(self, action: Action) -> bool:
    """Whether the action begins with a repeated forward pass."""
    if not (self.IsWholeBackward(action) or action.kind is Kind.INPUT_GRADIENT):
      return False
    return self.Exists(action) and self.RunsAgain(action.stage, action.micro_batch)

  def KeepsLayers(self, stage: int, micro_batch: int) -> bool:
    """Whether forward keeps the input of each layer, and maybe more."""
    recompute = self._Recompute(stage, micro_batch)
    is_by_layer = isinstance(recompute, rematerialisation.ByLayer)
    return is_by_layer or recompute is rematerialisation.Recompute.LAYER

  def GoesByLayer(self, stage: int, micro_batch: int) -> bool:
    """Whether backward recomputes one layer at a time, which a backward in halves cannot."""
    recompute = self._Recompute(stage, micro_batch)
    if isinstance(recompute, rematerialisation.ByLayer):
      return not recompute.is_split
    return recompute is rematerialisation.Recompute.LAYER

  def _Recompute(
    self, stage: int, micro_batch: int
  ) -> rematerialisation.Recompute | rematerialisation.ByLayer:
    return self._recompute.get((stage, micro_batch), rematerialisation.Recompute.NOTHING)

  @functools.cached_property
  def _recompute(
    self,
  ) -> dict[tuple[int, int], rematerialisation.Recompute | rematerialisation.ByLayer]:
    return rematerialisation.ByMicroBatch(self.schedule.actions, self.remat_policy)
