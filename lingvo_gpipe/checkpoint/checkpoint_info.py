# SPDX-License-Identifier: Apache-2.0
"""The commit file of a checkpoint, and the check that a map of variables fits the checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.checkpoint import tensor_bundle
from lingvo_gpipe.core import files

FORMAT_VERSION = 1

# Names in a checkpoint directory: the commit file, the folder of the tensors, the bundle in it.
COMMIT = re.compile(r'ckpt-(\d{8,20})\.json')
FOLDER = re.compile(r'ckpt-(\d{8,20})-[0-9a-f]{8}')
BUNDLE = 'tensors'


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
  """A committed checkpoint, as described by its commit file.

  Attributes:
    step: training step.
    path: path of the commit file.
    prefix: path prefix of the tensors; `tf.train.load_checkpoint(prefix)` reads them, too.
    time: time of saving, in seconds since 1970.
    tensors: {path: shape and dtype}.
    metadata: the metadata passed to `Save`; `ReadMetadata` returns a copy.
    written: the expected names, sizes and digest of the data files.
  """

  step: int
  path: str
  prefix: str
  time: float
  tensors: Mapping[str, tf.TensorSpec] = dataclasses.field(repr=False, compare=False)
  metadata: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
  written: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)


class _NewerFormatError(ValueError):
  """The file is intact but has another format."""


def CommitName(step: int) -> str:
  """Returns the name of the commit file of a step."""
  return f'ckpt-{step:08d}.json'


def CheckJson(path: str, value: Any) -> None:
  """Raises a TypeError that names the first item that JSON would change or refuse.

  Args:
    path: name of the value in the message, such as "metadata['x'][1]".
    value: the value to check.
  """
  if isinstance(value, dict):
    for key, item in value.items():
      if not isinstance(key, str):
        raise TypeError(f'{path} has the key {key!r}, but keys of metadata must be strings.')
      CheckJson(f'{path}[{key!r}]', item)
  elif isinstance(value, list | tuple):
    for i, item in enumerate(value):
      CheckJson(f'{path}[{i}]', item)
  elif value is not None and type(value) not in (bool, int, float, str):
    raise TypeError(
      f'{path} is a {type(value).__name__}, but metadata must be JSON: dict, list, str, int, '
      'float, bool or None. Convert it with int(x) or str(x), or save it as a variable.'
    )


def CommitText(
  step: int,
  folder: str,
  specs: Mapping[str, tf.TensorSpec],
  metadata: Mapping[str, Any],
  written: Mapping[str, Any],
) -> str:
  """Returns the text of the commit file.

  A later format may change the contents of 'checkpoint'. The two outer keys and the meaning of the
  digest must stay.
  """
  tensors = {k: {'dtype': s.dtype.name, 'shape': s.shape.as_list()} for k, s in specs.items()}
  record = {
    'format': FORMAT_VERSION,
    'step': step,
    'time': time.time(),
    'folder': folder,
    'written': written,
    'tensors': tensors,
    'metadata': metadata,
  }
  return json.dumps({'sha256': _Digest(record), 'checkpoint': record}, indent=1) + '\n'


def _Digest(record: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def ParseCommit(directory: str, path: str, text: str) -> CheckpointInfo:
  """Parses the text of a commit file.

  Args:
    directory: directory of the checkpoint.
    path: path of the commit file.
    text: text of the commit file.

  Raises:
    DamagedError: the text differs from the text that was written.
    ValueError: the text has another format version.
  """
  try:
    outer = json.loads(text)
    record = outer['checkpoint']
    if outer['sha256'] != _Digest(record):
      raise tensor_bundle.DamagedError(
        'the commit file differs from the file that was written (SHA-256 mismatch)'
      )
    if record['format'] != FORMAT_VERSION:
      raise _NewerFormatError(
        f'Checkpoint {path} has format {record["format"]}, this program reads {FORMAT_VERSION}. '
        'Use the version of lingvo_gpipe that wrote it, or another directory.'
      )
    step, folder = record['step'], record['folder']
    match = FOLDER.fullmatch(folder)
    # Only a folder of this step next to the commit file is accepted, whatever the text says.
    if not match or int(match[1]) != step or os.path.basename(path) != CommitName(step):
      raise tensor_bundle.DamagedError(f'the commit file names step {step!r} and folder {folder!r}')
    written = record['written']
    sizes = dict(written['files'])
    for name, size in sizes.items():  # Only files in this folder are accepted.
      if os.path.basename(name) != name or not isinstance(size, int):
        raise tensor_bundle.DamagedError(
          f'the commit file names the file {name!r} of {size!r} bytes'
        )
    return CheckpointInfo(
      step=step,
      path=path,
      prefix=os.path.join(directory, folder, BUNDLE),
      time=float(record['time']),
      tensors={k: tf.TensorSpec(s['shape'], s['dtype']) for k, s in record['tensors'].items()},
      metadata=dict(record['metadata']),
      written={**written, 'files': sizes, 'index_sha256': written['index_sha256']},
    )
  except _NewerFormatError:
    raise
  except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
    raise tensor_bundle.DamagedError(f'the commit file cannot be parsed: {files.OneLine(e)}') from e


def CheckMatch(
  info: CheckpointInfo, variables: Mapping[str, Any], allow_missing: bool, allow_extra: bool
) -> None:
  """Checks that a map of variables fits a checkpoint.

  Raises:
    ValueError: it does not fit; the message lists every kind of mismatch.
  """
  problems = []
  missing = [path for path in variables if path not in info.tensors]
  extra = [path for path in info.tensors if path not in variables]
  if missing and not allow_missing:
    problems.append('not in the checkpoint: ' + _ListNames(missing, extra or list(info.tensors)))
  if extra and not allow_extra:
    problems.append('only in the checkpoint: ' + _ListNames(extra, missing or list(variables)))
  different = []
  for path, variable in variables.items():
    saved = info.tensors.get(path)
    if saved is None:
      continue
    spec = tensor_bundle.Spec(path, variable)
    if spec.dtype != saved.dtype or not spec.shape.is_compatible_with(saved.shape):
      different.append(f'{path} (variable {_Type(spec)}, checkpoint {_Type(saved)})')
  if different:
    problems.append('of another shape or dtype: ' + _ListNames(different, []))
  if problems:
    raise ValueError(
      f'Checkpoint {info.path} does not fit these {len(variables)} variables; '
      + '; '.join(problems)
      + '.'
    )
  if missing or extra:
    logging.info(
      'Checkpoint %s: restoring %d variables%s%s.',
      info.path,
      len(variables) - len(missing),
      f'; {len(missing)} are not in it and keep their values' if missing else '',
      f'; ignoring its {len(extra)} other tensors' if extra else '',
    )


def _Type(spec: tf.TensorSpec) -> str:
  return f'{spec.dtype.name}{spec.shape.as_list()}'


def _ListNames(names: Sequence[str], candidates: Sequence[str], limit: int = 8) -> str:
  """Returns the count and the first names, each with the closest of the candidates."""
  items = []
  for name in names[:limit]:
    close = difflib.get_close_matches(name, candidates, 1)
    items.append(f'{name} (closest: {close[0]})' if close else name)
  more = f', and {len(names) - limit} more' if len(names) > limit else ''
  return f'{len(names)}: ' + ', '.join(items) + more
