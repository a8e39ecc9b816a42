# SPDX-License-Identifier: Apache-2.0
"""Pages with pictures: of each schedule, and of cuts, plans and a profile."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from lingvo_gpipe.core import text_table
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.pipeline.profiling import schedule_svg, timeline_html
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.planner import device_description, plan_choice, planner
from tools import draw_cut, draw_schedule
from tools.planning import experiment, report

_ROOT = pathlib.Path(__file__).parents[2]

_K, _M = 4, 8
_SCHEDULES = """# Pictures of schedules

Every schedule with {k} devices and {m} micro-batches. All devices have the same work, F = I = W and
B = I + W, and nothing is recomputed. Later stages of a device are paler. The grey area is the
number of activations, of a stage and a micro-batch, that the device holds.
[The reference](reference/schedules.md) has the formulas.

{legend}
"""

# {experiment: its family}.
_CUTS = {
  'image.imagenet.AmoebaNetD18x256': 'Image classification: AmoebaNet-D',
  'lm.one_billion_wds.Transformer48': 'Language model: Transformer',
  'mt.multilingual.T32x16384x32': 'Translation: Transformer with encoder and decoder',
  'lm.keras_hub.ByteGPT2': 'A Keras model: GPT-2 of KerasHub',
}
_PICTURES = """# Pictures of cuts, plans and runs

The command that makes a picture stands above it.

## The cut of each model family

The layers of a model are cut into consecutive stages, so that the stage with the most work has as
little as possible. A row is a stage. The first column has its share of the work of a training step,
and a line at the mean. The other two columns have the predicted bytes, and their sums over all
stages. The largest shape of a batch counts.
"""
_CUT = """### {family}

    python -m tools.draw_cut --model={key} --output=cut.svg

K={k} stages on as many devices, M={m} micro-batches, `{schedule}`, policy `{policy}`.

{picture}
"""

_MODEL, _BATCH = 'lm.one_billion_wds.Transformer24', 128
_SPACE = plan_choice.Space(
  schedules=['gpipe', '1f1b', 'interleaved_1f1b', 'zb_h1'],
  remat_policies=['none', 'stage'],
  stages_per_device=[1, 2],
)
# (file of tools/devices, number of devices).
_DEVICES = (('tpu_v3', 8), ('tpu_v3', 16), ('h100', 8))
_PLANS = """## The planner's choice

`tools.plan` compares all combinations of R replicas, K devices a replica, v stages a device, M
micro-batches, schedule and policy by the predicted step, and chooses the fastest that fits into
memory. The model is `{model}` with mini-batches of {batch}. Each picture begins with
the best plan for several R and K. Below are plans that differ from the chosen plan in one respect.
The line marks the memory of a device, and a red bar exceeds it. An arrow ends a bar that is cut
off. `shared` means that replicas share the optimizer slots.
"""
_PLAN = """### {count} devices {name} with {memory} each

    python -m tools.plan --model={model} --global_batch={batch} \\
        --device_file=tools/devices/{file}.json --num_devices={count} \\
        --schedules={schedules} --remat_policies={policies} \\
        --stages_per_device={stages} --plot=plan.svg

Chosen: R={r} replicas of K={k} devices.

{picture}
"""

_PROFILE = """## A profile beside its plan

    trainer --model=lm.stdlib.ByteTransformerGPipe2 --platform=cpu --logdir=runs/profile \\
        --max_steps=7 --profile_steps=7,7
    python -m tools.draw_schedule --timeline=runs/profile/timeline_7_7.html --output=profile.svg

Two logical CPU devices on two cores. The broad row of a device has its actions as they ran, and the
narrow row below it the plan: the same schedule, simulated with the mean time of each kind of
action. Other programs used the same cores. The first command printed for this step:

    profiled step 7: 352.78 ms a step; bubble 17.8% measured, 22.7% simulated with the measured
    times, 21.1% predicted by flops

[Profile a step](profiling.md) says more.

![Each device's actions as measured, above the simulated ones](profile.svg)
"""


def Pages() -> dict[str, str]:
  """Returns {path: Markdown} of the pages."""
  pictures = [_PICTURES, *_Cuts(), *_Plans(), _PROFILE]
  return {'schedule_pictures.md': _Schedules(), 'pictures.md': '\n'.join(pictures)}


def _Schedules() -> str:
  legend = ' '.join(map(timeline_html.Legend, timeline_html.COLOURS))
  parts = [_SCHEDULES.format(k=_K, m=_M, legend=legend)]
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
  return '\n'.join(parts)


def _Params(key: str) -> Any:
  return registry.GetParams(key, 'Train', packages=['params'])


def _Cuts() -> Iterator[str]:
  for key, family in _CUTS.items():
    cut = draw_cut.Cut(_Params(key))
    yield _CUT.format(
      family=family,
      key=key,
      k=cut.num_devices,
      m=cut.num_micro_batches,
      schedule=cut.schedule.name,
      policy=cut.remat_policy,
      picture=draw_cut.Draw(cut, f'{key}, cut into stages'),
    )


def _Plans() -> Iterator[str]:
  yield _PLANS.format(model=_MODEL, batch=_BATCH)
  model = experiment.Experiment(_Params(_MODEL), _BATCH)
  costs = model.Costs([])
  for file, count in _DEVICES:
    path = _ROOT / 'tools' / 'devices' / f'{file}.json'
    values = {**json.loads(path.read_text()), 'num_devices': count}
    devices = device_description.FromMapping(values, path.name)
    plans = planner.Planner(costs, devices, _BATCH, _SPACE)
    result = plans.Search()
    assert result.best is not None
    rows = [*result.rows, *report.Near(plans, result.best)]
    title = f'Plans for {_MODEL} on {count} devices {devices.name}'
    yield _PLAN.format(
      count=count,
      name=devices.name,
      memory=text_table.FormatBytes(devices.memory_bytes),
      r=result.best.choice.num_replicas,
      k=result.best.choice.num_devices,
      model=_MODEL,
      batch=_BATCH,
      file=file,
      schedules=','.join(_SPACE.schedules),
      policies=','.join(_SPACE.remat_policies),
      stages=','.join(map(str, _SPACE.stages_per_device)),
      picture=report.Draw(rows, result.best, devices.memory_bytes, title),
    )
