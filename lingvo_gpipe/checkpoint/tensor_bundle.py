# SPDX-License-Identifier: Apache-2.0
"""Writes, reads and verifies named tensors as TensorFlow's tensor bundle, a few at a time.

A bundle is `PREFIX.index` and `PREFIX.data-*`, the files of every TensorFlow checkpoint
(`tf.train.load_checkpoint(PREFIX)` reads them). The names in it are any strings. TensorFlow keeps a
checksum of every tensor, but does not check one of the whole index, so flipped bits in the index
can go unnoticed. `Write` therefore returns the SHA-256 of the index for the caller to keep.

Workers that share the directory may each write and read the tensors on their devices, concurrently.
`placed` then maps hosts to tensors. The files still form one bundle.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import worker_hosts

# Tensors are written and read in groups of about this many bytes, one data file per group. A host
# holds up to two groups in memory at a time. A larger tensor forms its own group.
GROUP_BYTES = 128 * 2**20


# {host: names of the tensors that it writes or reads}; `worker_hosts.HERE` is this process.
Placed = Mapping[str, Sequence[str]]


class DamagedError(OSError):
  """A file is missing, truncated or changed."""


def Spec(path: str, value: Any) -> tf.TensorSpec:
  """Returns the shape and dtype of a variable, tensor or array.

  Raises:
    TypeError: the value has another type; the message names the path.
  """
  if not hasattr(value, 'shape') or not hasattr(value, 'dtype'):
    raise TypeError(
      f'A checkpoint holds variables, tensors and arrays; {path!r} is a {type(value).__name__}. '
      'Put plain numbers and text into the metadata.'
    )
  dtype = value.dtype if isinstance(value.dtype, tf.DType) else None
  if dtype is None:
    # An array of str or bytes objects becomes a string tensor.
    is_text = getattr(value.dtype, 'kind', '') in ('U', 'S', 'O')
    dtype = tf.string if is_text else tf.as_dtype(value.dtype)
  return tf.TensorSpec(value.shape, dtype)


def _Groups(specs: Mapping[str, tf.TensorSpec]) -> Iterator[list[str]]:
  """Splits the names, in their order, into groups of about GROUP_BYTES."""
  group: list[str] = []
  total = 0
  for name, spec in specs.items():
    size = (spec.shape.num_elements() or 0) * spec.dtype.size
    if group and total + size > GROUP_BYTES:
      yield group
      group, total = [], 0
    group.append(name)
    total += size
  if group:
    yield group


def _IndexDigest(prefix: str) -> str:
  with tf.io.gfile.GFile(f'{prefix}.index', 'rb') as f:
    return hashlib.sha256(f.read()).hexdigest()


def Write(prefix: str, values: Mapping[str, Any], placed: Placed | None = None) -> dict[str, Any]:
  """Writes a bundle into an existing empty folder.

  Each host needs memory for twice GROUP_BYTES, or twice the largest tensor, in addition to the
  variables.

  Args:
    prefix: FOLDER/NAME of the bundle; the folder is empty.
    values: {name: tf.Variable, tf.Tensor or array}, not empty, on any devices.
    placed: {host: names of the tensors that it writes}. If None, this process writes all tensors.

  Returns:
    {'index_sha256': text, 'files': {file name: bytes}}, the argument `written` of `Verify`.

  Raises:
    OSError, tf.errors.OpError: a file cannot be written.
  """
  folder = os.path.dirname(prefix)
  specs = {name: Spec(name, value) for name, value in values.items()}
  parts: list[str] = []
  parts_of_host: dict[str, list[tuple[str, list[str]]]] = {}
  for host, names in (placed or {worker_hosts.HERE: list(values)}).items():
    for group in _Groups({name: specs[name] for name in names}):
      parts.append(f'{prefix}.part-{len(parts):05d}')
      parts_of_host.setdefault(host, []).append((parts[-1], group))

  def WriteParts(host: str) -> None:
    for part, group in parts_of_host[host]:
      worker_hosts.Call(
        host,
        _Save,
        tf.constant(part),
        tf.constant(group),
        [values[name] for name in group],
        [specs[name].dtype for name in group],
      )

  worker_hosts.ForEach(WriteParts, parts_of_host)
  with tf.device(worker_hosts.HERE):
    # Renames the data files and writes one index for all of them.
    tf.raw_ops.MergeV2Checkpoints(
      checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False
    )
  sizes = {}
  for name in sorted(tf.io.gfile.listdir(folder)):
    path = os.path.join(folder, name)
    files.Sync(path)
    sizes[name] = int(tf.io.gfile.stat(path).length)
  files.Sync(folder)
  return {'index_sha256': _IndexDigest(prefix), 'files': sizes}


def _Save(
  prefix: tf.Tensor, names: tf.Tensor, values: Sequence[Any], dtypes: Sequence[tf.DType]
) -> tf.Tensor:
  saved = tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=names,
    shape_and_slices=[''] * len(values),
    tensors=[tf.convert_to_tensor(v, dtype) for v, dtype in zip(values, dtypes, strict=True)],
  )
  return worker_hosts.ReturnAfter(saved, prefix)


def CheckFiles(prefix: str, written: Mapping[str, Any]) -> None:
  """Checks the existence and size of every file, and the digest of the index. Reads no tensors.

  Args:
    prefix: FOLDER/NAME of the bundle.
    written: the result of `Write`.

  Raises:
    DamagedError: a file is missing or differs; the message names it.
  """
  folder = os.path.dirname(prefix)
  for name, size in written['files'].items():
    try:
      actual_size = tf.io.gfile.stat(os.path.join(folder, name)).length
    except (tf.errors.OpError, OSError) as e:
      raise DamagedError(f'{name}: {files.OneLine(e)}') from e
    if actual_size != size:
      raise DamagedError(f'{name} has {actual_size} bytes, but {size} were written')
  try:
    digest = _IndexDigest(prefix)
  except (tf.errors.OpError, OSError) as e:
    raise DamagedError(f'the index cannot be read: {files.OneLine(e)}') from e
  if digest != written['index_sha256']:
    raise DamagedError('the index differs from the index that was written (SHA-256 mismatch)')


def Read(
  prefix: str,
  specs: Mapping[str, tf.TensorSpec],
  take: Callable[[str, tf.Tensor], Any],
  placed: Placed | None = None,
) -> None:
  """Calls take(name, tensor) for each tensor, after TensorFlow has verified its checksum.

  Each host needs memory for twice GROUP_BYTES, or twice the largest tensor, in addition to the
  variables.

  Args:
    prefix: FOLDER/NAME of the bundle.
    specs: {name: shape and dtype} of the tensors to read; the bundle must contain each of them.
    take: called with each tensor on its host; with several hosts, from several threads.
    placed: {host: names of the tensors that it reads}. If None, this process reads all tensors.

  Raises:
    DamagedError: a file is missing, truncated or changed.
    OSError: not enough memory to read.
  """
  placed = placed or {worker_hosts.HERE: list(specs)}

  # A function of its own, so that its return frees the tensors of the group.
  def TakeGroup(host: str, group: list[str]) -> None:
    dtypes = [specs[name].dtype for name in group]
    for name, tensor in zip(group, _ReadGroup(host, prefix, group, dtypes), strict=True):
      if tensor.shape != specs[name].shape:
        raise DamagedError(
          f'{name!r} has shape {tensor.shape}, but {specs[name].shape} was written'
        )
      take(name, tensor)

  def TakeGroups(host: str) -> None:
    for group in _Groups({name: specs[name] for name in placed[host]}):
      TakeGroup(host, group)

  worker_hosts.ForEach(TakeGroups, placed)


def _ReadGroup(
  host: str, prefix: str, group: list[str], dtypes: list[tf.DType]
) -> Sequence[tf.Tensor]:
  args = [_Restore, tf.constant(prefix), tf.constant(group), dtypes]
  if host != worker_hosts.HERE:
    try:
      return worker_hosts.Call(host, *args)
    except tf.errors.OpError as e:
      # Either the file or the worker is at fault. Reading in this process shows which.
      logging.warning('%s cannot read %s: %s', host, prefix, files.OneLine(e))
  try:
    return worker_hosts.Call(worker_hosts.HERE, *args)
  except tf.errors.ResourceExhaustedError as e:
    # The file is intact: an older checkpoint would not fit into memory either.
    raise OSError(f'Not enough memory to read {prefix}: {files.OneLine(e)}') from e
  except tf.errors.OpError as e:
    raise DamagedError(files.OneLine(e)) from e


def _Restore(
  prefix: tf.Tensor, names: tf.Tensor, dtypes: Sequence[tf.DType]
) -> Sequence[tf.Tensor]:
  tensors: Sequence[tf.Tensor] = tf.raw_ops.RestoreV2(
    prefix=prefix, tensor_names=names, shape_and_slices=[''] * len(dtypes), dtypes=dtypes
  )
  return tensors


def Verify(
  prefix: str,
  specs: Mapping[str, tf.TensorSpec],
  written: Mapping[str, Any],
  placed: Placed | None = None,
) -> None:
  """Reads the whole bundle and checks every size and checksum.

  Args:
    prefix: FOLDER/NAME of the bundle.
    specs: {name: shape and dtype} of all tensors of the bundle.
    written: the result of `Write`.
    placed: {host: names of the tensors that it reads}. If None, this process reads all tensors.

  Raises:
    DamagedError: a file is missing, truncated or changed; the message says which.
  """
  CheckFiles(prefix, written)
  Read(prefix, specs, lambda name, tensor: None, placed)
