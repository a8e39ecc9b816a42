# SPDX-License-Identifier: Apache-2.0
"""A local worker whose standard input never ends, because it also holds the other end."""

import os
import signal
import sys

from lingvo_gpipe import worker

starter = os.getpid()
if os.fork():
  signal.pause()
os.dup2(os.pipe()[0], 0)
sys.argv = ['worker', '--local', f'--starter={starter}']
worker.Run()
