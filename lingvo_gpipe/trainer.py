# SPDX-License-Identifier: Apache-2.0
"""The trainer: `trainer --model=KEY --logdir=DIR`; other modes print, or export, and leave."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from lingvo_gpipe.cli import binary  # First: it keeps TensorFlow quiet.

# isort: split
from lingvo_gpipe.checkpoint import checkpoint_choice, checkpoint_table, checkpointer, logdir_lock
from lingvo_gpipe.cli import steady_output, supervised
from lingvo_gpipe.distributed import cluster, cluster_spec, stop_request, supervisor
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.runners import failure_notes, multi_task_runner
from lingvo_gpipe.training import elastic, export, inspection, step_profiler, train_program

FLAGS = flags.FLAGS


def _List() -> int:
  keys = registry.ListKeys(binary.Packages())
  for key in keys:
    print(key)
  if not keys:
    print(
      'no experiments here: run in a directory that has a package `params`, or name a package with '
      '--params_package',
      file=sys.stderr,
    )
  return 0


def _InspectParams() -> int:
  print(binary.ModelParams('Train').ToText(), end='')
  return 0


def _InspectModel() -> int:
  print(inspection.ModelText(binary.ModelParams('Train').Instantiate()))
  return 0


def _InspectPartition() -> int:
  params = binary.ModelParams('Train')
  binary.OneDevice()
  logdir = binary.LogDir() if FLAGS.logdir else ''
  print(inspection.PartitionText(params, logdir, FLAGS.num_replicas))
  return 0


def _InspectCheckpoint() -> int:
  binary.OneDevice()
  text, are_whole = checkpoint_table.Describe(binary.LogDir())
  print(text)
  return 0 if are_whole else 1


def _DiffParams() -> int:
  texts = [_ParamsText(argument) for argument in binary.arguments]
  lines = inspection.ParamsDiff(*texts)
  for line in lines:
    print(line)
  return 1 if lines else 0


def _ParamsText(argument: str) -> str:
  """The Params that an argument of diff_params names: a log directory, a file, an experiment."""
  found = inspection.ReadParams(os.path.expanduser(argument))
  return binary.ModelParams('Train', argument).ToText() if found is None else found


def _Export() -> int:
  params = binary.ModelParams('Train')
  binary.OneDevice()
  directory = os.path.expanduser(FLAGS.export_dir or '')
  exported = export.Export(
    params,
    binary.LogDir(),
    directory,
    checkpoint=FLAGS.checkpoint,
    allow_params_change=FLAGS.allow_params_change,
  )
  print(exported.Text())
  return 0


def _Train() -> int:
  if FLAGS.checkpoint != checkpoint_choice.LAST:
    raise binary.UsageError(
      f'--checkpoint={FLAGS.checkpoint} is for --mode=export; training goes on from the last one. '
      'A new run begins with the weights of any by train.init_from_checkpoint_rules'
    )
  has_workers, spec = supervised.Workers()
  _CheckMinWorkers(spec)
  steady_output.Install()
  stop = stop_request.StopRequest()
  if not has_workers:
    stop.Install()
  params = binary.ModelParams('Train')
  steps = None
  if FLAGS.profile_steps:
    steps = step_profiler.ParseSteps(
      FLAGS.profile_steps, model_lib.FindTrainParams(params).max_steps
    )
  logdir = binary.LogDir()
  num_devices = multi_task_runner.NumDevices(params.Instantiate())
  if not has_workers:
    return _TrainOn(
      params,
      logdir,
      lambda: (binary.OwnDevices(num_devices, FLAGS.num_replicas), params),
      stop,
      steps,
    )

  def Train(
    workers: cluster_spec.ClusterSpec,
    seconds: float,
    stop: stop_request.StopRequest,
    failures: Mapping[str, int],
  ) -> int:
    def MakeDevices() -> tuple[cluster.Cluster, Any]:
      if FLAGS.min_workers and (failures or LastCheckpoint() >= 0):
        return _RemainingDevices(workers, params, seconds)
      return binary.WorkersDevices(workers, num_devices, seconds), params

    return _TrainOn(params, logdir, MakeDevices, stop, steps, failures)

  def LastCheckpoint() -> int:
    found = checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()
    return found[-1].step if found else -1

  return supervised.Run(
    Train,
    supervisor.Work('training', 'a new checkpoint', LastCheckpoint),
    spec,
    num_devices,
    renews_at_start=True,
    record=lambda step, failures: train_program.RecordFailures(logdir, step, failures),
  )


def _CheckMinWorkers(spec: cluster_spec.ClusterSpec | None) -> None:
  """Raises UsageError where --min_workers and --worker_timeout do not fit these workers."""
  if FLAGS.min_workers and not spec:
    raise binary.UsageError(
      '--min_workers goes on with those of --cluster that are there; local workers are started anew'
    )
  if spec and (FLAGS.min_workers or 0) > len(spec.workers):
    raise binary.UsageError(
      f'--min_workers={FLAGS.min_workers} are more than the {len(spec.workers)} of the cluster'
    )
  if FLAGS['worker_timeout'].present and not FLAGS.min_workers:
    raise binary.UsageError(
      '--worker_timeout says after how long --min_workers are enough: give both, or none'
    )


def _RemainingDevices(
  workers: cluster_spec.ClusterSpec, params: Any, seconds: float
) -> tuple[cluster.Cluster, Any]:
  """Devices of the workers that are there in time, and the model's Params for them."""
  answers, found, num_replicas = elastic.Await(
    workers,
    params,
    FLAGS.num_replicas,
    min_workers=FLAGS.min_workers,
    patience_seconds=FLAGS.worker_timeout,
    timeout_seconds=seconds + FLAGS.worker_timeout,
    platform=FLAGS.platform,
  )
  num_devices = multi_task_runner.NumDevices(found.Instantiate())
  devices = binary.WorkersDevices(workers, num_devices, num_replicas=num_replicas, answers=answers)
  return devices, found


