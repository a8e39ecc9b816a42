# SPDX-License-Identifier: Apache-2.0
"""A supervised process that hangs after an error."""

import sys
import time

from lingvo_gpipe.cli import binary
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import supervisor

supervisor._END_SECONDS = supervisor._PAUSE_SECONDS = 0.01


class Hanging:
  def __del__(self):
    time.sleep(100)

  def flush(self):
    time.sleep(100)


def Train(workers, is_again):
  held = Hanging()
  heartbeat.Begin(heartbeat.TRAIN)
  if sys.argv[1] == '--stack_trace':
    sys.stdout = held
  raise ValueError('a mistake')


binary.DefineDeviceFlags()
work = supervisor.Work('training', 'a new checkpoint', lambda: -1)
binary.Run(lambda: supervisor.Supervisor(Train, work, step_timeout=5.0).Run(), '')
