# SPDX-License-Identifier: Apache-2.0
"""Resumes a run with fewer replicas or stages if some workers do not return.

The micro-batches of a mini-batch do not change, so their random seeds and the rows that BatchNorm
normalises together stay the same: the results are equal except for rounding.
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
  """Waits for all workers; after `patience_seconds`, a minimum number of workers is enough.

  Args:
    spec: all workers.
    params: Params of the model.
    num_replicas: number of replicas with all workers.
    min_workers: minimum number of workers, if the model can be cut for their devices.
    patience_seconds: time to wait for all workers.
    timeout_seconds: time to wait for the minimum number of workers.
    platform: kind of devices.

  Returns:
    (answers of the available workers, Params for them, number of replicas).

  Raises:
    TimeoutError, ValueError: raised by `worker_connection.AwaitWorkers`.
  """
  logged = ''
  new_params, new_replicas = params, num_replicas

  def AreEnough(answers: Mapping[str, bytes], seconds: float) -> bool:
    nonlocal logged, new_params, new_replicas
    if seconds < patience_seconds or len(answers) < min_workers:
      return False
    try:
      num_devices = worker_connection.NumDevices(answers, platform)
      new_params, new_replicas = Shrink(params, num_replicas, num_devices)
    except ValueError as e:
      if logged != str(e):
        logged = str(e)
        logging.warning(
          '%d of %d workers answer; waiting for the others: %s',
          len(answers),
          len(spec.workers),
          logged,
        )
      return False
    return True

  answers = worker_connection.AwaitWorkers(spec.workers, timeout_seconds, AreEnough)
  if len(answers) == len(spec.workers):
    return answers, params, num_replicas
  logging.warning(
    'training continues with %d of %d workers: %d x %d devices (replicas x stages) instead of '
    '%d x %d',
    len(answers),
    len(spec.workers),
    new_replicas,
    _NumDevices(new_params),
    num_replicas,
    _NumDevices(params),
  )
  return answers, new_params, new_replicas


def Shrink(params: Any, num_replicas: int, num_devices: int) -> tuple[Any, int]:
  """Returns Params and a number of replicas of a model for fewer devices.

  Fewer replicas keep the cut. If there is no room for one replica, it gets fewer stages.

  Args:
    params: Params of the model.
    num_replicas: number of replicas with all devices.
    num_devices: number of available devices.

  Raises:
    ValueError: the model cannot be cut for these devices; the message is one line.
  """
  devices_per_replica = _NumDevices(params)
  if num_devices >= devices_per_replica * num_replicas:
    return params, num_replicas
  if not num_devices:
    raise ValueError('they have no device of this platform')
  if 'task' not in params or 'stack' not in params.task:
    raise ValueError('a model of several tasks, or without a stack, cannot be cut differently')
  params = params.Copy()
  stack = params.task.stack
  if stack.memory_limit:
    raise ValueError('memory_limit is set, and each of fewer devices may need more memory')
  num_micro_batches = stack.num_micro_batches * num_replicas
  most_replicas = max(1, num_devices // devices_per_replica)
  replicas = max(r for r in range(1, most_replicas + 1) if num_micro_batches % r == 0)
  stack.num_micro_batches = num_micro_batches // replicas
  if num_devices < devices_per_replica:
    if stack.splits:
      raise ValueError('splits are set by hand, and there are more stages than devices')
    stack.num_stages = num_devices * stack.stages_per_device
  # A custom schedule is made for other numbers of devices, and fails this check too.
  if _NumDevices(params) * replicas > num_devices:
    raise ValueError('its number of devices does not follow from task.stack')
  return params, replicas


def _NumDevices(params: Any) -> int:
  return multi_task_runner.NumDevices(params.Instantiate())
