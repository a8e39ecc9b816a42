# SPDX-License-Identifier: Apache-2.0
"""Where some workers do not come back: a run goes on with the others, in fewer replicas or stages.

The micro-batches of a mini-batch stay as they were, and with them their random seeds and what
BatchNorm normalises: the result is equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.distributed import cluster_spec, worker_connection
from lingvo_gpipe.runners import multi_task_runner


def Await(
  spec: cluster_spec.ClusterSpec,
  params: Any,
  num_replicas: int,
  *,
  min_workers: int,
  patience_seconds: float,
  timeout_seconds: float,
  platform: str = 'auto',
) -> tuple[dict[str, bytes], Any, int]:
  """Waits for all workers, and after a while for as many as are enough.

  Args:
    spec: all workers.
    params: the Params of the model.
    num_replicas: R, with all workers.
    min_workers: so many are enough, if the model can be cut for their devices.
    patience_seconds: so long all are waited for.
    timeout_seconds: so long any are waited for.
    platform: the kind of devices.

  Returns:
    (what the workers answered that are there, the Params for them, R).

  Raises:
    TimeoutError, ValueError: as `worker_connection.AwaitWorkers`.
  """
  told = ''
  found, replicas = params, num_replicas

  def AreEnough(answers: Mapping[str, bytes], seconds: float) -> bool:
    nonlocal told, found, replicas
    if seconds < patience_seconds or len(answers) < min_workers:
      return False
    try:
      num_devices = worker_connection.NumDevices(answers, platform)
      found, replicas = Shrink(params, num_replicas, num_devices)
    except ValueError as e:
      if told != str(e):
        told = str(e)
        logging.warning(
          '%d of %d workers answer; waiting for the others: %s',
          len(answers),
          len(spec.workers),
          told,
        )
      return False
    return True

  answers = worker_connection.AwaitWorkers(spec.workers, timeout_seconds, AreEnough)
  if len(answers) == len(spec.workers):
    return answers, params, num_replicas
  logging.warning(
    'training goes on with %d of %d workers: %d x %d devices (replicas x stages), instead of '
    '%d x %d',
    len(answers),
    len(spec.workers),
    replicas,
    _NumDevices(found),
    num_replicas,
    _NumDevices(params),
  )
  return answers, found, replicas


def Shrink(params: Any, num_replicas: int, num_devices: int) -> tuple[Any, int]:
  """The Params of a model, and how many replicas, where there are fewer devices.

  Fewer replicas keep the cut. Where not even one has room, it gets fewer stages.

  Args:
    params: of a model.
    num_replicas: R, with all devices.
    num_devices: how many there are.

  Raises:
    ValueError: the model cannot be cut for them: one line that says why.
  """
  each = _NumDevices(params)
  if num_devices >= each * num_replicas:
    return params, num_replicas
  if not num_devices:
    raise ValueError('they have no device of the kind')
  if 'task' not in params or 'stack' not in params.task:
    raise ValueError('a model of several tasks, or without a stack, has no other cut')
  params = params.Copy()
  stack = params.task.stack
  if stack.memory_limit:
    raise ValueError('memory_limit is set, and fewer devices may need more memory each')
  num_micro_batches = stack.num_micro_batches * num_replicas
  rows = max(1, num_devices // each)
  replicas = max(r for r in range(1, rows + 1) if num_micro_batches % r == 0)
  stack.num_micro_batches = num_micro_batches // replicas
  if num_devices < each:
    if stack.splits:
      raise ValueError('splits were set by hand, and there is no device for each stage')
    stack.num_stages = num_devices * stack.stages_per_device
  # A schedule of one's own is for other numbers, and then this is refused, too.
  if _NumDevices(params) * replicas > num_devices:
    raise ValueError('its stages are not those of task.stack')
  return params, replicas


def _NumDevices(params: Any) -> int:
  return multi_task_runner.NumDevices(params.Instantiate())
