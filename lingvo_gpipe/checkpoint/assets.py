# SPDX-License-Identifier: Apache-2.0
"""Copies files that a run depends on, such as a vocabulary, into <logdir>/assets/."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.core import files

FOLDER = 'assets'


def Keep(logdir: str, paths: Sequence[str], is_resumed: bool) -> None:
  """Copies files into the log directory under their own names.

  Args:
    logdir: the log directory.
    paths: paths of the files; any path that tf.io.gfile accepts.
    is_resumed: whether the run resumes from a checkpoint. Its weights were then trained with the
      copies in the log directory, which must not change. Otherwise old copies are replaced.

  Raises:
    ValueError: two files have the same name, or a file of a resumed run differs from its copy.
  """
  folder = os.path.join(logdir, FOLDER)
  names = [os.path.basename(path) for path in paths]
  for path, name in zip(paths, names, strict=True):
    if names.count(name) > 1:
      raise ValueError(
        f'the input needs several files named {name!r}, but a run can keep only one: rename one of '
        f'{sorted(paths)}'
      )
    content = _Read(path)
    copied = os.path.join(folder, name)
    if tf.io.gfile.exists(copied):
      if _Read(copied) == content:
        continue
      if is_resumed:
        raise ValueError(
          f'this run was trained with another {name!r} than {path!r}; its copy is {copied!r}. Let '
          'the input read that copy, or start a new run in another --logdir. To continue this run '
          'with the new file anyway, remove the copy'
        )
    tf.io.gfile.makedirs(folder)
    files.WriteWhole(copied, content)


def Check(logdir: str, paths: Sequence[str]) -> None:
  """Raises a ValueError if the run was trained with another file of the same name.

  Args:
    logdir: the log directory of a run, which may not have started yet.
    paths: paths of the files that the caller needs.
  """
  for path in paths:
    copied = os.path.join(logdir, FOLDER, os.path.basename(path))
    if tf.io.gfile.exists(copied) and _Read(copied) != _Read(path):
      raise ValueError(
        f'this run was trained with another {os.path.basename(path)!r} than {path!r}; its copy is '
        f'{copied!r}. Let the input read that copy. To use the weights with the new file anyway, '
        'pass --allow_params_change'
      )


def _Read(path: str) -> bytes:
  return files.ReadBytes(path, 'a file of the input')
