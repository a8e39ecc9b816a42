# SPDX-License-Identifier: Apache-2.0
"""A supervisor whose children do no real training.

Arguments: a directory, whose file `children` holds the index of the child; the name of a function
of `TRAIN`, for the child, with an argument after a colon; the step of the last checkpoint, or
`counted`; the name of a function of `WORKERS`; and the time limit of a step in seconds.
"""

import json
import os
import pathlib
import signal
import sys
import time

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import supervisor

directory = pathlib.Path(sys.argv[1])
train, _, argument = sys.argv[2].partition(':')
last, workers, step_seconds = sys.argv[3], sys.argv[4], float(sys.argv[5])
supervisor._END_SECONDS, supervisor._PAUSE_SECONDS, supervisor._POLL_SECONDS = 0.2, 0.01, 0.1
supervisor._MIN_SECONDS, supervisor._MIN_TIMES = 0.5, 1
supervisor._MIN_STORE_SECONDS = 0.5


def Next(name):
  """Returns how often it has been called with this name before."""
  number = int((directory / name).read_text()) + 1 if (directory / name).exists() else 0
  (directory / name).write_text(str(number))
  return number


# ---- in the child --------------------------------------------------------------------------------


def Return(child):
  return int(argument)


def Raise(child):
  raise ValueError('a mistake')


def FailUntil(child):
  return 0 if child == int(argument) else os._exit(supervisor.WORKER_FAILED)


def Crash(child):
  os.kill(os.getpid(), signal.SIGSEGV)


def HangOnce(child):
  if child == 0:
    heartbeat.Begin(b't')
    time.sleep(100)
  return 0


def LoseAWorkerOnce(child):
  """A local worker is killed while the child connects to it, so TensorFlow waits."""
  if child == 0:
    (directory / 'gone').touch()
    time.sleep(100)
  return 0


def SuspendTheLimit(child):
  heartbeat.Begin(b't')
  heartbeat.SuspendTimeout()
  time.sleep(1.4)
  return 0


def PauseBetweenSteps(child):
  """Data may be read between two steps."""
  heartbeat.Begin(b't')
  heartbeat.Step(b't')
  time.sleep(1.4)
  return 0


def HangAfterTheEnd(child):
  heartbeat.End(4)
  time.sleep(100)


def CrashAfterTheEnd(child):
  heartbeat.End(0)
  os._exit(1)


def HangInAWriteOnce(child):
  if child == 1:
    return 0
  for _ in range(10):
    heartbeat.Begin(b'w')
    time.sleep(0.02)
    heartbeat.Step(b'w')
  heartbeat.Begin(b'w')
  while True:
    heartbeat.Begin(b't')
    heartbeat.Step(b't')


def FailInEachWay(child):
  if child == 0:
    Crash(child)
  if child == 1:
    heartbeat.Begin(b't')
    time.sleep(100)
  return 0 if child == 3 else os._exit(supervisor.WORKER_FAILED)


def ExitAtASignal(child):
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  (directory / 'ready').write_text('yes')
  time.sleep(100)


def IgnoreSignals(child):
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  (directory / 'ready').write_text('yes')
  heartbeat.Begin(heartbeat.TRAIN)
  time.sleep(100)


def Sleep(child):
  (directory / 'pid').write_text(str(os.getpid()))
  time.sleep(100)


# ---- at the start of workers ---------------------------------------------------------------------


def Nothing():
  pass


def StopTheSupervisor():
  os.kill(os.getpid(), signal.SIGTERM)
  Next('late')


def StartSlowly():
  """The worker is the program `sleeper`."""
  from lingvo_gpipe.distributed import local_workers

  local_workers._END_SECONDS = 1000.0
  local_workers._ReadAddress = lambda *_: (
    (directory / 'waits').write_text('yes'),
    time.sleep(1000),
  )
  sys.executable = str(directory / 'sleeper')
  local_workers.LocalWorkers(1)


def FailAtTheRestart():
  if Next('starts') == 1:
    Next('children')
    FailAtTheStart()


def FailAtTheStart():
  raise OSError('worker 0 ended at its start')


def StopDuringTheFork():
  kill, fork = os.kill, os.fork
  os.kill = lambda *args: (Next('kills'), kill(*args))
  os.fork = lambda: (kill(os.getpid(), signal.SIGTERM), fork())[1]


def Print():
  print('workers start')


def PauseLong():
  supervisor._PAUSE_SECONDS = 100.0


def OutliveTheSupervisor():
  supervisor._EndWithSupervisor = lambda _: time.sleep(100)


TRAIN = [
  Return,
  Raise,
  FailUntil,
  Crash,
  HangOnce,
  LoseAWorkerOnce,
  SuspendTheLimit,
  PauseBetweenSteps,
  HangAfterTheEnd,
  CrashAfterTheEnd,
  HangInAWriteOnce,
  FailInEachWay,
  ExitAtASignal,
  IgnoreSignals,
  Sleep,
]
WORKERS = [
  Nothing,
  StopTheSupervisor,
  StartSlowly,
  FailAtTheRestart,
  FailAtTheStart,
  StopDuringTheFork,
  Print,
  PauseLong,
  OutliveTheSupervisor,
]


def Named(functions, name):
  (function,) = [function for function in functions if function.__name__ == name]
  return function


def Train(spec, failures):
  child = Next('children')
  assert sum(failures.values()) == child and spec == 'their addresses'
  return Named(TRAIN, train)(child)


def Record(step, failures):
  (directory / 'failures').write_text(json.dumps([step, failures]))


def Last():
  return Next('step') if last == 'counted' else int(last)


class Workers:
  spec = 'their addresses'

  def __init__(self):
    Named(WORKERS, workers)()

  def DetachInFork(self):
    pass

  def AnyHasEnded(self):
    return (directory / 'gone').exists() and not (directory / 'closed').exists()

  def Close(self):
    Next('closed')


work = supervisor.Work('training', 'a new checkpoint', Last)
supervised = supervisor.Supervisor(Train, work, Workers, step_seconds, Record)
sys.exit(supervised.Run())
