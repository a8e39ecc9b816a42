# SPDX-License-Identifier: Apache-2.0
"""The page with a picture of each schedule."""

from __future__ import annotations

from lingvo_gpipe.pipeline.profiling import schedule_svg, timeline_html
from lingvo_gpipe.pipeline.schedule import schedules
from tools import draw_schedule

_K, _M = 4, 8
_TEXT = """# Pictures of schedules

Every schedule with {k} devices and {m} micro-batches. All devices have the same work, F = I = W and
B = I + W, and nothing is recomputed. Later stages of a device are paler. The grey area is the
number of activations, of a stage and a micro-batch, that the device holds.
[Schedules](schedules.md) has the formulas.

{legend}
"""


def Pages() -> dict[str, str]:
  """Returns {path: Markdown} of the page."""
  legend = ' '.join(map(timeline_html.Legend, timeline_html.COLOURS))
  parts = [_TEXT.format(k=_K, m=_M, legend=legend)]
  for name in schedules.Names():
    per_device = draw_schedule.LeastStages(name, _K)
    result = draw_schedule.Simulate(schedules.Get(name, per_device * _K, _M, _K))
    held = max(result.schedule.DevicePeakActivations())
    of_layers = f', each of 1/{per_device} of its layers' if per_device > 1 else ''
    parts += [
      f'## {name}', '',
      f'The step takes {result.makespan:g} F, devices idle {result.overall_bubble:.1%} of it, and '
      f'one holds up to {held} activations{of_layers}.', '',
      f'    python -m tools.draw_schedule --schedule={name} --output={name}.svg', '',
      schedule_svg.Draw(result),
    ]  # fmt: skip
  return {'schedule_pictures.md': '\n'.join(parts)}
