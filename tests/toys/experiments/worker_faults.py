# SPDX-License-Identifier: Apache-2.0
"""Experiments in which workers are killed or stopped at chosen moments."""

import os
import pathlib
import signal
import socket
import time

from lingvo_gpipe import batch_norm, registry
from lingvo_gpipe.checkpoint import tensor_bundle
from lingvo_gpipe.cli import supervised
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import (
  supervisor,
  worker_connection,
  worker_hosts,
  worker_watch,
)
from params import without_pauses
from tasks import regression


def _IsServed(port):
  with socket.socket() as s:
    return s.connect_ex(('localhost', port)) == 0


@registry.RegisterSingleTaskModel
class Toy(without_pauses.Toy):
  pass


@registry.RegisterSingleTaskModel
class Streamed(Toy):
  def Train(self):
    return regression.Draws.Params().Set(num_draws=100, batch_size=8, shuffle_buffer_size=50)


@registry.RegisterSingleTaskModel
class Normalised(Toy):
  # Replicas wait for each other within their stages.
  def Task(self):
    p = super().Task()
    norm = batch_norm.BatchNormLayer.Params().Set(dim=32, over_replicas=True)
    p.stack.sub = [p.stack.sub[0], norm, *p.stack.sub[2:]]
    return p


@registry.RegisterSingleTaskModel
class KilledInSaves(Toy):
  def Task(self):
    # The file `kill` names a function of `tensor_bundle`, a step, a process id, its port, and a
    # signal. The process gets the signal before the second call of the function on worker 1 for
    # the checkpoint of this step.
    supervisor._MIN_SECONDS = supervisor._MIN_STORE_SECONDS = 3.0
    call, num_calls = worker_hosts.Call, 0
    tensor_bundle.GROUP_BYTES = 1000

    def Call(host, function, *args):
      nonlocal num_calls
      kill = pathlib.Path('kill')
      if 'task:1' in host and kill.exists():
        name, step, pid, port, number = kill.read_text().split()
        is_meant = f'/ckpt-{int(step):08d}-' in str(args[0])
        num_calls += is_meant and function.__name__ == name
        if num_calls == 2:
          os.kill(int(pid), int(number))
          while int(number) == signal.SIGKILL and _IsServed(int(port)):
            time.sleep(0.01)
          num_calls = 0
          kill.unlink()
      return call(host, function, *args)

    worker_hosts.Call = Call
    return super().Task()


@registry.RegisterSingleTaskModel
class StoppedAtTheStart(Toy):
  def Task(self):
    # The file `worker` names the worker's process, which hangs as soon as the first training
    # process is connected to it.
    supervised._SILENCE_SECONDS, worker_watch._PAUSE_SECONDS = 1.0, 0.2
    worker_connection._ASK_SECONDS = 1.5
    connect = worker_connection.Connect

    def Connect(*args):
      facts = connect(*args)
      if pathlib.Path('worker').exists():
        worker = int(pathlib.Path('worker').read_text())
        pathlib.Path('worker').unlink()
        os.kill(worker, signal.SIGSTOP)
      return facts

    worker_connection.Connect = Connect
    return super().Task()


@registry.RegisterSingleTaskModel
class KilledInEvaluation(Toy):
  def Task(self):
    # The file `signal` names the worker's process and a signal, which the worker gets in the third
    # batch of a process.
    begin, num_batches = heartbeat.Begin, 0

    def Begin(kind):
      nonlocal num_batches
      begin(kind)
      num_batches += kind == heartbeat.EVALUATE
      if num_batches == 3 and pathlib.Path('signal').exists():
        worker, number = map(int, pathlib.Path('signal').read_text().split())
        pathlib.Path('signal').unlink()
        os.kill(worker, number)

    heartbeat.Begin = Begin
    return super().Task()
