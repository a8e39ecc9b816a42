# SPDX-License-Identifier: Apache-2.0
"""The evaluator: `evaluator --model=KEY --logdir=DIR --split=Test [--job=decode] [--once]`."""

from __future__ import annotations

from collections.abc import Mapping

from absl import flags

from lingvo_gpipe.cli import binary  # First: it keeps TensorFlow quiet.

# isort: split
from lingvo_gpipe.checkpoint import checkpoint_choice
from lingvo_gpipe.cli import steady_output, supervised
from lingvo_gpipe.distributed import cluster, cluster_spec, stop_request, supervisor
from lingvo_gpipe.evaluation import eval_program, pass_schedule
from lingvo_gpipe.runners import failure_notes, multi_task_runner

FLAGS = flags.FLAGS


def _Evaluate() -> int:
  has_workers, spec = supervised.Workers()
  if not FLAGS.once:  # Else what it prints is what it is called for.
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
    return EvaluateOn(binary.OwnDevices(num_devices, FLAGS.num_replicas), stop)

  def Evaluate(
    workers: cluster_spec.ClusterSpec,
    seconds: float,
    stop: stop_request.StopRequest,
    failures: Mapping[str, int],
  ) -> int:
    del failures
    return EvaluateOn(binary.WorkersDevices(workers, num_devices, seconds), stop)

  return supervised.Run(
    Evaluate,
    supervisor.Work('evaluation', 'a result', lambda: progress.total, lambda: _Where(progress)),
    spec,
    num_devices,
  )


def _Where(progress: eval_program.EvalProgress) -> str:
  """From where another process goes on: one that follows a run takes no old checkpoint."""
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
    'eval: metrics. decode: write what the model makes of it.',
  )
  flags.DEFINE_string('split', 'Test', 'The data set: Train, Dev or Test.')
  flags.DEFINE_bool('once', False, 'Take the last checkpoint and leave.')
  flags.DEFINE_string(
    'checkpoint', checkpoint_choice.LAST, f'{checkpoint_choice.HELP} But for last: it alone.'
  )
  flags.DEFINE_bool(
    'allow_params_change', False, 'Take the weights of a run of another model, if they fit.'
  )
  binary.Run(_Evaluate, __doc__ or '')


if __name__ == '__main__':
  Run()
