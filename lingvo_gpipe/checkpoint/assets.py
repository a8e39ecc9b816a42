# SPDX-License-Identifier: Apache-2.0
"""Files that a run depends on, such as a vocabulary, are kept with it: <logdir>/assets/."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.core import files

FOLDER = 'assets'


def Keep(logdir: str, paths: Sequence[str], is_resumed: bool) -> None:
  """Copies files into the log directory, under their own names.

  Args:
    logdir: the log directory.
    paths: the files; any path that tf.io.gfile takes.
    is_resumed: the run goes on from a checkpoint, whose weights were trained with the files that
      are kept already. Else those are replaced.

  Raises:
    ValueError: two files have one name, or a run is to go on with another file than it began with.
  """
  folder = os.path.join(logdir, FOLDER)
  names = [os.path.basename(path) for path in paths]
  for path, name in zip(paths, names, strict=True):
    if names.count(name) > 1:
      raise ValueError(
        f'the input needs several files of the name {name!r}, of which a run can keep one: rename '
        f'one of {sorted(paths)}'
      )
    content = _Read(path)
    kept = os.path.join(folder, name)
    if tf.io.gfile.exists(kept):
      if _Read(kept) == content:
        continue
      if is_resumed:
        raise ValueError(
          f'this run was trained with another {name!r} than {path!r}, and keeps it as {kept!r}: go '
          'on with that one (let the input read it), or begin another run in another --logdir; to '
          'go on with the new one all the same, remove the one that is kept'
        )
    tf.io.gfile.makedirs(folder)
    files.WriteWhole(kept, content)


def Check(logdir: str, paths: Sequence[str]) -> None:
  """Raises ValueError where the run was trained with another file of the same name.

  Args:
    logdir: the log directory of a run, or of one that did not begin yet.
    paths: the files that are needed now.
  """
  for path in paths:
    kept = os.path.join(logdir, FOLDER, os.path.basename(path))
    if tf.io.gfile.exists(kept) and _Read(kept) != _Read(path):
      raise ValueError(
        f'this run was trained with another {os.path.basename(path)!r} than {path!r}, and keeps it '
        f'as {kept!r}: let the input read that one, or, to take its weights with this one all the '
        'same, give --allow_params_change'
      )


def _Read(path: str) -> bytes:
  with tf.io.gfile.GFile(path, 'rb') as f:
    return f.read()
