# SPDX-License-Identifier: Apache-2.0
"""Connects this process to workers: waits until they answer, then takes over their devices.

This is the one module that knows internals of TensorFlow's transport, which no public API covers:

* `Ask` calls `GetStatus` of TensorFlow's gRPC service, because TensorFlow itself waits for an
  absent worker without a time limit. `WhySilent` calls a method that does not exist: the server
  says so without its threads that compute.
* `_DEVICE` finds the names of devices in the serialized answer.
* `IsFailure` classifies errors by their type and by parts of their messages.
* `FACTS_DESCRIPTOR` is a file that TensorFlow's operations read in the worker's process.

If a new version of TensorFlow changes one of them, only this module changes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import grpc
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import cluster_spec, local_port

# The file descriptor at which a `worker` publishes facts about itself, as JSON in a file in memory.
# TensorFlow's operation that reads a file, executed by the worker, reads it through /proc/self/fd.
FACTS_DESCRIPTOR = 200

# The job name of this process; its devices have this name without workers, too.
_OWN_JOB = 'localhost'
_ASK_SECONDS = 5.0

# Errors that only a lost worker causes.
_LOST = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
)
# Errors of computations, which a worker that is alive returns.
_COMPUTED = (
  tf.errors.ResourceExhaustedError,
  tf.errors.UnimplementedError,
  tf.errors.OutOfRangeError,
  tf.errors.InvalidArgumentError,
  # Errors of the worker's file system.
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.FailedPreconditionError,
  tf.errors.DataLossError,
)
# Messages of a restarted worker, which does not know the state of its predecessor.
_UNKNOWN = re.compile('context_id|remote[_ ]handle|Remote address')
# The name of a device in a serialized answer of `GetStatus`.
_DEVICE = re.compile(rb'/job:(\w+)/replica:0/task:(\d+)/device:(\w+):(\d+)')

_T = TypeVar('_T')

# Called with the addresses of the workers before this process connects to them.
on_connect: Callable[[Collection[str]], None] | None = None
# {address: answer of the worker before this process connected to it}.
_answers: dict[str, bytes] = {}


def AwaitWorkers(
  addresses: Sequence[str],
  timeout_seconds: float,
  are_enough: Callable[[Mapping[str, bytes], float], bool] | None = None,
) -> dict[str, bytes]:
  """Waits until all workers answer; returns {address: answer}.

  A restarted worker gives another answer, because its devices have new numbers.

  Args:
    addresses: 'host:port' of each worker, by task index.
    timeout_seconds: time limit of the wait.
    are_enough: called with the answers so far and the seconds that have passed. If it returns True,
      the wait ends without the other workers.

  Raises:
    TimeoutError: workers do not answer in time; one line that names them and the reasons.
    ValueError: the process that answers is not the worker of this index.
  """
  start = time.monotonic()
  waiting: dict[int, str] = dict.fromkeys(range(len(addresses)), '')
  answers: dict[str, bytes] = {}
  while True:
    # This wait has its own time limit, and its error names the absent workers.
    heartbeat.SuspendTimeout()
    # If some workers may be left out, ask all of them again: one that answered may be lost by now.
    asked = range(len(addresses)) if are_enough else list(waiting)
    replies = AskAll([addresses[index] for index in asked])
    for index, (answer, reason) in zip(asked, replies, strict=True):
      if reason is None:
        _CheckName(index, addresses[index], answer)
        answers[addresses[index]] = answer
        waiting.pop(index, None)
      else:
        answers.pop(addresses[index], None)
        waiting[index] = reason
    if not waiting:
      return answers
    seconds = time.monotonic() - start
    absent = '; '.join(f'worker {i} at {addresses[i]} ({reason})' for i, reason in waiting.items())
    if are_enough and are_enough(answers, seconds):
      logging.warning('%d of %d workers do not answer: %s', len(waiting), len(addresses), absent)
      return answers
    if seconds >= timeout_seconds:
      raise TimeoutError(
        f'{len(waiting)} of {len(addresses)} workers did not answer within '
        f'{timeout_seconds:g} s: {absent}. Check that `worker` runs there and that this host can '
        'reach its port.'
      )
    time.sleep(0.2)


def Ask(address: str) -> tuple[bytes, str | None]:
  """Asks a server for its devices: returns (serialized answer, None) or (b'', reason)."""
  try:
    with grpc.insecure_channel(address) as channel:
      ask = channel.unary_unary('/tensorflow.WorkerService/GetStatus')
      answer: bytes = ask(b'', timeout=_ASK_SECONDS)
  except grpc.RpcError as e:
    return b'', DescribeRpcError(e)
  return answer, None


def _WhySilent(address: str) -> str | None:
  try:
    with grpc.insecure_channel(address) as channel:
      channel.unary_unary('/tensorflow.WorkerService/Watch')(b'', timeout=_ASK_SECONDS)
  except grpc.RpcError as e:
    return None if e.code() == grpc.StatusCode.UNIMPLEMENTED else DescribeRpcError(e)
  return None


def WhySilent(addresses: Collection[str]) -> list[str | None]:
  """Returns for each server why it does not answer, or None if it does; asks concurrently."""
  return _ForAll(_WhySilent, addresses)


def AskAll(addresses: Collection[str]) -> list[tuple[bytes, str | None]]:
  """Returns the results of `Ask` for several servers, asked concurrently."""
  return _ForAll(Ask, addresses)


def _ForAll(function: Callable[[str], _T], addresses: Collection[str]) -> list[_T]:
  with futures.ThreadPoolExecutor(max_workers=min(32, len(addresses))) as pool:
    return list(pool.map(function, addresses))


def _CheckName(index: int, address: str, answer: bytes) -> None:
  names = {(match[1].decode(), int(match[2])) for match in _DEVICE.finditer(answer)}
  if names != {('worker', index)}:
    actual = ', '.join(f'{job} {task}' for job, task in sorted(names)) or 'another program'
    raise ValueError(
      f'expected worker {index} at {address}, but the process there is {actual}: start '
      f'`worker --task_index={index}` there, or correct the order of the addresses'
    )


def Host(index: int) -> str:
  """Returns the CPU device of a worker."""
  return f'/job:worker/replica:0/task:{index}/device:CPU:0'


def DescribeRpcError(error: grpc.RpcError) -> str:
  """Returns the reason why a server did not answer a call, in one line."""
  text = ' '.join(str(error.details()).split())
  return f'{error.code().name.lower()}: {text[:160]}'


def NumDevices(answers: Mapping[str, bytes], platform: str = 'auto') -> int:
  """Returns the number of devices of a kind that the workers have.

  Args:
    answers: answers of the workers, from `AwaitWorkers`.
    platform: 'cpu', 'gpu', or 'auto' for GPUs if there are any, otherwise CPUs.
  """
  devices = {match.groups() for answer in answers.values() for match in _DEVICE.finditer(answer)}
  kinds = [kind.decode() for _, _, kind, _ in devices]
  if platform == 'auto':
    platform = 'GPU' if 'GPU' in kinds else 'CPU'
  return kinds.count(platform.upper())


def Connect(
  spec: cluster_spec.ClusterSpec, answers: Mapping[str, bytes]
) -> dict[int, dict[str, Any]]:
  """Connects TensorFlow to the workers that answered. Call it once per process.

  The logical devices of this process then include the devices of the workers.

  Args:
    spec: addresses of the cluster.
    answers: answers of the workers, from `AwaitWorkers`; other workers are left out.

  Returns:
    {task index: facts of the worker}. A server that was not started by `worker` has no facts.

  Raises:
    ValueError: a worker runs another version of TensorFlow.
  """
  _answers.update(answers)
  if on_connect:
    on_connect(answers)
  # Otherwise an operation outside of a step would wait for a lost worker forever.
  os.environ.setdefault('TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE', 'False')
  workers = {index: a for index, a in enumerate(spec.workers) if a in answers}
  own_address = spec.chief or _OwnAddress(list(workers.values()))
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)  # TensorFlow would log its whole configuration.
  try:
    tf.config.experimental_connect_to_cluster(
      tf.train.ClusterSpec({'worker': workers, _OWN_JOB: [own_address]}),
      job_name=_OWN_JOB,
      protocol='grpc',
    )
  finally:
    logging.set_verbosity(verbosity)
  logging.info('Workers reach this process at %s.', own_address)
  facts = {index: _Facts(index) for index in workers}  # TensorFlow's server starts here.
  _CloseToOthers([own_address, *workers.values()])
  for index, worker_facts in facts.items():
    version = worker_facts.get('tensorflow', tf.__version__)
    if version != tf.__version__:
      raise ValueError(
        f'worker {index} at {spec.workers[index]} runs TensorFlow {version}, but this process runs '
        f'{tf.__version__}: install the same version everywhere'
      )
  return facts


def _CloseToOthers(addresses: Sequence[str]) -> None:
  """Keeps other machines away from this process if all processes of the run are on this one.

  Args:
    addresses: the address of this process, then the addresses of the workers.
  """
  try:
    if all(map(local_port.IsLocal, addresses)):
      local_port.CloseToOthers(int(addresses[0].rpartition(':')[2]))
  except OSError as e:
    logging.warning('Other machines are not kept away from this process: %s.', e)


def IsFailure(error: BaseException) -> bool:
  """Whether an error was caused by the loss of a worker, not by the worker's computation.

  Usually the type and message of TensorFlow's error decide. Otherwise, and for errors of files,
  which may be on a lost file server, asks the workers whether they are still the processes that
  this process connected to. Returns False without workers.
  """
  if not _answers:
    return False
  cause: BaseException | None = error
  is_of_tensorflow = is_of_files = False
  while cause is not None:
    is_of_files |= isinstance(cause, OSError)
    if isinstance(cause, tf.errors.OpError):
      is_of_tensorflow = True
      if _IsOfLostWorker(cause, is_of_files):
        return True
    cause = cause.__cause__
  return is_of_tensorflow and [answer for answer, _ in AskAll(_answers)] != [*_answers.values()]


def _IsOfLostWorker(error: tf.errors.OpError, is_of_files: bool) -> bool:
  if isinstance(error, _LOST) and not is_of_files:
    return True
  if _UNKNOWN.search(error.message):
    return True
  # TensorFlow marks each error that a worker returned as coming from a remote target.
  return 'remote target' in error.message and not isinstance(error, _COMPUTED)


def _OwnAddress(workers: Sequence[str]) -> str:
  """Returns 'host:port': the address from which this process reaches workers, and a free port."""
  host = 'localhost'
  for worker in workers:
    name, _, port = worker.rpartition(':')
    family, kind, _, _, target = socket.getaddrinfo(
      name.strip('[]'), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as s:
      s.connect(target)  # Connecting a UDP socket sends nothing; it only selects the route.
      address = s.getsockname()[0]
    if not (address.startswith('127.') or address == '::1'):
      host = f'[{address}]' if ':' in address else address
      break
  with socket.socket() as s:
    s.bind(('', 0))
    return f'{host}:{s.getsockname()[1]}'


def _Facts(index: int) -> dict[str, Any]:
  """Reads the facts that a worker publishes; {} if it publishes none."""
  try:
    with tf.device(Host(index)):
      text = tf.io.read_file(f'/proc/self/fd/{FACTS_DESCRIPTOR}').numpy()
    facts = json.loads(text)
  except (tf.errors.OpError, ValueError):
    return {}
  return facts if isinstance(facts, dict) else {}
