# SPDX-License-Identifier: Apache-2.0
"""Runs tools/chaos.py of a checkout, with planted faults, once with each kind of file, or as it is.

The first argument is the checkout; the next may be `planted` or `files`; the rest are flags.
"""

import sys
import time

sys.path.insert(0, sys.argv.pop(1))

from tools import chaos, program  # noqa: E402  # From the checkout.
from tools.chaos_attacks import children, run_attacks  # noqa: E402


def Wrong(draw, runner):
  raise children.FindingError(f'wrong {draw.random()}')


def Hanging(draw, runner):
  time.sleep(60.0)


def Raising(draw, runner):
  runner.Call(lambda: 1 / 0)


def Right(draw, runner):
  children.CheckEnd(runner.Run('trainer', ['--mode=list']))
  children.CheckEnd(runner.Run('trainer', ['--model=no.Such']))


if sys.argv[1] == 'planted':
  del sys.argv[1]
  chaos._CASE_SECONDS = 10.0
  chaos._ATTACKS = {f.__name__: f for f in (Wrong, Raising, Right)}
  if 'Hanging' in sys.argv[-1]:
    chaos._CASE_SECONDS = 0.1
    chaos._ATTACKS['Hanging'] = Hanging
elif sys.argv[1] == 'files':  # All kinds of texts and files, once each.
  for name in chaos._RUN_ATTACKS:
    del chaos._ATTACKS[name]
  sys.argv[1] = f'--cases={len(chaos._ATTACKS)}'
run_attacks._LAST_STEP, run_attacks._HALF_STEP = 4, 2
run_attacks._PARAMS += ';task.num_layers:1;task.stack.num_micro_batches:2'  # Faster to trace.
program.Main(chaos.DefineFlags, chaos.Run, '')
