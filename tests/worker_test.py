# SPDX-License-Identifier: Apache-2.0
"""Stages in other processes: equal results, equal checkpoints, and no orphaned workers."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import stat
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import worker_connection
from tests import naming, processes, worker_processes

_Args = processes.ToyArgs
hosts, project = worker_processes.hosts, worker_processes.project


def testRunsOnWorkersAndInOneProcessAreEqualAndResumeEachOther(forks, project, hosts, tmp_path):
  first, other = tmp_path / 'one', tmp_path / 'other'

  def Train(logdir, max_steps, *more):
    overrides = 'task.stack.xla:False;task.train.save_interval_steps:1'
    done = forks.Run('trainer', *_Args(logdir, max_steps, overrides), *more, cwd=project)
    return processes.Succeeded(done)

  done = Train(first, 2, f'--cluster={hosts}')
  assert not processes.Messages(done.stderr)
  assert naming.AnyLineNames(done.stdout, '2 CPU devices', '2 workers')
  assert 'task:1/device:CPU:0' in done.stdout
  assert re.search('written .* 2 workers ', done.stderr)
  tensors = processes.Tensors(first, 2)
  assert 'toy.stack.layers[0].w/momentum' in tensors
  parts = _Parts(first, 2)
  stages = (r'layers\[0\]|learner/iterations', r'layers\[[23]\]')
  for mode, stage in zip(worker_processes.UMASKS.values(), stages, strict=True):
    sizes = [value.nbytes for name, value in tensors.items() if re.search(stage, name)]
    assert len(sizes) > 2 * 3 and parts[mode].stat().st_size == sum(sizes)
  assert len(parts) == 3
  Train(other, 2)
  assert len(_Parts(other, 2)) == 1
  processes.AssertSameTensors(tensors, processes.Tensors(other, 2))
  done = Train(other, 4, f'--cluster={hosts}', '--profile_steps=4,4')
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 2')
  # The placement of stages does not count as a changed circumstance.
  assert not processes.Messages(done.stderr)
  _AssertProfiled(other, done.stdout)
  # A part of a worker that is damaged is named, and the previous checkpoint is used.
  part = parts[worker_processes.UMASKS['014']]
  os.truncate(part, part.stat().st_size - 1)
  done = Train(first, 4)
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 1')
  (message,) = processes.Messages(done.stderr)
  assert naming.Names(message, 'damaged', f'{part.parent}/tensors', part.name)
  processes.AssertSameTensors(processes.Tensors(first, 4), processes.Tensors(other, 4))


def _AssertProfiled(logdir, message):
  """Checks the profile of step 4: each action of the two workers, and their traces."""
  assert re.search(r'^profiled step 4: [^;]*; [^;]*$', message, re.MULTILINE), message
  page = (logdir / 'timeline_4_4.html').read_text()
  rows = page.split('<text x="0"')[1:]
  for k in range(2):
    actions = re.findall(r'class="measured" data-action="(\w+)"', rows[2 * k + 1])
    assert rows[2 * k].partition('>')[2].startswith(f'worker {k} CPU:0<')
    assert sorted(actions) == sorted(f'{k}{kind}{m}' for kind in 'FB' for m in range(2))
  (folder,) = logdir.glob('train/plugins/profile/*')
  names = {path.name.removesuffix('.xplane.pb'): path for path in folder.iterdir()}
  assert names.keys() > {'worker_0', 'worker_1'} and len(names) == 3
  (trainer,) = names.keys() - {'worker_0', 'worker_1'}
  assert b'pipeline worker 1 CPU:0' in names[trainer].read_bytes()


def _Parts(logdir, step):
  """Returns {mode: data file} of a checkpoint."""
  infos = checkpointer.Checkpointer(logdir / 'train').All()
  (info,) = [info for info in infos if info.step == step]
  files = pathlib.Path(info.prefix).parent.glob('*.data-*')
  return {stat.S_IMODE(file.stat().st_mode): file for file in files}


def testWorkersSaveAndRestoreTheirVariablesLocally(forks, hosts, tmp_path):
  def NumBytes(directory, more):
    args = [str(hosts), str(directory), more]
    # TensorFlow's optimiser of graphs keeps the tensors of a worker from passing through here.
    program = processes.Program('save_on_workers')
    done = forks.Run(program, *args, more_environment=processes.OPTIMIZED)
    return int(processes.Succeeded(done).stdout)

  size = sent = 8 * 2**20  # The bytes of the variables, and of the ones added to them.
  assert NumBytes(tmp_path / 'workers', 'workers') < 2 * sent + 2**20
  assert NumBytes(tmp_path / 'alone', '') > 2 * (sent + 2 * size) - 2**20
  saved = [
    tf.train.load_checkpoint(info.prefix)
    for name in ('workers', 'alone')
    for info in checkpointer.Checkpointer(tmp_path / name).All()
  ]
  assert len(saved) == 4
  expected = tf.random.stateless_normal([256, 1024], [1, 2]).numpy()
  for reader in saved:
    for name in reader.get_variable_to_shape_map():
      assert reader.get_tensor(name).tobytes() == expected.tobytes()


def testTheTrainerWritesEverythingIfAWorkerDoesNotSeeTheDirectory(forks, project, hosts):
  # A different directory for each process.
  args = [*_Args('/proc/self/cwd/unseen', 1, 'task.stack.xla:False'), f'--cluster={hosts}']
  done = processes.Succeeded(forks.Run('trainer', *args, cwd=project))
  (mode,) = _Parts(project / 'unseen', 1)
  assert mode not in worker_processes.UMASKS.values()
  (line,) = [x for x in done.stderr.splitlines() if naming.Names(x, 'Checkpoints', 'process')]
  path = '/proc/self/cwd/unseen/train'
  assert naming.Names(line, 'alone', 'worker 0', path, f'{path}/ckpt-00000000')
  assert len(list(project.glob('unseen/train/ckpt-*'))) == 2


def testReplicasOnWorkersOfTfConfigEqualReplicasInOneProcess(forks, project, hosts, tmp_path):
  """With XLA and sharded slots: one replica on two workers, one on both devices of a third."""
  port, chief = worker_processes.FreePorts(2)
  workers = [*worker_processes.Addresses(hosts), f'localhost:{port}']

  def Environment(kind, index):
    config = {
      'cluster': {'worker': workers, 'chief': [f'localhost:{chief}']},
      'task': {'type': kind, 'index': index},
    }
    return {'TF_CONFIG': json.dumps(config)}

  pid = forks.Start(
    'worker', '--trusted_network', '--num_devices=2', '--threads_per_device=1',
    more_environment=Environment('worker', 2), is_waited_for=False,
  )  # fmt: skip
  logs = [worker_processes.Log(hosts, 0), worker_processes.Log(hosts, 1), forks._outputs['stderr']]
  try:
    forks.Await(
      f'worker 2 serves CPU:0, CPU:1 at port {port} of all interfaces of this machine, without '
      'authentication: '
    )
    processes.Succeeded(forks.Run(processes.Program('connect_to_workers'), str(hosts)))
    before = [_NumRestarts(log) for log in logs]
    for logdir, variables in (('process', None), ('workers', Environment('chief', 0))):
      args = _Args(tmp_path / logdir, 3, 'task.train.shard_optimizer_slots:True')
      done = processes.Succeeded(
        forks.Run('trainer', *args, '--num_replicas=2', cwd=project, more_environment=variables)
      )
  finally:
    os.kill(pid, signal.SIGKILL)
  expected, on_workers = (processes.Tensors(tmp_path / name, 3) for name in ('process', 'workers'))
  processes.AssertSameTensors(on_workers, expected)
  assert naming.AnyLineNames(done.stderr, '4 CPU devices', '3 workers', ', '.join(workers))
  # By the process that restarts the workers, and by the process that trains.
  lines = done.stderr.splitlines()
  assert [naming.Names(line, f'localhost:{chief}') for line in lines].count(True) == 2
  assert 'cuInit' not in done.stderr  # The run does not ask for a GPU.
  # A process had used two of the three workers.
  assert [_NumRestarts(log) - n for log, n in zip(logs, before, strict=True)] == [1, 1, 0]


def _NumRestarts(log):
  lines = log.read_text().splitlines()
  return [naming.Names(line, 'restarting', 'worker') for line in lines].count(True)


def testTestsChooseOtherPortsWithTheSameSeed():
  """Two concurrent tests have the same seed, and must not take the same port."""
  ports = []
  for _ in range(2):
    random.seed(0)
    ports.append(worker_processes.FreePorts(2))
  assert ports[0] != ports[1]


def testTooFewDevicesAreCounted(forks, project, hosts, tmp_path):
  args = _Args(tmp_path, 1, 'task.stack.num_stages:3;task.stack.splits:[]')
  done = forks.Run('trainer', *args, f'--cluster={hosts}', cwd=project)
  first, second = worker_processes.Addresses(hosts)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, '3 devices', '3 stages', '1 replica', 'workers have 2')
  assert naming.Names(line, f'1 of worker 0 at {first}', f'1 of worker 1 at {second}')


def testAnotherVersionOfTensorFlowIsNamed(forks, hosts):
  done = forks.Run(processes.Program('connect_with_other_version'), str(hosts))
  address, *_ = worker_processes.Addresses(hosts)
  assert naming.Names(done.stdout, f'worker 0 at {address}', tf.__version__, '2.0.0'), done.stderr


def testWorkersThatDoNotAnswerAreNamed(hosts, monkeypatch):
  monkeypatch.setattr(worker_connection, '_ASK_SECONDS', 1.0)
  first, second = worker_processes.Addresses(hosts)
  with pytest.raises(ValueError, match=naming.Naming(f'worker 0 at {second}', 'worker 1')):
    worker_connection.AwaitWorkers([second, first], 10)
  with socket.socket() as silent:  # Accepts and never answers, like a stopped process.
    silent.bind(('localhost', 0))
    silent.listen()
    addresses = [
      first,
      f'localhost:{worker_processes.FreePorts(1)[0]}',
      f'localhost:{silent.getsockname()[1]}',
    ]
    with pytest.raises(TimeoutError) as e:
      worker_connection.AwaitWorkers(addresses, 0.1)
  message = str(e.value)
  assert naming.Names(message, '0.1 s')
  assert naming.Names(message, f'worker 1 at {addresses[1]} (unavailable')
  assert naming.Names(message, f'worker 2 at {addresses[2]} (deadline_exceeded')
  assert first not in message


def testTheSupervisorKnowsOfTheWaitForWorkers(monkeypatch):
  read, write = os.pipe()
  monkeypatch.setattr(heartbeat, '_descriptor', write)
  with pytest.raises(TimeoutError):
    worker_connection.AwaitWorkers([f'localhost:{worker_processes.FreePorts(1)[0]}'], 0.3)
  os.close(write)
  with open(read, 'rb') as signs:
    messages = signs.read()
  assert len(messages) >= 2 and messages == heartbeat.LONG * len(messages)


@pytest.mark.parametrize(
  'args, names',
  [
    (['--task_index=0'], ['--local_only', '--trusted_network']),
    (
      ['--task_index=0', '--local_only', '--trusted_network'],
      ['--local_only', '--trusted_network'],
    ),
    (['--local_only'], ['--task_index']),
    (['--trusted_network', '--task_index=2'], ['no worker 2']),
    (['--local_only', '--task_index=0'], ['worker 0', 'port']),
  ],
)
def testMistakesOfAWorkerAreOneLineErrors(forks, hosts, args, names):
  done = forks.Run('worker', f'--cluster={hosts}', *args)
  assert done.returncode == 2, done.stderr
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, *names)


def testALocalWorkerCannotBeStartedByHand(forks):
  """A local worker listens without --local_only and --trusted_network."""
  done = forks.Run(processes.Program('worker_without_input'), '--local')
  assert done.returncode == 2, done.stderr
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, '--local', '--local_only')


def testMistakesInTheChoiceOfWorkersAreOneLineErrors(forks, project, hosts, tmp_path):
  config = {
    'cluster': {'worker': worker_processes.Addresses(hosts)},
    'task': {'type': 'worker', 'index': 1},
  }
  for args, environment, names in (
    (['--local_workers=2', f'--cluster={hosts}'], {}, ['--local_workers', '--cluster']),
    (['--local_workers=2', '--platform=gpu'], {}, ['--local_workers', 'CPU']),
    (['--local_workers=2', '--min_workers=1'], {}, ['local workers', '--min_workers']),
    ([f'--cluster={hosts}', '--min_workers=3'], {}, ['--min_workers=3', '2 workers']),
    ([f'--cluster={hosts}', '--worker_timeout=9'], {}, ['--worker_timeout', '--min_workers']),
    (['--local_workers=2', '--num_devices=2'], {}, ['--num_devices', 'local workers']),
    ([f'--cluster={hosts}', '--devices=0'], {}, ['--devices', 'CUDA_VISIBLE_DEVICES']),
    ([f'--cluster={tmp_path}/none'], {}, [tmp_path / 'none', 'No such file']),
    ([], {'TF_CONFIG': json.dumps(config)}, ['worker 1', '`worker`']),
  ):
    args = [*_Args(tmp_path, 1), *args]
    done = forks.Run('trainer', *args, cwd=project, more_environment=environment)
    assert done.returncode == 2
    (line,) = processes.Messages(done.stderr)
    assert naming.Names(line, *names)


# ---- local workers ---------------------------------------------------------------------------


def testLocalWorkersEndWithATrainerKilledWhileTheyStart(forks, project, tmp_path):
  pid = forks.Start('trainer', *_Args(tmp_path, 2), '--local_workers=1', cwd=project)
  try:
    workers = worker_processes.Await('worker', lambda: worker_processes.Children(pid))
  finally:
    os.kill(pid, signal.SIGKILL)
    assert forks.Wait().returncode == -signal.SIGKILL
  worker_processes.AwaitEnd(workers)


def testALocalWorkerEndsWithItsStarterIfThePipeStaysOpen(forks):
  pid = forks.Start(processes.Program('start_local_worker'))
  workers = []
  try:
    forks.Await('worker 0 serves ')
    workers = worker_processes.Children(pid)
    os.kill(pid, signal.SIGKILL)
    forks.Wait()
    assert len(workers) == 1
    worker_processes.AwaitEnd(workers)
  finally:
    for worker in workers:
      with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
