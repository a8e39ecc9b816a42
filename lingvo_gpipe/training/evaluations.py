# SPDX-License-Identifier: Apache-2.0
"""`Evaluations`: evaluates and decodes between steps, and informs early stopping."""

from __future__ import annotations

from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.learning import early_stopping
from lingvo_gpipe.reporting import metrics_log
from lingvo_gpipe.training import callback, run_store, step_output


class Evaluations(callback.StepHook):
  """Runs the passes over data sets that are due."""

  def __init__(
    self,
    passes: pass_schedule.DatasetPasses,
    early_stop: early_stopping.EarlyStopping,
    store: run_store.RunStore,
    log: metrics_log.MetricsLog,
    line: step_output.ProgressLine,
    stop: stop_request.StopRequest,
  ) -> None:
    """Evaluates nothing yet.

    Args:
      passes: the evaluations and decodings.
      early_stop: receives their metrics.
      store: saves the run; it must not write on workers while new functions are sent to them.
      log: metrics.jsonl.
      line: shows that data sets are evaluated.
      stop: request to stop; no pass starts after it.
    """
    self._passes = passes
    self._early_stop = early_stop
    self._store = store
    self._log = log
    self._line = line
    self._stop = stop

  def AfterStep(self, step: callback.Step) -> None:
    """Runs the passes that are due; `AtEnd` runs them after the last step."""
    if step.end_reason is None:
      self._RunBetweenSteps(step, at_end=False)

  def AtEnd(self, step: callback.Step) -> None:
    """Runs all passes that have not seen these weights."""
    self._RunBetweenSteps(step, at_end=True)

  def Run(self, step: callback.Step, *, at_end: bool) -> None:
    """Runs passes with the present weights; asks for a save if one is the best so far.

    Args:
      step: the last step.
      at_end: whether to run all passes that have not seen these weights, due or not.
    """
    self._store.BeforeNewFunctions()
    for result in self._passes.Run(step.number, at_end=at_end):
      self._log.Write(step.number, result.jobname, result.values)
      step.evaluations[result.jobname] = result.values
      step.needs_save |= self._early_stop.Update(
        step.number, result.jobname, result.values, is_extra=not result.is_due
      )

  def _RunBetweenSteps(self, step: callback.Step, *, at_end: bool) -> None:
    passes = self._passes
    if not passes.during_training or not passes.IsDue(step.number, at_end=at_end):
      return
    if self._stop.signal is None:
      with self._line.Pause('evaluating'):
        self.Run(step, at_end=at_end)
