# SPDX-License-Identifier: Apache-2.0
"""Predicts the speed of pipelines and replicas up to 128 stages and 1024 hosts: docs/scaling.md.

Run `python -m tools.scaling` in the checkout; it prints four tables and takes some minutes. All
figures are predictions: layers are counted and traced as in `tools.plan`, devices come from the
JSON files in tools/devices, and no weight is allocated.

* depth: the paper's Transformer-L with 13 layers per device, one replica, on TPU v3 cores.
* replicas: pipelines of 8 devices, one per host, from one host to 1024, on H100s.
* choices: the choices of the planner for some numbers of hosts, on H100s, without offload.
* offload: activations that wait for backward in the memory of the host, or are recomputed, for
  docs/offload.md. The layers are Transformers by formulas: `--tables=offload` takes a second.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary as binary  # First: it drops the messages of native code.

# isort: split
import itertools
import json
from collections.abc import Iterator
from typing import Any

from absl import flags

from lingvo_gpipe.core import text_table
from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.planner import device_description, model_costs, plan_choice, planner
from tools import program
from tools.planning import experiment, report

FLAGS = flags.FLAGS

_TABLES = ('depth', 'replicas', 'choices', 'offload')
_TRANSFORMER, _AMOEBANET = 'lm.one_billion_wds.Transformer3', 'image.imagenet.AmoebaNetD18x256'
# Index of a typical layer in the flat list of a Transformer-L.
_LAYER = 2
_HOSTS = (1, 4, 16, 64, 256, 1024)
_CHOSEN_HOSTS = (1, 16, 256, 1024)
# For each device a number of layers, and M micro-batches of one example.
_OFFLOAD = {'num_devices': 8, 'layers': 4, 'num_micro_batches': 32, 'length': 4096}


def Devices(name: str, num_devices: int) -> device_description.Devices:
  """Returns a description of this many devices of a file in tools/devices."""
  path = program.ROOT / 'tools' / 'devices' / f'{name}.json'
  values = {**json.loads(path.read_text(encoding='utf-8')), 'num_devices': num_devices}
  return device_description.FromMapping(values, str(path))


def Costs(key: str) -> model_costs.ModelCosts:
  """Returns the costs of the layers of an experiment."""
  from lingvo_gpipe.experiment import registry

  params: Any = registry.GetParams(key, 'Train')
  return experiment.Experiment(params, None).Costs([])


def Deeper(costs: model_costs.ModelCosts, layer: int, more: int) -> model_costs.ModelCosts:
  """Returns the costs with `more` additional copies of one layer."""

  def Repeat(row: tuple) -> tuple:
    return (*row[:layer], *[row[layer]] * more, *row[layer:])

  return model_costs.ModelCosts(
    Repeat(costs.weights),
    {size: Repeat(row) for size, row in costs.samples.items()},
    costs.slots_per_weight,
    costs.averages_per_weight,
  )


def _Row(name: str, batch: int, prediction: planner.Prediction) -> str:
  p = prediction
  c = p.choice
  return (
    f'{name:>9} {c.num_replicas:>5} {c.num_devices:>4} {c.num_micro_batches:>5} {batch:>7} '
    f'{report.SecondsText(p.seconds):>8} {p.work / p.seconds:>7.1%} {p.bubble / p.seconds:>7.1%} '
    f'{p.communication / p.seconds:>7.1%} {text_table.FormatBytes(p.peak_bytes):>9}'
  )


def _Head(first: str) -> str:
  return (
    f'{first:>9} {"R":>5} {"K":>4} {"M":>5} {"batch":>7} {"step":>8} {"work":>7} {"bubble":>7} '
    f'{"links":>7} {"memory":>9}'
  )


def Depth(transformer: model_costs.ModelCosts) -> Iterator[str]:
  """Returns the rows for Transformer-L with 13 layers per device, 1f1b, recomputed by layer."""
  yield 'Transformer-L, 13 layers a device, 1f1b, remat_policy layer, TPU v3 cores'
  yield _Head('L')
  for k, batch in ((1, 32), (8, 32), (32, 32), (128, 32), (32, 128), (128, 512)):
    num_layers = 13 * k - (k > 1)
    deep = Deeper(transformer, _LAYER, num_layers - 3)
    choice = plan_choice.Choice(1, k, 1, batch, 1, '1f1b', 'layer')
    plans = planner.Planner(deep, Devices('tpu_v3', k), batch)
    yield _Row(str(num_layers), batch, plans.Predict(choice))


def Replicas(name: str, costs: model_costs.ModelCosts, size: int, most: int) -> Iterator[str]:
  """Yields rows for pipelines of eight devices, with a constant batch per pipeline or in total."""
  for total in (0, most):
    fixed = f'a batch of {total} for all' if total else f'a batch of {32 * size} for each replica'
    yield f'{name}, a replica a host, {fixed}, 1f1b, remat_policy stage, H100'
    yield _Head('hosts')
    for r in _HOSTS:
      batch = total or 32 * size * r
      choice = plan_choice.Choice(
        r, 8, 1, max(batch // (r * size), 1), min(size, batch // r), '1f1b', 'stage'
      )
      yield _Row(
        str(r), batch, planner.Planner(costs, Devices('h100', 8 * r), batch).Predict(choice)
      )


def Chosen(name: str, costs: model_costs.ModelCosts, batch: int) -> Iterator[str]:
  """Returns the rows with the choices of the planner."""
  yield f'{name}, a batch of {batch}, H100: chosen'
  yield f'{_Head("hosts")}  schedule'
  for hosts in _CHOSEN_HOSTS:
    space = plan_choice.Space(offloads=(0.0,))
    plans = planner.Planner(costs, Devices('h100', 8 * hosts), batch, space)
    best = plans.Search(1).best
    if best is None:
      yield f'{hosts:>9} nothing fits'
      continue
    c = best.choice
    slots = ', slots shared' if c.shard_slots else ''
    yield (
      f'{_Row(str(hosts), batch, best)}  {c.schedule} v={c.stages_per_device} {c.remat_policy}'
      f' size {c.micro_batch_size}{slots}'
    )


def OffloadCosts(
  devices: device_description.Devices, dim: int, layers: float
) -> tuple[simulator.Costs, simulator.ActivationSizes]:
  """Returns the costs of stages of Transformer layers.

  A layer of dimension h on s positions takes 24 s h^2 + 4 s^2 h FLOPs forward. It keeps 68 s h
  bytes in float32 if attention keeps no scores (arXiv:2205.05198, section 4.1: 34 s h in 16 bits),
  of which its input is 4 s h.

  Args:
    devices: the devices.
    dim: h.
    layers: the number of layers of a stage; may be a fraction.
  """
  s = _OFFLOAD['length']
  link = devices.to_host
  assert link is not None, 'The files in tools/devices have this link.'
  forward = layers * (24 * s * dim**2 + 4 * s**2 * dim) / devices.flops_per_second
  costs = simulator.Costs(forward, host_link=simulator.HostLink(link.bandwidth, link.latency))
  return costs, simulator.ActivationSizes(4 * s * dim, (layers * 68 - 4) * s * dim)


def Offload(name: str) -> Iterator[str]:
  """Yields rows in Markdown: the time of a step, relative to the first column, and GiB."""
  k, m, layers = (_OFFLOAD[key] for key in ('num_devices', 'num_micro_batches', 'layers'))
  devices = Devices(name, k)
  yield f'| {devices.name} | kept | half offloaded | offloaded | L two ahead | recomputed |'
  yield '| --- | --- | --- | --- | --- | --- |'
  for dim, schedule in itertools.product((4096, 8192, 12288), ('gpipe', '1f1b', 'v_half')):
    v = 2 if schedules.TakesStagesPerDevice(schedule, 2) else 1
    plain = schedules.Get(schedule, v * k, m, k)
    costs, sizes = OffloadCosts(devices, dim, layers / v)
    full = schedules.WithOffload(plain)
    choices = [plain, schedules.WithOffload(plain, 0.5), full]
    choices.append(schedules.WithOffload(plain, ahead=2))
    steps = [simulator.Simulate(c, costs, remat_policy='none', sizes=sizes) for c in choices]
    steps.append(simulator.Simulate(plain, costs, remat_policy='stage', sizes=sizes))
    seconds = [step.makespan / steps[0].makespan - 1 for step in steps]
    gib = [max(step.device_peak_bytes or ()) / 2**30 for step in steps]
    cells = [f'{s:+.0%}, {b:.0f}' for s, b in zip(seconds, gib, strict=True)]
    yield f'| h = {dim:,}, `{schedule}` | {" | ".join(cells)} |'


def _DefineFlags() -> None:
  flags.DEFINE_list('tables', list(_TABLES), f'Some of {", ".join(_TABLES)}.')


def Run() -> int:
  """Prints the tables."""
  tables = program.Names('tables', _TABLES)
  if 'offload' in tables:
    for name in ('h100', 'tpu_v3'):
      print('\n'.join(Offload(name)) + '\n', flush=True)
  if tables == ['offload']:
    return 0
  cluster.Cluster.Create(1, platform='cpu')  # Nothing is computed on an accelerator.
  transformer = Costs(_TRANSFORMER)
  if 'depth' in tables:
    print('\n'.join(Depth(transformer)) + '\n', flush=True)
  models = []
  if 'replicas' in tables or 'choices' in tables:
    models = [
      ('Transformer-103', Deeper(transformer, _LAYER, 100), 1, 8192),
      ('AmoebaNet-D (18, 256)', Costs(_AMOEBANET), 4, 8192),
    ]
  for name, costs, size, most in models:
    if 'replicas' in tables:
      print('\n'.join(Replicas(name, costs, size, most)) + '\n', flush=True)
    if 'choices' in tables:
      for line in Chosen(name, costs, most):
        print(line, flush=True)
      print()
  return 0


if __name__ == '__main__':
  program.Main(_DefineFlags, Run, __doc__)
