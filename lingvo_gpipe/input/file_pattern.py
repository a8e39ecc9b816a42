# SPDX-License-Identifier: Apache-2.0
"""Globs to lists of files, with an error that helps where there is none."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf


def Files(pattern: str | Sequence[str], where: str) -> list[str]:
  """The files that a glob or a list of globs matches, sorted, each once.

  Args:
    pattern: any path or glob that tf.io.gfile takes, or some of them.
    where: what names the pattern in messages, such as 'TextFilesInput: param file_pattern'.

  Raises:
    ValueError: the pattern is empty or matches no file.
  """
  if not pattern:
    raise ValueError(f'{where} is not set: set it to a glob of text files')
  patterns = [pattern] if isinstance(pattern, str) else list(pattern)
  matches = {path for one in patterns for path in tf.io.gfile.glob(one)}
  files = sorted(path for path in matches if not tf.io.gfile.isdir(path))
  if not files:
    raise ValueError(
      f'{where}: no file matches {pattern!r}: check the path (a relative one counts from '
      f'{os.getcwd()!r})'
    )
  return files
