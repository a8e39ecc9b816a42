# SPDX-License-Identifier: Apache-2.0
"""XLA's persistent compilation cache: what was compiled once need not be the next time."""

from __future__ import annotations

import hashlib
import os

import tensorflow as tf

_OPTION = '--tf_xla_persistent_cache_directory'


def Use(directory: str) -> str:
  """Keeps what XLA compiles from now on in `directory`, and takes from there what fits.

  To be called before the first step. TensorFlow has no function for it: it reads the environment
  variable TF_XLA_FLAGS when XLA compiles for the first time. XLA's key knows neither TensorFlow's
  version nor the processor, so each pair of these gets a directory of its own. An entry that was
  damaged stops the program with TensorFlow's error; remove the directory then.

  Args:
    directory: made where it is missing.

  Returns:
    The directory within `directory` that is used.

  Raises:
    ValueError: the environment names another cache, or the path has spaces, which cannot be said
      in that variable.
    OSError: the directory cannot be made.
  """
  path = os.path.join(
    os.path.abspath(os.path.expanduser(directory)), f'tensorflow-{tf.__version__}-{_Processor()}'
  )
  if len(path.split()) > 1:
    raise ValueError(f'the compilation cache {path!r} has spaces in its path; take another')
  flags = os.environ.get('TF_XLA_FLAGS', '').split()
  named = [flag for flag in flags if flag.startswith(_OPTION)]
  if named and named != [f'{_OPTION}={path}']:
    raise ValueError(f'TF_XLA_FLAGS names a compilation cache already ({named[0]}); unset one')
  os.makedirs(path, exist_ok=True)
  if not named:
    os.environ['TF_XLA_FLAGS'] = ' '.join([*flags, f'{_OPTION}={path}'])
  return path


def _Processor() -> str:
  """Differs between machines that cannot run each other's code."""
  machine = os.uname().machine
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as f:
      features = next((line for line in f if line.startswith(('flags', 'Features'))), '')
  except OSError:
    features = ''
  return f'{machine}-{hashlib.sha256(features.encode()).hexdigest()[:8]}'
