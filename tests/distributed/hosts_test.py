# SPDX-License-Identifier: Apache-2.0
"""Runs on several hosts, which are network namespaces with addresses and links of their own."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import naming, processes, worker_processes
from tests.toys import projects
from tools.chaos_attacks import network

_PORT = 2222
_STAGES = (
  'task.stack.num_stages:3;task.stack.splits:[1,2,4];task.stack.xla:False;'
  'task.train.save_interval_steps:20'
)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  folder = tmp_path_factory.mktemp('project')
  return projects.Write(folder, projects.Experiments('without_pauses'), 'pipelined')


@pytest.fixture(scope='module')
def hosts():
  """A trainer's host, three workers' hosts, and in the same network a stranger's."""
  try:
    with network.Network(5) as hosts:
      yield hosts
  except OSError as e:
    pytest.skip(f'hosts on this machine need root, ip and network namespaces: {e}')


def _Connect(hosts, source, address, port=_PORT, seconds=1.0):
  """Returns 'connected' or the name of the error."""
  program = processes.Program('connect_socket')
  command = ['ip', 'netns', 'exec', hosts.namespaces[source], sys.executable, program]
  return subprocess.run(
    [*command, address, str(port), str(seconds)], capture_output=True, text=True, check=True,
    timeout=processes.TIMEOUT,
  ).stdout.strip()  # fmt: skip


class _Run:
  """A trainer on host 0 and workers on hosts 1 to 3."""

  def __init__(self, forks, hosts, project, folder, hidden=None):
    self._forks, self._hosts, self._project, self._hidden = forks, hosts, project, hidden
    self._addresses = folder / 'hosts.json'
    names = [f'{address}:{_PORT}' for address in hosts.addresses[1:4]]
    self._addresses.write_text(json.dumps({'worker': names}))
    self.pids = {}

  def Start(self, host, *args, program=None):
    """Starts the trainer on host 0 or a worker on another; returns the file of its messages."""
    program = program or ('worker' if host else 'trainer')
    environment = {'HOST': self._hosts.namespaces[host]}
    if host and self._hidden:
      environment['HIDE'] = str(self._hidden)
    self.pids[program, host] = self._forks.Start(
      processes.Program('on_host'), program, f'--cluster={self._addresses}', *args,
      cwd=self._project, more_environment=environment, is_waited_for=False,
    )  # fmt: skip
    return self._forks._outputs['stderr']

  def StartWorker(self, host):
    args = [f'--task_index={host - 1}', '--trusted_network', '--threads_per_device=1']
    self.Start(host, *args)

  def KillWorker(self, host):
    pid = self.pids['worker', host]
    os.kill(pid, signal.SIGKILL)
    worker_processes.AwaitEnd([pid])

  def StopTrainer(self):
    pid = self.pids['trainer', 0]
    os.kill(pid, signal.SIGTERM)
    worker_processes.AwaitEnd([pid])

  def Close(self):
    for pid in self.pids.values():
      os.kill(pid, signal.SIGKILL)


def _IsPaused(logdir):
  before = processes.Steps(logdir)
  time.sleep(0.5)
  return processes.Steps(logdir) == before


@pytest.mark.parametrize('is_shared', [True, False])
def testALostLinkOrHostDoesNotChangeTheResult(forks, hosts, project, tmp_path, is_shared):
  """A link fails for a moment; or a host goes with its worker, and both come back."""
  logdir = tmp_path / 'run'
  logdir.mkdir()
  run = _Run(forks, hosts, project, tmp_path, hidden=None if is_shared else logdir)
  try:
    for host in (1, 2, 3):
      run.StartWorker(host)
    args = processes.ToyArgs(logdir, 10**6, _STAGES)
    stderr = run.Start(0, *args, f'--step_timeout={60 if is_shared else 3}')
    worker_processes.AwaitCheckpoint(logdir)
    hosts.SetLink(2, is_up=False)
    if is_shared:
      worker_processes.Await('pause', lambda: _IsPaused(logdir))
    else:
      run.KillWorker(2)
      worker_processes.Await('time limit', lambda: 'may hang' in stderr.read_text())
      run.StartWorker(2)
    hosts.SetLink(2, is_up=True)
    worker_processes.AwaitCheckpoint(logdir)
    run.StopTrainer()
  finally:
    run.Close()
    hosts.SetLink(2, is_up=True)
  text = stderr.read_text()
  assert naming.Names(text, '3 workers' if is_shared else 'alone')
  assert naming.AnyLineNames(text, 'resuming', 'training') == (not is_shared), text
  _CheckWeights(forks, project, logdir, tmp_path / 'once', _STAGES)


