# SPDX-License-Identifier: Apache-2.0
"""`FiniteCheck`: reports steps that are not finite, and fails after too many of them."""

from __future__ import annotations

from lingvo_gpipe.learning import nonfinite_steps
from lingvo_gpipe.runners import multi_task_runner
from lingvo_gpipe.training import callback, run_store


class FiniteCheck(callback.StepHook):
  """Checks the loss and the gradients of each step."""

  def __init__(
    self,
    nonfinite: nonfinite_steps.NonFiniteSteps,
    runner: multi_task_runner.TrainingRunner,
    store: run_store.RunStore,
  ) -> None:
    """Checks nothing yet.

    Args:
      nonfinite: counts the steps; its counts are part of the checkpoint.
      runner: repeats a step to find the layer that causes it.
      store: store with the counts of the restored checkpoint.
    """
    self._nonfinite = nonfinite
    self._runner = runner
    nonfinite.in_a_row = store.counts.nonfinite_in_a_row

  def AfterStep(self, step: callback.Step) -> None:
    """Reports the step if it is not finite.

    Raises:
      NotFiniteError: too many steps in a row are not finite.
    """
    self._nonfinite.Check(
      step.number,
      step.values,
      step.Print,
      lambda: self._runner.WhyNotFinite(*step.data),
      step.task_name,
    )
