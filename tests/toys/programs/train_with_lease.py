# SPDX-License-Identifier: Apache-2.0
"""The trainer with a short lease.

If a file `stop` exists it stops between two of its saves and beats, and removes the file.
"""

import os
import pathlib
import signal

from lingvo_gpipe import trainer
from lingvo_gpipe.checkpoint import background_saver, logdir_lock

logdir_lock.BEAT_SECONDS, logdir_lock.LIFETIME_SECONDS, logdir_lock.SETTLE_SECONDS = 0.1, 3.0, 0.1
save = background_saver.BackgroundSaver.Save


def Save(self, *args, **options):
  saved = save(self, *args, **options)
  if os.path.exists('stop'):
    with self._lock._mutex:
      os.remove('stop')
      os.kill(os.getpid(), signal.SIGSTOP)
  return saved


background_saver.BackgroundSaver.Save = Save
end = os._exit


def End(status):
  pathlib.Path(f'{os.getpid()}.status').write_text(str(status))
  end(status)


os._exit = End
trainer.Run()