def _TrainOn(
  own_params: Any,
  logdir: str,
  make_devices: Callable[[], tuple[cluster.Cluster, Any]],
  stop: stop_request.StopRequest,
  profile_steps: tuple[int, int] | None = None,
  failures: Mapping[str, int] | None = None,
) -> int:
  """Trains in this process, on devices that are made when the log directory is its own.

  Args:
    own_params: the experiment's Params.
    logdir: the log directory.
    make_devices: makes them; returns the Params for them, too.
    stop: asked after each step.
    profile_steps: the first and the last step to profile.
    failures: how often training failed before, in this call.
  """

  def InputParams(dataset: str) -> Any:
    return binary.ModelParams(dataset).input

  # Before the devices: a second trainer would find their memory taken.
  with logdir_lock.Held(os.path.join(logdir, 'train')) as lock:
    devices, params = make_devices()
    with failure_notes.Hints(params):
      return train_program.TrainProgram(
        params,
        logdir,
        devices,
        InputParams,
        stop,
        train_program.RunOptions(
          job=FLAGS.job,
          check_numerics=FLAGS.check_numerics,
          allow_params_change=FLAGS.allow_params_change,
          lock=lock,
          profile_steps=profile_steps,
          failures=failures or {},
          experiment_params=own_params,
        ),
      ).Run()


_MODES = {
  'train': _Train,
  'list': _List,
  'inspect_params': _InspectParams,
  'inspect_model': _InspectModel,
  'inspect_partition': _InspectPartition,
  'inspect_checkpoint': _InspectCheckpoint,
  'diff_params': _DiffParams,
  'export': _Export,
}

# The modes for which a flag means something, unless it says what run it is about: a command line
# with --mode behind it looks at the run that it would train.
_MODES_OF_FLAGS = {
  'job': ('train',),
  'check_numerics': ('train',),
  'profile_steps': ('train',),
  'step_timeout': ('train',),
  'allow_params_change': ('train', 'export'),
  'checkpoint': ('train', 'export'),
  'export_dir': ('export',),
  'min_workers': ('train',),
  'worker_timeout': ('train',),
}

# How many arguments a mode takes beside flags.
_ARGUMENTS = {'diff_params': 2}


def _Main() -> int:
  for name, modes in _MODES_OF_FLAGS.items():
    flag = FLAGS[name]
    if flag.value != flag.default and FLAGS.mode not in modes:
      raise binary.UsageError(
        f'--{name} is for --mode={" or ".join(modes)}; --mode={FLAGS.mode} does nothing with it'
      )
  return _MODES[FLAGS.mode]()


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineFlags()
  supervised.DefineFlags()
  flags.DEFINE_enum('mode', 'train', list(_MODES), 'What to do.')
  flags.DEFINE_enum(
    'job',
    'train',
    list(train_program.JOBS),
    'train, or train_and_eval: evaluate and decode between steps, as the Params say.',
  )
  flags.DEFINE_bool(
    'check_numerics', False, 'Stop at the first step that is not finite and name the layer.'
  )
  flags.DEFINE_bool(
    'allow_params_change', False, 'Go on with a run whose Params were others, if its weights fit.'
  )
  flags.DEFINE_string(
    'profile_steps',
    None,
    'The first and the last step to profile, such as 5,7: a trace, and a picture of the schedule.',
  )
  flags.DEFINE_string(
    'checkpoint', checkpoint_choice.LAST, f'--mode=export: {checkpoint_choice.HELP}'
  )
  flags.DEFINE_integer(
    'min_workers',
    None,
    'Go on from a checkpoint with so many workers if no more come, in fewer replicas or stages.',
    lower_bound=1,
  )
  flags.DEFINE_float(
    'worker_timeout',
    60.0,
    'Seconds for which all workers are waited for, where --min_workers are enough.',
    lower_bound=0.0,
  )
  flags.DEFINE_string('export_dir', None, 'Where --mode=export writes; <logdir>/export/<step>.')
  binary.Run(_Main, __doc__ or '', lambda: _ARGUMENTS.get(FLAGS.mode, 0))


if __name__ == '__main__':
  Run()
