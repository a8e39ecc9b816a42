# SPDX-License-Identifier: Apache-2.0
"""A worker whose standard input is at its end, as if a shell had started it."""

import os

from lingvo_gpipe import worker

os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
worker.Run()
