# SPDX-License-Identifier: Apache-2.0
"""Sends Ctrl-C to its own process while Python deletes the modules, as its `sitecustomize`.

Python restores the default of all signals before it deletes the modules.
"""

import os
import signal
import sys

_PROCESS = os.getpid()


class _AtExit:
  # Defaults: Python may have cleared the names of this module by then.
  def __del__(self, kill=os.kill, process=_PROCESS, number=signal.SIGINT):
    kill(process, number)


sys.at_exit = _AtExit()
