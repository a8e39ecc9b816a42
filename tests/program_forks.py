# SPDX-License-Identifier: Apache-2.0
"""Imports the programs once; then forks for each input line, a call of a program or of a file."""

import gc
import importlib
import json
import os
import random
import runpy
import signal
import sys

# The programs import from their working directories, and nothing from the folder of this file.
sys.path[0] = ''

from lingvo_gpipe import evaluator, trainer, worker  # noqa: E402

# isort: split
import tensorboard.summary  # noqa: E402, F401  # TensorFlow imports it for the first summary.

for name in sys.argv[2:]:
  importlib.import_module(name)
fast_tracing = runpy.run_path(sys.argv[1])
gc.freeze()  # Else each child's collections visit, and so copy, all objects of its parent.
programs = {'trainer': trainer.Run, 'evaluator': evaluator.Run, 'worker': worker.Run}
beside = []
for line in sys.stdin:
  call = json.loads(line)
  pid = os.fork()
  if not pid:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    for fd, path in ((1, call['stdout']), (2, call['stderr'])):
      os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.chdir(call['cwd'])
    os.environ.update(call['environment'])
    program = call['program']
    if not os.environ.get('OPTIMIZE_GRAPHS'):
      fast_tracing['Configure']()
    random.seed(0)  # Keras draws the seeds of initial weights from it.
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # As at the start of a process.
    sys.argv = [program, *call['args']]
    programs[program]() if program in programs else runpy.run_path(program, run_name='__main__')
    sys.exit(0)
  print(pid, flush=True)
  if call['is_waited_for']:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
  else:
    beside.append(pid)
for pid in beside:
  os.kill(pid, signal.SIGKILL)
