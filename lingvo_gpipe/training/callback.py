# SPDX-License-Identifier: Apache-2.0
"""Callbacks: the things that happen between two steps of training, such as evaluating or saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.input import batches


@dataclasses.dataclass
class Step:
  """A finished step of training. Callbacks may set the attributes marked with a star.

  Attributes:
    number: number of steps of the run so far.
    Print: prints lines above the progress line.
    task_name: name of the trained task in a model of several tasks; '' in a model of one task.
    num_task_steps: number of steps of this task so far; 0 in a model of one task.
    values: metrics of the step by name, as `TrainRunner.TrainStep` returns them.
    data: the mini-batches of the step.
    num_rows: number of rows of these mini-batches.
    evaluations: {jobname: metrics} of the data sets that were evaluated or decoded after the step.
    end_reason: * why training ends after this step; None if it continues.
    needs_save: * whether a checkpoint must be written after this step.
  """

  number: int
  Print: Callable[[str], None]
  task_name: str = ''
  num_task_steps: int = 0
  values: Mapping[str, float] = dataclasses.field(default_factory=dict)
  data: Sequence[batches.AnyBatch] = ()
  num_rows: int = 0
  evaluations: dict[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
  end_reason: str | None = None
  needs_save: bool = False


class StepHook:
  """Base class of everything that runs between two steps. Override the methods that you need."""

  def Begin(self, step: int) -> None:
    """Runs before the first step of a call of the trainer.

    Args:
      step: number of steps that are already done.
    """

  def AfterStep(self, step: Step) -> None:
    """Runs after each step, the last one included (`step.end_reason` is set if it is known)."""

  def AtEnd(self, step: Step) -> None:
    """Runs once after the last step, unless training fails."""

  def Close(self) -> None:
    """Releases resources, also after a failure."""


class Callback(StepHook):
  """Base class of an experiment's own hooks; `task.train.callbacks` has a list of their Params."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params, to which a subclass adds its own."""
    return hyperparams.InstantiableParams(cls)

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Keeps a copy of the Params."""
    self.params = params.Copy()
