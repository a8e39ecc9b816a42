# SPDX-License-Identifier: Apache-2.0
"""Support for tests of runs on workers: an experiment, two shared workers, and waits."""

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import time

import pytest

from lingvo_gpipe.distributed import worker_connection
from tests import processes
from tests.toys import projects

SECONDS = 100
EXPERIMENT = projects.Experiments('pipelined')

UMASKS = {'041': 0o626, '014': 0o662}  # {umask of a worker: mode of its files}


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(tmp_path_factory.mktemp('project'), EXPERIMENT)


def FreePorts(count):
  """Returns ports outside the system's range, so that a killed worker gets its port again.

  The generator of the tests has one seed, so two processes would choose the same ports, of which
  the second may not be taken yet.
  """
  low = int(pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range').read_text().split()[0])
  result = []
  for port in random.SystemRandom().sample(range(10_000, low), 1000):
    with contextlib.suppress(OSError), socket.socket() as s:
      s.bind(('', port))
      result.append(port)
    if len(result) == count:
      return result
  raise AssertionError(f'no {count} free ports from 10000 to {low}')


@pytest.fixture(scope='module')
def hosts(forks, tmp_path_factory):
  """Returns a file with the addresses of two running workers."""
  addresses = [f'localhost:{port}' for port in FreePorts(2)]
  path = tmp_path_factory.mktemp('cluster') / 'hosts.json'
  path.write_text(json.dumps({'worker': addresses}))
  program = processes.Program('worker_with_umask')
  pids = []
  for index, umask in enumerate(UMASKS):
    args = [f'--cluster={path}', f'--task_index={index}', '--threads_per_device=1']
    pids.append(
      forks.Start(
        program, *args, '--local_only', more_environment={'UMASK': umask},
        is_waited_for=False,
      )
    )  # fmt: skip
    Log(path, index).symlink_to(forks._outputs['stderr'])
  worker_connection.AwaitWorkers(addresses, SECONDS)
  yield path
  for pid in pids:
    os.kill(pid, signal.SIGKILL)


def Log(hosts, index):
  """Returns the path of the standard error of a worker of the fixture `hosts`."""
  return hosts.with_name(f'{index}.stderr')


def AwaitFree(port):
  """Waits until a port is free: a process may keep it after its first thread has ended."""

  def IsFree():
    with socket.socket() as s:
      return s.connect_ex(('localhost', port)) != 0

  Await('free port', IsFree)


def Addresses(hosts):
  return json.loads(hosts.read_text())['worker']


def _State(pid):
  """Returns (letter of the state, id of the parent) of a process; None if there is none."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return None
  state, parent = text.rpartition(')')[2].split()[:2]
  return state, int(parent)


def Children(pid):
  ids = [int(name) for name in os.listdir('/proc') if name.isdigit()]
  return [i for i in ids if (state := _State(i)) and state[1] == pid and state[0] != 'Z']


def IsStopped(pid):
  """Whether a signal such as SIGSTOP has stopped a process."""
  return (_State(pid) or 'Z')[0] == 'T'


def CommandLine(pid):
  return pathlib.Path(f'/proc/{pid}/cmdline').read_text()


def Await(what, predicate):
  deadline = time.monotonic() + SECONDS
  while not (result := predicate()):
    assert time.monotonic() < deadline, f'no {what} in {SECONDS} s'
    time.sleep(0.02)
  return result


def AwaitEnd(pids):
  Await(f'end of {pids}', lambda: all((_State(pid) or 'Z')[0] == 'Z' for pid in pids))


def AwaitCheckpoint(logdir):
  """Waits for another checkpoint."""
  before = processes.Steps(logdir)[-1:]
  Await('checkpoint', lambda: processes.Steps(logdir)[-1:] > before)
