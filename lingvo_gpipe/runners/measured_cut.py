# SPDX-License-Identifier: Apache-2.0
"""The cut of a run that hangs on a measurement: it stays that of the run's last checkpoint."""

from __future__ import annotations

from typing import Any

from absl import logging

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.experiment import task as task_lib


def PipelineSettings(p: hyperparams.Params) -> dict[str, Any]:
  """What of a PipeliningLayer's Params a checkpoint tells beside the cut."""
  return {
    'schedule': getattr(p.schedule, 'name', p.schedule),
    'stages_per_device': p.stages_per_device,
    'remat_policy': p.remat_policy,
    'xla': p.xla,
  }


def Key(name: str, task_name: str) -> str:
  """The key of what is told of a task: it ends with the task's name where there are several."""
  return f'{name}/{task_name}' if task_name else name


def Find(
  saved: checkpointer.Checkpointer | None, task: task_lib.BaseTask, task_name: str = ''
) -> list[int]:
  """The cut of the last checkpoint, where another measurement might find another one.

  With partition_by='time' a run would go on in other stages than it stopped in, and so not to the
  bit. Empty where there is no checkpoint, where it is of other stages or settings of the pipeline,
  or where the cut does not hang on a measurement.
  """
  if saved is None or task.pipeline is None:
    return []
  p = task.pipeline.params
  if p.partition_by != 'time' or p.splits:
    return []
  found = saved.All()
  metadata = saved.ReadMetadata(found[-1]) if found else {}
  cut: list[int] = metadata.get(Key('cut', task_name), [])
  settings = PipelineSettings(p)
  same = all(metadata.get(Key(name, task_name)) == value for name, value in settings.items())
  if not (same and len(cut) == p.num_stages and cut[-1] == len(task.pipeline.layers)):
    return []
  logging.info('keeping the cut of the last checkpoint: %s', cut)
  return cut
