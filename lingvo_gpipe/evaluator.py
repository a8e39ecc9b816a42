# SPDX-License-Identifier: Apache-2.0
"""The evaluator: `evaluator --model=KEY --logdir=DIR --split=Test [--job=decode] [--once]`."""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # First: it keeps TensorFlow quiet, and sees Ctrl-C.

# isort: split
from collections.abc import Mapping

from absl import flags

from lingvo_gpipe.checkpoint import checkpoint_choice
from lingvo_gpipe.cli import device_flags, steady_output, subjects, supervised
from lingvo_gpipe.distributed import cluster, cluster_spec, stop_request, supervisor
from lingvo_gpipe.evaluation import eval_program, pass_schedule
from lingvo_gpipe.runners import failure_notes, multi_task_runner

FLAGS = flags.FLAGS


def _Evaluate() -> int:
  has_workers, spec = supervised.Workers()
  if not FLAGS.once:  # With --once the printed metrics are the result.
    steady_output.Install()
  stop = stop_request.StopRequest()
  if not has_workers:
    stop.Install()
  params = binary.ModelParams(FLAGS.split)
  logdir = binary.LogDir()
  num_devices = multi_task_runner.NumDevices(params.Instantiate())
  progress = eval_program.EvalProgress()

  def EvaluateOn(devices: cluster.Cluster, stop: stop_request.StopRequest) -> int:
    with failure_notes.Hints(params):
      return eval_program.EvalProgram(
        params,
        logdir,
        devices,
        FLAGS.split,
        stop,
        job=FLAGS.job,
        checkpoint=FLAGS.checkpoint,
        allow_params_change=FLAGS.allow_params_change,
        progress=progress,
      ).Run(FLAGS.once)

  if not has_workers:
    return EvaluateOn(device_flags.OwnDevices(num_devices, FLAGS.num_replicas), stop)

  def Evaluate(
    workers: cluster_spec.ClusterSpec,
    seconds: float,
    stop: stop_request.StopRequest,
    failures: Mapping[str, int],
  ) -> int:
    del failures
    return EvaluateOn(device_flags.WorkersDevices(workers, num_devices, seconds), stop)

  return supervised.Run(
    Evaluate,
    supervisor.Work(
      'evaluation', 'a result', lambda: progress.total, lambda: _DescribeStart(progress)
    ),
    spec,
    num_devices,
  )


def _DescribeStart(progress: eval_program.EvalProgress) -> str:
  """Returns the checkpoint from which the next process continues, for a log line."""
  if FLAGS.once or FLAGS.checkpoint != checkpoint_choice.LAST:
    return supervisor.FromStep(progress.step)
  return 'from the newest checkpoint'


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineFlags()
  supervised.DefineFlags()
  flags.DEFINE_enum(
    'job',
    'eval',
    list(pass_schedule.JOBS),
    'eval computes metrics; decode writes the decoded examples and their scores.',
  )
  flags.DEFINE_string('split', 'Test', 'Data set: Train, Dev or Test.')
  flags.DEFINE_bool('once', False, 'Evaluate the last checkpoint, then exit.')
  flags.DEFINE_string(
    'checkpoint',
    checkpoint_choice.LAST,
    f'{checkpoint_choice.HELP} With any value but last, only this checkpoint.',
  )
  flags.DEFINE_bool(
    'allow_params_change', False, 'Use weights of a run with different Params if they fit.'
  )
  binary.Run(_Evaluate, __doc__ or '', subjects=subjects.SUBJECTS)


if __name__ == '__main__':
  Run()
