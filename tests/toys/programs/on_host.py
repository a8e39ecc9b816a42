# SPDX-License-Identifier: Apache-2.0
"""Runs a program in the namespace HOST. With HIDE, that folder is another one there."""

import ctypes
import os
import subprocess
import sys

libc = ctypes.CDLL(None, use_errno=True)
with open('/run/netns/' + os.environ['HOST']) as f:
  assert not libc.setns(f.fileno(), 0x40000000), os.strerror(ctypes.get_errno())
if hidden := os.environ.get('HIDE'):
  assert not libc.unshare(0x20000), os.strerror(ctypes.get_errno())  # A mount namespace.
  subprocess.run(['mount', '--make-rprivate', '/'], check=True)
  subprocess.run(['mount', '-t', 'tmpfs', 'none', hidden], check=True)
from lingvo_gpipe import trainer, worker  # noqa: E402  # Their threads would keep the namespace.

program = sys.argv.pop(1)
{'trainer': trainer.Run, 'worker': worker.Run}[program]()
