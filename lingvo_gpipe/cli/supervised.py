# SPDX-License-Identifier: Apache-2.0
"""Runs a program that computes on workers in child processes, which a `supervisor` watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from absl import flags

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.distributed import (
  cluster_spec,
  stop_request,
  supervisor,
  worker_restart,
  worker_watch,
)

FLAGS = flags.FLAGS

# Time to wait for workers at the start, and after a failure.
_WAIT_SECONDS, _WAIT_AGAIN_SECONDS = 60.0, 1800.0
# Time after which a worker that answers nothing counts as failed, unless --step_timeout is longer.
_SILENCE_SECONDS = 60.0

# The work of a child: takes the workers, the seconds to wait for them, the request to stop, and the
# numbers of earlier failures in this call by kind; returns the exit status.
Task = Callable[[cluster_spec.ClusterSpec, float, stop_request.StopRequest, Mapping[str, int]], int]


def DefineFlags() -> None:
  """Defines the flags of supervised programs."""
  flags.DEFINE_float(
    'step_timeout',
    None,
    'Seconds after which the workers of a step count as hung; by default ten times the median of '
    'the last steps, at least 60. Compilations and waiting have half an hour, if the workers '
    'answer.',
    lower_bound=0.001,
  )


def Workers() -> tuple[bool, cluster_spec.ClusterSpec | None]:
  """Returns whether the program computes on workers, and the workers if it does not start them."""
  spec = None if FLAGS.local_workers else device_flags.Workers()
  has_workers = bool(FLAGS.local_workers or spec)
  if FLAGS.step_timeout is not None and not has_workers:
    raise binary.UsageError(
      '--step_timeout detects workers that hang: it needs --local_workers or --cluster'
    )
  return has_workers, spec


def Run(
  task: Task,
  work: supervisor.Work,
  spec: cluster_spec.ClusterSpec | None,
  num_devices: int,
  *,
  renews_at_start: bool = False,
  record: Callable[[int, Mapping[str, int]], None] | None = None,
) -> int:
  """Runs a task in child processes until it succeeds; returns the exit status.

  In a child process it returns the exit status of the child.

  Args:
    task: the work of each child.
    work: description of the work for the supervisor.
    spec: the workers; None to start local workers.
    num_devices: number of devices of each replica, for local workers.
    renews_at_start: whether workers are restarted at the start too, and not only after a failure,
      because no other process may use them.
    record: records failures, see `supervisor.Supervisor`.
  """

  def Child(local: cluster_spec.ClusterSpec | None, failures: Mapping[str, int]) -> int:
    workers = local or spec
    assert workers is not None
    if not local and (renews_at_start or failures):
      with device_flags.StartingTensorFlow():
        worker_restart.RestartWorkers(workers, FLAGS.num_replicas)
    silence = max(_SILENCE_SECONDS, FLAGS.step_timeout or 0.0)
    worker_watch.Start(silence, supervisor.WORKER_FAILED)
    stop = stop_request.StopRequest()
    stop.Install()
    seconds = _WAIT_AGAIN_SECONDS if failures else _WAIT_SECONDS
    with binary.ExitIfAWorkerFails(supervisor.WORKER_FAILED):
      return task(workers, seconds, stop, failures)

  return supervisor.Supervisor(
    Child,
    work,
    None if spec else lambda: device_flags.LocalWorkers(num_devices),
    FLAGS.step_timeout,
    record,
  ).Run()
