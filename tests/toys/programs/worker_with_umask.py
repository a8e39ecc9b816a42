# SPDX-License-Identifier: Apache-2.0
"""A worker with its own umask: the mode of a file shows which worker wrote it."""

import os

from lingvo_gpipe import worker

os.umask(int(os.environ['UMASK'], 8))
worker.Run()
