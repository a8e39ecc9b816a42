# SPDX-License-Identifier: Apache-2.0
"""A program that computes on workers: it does so in a child, which a `supervisor` watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from absl import flags

from lingvo_gpipe.cli import binary
from lingvo_gpipe.distributed import cluster_spec, stop_request, supervisor, worker_restart

FLAGS = flags.FLAGS

# So long workers are waited for, and so long those that failed.
_WAIT_SECONDS, _WAIT_AGAIN_SECONDS = 60.0, 1800.0

# What a child does: takes the workers, so many seconds to wait for them, what to ask after each
# step, and how often the work failed before in this call, by kind; returns the exit status.
Task = Callable[[cluster_spec.ClusterSpec, float, stop_request.StopRequest, Mapping[str, int]], int]


def DefineFlags() -> None:
  """Defines the flag of programs that are supervised."""
  flags.DEFINE_float(
    'step_timeout',
    None,
    'Seconds that a step may take before its workers count as hung; by default ten times the '
    'median of the last ones, at least 60. What compiles or is waited for has half an hour.',
    lower_bound=0.001,
  )


def Workers() -> tuple[bool, cluster_spec.ClusterSpec | None]:
  """Whether the program computes on workers; those of them that others start."""
  spec = None if FLAGS.local_workers else binary.Workers()
  has_workers = bool(FLAGS.local_workers or spec)
  if FLAGS.step_timeout is not None and not has_workers:
    raise binary.UsageError(
      '--step_timeout gives up workers that hang: it needs --local_workers or --cluster'
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
  """Does a task in children until it is done; returns the exit status, in each child that of it.

  Args:
    task: what each child does.
    work: what it is, for the supervisor.
    spec: the workers; None: local ones.
    num_devices: of each replica, for local workers.
    renews_at_start: workers begin anew not only after a failure: nobody else is to use them.
    record: as `supervisor.Supervisor` takes it.
  """

  def Child(local: cluster_spec.ClusterSpec | None, failures: Mapping[str, int]) -> int:
    workers = local or spec
    assert workers is not None
    if not local and (renews_at_start or failures):
      with binary.StartingTensorFlow():
        worker_restart.Renew(workers, FLAGS.num_replicas)
    stop = stop_request.StopRequest()
    stop.Install()
    seconds = _WAIT_AGAIN_SECONDS if failures else _WAIT_SECONDS
    with binary.LeavingWhereAWorkerFails(supervisor.WORKER_FAILED):
      return task(workers, seconds, stop, failures)

  return supervisor.Supervisor(
    Child,
    work,
    None if spec else lambda: binary.LocalWorkers(num_devices),
    FLAGS.step_timeout,
    record,
  ).Run()
