# SPDX-License-Identifier: Apache-2.0
"""The trainer: `trainer --model=KEY --logdir=DIR`; other modes print or export, and exit."""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # First: it keeps TensorFlow quiet, and sees Ctrl-C.

# isort: split
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from lingvo_gpipe.checkpoint import (
  checkpoint_choice,
  checkpoint_table,
  checkpointer,
  logdir_lock,
  params_change,
)
from lingvo_gpipe.cli import device_flags, steady_output, subjects, supervised
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
      'no experiments found: run in a directory with a package `params`, or name a package with '
      '--params_package',
      file=sys.stderr,
    )
  return 0


def _InspectParams() -> int:
  print(inspection.ParamsText(binary.ModelParams('Train')), end='')
  return 0


def _InspectModel() -> int:
  print(inspection.ModelText(binary.ModelParams('Train').Instantiate()))
  return 0


def _InspectPartition() -> int:
  params = binary.ModelParams('Train')
  device_flags.OneDevice()
  logdir = binary.LogDir() if FLAGS.logdir else ''
  print(inspection.PartitionText(params, logdir, FLAGS.num_replicas))
  return 0


def _InspectCheckpoint() -> int:
  device_flags.OneDevice()
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
  """Returns the Params of a log directory, a file or an experiment as text."""
  text = inspection.ReadParams(os.path.expanduser(argument))
  return binary.ModelParams('Train', argument).ToText() if text is None else text


def _Export() -> int:
  params = binary.ModelParams('Train')
  device_flags.OneDevice()
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
      f'--checkpoint={FLAGS.checkpoint} is for --mode=export; training resumes from the last '
      'checkpoint. To start a new run with the weights of another, set '
      'train.init_from_checkpoint_rules'
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
      lambda: (device_flags.OwnDevices(num_devices, FLAGS.num_replicas), params),
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
      return device_flags.WorkersDevices(workers, num_devices, seconds), params

    return _TrainOn(params, logdir, MakeDevices, stop, steps, failures)

  def LastCheckpoint() -> int:
    infos = checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()
    return infos[-1].step if infos else -1

  return supervised.Run(
    Train,
    supervisor.Work('training', 'a new checkpoint', LastCheckpoint),
    spec,
    num_devices,
    renews_at_start=True,
    record=lambda step, failures: train_program.RecordFailures(logdir, step, failures),
  )


def _CheckMinWorkers(spec: cluster_spec.ClusterSpec | None) -> None:
  """Raises UsageError if --min_workers and --worker_timeout do not fit these workers."""
  if FLAGS.min_workers and not spec:
    raise binary.UsageError(
      '--min_workers is for workers of --cluster that do not return; local workers are restarted'
    )
  if spec and (FLAGS.min_workers or 0) > len(spec.workers):
    raise binary.UsageError(
      f'--min_workers={FLAGS.min_workers} exceeds the {len(spec.workers)} workers of the cluster'
    )
  if FLAGS['worker_timeout'].present and not FLAGS.min_workers:
    raise binary.UsageError(
      '--worker_timeout is the time to wait before --min_workers are enough: set --min_workers, too'
    )


def _RemainingDevices(
  workers: cluster_spec.ClusterSpec, params: Any, seconds: float
) -> tuple[cluster.Cluster, Any]:
  """Returns devices of the workers that answer in time, and the model's Params for them."""
  answers, new_params, num_replicas = elastic.Await(
    workers,
    params,
    FLAGS.num_replicas,
    min_workers=FLAGS.min_workers,
    patience_seconds=FLAGS.worker_timeout,
    timeout_seconds=seconds + FLAGS.worker_timeout,
    platform=FLAGS.platform,
  )
  num_devices = multi_task_runner.NumDevices(new_params.Instantiate())
  devices = device_flags.WorkersDevices(
    workers, num_devices, num_replicas=num_replicas, answers=answers
  )
  return devices, new_params


def _TrainOn(
  experiment_params: Any,
  logdir: str,
  make_devices: Callable[[], tuple[cluster.Cluster, Any]],
  stop: stop_request.StopRequest,
  profile_steps: tuple[int, int] | None = None,
  failures: Mapping[str, int] | None = None,
) -> int:
  """Trains in this process, on devices that are made once the log directory is locked.

  Args:
    experiment_params: Params of the experiment.
    logdir: the log directory.
    make_devices: returns the devices, and the Params for them.
    stop: request to stop; checked after each step.
    profile_steps: the first and the last step to profile.
    failures: number of earlier failures of this call, by kind.
  """

  def InputParams(dataset: str) -> Any:
    p = binary.ModelParams(dataset)
    params_change.CheckEvaluatedByTrainer(dataset, p, experiment_params)
    return p.input

  # Locked before the devices are made: the first trainer already uses their memory.
  with logdir_lock.HoldLock(os.path.join(logdir, 'train')) as lock:
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
          experiment_params=experiment_params,
          command=shlex.join(['trainer', *sys.argv[1:]]),
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

# Modes that use a flag. Flags that choose the run are not listed: with --mode added, a command line
# inspects the run that it would train.
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

# Number of arguments of a mode that are not flags.
_ARGUMENTS = {'diff_params': 2}


def _Main() -> int:
  for name, modes in _MODES_OF_FLAGS.items():
    flag = FLAGS[name]
    if flag.value != flag.default and FLAGS.mode not in modes:
      raise binary.UsageError(
        f'--{name} is for --mode={" or ".join(modes)}; --mode={FLAGS.mode} does not use it'
      )
  return _MODES[FLAGS.mode]()


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineFlags()
  supervised.DefineFlags()
  flags.DEFINE_enum('mode', 'train', list(_MODES), 'The action of the program.')
  flags.DEFINE_enum(
    'job',
    'train',
    list(train_program.JOBS),
    'train, or train_and_eval to evaluate and decode between steps, as the Params specify.',
  )
  flags.DEFINE_bool(
    'check_numerics', False, 'Stop at the first step that is not finite, and name the layer.'
  )
  flags.DEFINE_bool(
    'allow_params_change', False, 'Resume a run with different Params if its weights fit.'
  )
  flags.DEFINE_string(
    'profile_steps',
    None,
    'First and last step to profile, such as 5,7: writes a trace and a picture of the schedule.',
  )
  flags.DEFINE_string(
    'checkpoint', checkpoint_choice.LAST, f'--mode=export: {checkpoint_choice.HELP}'
  )
  flags.DEFINE_integer(
    'min_workers',
    None,
    'Resume with at least this many workers, in fewer replicas or stages, if others do not return.',
    lower_bound=1,
  )
  flags.DEFINE_float(
    'worker_timeout',
    60.0,
    'Seconds to wait for all workers before --min_workers are enough.',
    lower_bound=0.0,
  )
  flags.DEFINE_string(
    'export_dir', None, 'Directory of --mode=export; defaults to <logdir>/export/<step>.'
  )
  binary.Run(_Main, __doc__ or '', lambda: _ARGUMENTS.get(FLAGS.mode, 0), subjects.SUBJECTS)


if __name__ == '__main__':
  Run()
