# SPDX-License-Identifier: Apache-2.0
"""Connects this process to workers: asks whether they are there, then takes over their devices.

What is asked is `GetStatus` of TensorFlow's own gRPC service, which names the devices of a server.
TensorFlow itself would wait for an absent worker, with no end that one can choose.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import cluster_spec

# The file descriptor at which a `worker` keeps what it tells of itself, as JSON in a file that lies
# in memory: TensorFlow's own operation that reads a file reads it there, in the worker's process.
FACTS_DESCRIPTOR = 200

# The job of this process: the name that devices have without workers, too.
_OWN_JOB = 'localhost'
_ASK_SECONDS = 5.0

# What a worker that is gone is told by, and what one that computes answers.
_GONE = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
)
_COMPUTED = (
  tf.errors.ResourceExhaustedError,
  tf.errors.UnimplementedError,
  tf.errors.OutOfRangeError,
  tf.errors.InvalidArgumentError,
  # Of files.
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.FailedPreconditionError,
  tf.errors.DataLossError,
)
_UNKNOWN = re.compile('context_id|remote[_ ]handle|Remote address')
_DEVICE = re.compile(rb'/job:(\w+)/replica:0/task:(\d+)/device:(\w+):(\d+)')

# What each worker answered, by its address, before this process was connected to it.
_answers: dict[str, bytes] = {}


def AwaitWorkers(
  addresses: Sequence[str],
  timeout_seconds: float,
  are_enough: Callable[[Mapping[str, bytes], float], bool] | None = None,
) -> dict[str, bytes]:
  """Returns when each worker answers: what it answers, by its address.

  A worker that is started again answers otherwise: its devices have other numbers.

  Args:
    addresses: 'host:port' of each, by task index.
    timeout_seconds: so long it is tried.
    are_enough: where it says so of the answers that came, after so many seconds, the other workers
      are left out.

  Raises:
    TimeoutError: some do not answer in time: one line that says which, and why.
    ValueError: what answers is not the worker of that index.
  """
  start = time.monotonic()
  waiting: dict[int, str] = dict.fromkeys(range(len(addresses)), '')
  answers: dict[str, bytes] = {}
  while True:
    heartbeat.SuspendTimeout()  # It is this wait that ends, and names who is absent.
    # Of those that may be left with the work none is to be gone meanwhile.
    wanted = range(len(addresses)) if are_enough else list(waiting)
    told = AskAll([addresses[index] for index in wanted])
    for index, (found, why) in zip(wanted, told, strict=True):
      if not why:
        _CheckName(index, addresses[index], found)
        answers[addresses[index]] = found
        waiting.pop(index, None)
      else:
        answers.pop(addresses[index], None)
        waiting[index] = why
    if not waiting:
      return answers
    seconds = time.monotonic() - start
    absent = '; '.join(f'worker {i} at {addresses[i]} ({why})' for i, why in waiting.items())
    if are_enough and are_enough(answers, seconds):
      logging.warning('%d of %d workers do not answer: %s', len(waiting), len(addresses), absent)
      return answers
    if seconds >= timeout_seconds:
      raise TimeoutError(
        f'{len(waiting)} of {len(addresses)} workers did not answer within '
        f'{timeout_seconds:g} s: {absent}. Is `worker` started there, and is its port open from '
        'here?'
      )
    time.sleep(0.2)


def Ask(address: str) -> tuple[bytes, str]:
  """Asks a server: (its devices as they are sent, ''), or (nothing, why there is no answer)."""
  try:
    with grpc.insecure_channel(address) as channel:
      ask = channel.unary_unary('/tensorflow.WorkerService/GetStatus')
      answer: bytes = ask(b'', timeout=_ASK_SECONDS)
  except grpc.RpcError as e:
    return b'', WhyNot(e)
  return answer, ''


def AskAll(addresses: Collection[str]) -> list[tuple[bytes, str]]:
  """What `Ask` returns for each server; they are asked at once."""
  with futures.ThreadPoolExecutor(max_workers=min(32, len(addresses))) as pool:
    return list(pool.map(Ask, addresses))


def _CheckName(index: int, address: str, answer: bytes) -> None:
  names = {(found[1].decode(), int(found[2])) for found in _DEVICE.finditer(answer)}
  if names != {('worker', index)}:
    told = ', '.join(f'{job} {task}' for job, task in sorted(names)) or 'nothing'
    raise ValueError(
      f'worker {index} is to be at {address}, but what answers there calls itself {told}: start '
      f'`worker --task_index={index}` there, or change the order of the addresses'
    )


def Host(index: int) -> str:
  """Returns the CPU of a worker."""
  return f'/job:worker/replica:0/task:{index}/device:CPU:0'


def WhyNot(error: grpc.RpcError) -> str:
  """Why a server did not answer a call."""
  text = ' '.join(str(error.details()).split())
  return f'{error.code().name.lower()}: {text[:160]}'


def NumDevices(answers: Mapping[str, bytes], platform: str = 'auto') -> int:
  """How many devices of a kind the workers have that gave these answers.

  Args:
    answers: what `AwaitWorkers` returned.
    platform: 'cpu', 'gpu', 'tpu', or 'auto': accelerators if there are any.
  """
  devices = {found.groups() for answer in answers.values() for found in _DEVICE.finditer(answer)}
  kinds = [kind.decode() for _, _, kind, _ in devices]
  if platform == 'auto':
    platform = next((kind for kind in ('TPU', 'GPU') if kind in kinds), 'CPU')
  return kinds.count(platform.upper())


def Connect(
  spec: cluster_spec.ClusterSpec, answers: Mapping[str, bytes]
) -> dict[int, dict[str, Any]]:
  """Connects TensorFlow to workers that answer, and to no others; once in a process.

  From then on the devices of the workers are among the logical devices of this process.

  Args:
    spec: the cluster.
    answers: what `AwaitWorkers` returned.

  Returns:
    {task index: what the worker tells of itself}; nothing: it was not started by `worker`.

  Raises:
    ValueError: a worker runs another version of TensorFlow.
  """
  _answers.update(answers)
  # Else what is asked of a worker that is gone, outside of a step, is waited for without an end.
  os.environ.setdefault('TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE', 'False')
  workers = {index: a for index, a in enumerate(spec.workers) if a in answers}
  own = spec.chief or _OwnAddress(list(workers.values()))
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)  # TensorFlow would log its whole configuration.
  try:
    tf.config.experimental_connect_to_cluster(
      tf.train.ClusterSpec({'worker': workers, _OWN_JOB: [own]}),
      job_name=_OWN_JOB,
      protocol='grpc',
    )
  finally:
    logging.set_verbosity(verbosity)
  logging.info('Workers reach this process at %s.', own)
  facts = {index: _Facts(index) for index in workers}
  for index, found in facts.items():
    version = found.get('tensorflow', tf.__version__)
    if version != tf.__version__:
      raise ValueError(
        f'worker {index} at {spec.workers[index]} runs TensorFlow {version}, and this process '
        f'{tf.__version__}: install one version everywhere'
      )
  return facts


def IsFailure(error: BaseException) -> bool:
  """Whether an error came from a worker that is gone, and not from what it was to compute.

  TensorFlow's error tells so most times. Where it does not, or is of files, which may be on a
  server that is gone as well, the workers are asked whether they are those that this process was
  connected to. Without workers there is no such error.
  """
  if not _answers:
    return False
  found: BaseException | None = error
  is_of_tensorflow = is_of_files = False
  while found is not None:
    is_of_files |= isinstance(found, OSError)
    if isinstance(found, tf.errors.OpError):
      is_of_tensorflow = True
      if _IsOfGoneWorker(found, is_of_files):
        return True
    found = found.__cause__
  return is_of_tensorflow and [answer for answer, _ in AskAll(_answers)] != [*_answers.values()]


def _IsOfGoneWorker(error: tf.errors.OpError, is_of_files: bool) -> bool:
  if isinstance(error, _GONE) and not is_of_files:
    return True
  # A worker that was started again does not know what the one before it had.
  if _UNKNOWN.search(error.message):
    return True
  # Of all that a worker answers TensorFlow says that it came from a remote target.
  return 'remote target' in error.message and not isinstance(error, _COMPUTED)


def _OwnAddress(workers: Sequence[str]) -> str:
  """A free port at the address from which this process reaches the workers."""
  host = 'localhost'
  for worker in workers:
    name, _, port = worker.rpartition(':')
    family, kind, _, _, target = socket.getaddrinfo(
      name.strip('[]'), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as s:
      s.connect(target)  # Sends nothing: it asks for the way.
      found = s.getsockname()[0]
    if not (found.startswith('127.') or found == '::1'):
      host = f'[{found}]' if ':' in found else found
      break
  with socket.socket() as s:
    s.bind(('', 0))
    return f'{host}:{s.getsockname()[1]}'


def _Facts(index: int) -> dict[str, Any]:
  """What a worker tells of itself."""
  try:
    with tf.device(Host(index)):
      text = tf.io.read_file(f'/proc/self/fd/{FACTS_DESCRIPTOR}').numpy()
    found = json.loads(text)
  except (tf.errors.OpError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
