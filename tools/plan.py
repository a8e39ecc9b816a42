# SPDX-License-Identifier: Apache-2.0
"""Chooses a plan to run an experiment on given devices, explains it, and prints its flags.

    python -m tools.plan --model=KEY --device_file=tools/devices/tpu_v3.json --global_batch=512

The plan consists of the number of replicas, stages and micro-batches, the cut, the schedule, the
re-materialisation policy, the placement of optimizer slots, and whether devices share a vocabulary.
It has the fastest predicted step that fits into the memory of the devices. No weight is allocated.
--device_file is a JSON file (see lingvo_gpipe/planner/device_description.py). Without it, the
devices of this process are used, or the workers that --local_workers or --cluster names. With these
devices, --measure times each kind of layer and transfers, and --check trains some steps with the
best plans and compares their times with the predictions.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from absl import flags

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import cluster, worker_connection
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.planner import device_description, plan_choice, planner
from tools import program
from tools.planning import experiment, report, target, trial

FLAGS = flags.FLAGS

_OF_WORKERS = ('cluster', 'local_workers')


def _DefineFlags() -> None:
  space = plan_choice.Space()
  flags.DEFINE_string('device_file', None, 'A JSON file that describes the devices.')
  flags.DEFINE_integer(
    'global_batch',
    None,
    'Number of examples per mini-batch; default: the batch size of the experiment.',
    lower_bound=1,
  )
  flags.DEFINE_list('schedules', list(space.schedules), 'Schedules to choose from.')
  flags.DEFINE_list(
    'remat_policies', list(space.remat_policies), 'Re-materialisation policies to choose from.'
  )
  flags.DEFINE_list(
    'stages_per_device', list(map(str, space.stages_per_device)), 'Numbers of stages per device.'
  )
  flags.DEFINE_list(
    'vocabularies',
    list(space.vocabularies),
    'one: the last stage has the softmax; shared: all devices share it, if its layer and loss can.',
  )
  flags.DEFINE_integer('num_stages', None, 'Number of devices per replica; any if not set.', 1)
  flags.DEFINE_integer('num_rows', 12, 'Plans to show.', lower_bound=1)
  flags.DEFINE_string('plot', None, 'Draw the plans of both tables into this file of SVG.')
  flags.DEFINE_bool('measure', False, 'Measure the layers and the links on these devices.')
  flags.DEFINE_list(
    'measured_sizes', ['1', '4', '16'], 'Micro-batch sizes at which layers are measured.'
  )
  flags.DEFINE_integer('check', 0, 'Number of best plans to train for some steps.', 0)
  flags.DEFINE_integer('repeats', 5, 'Number of timed steps to check a plan.', lower_bound=1)
  flags.DEFINE_integer(
    'timeout', 600, 'Time limit in seconds to check a plan, except on workers.', 1
  )


def _ReadDeviceFile() -> dict[str, Any] | None:
  """Returns the contents of --device_file with --num_devices applied, or None without the flag."""
  if not FLAGS.device_file:
    return None
  text = files.ReadText(FLAGS.device_file, '--device_file')
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise binary.UsageError(f'--device_file={FLAGS.device_file} is not valid JSON: {e}') from e
  if FLAGS.num_devices and isinstance(values, dict):
    values['num_devices'] = FLAGS.num_devices
  return values


def _FlagsOfRun() -> list[str]:
  """Returns the flags for Params and workers that a training run needs in addition to --model."""
  names = ('params_package', 'model_params_file_override', 'model_params_override', 'max_steps')
  values = {name: FLAGS[name].value for name in (*names, *_OF_WORKERS)}
  return [
    f'--{name}={value}'
    for name, value_or_list in values.items()
    for value in (value_or_list if isinstance(value_or_list, list) else [value_or_list])
    if value is not None
  ]


def _Space() -> plan_choice.Space:
  replicas = FLAGS.num_replicas if FLAGS['num_replicas'].present else None
  return plan_choice.Space(
    schedules=program.Names('schedules', [n for n in schedules.Names() if n != 'forward_only']),
    remat_policies=program.Names('remat_policies', plan_choice.POLICIES),
    vocabularies=program.Names('vocabularies', plan_choice.VOCABULARIES),
    stages_per_device=program.Numbers('stages_per_device'),
    num_replicas=[replicas] if replicas else None,
    num_devices=[FLAGS.num_stages] if FLAGS.num_stages else None,
  )


def _Target() -> cluster.Cluster:
  """Returns all devices of the workers that flags name, or of this process.

  Local workers together have as many devices as --num_stages and --num_replicas require, and at
  least one each.
  """
  spec = device_flags.LocalWorkers(FLAGS.num_stages or 1).spec if FLAGS.local_workers else None
  spec = spec or device_flags.Workers()
  if spec is None:
    return device_flags.OwnDevices(FLAGS.num_devices or target.NumCpus(), 1)
  answers = worker_connection.AwaitWorkers(spec.workers, 60.0)
  count = worker_connection.NumDevices(answers, FLAGS.platform)
  return device_flags.WorkersDevices(spec, max(count, 1), num_replicas=1, answers=answers)


def _Plan() -> int:
  with binary.ExitIfAWorkerFails(1):
    return _PlanOnDevices()


def _PlanOnDevices() -> int:
  start = time.monotonic()
  for name in _OF_WORKERS:
    if FLAGS[name].present and not FLAGS.measure:
      raise binary.UsageError(f'--{name} does nothing without --measure, which measures workers')
  params = binary.ModelParams('Train')
  description = _ReadDeviceFile()
  if description is None and not FLAGS.measure:
    raise binary.UsageError('--device_file=FILE is needed, or --measure on the devices themselves')
  if description is not None and not FLAGS.measure:
    devices = device_description.FromMapping(description, FLAGS.device_file)
  space = _Space()
  # Before TensorFlow starts, because its devices cannot change afterwards.
  local = _Target() if FLAGS.measure else None
  if local is None:
    device_flags.OneDevice()
  chosen = experiment.Experiment(params, FLAGS.global_batch)
  if local is not None:
    costs = chosen.Costs(program.Numbers('measured_sizes'), local.devices)
    hosts = target.Hosts(local.devices)
    slowdown = chosen.Slowdown(costs, hosts[0])
    devices = target.Describe(local, hosts, costs, slowdown, description)
    print(json.dumps(device_description.ToMapping(devices)))
  else:
    costs = chosen.Costs([])
  plans = planner.Planner(costs, devices, chosen.global_batch, space)
  result = plans.Search(FLAGS.num_rows)
  print(
    f'{FLAGS.model}: {costs.num_layers} layers, '
    f'{chosen.model.task.NumParams():,} parameters, mini-batches of {chosen.global_batch}\n'
    f'{report.DevicesText(devices)}\n'
  )
  if result.best is None:
    raise binary.UsageError(report.NothingFits(result, devices))
  near = _Explain(plans, result)
  if FLAGS.plot:
    title = f'Plans for {FLAGS.model}, batch {chosen.global_batch}'
    rows, limit = [*result.rows, *near], devices.memory_bytes
    picture = report.Draw(rows, result.best, limit, title, is_standalone=True)
    program.WriteOutput(picture, 'plot')
  print(f'\n{chosen.Command(FLAGS.model, result.best, _FlagsOfRun())}\n')
  print(
    f'{result.num_choices:,} choices, {result.num_simulated} simulated, '
    f'{time.monotonic() - start:.0f} s'
  )
  if FLAGS.check:
    _Check(chosen, result.rows[: FLAGS.check], local)
  return 0


def _Explain(plans: planner.Planner, result: planner.Result) -> list[planner.Prediction]:
  """Prints the tables of plans; returns the plans of the second one."""
  best = result.best
  assert best is not None
  memory = plans.devices.memory_bytes
  print('The best plan, and a good one of other numbers of replicas and devices:')
  print(report.Table(result.rows, best, memory))
  near = report.Near(plans, best)[: FLAGS.num_rows]
  print('\nOne thing changed:')
  print(report.Table(near, best, memory))
  print(f'\n{report.LEGEND}')
  print('\nA step for each R and K (>: a lower bound):')
  print(report.Grid(result))
  return near


def _Check(chosen: experiment.Experiment, rows: Any, local: cluster.Cluster | None) -> None:
  """Prints predicted and measured times."""
  print(f'{"R":>4} {"K":>4} {"predicted":>10} {"best":>10} {"median":>10} {"predicted/best":>15}')
  for row in rows:
    plan = trial.Trial(
      key=FLAGS.model,
      packages=binary.Packages(),
      overrides=[*binary.Overrides(), chosen.Overrides(row)],
      num_replicas=row.choice.num_replicas,
      num_devices=None if local is None else len(local.devices),
      platform=FLAGS.platform,
      repeats=FLAGS.repeats,
    )
    # Only this process is connected to its workers.
    steps = plan.Steps(local.devices) if local and local.workers else plan.Run(FLAGS.timeout)
    print(
      f'{row.choice.num_replicas:4} {row.choice.num_devices:4} '
      f'{report.SecondsText(row.seconds):>10} {report.SecondsText(min(steps)):>10} '
      f'{report.SecondsText(statistics.median(steps)):>10} {row.seconds / min(steps):>14.0%}',
      flush=True,
    )


def Run() -> None:
  """Entry point."""
  binary.DefineFlags()
  _DefineFlags()
  binary.Run(_Plan, __doc__ or '')


if __name__ == '__main__':
  Run()
