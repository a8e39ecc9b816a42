# SPDX-License-Identifier: Apache-2.0
"""The hosts of values: what is done to a value on the CPU of the worker that has it stays there."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import files

# The CPU of this process: where values are gathered, and what no worker is to do is done.
HERE = '/device:CPU:0'


class _Gate:
  """Lets calls of functions in at once, but the first call of each alone.

  With it the function is brought to the workers, and TensorFlow then moves what it knows of others
  while these may read it (EagerClusterFunctionLibraryRuntime holds them in a vector): seen once, as
  "invalid UTF-8" in the name of a device.
  """

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._num_inside = 0
    self._known: set[Any] = set()

  @contextlib.contextmanager
  def Entered(self, function: Any) -> Iterator[None]:
    with self._changed:
      if function not in self._known:
        self._changed.wait_for(lambda: not self._num_inside)
        yield
        self._known.add(function)
        return
      self._num_inside += 1
    try:
      yield
    finally:
      with self._changed:
        self._num_inside -= 1
        self._changed.notify_all()


_GATE = _Gate()


def Of(devices: Iterable[str]) -> list[str]:
  """Returns the CPU device of each worker that has some of these devices."""
  hosts = [Host(device) for device in devices if WorkerOf(device) is not None]
  return list(dict.fromkeys(hosts))


def WorkerOf(device: str) -> int | None:
  """Returns the number of the worker that has a device; None for one of this process."""
  spec = tf.DeviceSpec.from_string(device)
  return spec.task if spec.job == 'worker' else None


def Host(device: str) -> str:
  """Returns the CPU of the process that has a device."""
  spec = tf.DeviceSpec.from_string(device)
  return str(spec.replace(device_type='CPU', device_index=0).to_string())


def Split(values: Mapping[str, Any], workers: Collection[str]) -> dict[str, list[str]]:
  """Returns {host: names of the values that lie there}, without hosts that have none.

  Args:
    values: {name: tf.Variable, tf.Tensor or array}.
    workers: the hosts that count, from `Of`; what lies elsewhere is named under `HERE`, the first.
  """
  found: dict[str, list[str]] = {host: [] for host in (HERE, *workers)}
  for name, value in values.items():
    host = HERE
    if workers and isinstance(value, tf.Variable | tf.Tensor):
      host = Host(value.device)
    found[host if host in found else HERE].append(name)
  return {host: names for host, names in found.items() if names}


def ByOthers(placed: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
  """Hands what each worker has to another one, where there are several.

  What a worker wrote it would read from its own memory, or a directory that nobody else sees.

  Args:
    placed: from `Split`.
  """
  workers = [host for host in placed if host != HERE]
  others = dict(zip(workers, [*workers[1:], *workers[:1]], strict=True))
  return {others.get(host, host): names for host, names in placed.items()}


def Each(function: Callable[[str], Any], hosts: Collection[str]) -> None:
  """Calls a function with each host, all at once; returns, or raises, when all calls have ended.

  With one host it is called in this thread.
  """
  if len(hosts) <= 1:
    for host in hosts:
      function(host)
    return
  with futures.ThreadPoolExecutor(max_workers=len(hosts)) as pool:
    calls = [pool.submit(function, host) for host in hosts]
  for call in calls:
    call.result()


def Call(host: str, function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function of TensorFlow operations on a host; returns when they are done.

  May be called from any thread, while other operations run.

  Args:
    host: `HERE` or a worker's.
    function: of a module. For a worker it is traced, once for all arguments of the same types,
      and what its results do not depend on is not done.
    *args: tensors, variables, lists of them, on any devices; or what is part of the type.

  Returns:
    What the function returns: tensors, which stay on the host.
  """
  if host != HERE:
    # Its own call would warn of tracing often: a bundle has groups of many kinds.
    traced = _Traced(host, function).get_concrete_function(*args)
    with _GATE.Entered(traced):
      return traced(*args)
  with tf.device(HERE):
    return function(*args)


@functools.cache
def _Traced(host: str, function: Callable[..., Any]) -> Any:
  """The function within one of this process: then its end is waited for, and tells its errors.

  Operations that are sent to a worker one by one stand in a row there, those of training included,
  and the sender does not wait for one that has no result.
  """

  def Traced(*args: Any) -> Any:
    with tf.device(host):
      return function(*args)

  return tf.function(Traced, autograph=False)


def Copies(worker: str, variables: Sequence[Any]) -> list[tf.Tensor]:
  """Copies what variables of a worker hold to its host, where the copies stay.

  Returns when they are made. Other operations of the worker may wait for that.
  """
  with tf.device(worker):  # As a whole: part of one of this process it would send the results here.
    traced = _Traced(worker, _DeepCopies).get_concrete_function(variables)
    copies, done = traced(variables)
  done.numpy()
  return list(copies)


def _DeepCopies(variables: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
  found = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in variables]
  return found, tf.constant(True)


def After(operation: tf.Operation | None, result: tf.Tensor) -> tf.Tensor:
  """Returns `result` when an operation that has none of its own is done, for `Call`."""
  with tf.control_dependencies([operation] if operation is not None else []):
    return tf.identity(result)


def WhyNotShared(directory: str, workers: Sequence[str]) -> str:
  """Says why a directory is not one that this process and all workers read and write; '' if it is.

  Args:
    directory: an absolute path, or a URL; is there, and can be written here.
    workers: hosts, from `Of`.
  """
  # The name of a checkpoint's folder: where a kill leaves it the next save removes it.
  folder = os.path.join(directory, f'ckpt-00000000-{secrets.token_hex(4)}')
  question, token = os.path.join(folder, 'question'), secrets.token_hex(16)
  reasons = {}

  def Ask(host: str) -> None:
    task = tf.DeviceSpec.from_string(host).task
    answer = os.path.join(folder, f'answer-{task}')
    try:
      Call(host, _Copy, tf.constant(question), tf.constant(answer))
      if (found := _ReadText(answer)) != token:
        reasons[host] = f'worker {task} wrote {found!r} for {token!r} into {answer}'
    except files.FILE_ERRORS as e:
      reasons[host] = f'worker {task} does not share {directory}: {files.OneLine(e)}'

  try:
    tf.io.gfile.mkdir(folder)
    with tf.io.gfile.GFile(question, 'w') as f:
      f.write(token)
    Each(Ask, workers)
    tf.io.gfile.rmtree(folder)
  except files.FILE_ERRORS as e:
    return f'{directory} cannot be tried: {files.OneLine(e)}'
  return next((reasons[host] for host in workers if host in reasons), '')


def _Copy(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
  """Copies a file. Where there is none to read, none is written, nor a directory for it made."""
  return After(tf.io.write_file(target, tf.io.read_file(source)), target)


def _ReadText(path: str) -> str:
  with tf.io.gfile.GFile(path, 'r') as f:
    return str(f.read())
