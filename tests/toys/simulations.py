# SPDX-License-Identifier: Apache-2.0
"""Schedules by their number of devices, and simulated steps."""

import itertools

from lingvo_gpipe.pipeline.profiling import measured_schedule
from lingvo_gpipe.pipeline.schedule import schedules


def Get(name, num_devices, num_micro_batches, stages_per_device=2):
  """Returns a schedule with several stages on each device, or one if it takes no more."""
  if not schedules.TakesStagesPerDevice(name, stages_per_device):
    stages_per_device = 1
  return schedules.Get(name, num_devices * stages_per_device, num_micro_batches, num_devices)


def AsMeasured(result, step=1, origin=0.0):
  """Returns the measurement of a simulated step; a recomputation is part of its action."""
  times = {}
  for span in itertools.chain(*result.timeline):
    start = times.get(span.action, (origin + span.start,))[0]
    times[span.action] = (start, origin + span.end)
  return measured_schedule.Measured(result.schedule, step, times)
