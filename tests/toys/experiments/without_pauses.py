# SPDX-License-Identifier: Apache-2.0
"""The experiment of `pipelined.py` without waits for workers that never come back by themselves."""

from lingvo_gpipe import registry
from lingvo_gpipe.distributed import local_workers, supervisor, worker_restart
from params import pipelined

supervisor._PAUSE_SECONDS = 0.1
local_workers._END_SECONDS = worker_restart._ASK_SECONDS = 0.5


@registry.RegisterSingleTaskModel
class Toy(pipelined.Toy):
  pass
