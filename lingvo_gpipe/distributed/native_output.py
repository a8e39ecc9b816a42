# SPDX-License-Identifier: Apache-2.0
"""Hides the output of TensorFlow's native code while it starts. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Iterator

from absl import logging


@contextlib.contextmanager
def DropOutput() -> Iterator[None]:
  """Drops output of native code on stderr unless the enclosed code fails; the log is kept.

  TensorFlow's libraries write to stderr at import, before any log level has an effect, but a user's
  mistake must be reported in one line. TF_CPP_MIN_LOG_LEVEL=0 shows everything.
  """
  if os.environ.get('TF_CPP_MIN_LOG_LEVEL') == '0':
    yield
    return
  sys.stderr.flush()
  saved = os.dup(2)
  log = logging.get_absl_handler().python_handler
  with tempfile.TemporaryFile() as dropped, open(saved, 'w', errors='backslashreplace') as stderr:
    os.dup2(dropped.fileno(), 2)
    log_stream = log.setStream(stderr)
    try:
      yield
    except (ValueError, OSError, KeyboardInterrupt):  # These errors explain themselves.
      raise
    except BaseException:
      dropped.seek(0)
      os.write(saved, dropped.read())
      raise
    finally:
      log.setStream(log_stream)
      os.dup2(saved, 2)


def DropOutputWithoutGpu() -> contextlib.AbstractContextManager[None]:
  """Enters `DropOutput` if the machine has no NVIDIA device.

  For code that lets TensorFlow search for devices: without one it reports an error of CUDA.
  """
  return contextlib.nullcontext() if glob.glob('/dev/nvidia*') else DropOutput()