def _CheckWeights(forks, project, logdir, once, overrides):
  """Compares the last checkpoint with the one of a run without workers."""
  last = processes.Steps(logdir)[-1]
  processes.Succeeded(forks.Run('trainer', *processes.ToyArgs(once, last, overrides), cwd=project))
  actual, expected = processes.Tensors(logdir, last), processes.Tensors(once, last)
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def testAWorkerForThisMachineAloneKeepsOthersAway(forks, hosts, project, tmp_path):
  run = _Run(forks, hosts, project, tmp_path)
  run._addresses.write_text(json.dumps({'worker': [f'localhost:{_PORT}']}))
  try:
    run.Start(1, '--task_index=0', '--local_only')
    forks.Await(f'at port {_PORT} of the loopback interface')
    assert _Connect(hosts, 1, '127.0.0.1') == 'connected'
    assert _Connect(hosts, 4, hosts.addresses[1]) == 'ConnectionRefusedError'
  finally:
    run.Close()


_SSHD = """
Port 2200
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""


@pytest.fixture
def tunnel(hosts, tmp_path):
  """Connects hosts 0 and 1, alpha and beta, by the command of the documents."""
  if not shutil.which('sshd'):
    pytest.skip('the tunnel needs sshd: Debian has it in openssh-server')
  folder = tmp_path / 'ssh'
  folder.mkdir()
  (folder / 'config').write_text(_SSHD.format(folder=folder))
  os.makedirs('/run/sshd', exist_ok=True)  # An empty folder, which sshd demands.
  subprocess.run(
    ['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', folder / 'key'], check=True,
    timeout=processes.TIMEOUT,
  )  # fmt: skip
  text = pathlib.Path(processes.ROOT, 'docs', 'network.md').read_text()
  (forwarded,) = re.findall(r'alpha\$ ssh -N (.*) beta\n', text)
  alpha, beta = (['ip', 'netns', 'exec', name] for name in hosts.namespaces[:2])
  commands = [
    [*beta, shutil.which('sshd'), '-D', '-e', '-f', folder / 'config'],
    [
      *alpha, 'ssh', '-N', '-F', 'none', '-p', '2200', '-i', folder / 'key', '-o',
      'StrictHostKeyChecking=no', '-o', 'UserKnownHostsFile=/dev/null', '-o',
      'ExitOnForwardFailure=yes', *forwarded.split(), f'root@{hosts.addresses[1]}',
    ],
  ]  # fmt: skip
  started = []
  try:
    for command, address, port in zip(
      commands, (hosts.addresses[1], '127.0.0.1'), (2200, 2223), strict=True
    ):
      started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
      worker_processes.Await(
        f'port {port}',
        lambda address=address, port=port: _Connect(hosts, 0, address, port) == 'connected',
      )
    yield
  finally:
    for process in reversed(started):
      process.kill()
      process.wait()


def testTheTunnelOfTheDocumentsCarriesARun(forks, hosts, project, tmp_path, tunnel):
  run, logdir = _Run(forks, hosts, project, tmp_path), tmp_path / 'run'
  text = pathlib.Path(processes.ROOT, 'docs', 'network.md').read_text()
  run._addresses.write_text(re.search(r'^    ({"worker": .*})$', text, re.MULTILINE)[1])
  # Each step takes many round trips through the tunnel.
  overrides = 'task.stack.num_stages:2;task.stack.xla:False;task.train.save_interval_steps:5'
  try:
    for host in (0, 1):
      run.Start(
        host, f'--task_index={host}', '--local_only', '--threads_per_device=1', program='worker'
      )
    stderr = run.Start(0, *processes.ToyArgs(logdir, 10**6, overrides))
    worker_processes.AwaitCheckpoint(logdir)
    # Only the tunnel leads to the worker.
    assert _Connect(hosts, 0, '127.0.0.1', 2223) == 'connected'
    assert _Connect(hosts, 0, hosts.addresses[1], 2223) == 'ConnectionRefusedError'
    run.StopTrainer()
  finally:
    run.Close()
  assert naming.Names(stderr.read_text(), 'localhost:2221')
  _CheckWeights(forks, project, logdir, tmp_path / 'once', overrides)


def testTheFirewallOfTheDocumentsKeepsAStrangerAway(hosts):
  if not shutil.which('nft'):
    pytest.skip('the firewall needs nft: Debian has it in nftables')
  text = pathlib.Path(processes.ROOT, 'docs', 'network.md').read_text()
  # Addresses 10.77.0.0 to 10.77.0.3: the trainer's host and the workers'.
  assert '192.0.2.0/24' in text
  commands = re.findall(r'^    nft .*', text.replace('192.0.2.0/24', '10.77.0.0/30'), re.MULTILINE)
  script = '\n'.join(['set -e', *commands])
  host = ['ip', 'netns', 'exec', hosts.namespaces[1]]
  server = subprocess.Popen(
    [*host, sys.executable, '-m', 'http.server', str(_PORT)],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  try:
    worker_processes.Await('server', lambda: _Connect(hosts, 4, hosts.addresses[1]) == 'connected')
    subprocess.run([*host, 'sh', '-c', script], check=True, timeout=processes.TIMEOUT)
    assert _Connect(hosts, 0, hosts.addresses[1]) == 'connected'
    assert _Connect(hosts, 1, '127.0.0.1') == 'connected'
    assert _Connect(hosts, 4, hosts.addresses[1]) == 'TimeoutError'
  finally:
    server.kill()
    server.wait()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
