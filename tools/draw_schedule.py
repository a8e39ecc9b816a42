# SPDX-License-Identifier: Apache-2.0
"""Draws a schedule as SVG: when each device runs which action, and how many activations it holds.

    python -m tools.draw_schedule --schedule=1f1b --output=1f1b.svg

Run it in the checkout. `--schedule` is a name, or a file with a schedule as text. The stages are
equal, and all stages of a device together take `--times` for a micro-batch: F, I and W. B takes as
long as I and W, and V as F and B. Nothing is recomputed.

    python -m tools.draw_schedule --timeline=LOGDIR/timeline_7_7.html --output=timeline.svg

takes the last step out of a page that `trainer --profile_steps=7,7` has written.
"""

from __future__ import annotations

import os

from absl import flags

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import schedule_svg, timeline_html
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib
from lingvo_gpipe.pipeline.schedule import schedules
from tools import program

FLAGS = flags.FLAGS

# The shortest step that a picture can show to scale.
_LEAST_TIME = 1e-9


def DefineFlags() -> None:
  """Defines the flags of this program."""
  flags.DEFINE_string('schedule', '1f1b', 'Name of a schedule, or a file.')
  flags.DEFINE_string('timeline', None, 'The page of a profile, to draw in place of a schedule.')
  flags.DEFINE_integer('num_devices', 4, 'K.', lower_bound=1)
  flags.DEFINE_integer('stages_per_device', 0, 'v; 0: the least possible.', lower_bound=0)
  flags.DEFINE_integer('num_micro_batches', 8, 'M.', lower_bound=1)
  flags.DEFINE_list('times', ['1', '1', '1'], 'Times of F, I and W.')
  program.DefineOutput()


def Simulate(
  schedule: schedule_lib.Schedule, times: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> simulator.Result:
  """Simulates equal stages; a device takes `times` for F, I and W of all its stages."""
  share = schedule.num_devices / schedule.num_stages
  forward, input_gradient, weight_gradient = (time * share for time in times)
  costs = simulator.Costs(
    forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
  )
  return simulator.Simulate(schedule, costs, remat_policy='none')


def LeastStages(name: str, num_devices: int) -> int:
  """Returns the least number of stages per device with which a schedule of this name exists."""
  try:
    schedules.Get(name, num_devices, num_devices, num_devices)
  except ValueError:
    return 2
  return 1


def Run() -> int:
  """Writes the picture; returns the exit status."""
  if FLAGS.timeline:
    program.WriteOutput(timeline_html.LastPicture(program.ReadText(FLAGS.timeline, 'timeline')))
    return 0
  num_devices = FLAGS.num_devices
  try:
    times = tuple(float(text) for text in FLAGS.times)
    forward, input_gradient, weight_gradient = times
  except ValueError:
    raise ValueError(f'--times: expected three numbers, got {",".join(FLAGS.times)}') from None
  if os.path.isfile(FLAGS.schedule):
    text, name = program.ReadText(FLAGS.schedule, 'schedule'), os.path.basename(FLAGS.schedule)
    schedule = schedule_lib.Schedule.FromText(text, name=name)
  elif FLAGS.schedule in schedules.Names():
    per_device = FLAGS.stages_per_device or LeastStages(FLAGS.schedule, num_devices)
    schedule = schedules.Get(
      FLAGS.schedule, per_device * num_devices, FLAGS.num_micro_batches, num_devices
    )
  else:
    names = ', '.join(schedules.Names())
    raise ValueError(f'--schedule: no file and no schedule {FLAGS.schedule!r}; names: {names}')
  result = Simulate(schedule, (forward, input_gradient, weight_gradient))
  if result.makespan < _LEAST_TIME:
    raise ValueError(
      f'--times: expected a step of {_LEAST_TIME:g} or longer, got {",".join(FLAGS.times)}'
    )
  picture = schedule_svg.Draw(result, is_standalone=True)
  program.WriteOutput(picture)
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
