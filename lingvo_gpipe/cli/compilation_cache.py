# SPDX-License-Identifier: Apache-2.0
"""XLA's persistent compilation cache: a later start reuses the compiled code."""

from __future__ import annotations

import hashlib
import os

import tensorflow as tf

from lingvo_gpipe.core import files

_OPTION = '--tf_xla_persistent_cache_directory'


def Use(directory: str) -> str:
  """Stores code that XLA compiles in a directory, and reuses the code that is there.

  Must be called before the first step. TensorFlow has no function for this: it reads the
  environment variable TF_XLA_FLAGS when XLA compiles for the first time. XLA's key contains neither
  TensorFlow's version nor the processor, so each pair of them has its own directory. A damaged
  entry stops the program with an error of TensorFlow; remove the directory in this case.

  Args:
    directory: the directory; created if it is missing.

  Returns:
    The directory within `directory` that is used.

  Raises:
    ValueError: the environment names another cache, or the path has spaces, which the variable
      cannot contain.
    OSError: the directory cannot be created.
  """
  path = os.path.join(
    os.path.abspath(os.path.expanduser(directory)), f'tensorflow-{tf.__version__}-{_Processor()}'
  )
  if len(path.split()) > 1:
    raise ValueError(f'the compilation cache {path!r} has spaces in its path; choose another')
  flags = os.environ.get('TF_XLA_FLAGS', '').split()
  named = [flag for flag in flags if flag.startswith(_OPTION)]
  if named and named != [f'{_OPTION}={path}']:
    raise ValueError(f'TF_XLA_FLAGS already names a compilation cache ({named[0]}); unset one')
  files.MakeDirs('compiled code', path)
  if not named:
    os.environ['TF_XLA_FLAGS'] = ' '.join([*flags, f'{_OPTION}={path}'])
  return path


def _Processor() -> str:
  """Returns a name that differs between machines that cannot run each other's code."""
  machine = os.uname().machine
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as f:
      features = next((line for line in f if line.startswith(('flags', 'Features'))), '')
  except OSError:
    features = ''
  return f'{machine}-{hashlib.sha256(features.encode()).hexdigest()[:8]}'
