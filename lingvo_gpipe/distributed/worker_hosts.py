# SPDX-License-Identifier: Apache-2.0
"""Runs operations on the host that holds a value, so that the value does not cross the network."""

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

# The CPU of this process. It gathers values and does everything that is not left to workers.
HERE = '/device:CPU:0'


class _Gate:
  """Runs calls of functions concurrently, but the first call of each function alone.

  The first call sends the function to the workers. TensorFlow then reallocates its table of
  functions while concurrent calls may read it (EagerClusterFunctionLibraryRuntime keeps a vector).
  This was seen once, as "invalid UTF-8" in the name of a device.
  """

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._num_inside = 0
    self._known: set[Any] = set()

  @contextlib.contextmanager
  def Enter(self, function: Any) -> Iterator[None]:
    """Holds the gate for one call of a function."""
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


def ListHosts(devices: Iterable[str]) -> list[str]:
  """Returns the CPU device of each worker that has any of these devices."""
  hosts = [Host(device) for device in devices if WorkerOf(device) is not None]
  return list(dict.fromkeys(hosts))


def WorkerOf(device: str) -> int | None:
  """Returns the index of the worker that has a device, or None for a device of this process."""
  spec = tf.DeviceSpec.from_string(device)
  return spec.task if spec.job == 'worker' else None


def Host(device: str) -> str:
  """Returns the CPU device of the process that has a device."""
  spec = tf.DeviceSpec.from_string(device)
  return str(spec.replace(device_type='CPU', device_index=0).to_string())


def Split(values: Mapping[str, Any], workers: Collection[str]) -> dict[str, list[str]]:
  """Groups values by host: returns {host: names of its values}, without hosts that have no values.

  Args:
    values: {name: tf.Variable, tf.Tensor or array}.
    workers: worker hosts, from `ListHosts`. Values on other devices are listed under `HERE`, which
      comes first.
  """
  names_of: dict[str, list[str]] = {host: [] for host in (HERE, *workers)}
  for name, value in values.items():
    host = HERE
    if workers and isinstance(value, tf.Variable | tf.Tensor):
      host = Host(value.device)
    names_of[host if host in names_of else HERE].append(name)
  return {host: names for host, names in names_of.items() if names}


def Rotate(placed: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
  """Assigns the names of each worker to the next worker, if there are several.

  A worker that reads back its own files may read them from its cache, or from a directory that no
  other process sees.

  Args:
    placed: {host: names}, from `Split`.
  """
  workers = [host for host in placed if host != HERE]
  successors = dict(zip(workers, [*workers[1:], *workers[:1]], strict=True))
  return {successors.get(host, host): names for host, names in placed.items()}


def ForEach(function: Callable[[str], Any], hosts: Collection[str]) -> None:
  """Calls a function with each host, concurrently; returns or raises after all calls have ended.

  Runs in this thread if there is one host.
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
  """Calls a function of TensorFlow operations on a host; returns when the operations are done.

  May be called from any thread while other operations run.

  Args:
    host: `HERE` or a worker's host.
    function: a function at module level. For a worker it is traced once per types of arguments,
      and operations that its results do not depend on are not executed.
    *args: tensors, variables and lists of them, on any devices; or Python values, which are part of
      the types of the trace.

  Returns:
    The results of the function: tensors, which stay on the host.
  """
  if host != HERE:
    # A direct call would log warnings of frequent retracing, because a bundle has groups of many
    # types.
    traced = _MakeFunction(host, function).get_concrete_function(*args)
    with _GATE.Enter(traced):
      return traced(*args)
  with tf.device(HERE):
    return function(*args)


@functools.cache
def _MakeFunction(host: str, function: Callable[..., Any]) -> Any:
  """Returns a tf.function of this process that runs the function on the host.

  A call waits for the function's end and raises its errors. Single operations would queue on the
  worker behind the operations of training, and nobody waits for an operation without a result.
  """

  def Traced(*args: Any) -> Any:
    with tf.device(host):
      return function(*args)

  return tf.function(Traced, autograph=False)


def CopyToHost(worker: str, variables: Sequence[Any]) -> list[tf.Tensor]:
  """Copies the values of a worker's variables to the memory of its host; returns the copies.

  Returns when all copies are made. Other operations of the worker may have to wait meanwhile.
  """
  # Runs the whole function on the worker. A function of this process that calls it there would send
  # the results to this process.
  with tf.device(worker):
    traced = _MakeFunction(worker, _DeepCopies).get_concrete_function(variables)
    copies, done = traced(variables)
  done.numpy()
  return list(copies)


def _DeepCopies(variables: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
  copies = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in variables]
  return copies, tf.constant(True)


def ReturnAfter(operation: tf.Operation | None, result: tf.Tensor) -> tf.Tensor:
  """Returns `result` after an operation without a result is done. For functions of `Call`."""
  with tf.control_dependencies([operation] if operation is not None else []):
    return tf.identity(result)


def WhyNotShared(directory: str, workers: Sequence[str]) -> str | None:
  """Returns the reason why not all workers can read and write a directory, or None if they can.

  Args:
    directory: an absolute path or a URL of an existing directory that this process can write.
    workers: worker hosts, from `ListHosts`.
  """
  # Named like a checkpoint's folder: if a kill leaves it behind, the next save removes it.
  folder = os.path.join(directory, f'ckpt-00000000-{secrets.token_hex(4)}')
  question, token = os.path.join(folder, 'question'), secrets.token_hex(16)
  reasons = {}

  def Ask(host: str) -> None:
    task = tf.DeviceSpec.from_string(host).task
    answer = os.path.join(folder, f'answer-{task}')
    try:
      Call(host, _Copy, tf.constant(question), tf.constant(answer))
      if (text := _ReadText(answer)) != token:
        reasons[host] = f'worker {task} wrote {text!r} for {token!r} into {answer}'
    except files.FILE_ERRORS as e:
      reasons[host] = f'worker {task} does not share {directory}: {files.OneLine(e)}'

  try:
    tf.io.gfile.mkdir(folder)
    with tf.io.gfile.GFile(question, 'w') as f:
      f.write(token)
    ForEach(Ask, workers)
    tf.io.gfile.rmtree(folder)
  except files.FILE_ERRORS as e:
    return f'{directory} cannot be tested: {files.OneLine(e)}'
  return next((reasons[host] for host in workers if host in reasons), None)


def _Copy(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
  """Copies a file. If the source is missing, creates neither the target nor its directory."""
  return ReturnAfter(tf.io.write_file(target, tf.io.read_file(source)), target)


def _ReadText(path: str) -> str:
  with tf.io.gfile.GFile(path, 'r') as f:
    return str(f.read())
