# SPDX-License-Identifier: Apache-2.0
"""Describes the checkpoints of a log directory: a table, and the contents of the newest one."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import tensorflow as tf

from lingvo_gpipe.checkpoint import catalogue, checkpoint_info
from lingvo_gpipe.core import files, text_table


def Describe(logdir: str) -> tuple[str, bool]:
  """Reads all checkpoints in full and describes them.

  Args:
    logdir: the log directory.

  Returns:
    (text, whether all checkpoints read back).

  Raises:
    ValueError: the directory has no checkpoints.
    OSError: the directory cannot be read.
  """
  checkpoints = catalogue.Catalogue(os.path.join(logdir, 'train'))
  rows = [['checkpoint', 'step', 'saved (UTC)', 'bytes', 'reads back']]
  are_whole, newest = True, None
  # Listed before and after, because a running trainer may save and remove checkpoints meanwhile.
  names = _ListCommits(checkpoints.directory)
  infos = checkpoints.All()
  for info in infos:
    state = 'yes'
    try:
      checkpoints.Verify(info)
      newest = info
    except catalogue.DamagedError as e:
      if not checkpoints.IsKnownDamaged(info):
        continue  # It was removed meanwhile.
      state, are_whole = f'no: {files.OneLine(e)}', False
    size = sum(info.written['files'].values())
    rows.append(
      [os.path.basename(info.path), f'{info.step:,}', _Utc(info.time), f'{size:,}', state]
    )
  known = {os.path.basename(info.path) for info in infos}
  for name in sorted((names - known) & _ListCommits(checkpoints.directory)):
    are_whole = False
    rows.append([name, '-', '-', '-', 'no: its commit file is damaged'])
  if len(rows) == 1 and infos:
    return Describe(logdir)  # All were removed meanwhile, so there are newer ones.
  if len(rows) == 1:
    raise ValueError(f'there is no checkpoint in {checkpoints.directory}: train first')
  lines = text_table.FormatTable(rows, text_columns={0, 2, 4})
  if newest is not None:
    lines += ['', f'{os.path.basename(newest.path)}:']
    lines += [f'  {key}: {_Format(value)}' for key, value in newest.metadata.items()]
    lines += [f'  {len(newest.tensors)} variables:', *_Variables(newest)]
  return '\n'.join(lines), are_whole


def _Format(value: Any) -> str:
  """Returns a value of the metadata in one line; a text of several lines becomes their number."""
  num_lines = value.count('\n') if isinstance(value, str) else 0
  return f'{num_lines} lines' if num_lines else json.dumps(value)


def _Utc(seconds: float) -> str:
  try:
    return time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))
  except (ValueError, OverflowError, OSError):  # A damaged file may hold any number.
    return str(seconds)


def _ListCommits(directory: str) -> set[str]:
  """Returns the names of the commit files in a directory."""
  names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
  return {name for name in names if checkpoint_info.COMMIT.fullmatch(name)}


def _Variables(info: checkpoint_info.CheckpointInfo) -> list[str]:
  rows = [
    [path, str(spec.shape.as_list()), spec.dtype.name, f'{spec.shape.num_elements():,}']
    for path, spec in info.tensors.items()
  ]
  return [f'    {line}' for line in text_table.FormatTable(rows, text_columns={0, 1, 2})]
