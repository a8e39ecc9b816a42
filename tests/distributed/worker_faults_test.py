# SPDX-License-Identifier: Apache-2.0
"""After failures of workers and networks, training continues and gives the same result."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import evaluator
from lingvo_gpipe.distributed import worker_connection, worker_watch
from lingvo_gpipe.evaluation import eval_program
from tests import naming, processes, tcp_proxy, worker_processes
from tests.toys import projects

_Args = processes.ToyArgs
hosts = worker_processes.hosts

_PIPELINE = 'task.stack.xla:False;task.train.save_interval_steps:20'
_REPLICAS = 'task.train.save_interval_steps:20;task.stack.num_stages:1;task.stack.splits:[]'
# Seconds of --step_timeout where a worker hangs: a step takes milliseconds.
_HANG_SECONDS = 3.0


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(
    tmp_path_factory.mktemp('project'),
    projects.Experiments('worker_faults'),
    'without_pauses',
    'pipelined',
  )


@pytest.mark.parametrize(
  'kind, message, expected',
  [
    ('UnavailableError', 'socket closed', True),
    ('UnavailableError', 'from remote target /job:worker: socket closed', True),
    ('InternalError', 'Additional GRPC error information from remote target /job:worker', True),
    ('InvalidArgumentError', 'Unable to find a context_id matching the specified one', True),
    ('InvalidArgumentError', 'Unable to find the relevant tensor remote_handle: 1', True),
    ('InternalError', 'Remote address looked up from remote data found to be poisoned', True),
    ('InvalidArgumentError', 'from remote target /job:worker: indices[0] = 9', False),
    ('ResourceExhaustedError', 'from remote target /job:worker: OOM', False),
    ('UnimplementedError', 'from remote target /job:worker: not on CPU', False),
    ('OutOfRangeError', 'from remote target /job:worker: end of sequence', False),
    ('NotFoundError', 'from remote target /job:worker: a/b; No such file or directory', False),
    ('PermissionDeniedError', 'from remote target /job:worker: a/b; Permission denied', False),
    ('DataLossError', 'from remote target /job:worker: Checksum does not match', False),
    ('InternalError', 'of its own', False),
  ],
)
def testIsFailureDistinguishesLostWorkersFromErrorsOfComputations(
  monkeypatch, kind, message, expected
):
  error = getattr(tf.errors, kind)(None, None, message)
  assert not worker_connection.IsFailure(error)  # There are no workers.
  monkeypatch.setattr(worker_connection, '_answers', {'alpha:2222': b''})
  monkeypatch.setattr(worker_connection, 'Ask', lambda address: (b'', None))
  assert worker_connection.IsFailure(error) == expected
  saving = OSError('cannot write checkpoints')
  saving.__cause__ = error
  # A failing file operation of this process may mean a lost file server instead.
  assert worker_connection.IsFailure(saving) == (expected and message != 'socket closed')
  assert not worker_connection.IsFailure(OSError('cannot write'))


def testWorkersAreAskedConcurrently(monkeypatch):
  both = threading.Barrier(2)

  def Ask(address):
    both.wait(60)
    return b'', address

  monkeypatch.setattr(worker_connection, 'Ask', Ask)
  assert worker_connection.AskAll(['a', 'b']) == [(b'', 'a'), (b'', 'b')]


def testAWorkerThatComputesIsNotAFailure(forks, hosts):
  done = forks.Run(processes.Program('compute_on_worker'), str(hosts))
  assert done.stdout == 'False\n', done.stderr


def _Hosts(tmp_path, ports):
  """Returns a file with the addresses of workers at these ports of this machine."""
  path = tmp_path / 'hosts.json'
  path.write_text(json.dumps({'worker': [f'localhost:{port}' for port in ports]}))
  return path


def _StartWorker(forks, hosts, index, *args):
  """Returns the id of a worker's process, a fork: a `--local_workers` imports TensorFlow itself."""
  flags = [f'--cluster={hosts}', f'--task_index={index}', '--threads_per_device=1', *args]
  return forks.Start('worker', *flags, '--local_only', is_waited_for=False)


def testWorkersAreAskedIfTheErrorDoesNotDecide(forks, monkeypatch, tmp_path):
  port = worker_processes.FreePorts(1)[0]
  address = f'localhost:{port}'
  hosts = _Hosts(tmp_path, [port])
  pid = _StartWorker(forks, hosts, 0)
  monkeypatch.setattr(
    worker_connection,
    '_answers',
    worker_connection.AwaitWorkers([address], worker_processes.SECONDS),
  )
  error = tf.errors.InternalError(None, None, 'of its own')
  assert not worker_connection.IsFailure(error)
  os.kill(pid, signal.SIGKILL)
  worker_processes.AwaitFree(port)
  assert worker_connection.IsFailure(error)
  assert not worker_connection.IsFailure(ValueError('of the user'))
  pid = _StartWorker(forks, hosts, 0)
  try:
    worker_connection.AwaitWorkers([address], worker_processes.SECONDS)
    assert worker_connection.IsFailure(error)
  finally:
    os.kill(pid, signal.SIGKILL)


def _Failures(logdir):
  """Returns [(step, {kind: number of failures})] from metrics.jsonl."""
  lines = map(json.loads, (logdir / 'metrics.jsonl').read_text().splitlines())
  return [(line['step'], line['values']) for line in lines if line['split'] == 'failures']


def _AssertAsUndisturbed(forks, project, tmp_path, logdir, more, *args):
  """Compares the last checkpoint with the result of an undisturbed run in one process."""
  last = processes.Steps(logdir)[-1]
  once = _Args(tmp_path / 'once', last, f'{more};task.train.save_interval_steps:0')
  done = forks.Run('trainer', *once, *args, cwd=project)
  processes.Succeeded(done)
  actual, expected = (processes.Tensors(path, last) for path in (logdir, tmp_path / 'once'))
  for tensors in (actual, expected):
    tensors.pop('input/iterator', None)  # The number of prefetched batches depends on timing.
  processes.AssertSameTensors(actual, expected)


def testTrainingOnLocalWorkersResumesAfterAFailureAndStops(forks, project, tmp_path):
  """A worker is killed, the next one hangs, and then the trainer gets a signal."""
  # Many steps follow each checkpoint, so that the signal comes during a step: a worker that hangs
  # in the copy for a checkpoint has a longer limit.
  more = 'task.stack.xla:False;task.train.save_interval_steps:50'
  args = [*_Args(tmp_path, 10**6, more), '--local_workers=1', f'--step_timeout={_HANG_SECONDS}']
  pid = forks.Start('trainer', *args, cwd=project)
  try:
    for number in (signal.SIGKILL, signal.SIGSTOP, None):
      worker_processes.AwaitCheckpoint(tmp_path)
      children = worker_processes.Children(pid)
      assert len(children) == 2
      (worker,) = [i for i in children if 'lingvo_gpipe.worker' in worker_processes.CommandLine(i)]
      assert f'--starter={pid}\0' in worker_processes.CommandLine(worker)
      # Ctrl-C in a terminal reaches neither process; the supervisor forwards it.
      assert len({os.getpgid(i) for i in (pid, *children)}) == 3
      if number == signal.SIGKILL:
        assert not processes.Messages(forks._outputs['stderr'].read_text())
      if number:
        os.kill(worker, number)
        worker_processes.AwaitEnd(children)
    os.kill(pid, signal.SIGTERM)
    worker_processes.AwaitEnd([pid, *children])
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)
    done = forks.Wait()
  assert done.returncode == 128 + signal.SIGTERM
  assert naming.AnyLineNames(done.stdout, '2 CPU devices', '1 worker')
  assert 'task:0/device:CPU:1' in done.stdout
  assert naming.AnyLineNames(done.stdout, 'stopped', 'SIGTERM', 'step')
  # TensorFlow may log that it cancelled transfers when the connection ended.
  messages = [line for line in processes.Messages(done.stderr) if 'local_rendezvous' not in line]
  assert naming.Names(messages[-1], 'SIGTERM: finishing', 'SIGTERM again')
  lines = [line for line in messages if naming.Names(line, 'resuming', 'training')]
  assert len(lines) == 2, done.stderr
  assert naming.Names(lines[0], 'worker', 'failed')
  assert naming.Names(lines[1], 'no step', f'{_HANG_SECONDS} s')
  assert [failures for _, failures in _Failures(tmp_path)] == [
    {'worker_failed': 1},
    {'worker_failed': 1, 'no_step': 1},
  ]
  _AssertAsUndisturbed(forks, project, tmp_path, tmp_path, more)


def testAWorkerThatHangsBeforeTheFirstStepIsNoticed(forks, project, tmp_path):
  more, ports = 'task.stack.xla:False', worker_processes.FreePorts(1)
  hosts = _Hosts(tmp_path, ports)
  worker = _StartWorker(forks, hosts, 0, '--num_devices=2')
  (project / 'worker').write_text(str(worker))
  args = [*_Args(tmp_path, 2, more), '--model=toy.StoppedAtTheStart', f'--cluster={hosts}']
  trainer = forks.Start('trainer', *args, cwd=project, is_waited_for=False)
  stderr = forks._outputs['stderr']
  try:
    forks.Await('has answered nothing')
    os.kill(worker, signal.SIGKILL)
    worker_processes.AwaitFree(ports[0])
    worker = _StartWorker(forks, hosts, 0, '--num_devices=2')
    worker_processes.AwaitEnd([trainer])
  finally:
    for pid in (worker, trainer):
      os.kill(pid, signal.SIGKILL)
  lines = processes.Messages(stderr.read_text())
  (line,) = [line for line in lines if naming.Names(line, 'answered')]
  assert naming.Names(line, 'worker failed', *worker_processes.Addresses(hosts))
  assert [failures for _, failures in _Failures(tmp_path)] == [{'worker_failed': 1}]
  assert processes.Steps(tmp_path)[-1] == 2
  _AssertAsUndisturbed(forks, project, tmp_path, tmp_path, more)


def testAWatchCountsOnlyTheTimeSinceTheLastAnswer(monkeypatch):
  """The first worker answers each second time, the second worker never after the third."""
  rounds = []

  def WhySilent(addresses):
    rounds.append(time.monotonic())
    return ['late' if len(rounds) % 2 else None, 'gone' if len(rounds) > 3 else None]

  monkeypatch.setattr(worker_connection, 'WhySilent', WhySilent)
  monkeypatch.setattr(worker_watch, '_PAUSE_SECONDS', 0.02)
  reason = worker_watch.AwaitSilence(['a:1', 'b:2'], 0.05, os.getppid())
  assert 'b:2' in reason and 'gone' in reason
  assert rounds[-1] - rounds[3] >= 0.05
  assert worker_watch.AwaitSilence(['a:1', 'b:2'], 0.0, parent=-1) is None


def testAnEvaluatorResumesAfterItsWorkerIsKilledOrHangs(forks, project, tmp_path):
  more = 'task.stack.xla:False'
  processes.Succeeded(forks.Run('trainer', *_Args(tmp_path / 'run', 1, more), cwd=project))
  shutil.copytree(tmp_path / 'run', tmp_path / 'once')

  def Args(name):
    return [*_Args(tmp_path / name, 1, more), '--split=Train', '--once']

  processes.Succeeded(forks.Run('evaluator', *Args('once'), cwd=project))
  ports = worker_processes.FreePorts(1)
  hosts = _Hosts(tmp_path, ports)
  workers = [_StartWorker(forks, hosts, 0, '--num_devices=2')]
  (project / 'signal').write_text(f'{workers[0]} {int(signal.SIGKILL)}')
  args = ['--model=toy.KilledInEvaluation', f'--cluster={hosts}', f'--step_timeout={_HANG_SECONDS}']
  started = forks.Start('evaluator', *Args('run'), *args, cwd=project, is_waited_for=False)
  outputs = forks._outputs
  try:
    for then in (signal.SIGSTOP, None):
      worker_processes.Await('signal', lambda: not (project / 'signal').exists())
      if not then:
        worker_processes.Await('limit', lambda: 'may hang' in outputs['stderr'].read_text())
        os.kill(workers[-1], signal.SIGKILL)
      worker_processes.AwaitFree(ports[0])
      workers.append(_StartWorker(forks, hosts, 0, '--num_devices=2'))
      if then:
        (tmp_path / 'signal').write_text(f'{workers[-1]} {int(then)}')
        (tmp_path / 'signal').rename(project / 'signal')
    worker_processes.AwaitEnd([started])
  finally:
    for pid in (*workers, started):
      os.kill(pid, signal.SIGKILL)
  stdout, stderr = (outputs[name].read_text() for name in ('stdout', 'stderr'))
  lines = processes.Messages(stderr)
  lines = [line for line in lines if naming.Names(line, 'resuming', 'evaluation')]
  assert len(lines) == 2, stderr
  assert naming.Names(lines[0], 'evaluation', 'step 1')
  assert naming.Names(lines[1], 'no step', f'{_HANG_SECONDS} s')
  assert stdout.count('Train at step 1: loss ') == 1
  actual, expected = (processes.Scalars(tmp_path / name / 'eval_train') for name in ('run', 'once'))
  assert actual == expected and len(actual['loss']) == 1  # Bit for bit.


@pytest.mark.parametrize(
  'once, checkpoint, expected',
  [
    (False, 'last', 'newest checkpoint'),
    (True, 'last', 'checkpoint of step 3'),
    (False, 'best', 'checkpoint of step 3'),
  ],
)
def testAnEvaluatorLogsTheCheckpointItResumes(monkeypatch, once, checkpoint, expected):
  flags = types.SimpleNamespace(once=once, checkpoint=checkpoint)
  monkeypatch.setattr(evaluator, 'FLAGS', flags)
  progress = eval_program.EvalProgress()
  next(progress.PendingParts(3, ['result']))
  assert naming.Names(evaluator._DescribeStart(progress), expected)


@pytest.mark.parametrize(
  'more, victims, args, way',
  [
    # The training process twice in a row, and in the end the worker that reads the stream.
    (_PIPELINE, [2, 2, 0], ['--model=toy.Streamed'], ''),
    # The surviving worker still has collectives of the previous training process, of gradients and
    # of statistics within the stages.
    (
      f'{_REPLICAS};task.train.all_reduce:collective;task.stack.xla:False',
      [0],
      ['--model=toy.Normalised', '--num_replicas=2'],
      'collective',
    ),
    # Compiled by XLA.
    (f'{_REPLICAS};task.train.all_reduce:auto', [1], ['--num_replicas=2'], 'send'),
  ],
)
def testRandomKillsDoNotChangeTheResult(forks, project, tmp_path, more, victims, args, way):
  """Kills either worker, which is restarted at once, or the training process.

  The weights equal the weights after an undisturbed run in one process, with as many replicas.
  """
  rng = random.Random(5)
  logdir, ports = tmp_path / 'killed', worker_processes.FreePorts(2)
  hosts = _Hosts(tmp_path, ports)
  workers, logs = {}, []

  def StartWorker(index):
    workers[index] = _StartWorker(forks, hosts, index)
    logs.append(forks._outputs['stderr'])

  for index in range(2):
    StartWorker(index)
  flags = [*_Args(logdir, 10**6, more), f'--cluster={hosts}', *args]
  trainer = forks.Start('trainer', *flags, cwd=project, is_waited_for=False)
  stderr = forks._outputs['stderr']
  try:
    for num_failures, victim in enumerate([*victims, None]):
      # Not a checkpoint that was on its way when the last victim ended: two failures would be one,
      # or the trainer would end between two training processes and write no report.
      worker_processes.Await(
        'new start',
        lambda n=num_failures: (
          stderr.exists() and stderr.read_text().count('resuming training from') >= n
        ),
      )
      worker_processes.AwaitCheckpoint(logdir)
      if victim is None:
        break
      time.sleep(rng.uniform(0.0, 0.2))
      # There is no child for a moment if the checkpoint was written just before the last failure.
      (child,) = worker_processes.Await('child', lambda: worker_processes.Children(trainer))
      os.kill([*workers.values(), child][victim], signal.SIGKILL)
      if victim < 2:
        worker_processes.AwaitFree(ports[victim])
        StartWorker(victim)
    os.kill(trainer, signal.SIGTERM)
    worker_processes.AwaitEnd([trainer])
    # Only the worker of replicas that the previous training process has used restarts.
    lines = [log.read_text().splitlines() for log in logs]
    restarts = [sum(naming.Names(line, 'restarting', 'worker') for line in log) for log in lines]
    assert restarts == [int(bool(way) and i < 2 and i not in victims) for i in range(len(logs))]
    assert naming.AnyLineNames(stderr.read_text(), 'data', 'worker 0')
    added = re.findall(r'\bGradients\b.*\b2 replicas\b.*\bby (\w+)\b', stderr.read_text())
    assert added == ([way] * (len(victims) + 1) if way else [])
    report = json.loads((logdir / 'report.json').read_text())
    assert sum(report['failures'].values()) >= len(victims)
  finally:
    for pid in [*workers.values(), trainer]:
      os.kill(pid, signal.SIGKILL)
  _AssertAsUndisturbed(forks, project, tmp_path, logdir, more, *args)


@pytest.fixture
def proxies(hosts, tmp_path):
  """Yields proxies to the two workers; proxies.json lists their addresses."""
  ports = [int(address.rpartition(':')[2]) for address in worker_processes.Addresses(hosts)]
  with contextlib.ExitStack() as stack:
    proxies = [stack.enter_context(tcp_proxy.TcpProxy(port)) for port in ports]
    addresses = [f'localhost:{proxy.port}' for proxy in proxies]
    (tmp_path / 'proxies.json').write_text(json.dumps({'worker': addresses}))
    yield proxies


def testTrainingResumesAfterTheNetworkFailed(forks, project, proxies, tmp_path):
  """The network fails between the trainer and the workers, and between the workers."""
  logdir = tmp_path / 'cut'
  args = [*_Args(logdir, 10**6, _PIPELINE), f'--cluster={tmp_path}/proxies.json']
  trainer = forks.Start('trainer', *args, f'--step_timeout={_HANG_SECONDS}', cwd=project)
  try:
    for fail in (tcp_proxy.TcpProxy.Drop, tcp_proxy.TcpProxy.Swallow):
      worker_processes.AwaitCheckpoint(logdir)
      (child,) = worker_processes.Children(trainer)
      for proxy in proxies:
        fail(proxy)
      worker_processes.AwaitEnd([child])
      (child,) = worker_processes.Await(
        'new training process', lambda: worker_processes.Children(trainer)
      )
      for proxy in proxies:
        proxy.Forward()
    worker_processes.AwaitCheckpoint(logdir)
  finally:
    os.kill(trainer, signal.SIGKILL)
    done = forks.Wait()
  worker_processes.AwaitEnd([child])
  lines = processes.Messages(done.stderr)
  lines = [line for line in lines if naming.Names(line, 'resuming', 'training')]
  assert naming.Names(lines[0], 'worker', 'failed'), done.stderr
  assert re.search(r'\bno (step|batch)\b', lines[1])
  assert naming.Names(lines[1], f'{_HANG_SECONDS} s', 'may hang')
  assert len(lines) == 2, done.stderr
  _AssertAsUndisturbed(forks, project, tmp_path, logdir, _PIPELINE)


def testTrainingContinuesWithOneWorkerUntilTheOtherIsBack(forks, project, proxies, tmp_path):
  logdir, more = tmp_path / 'fewer', f'{_PIPELINE};task.stack.splits:[]'
  args = [*_Args(logdir, 10**6, more), f'--cluster={tmp_path}/proxies.json']
  args += ['--min_workers=1', '--worker_timeout=1']
  trainer = forks.Start('trainer', *args, cwd=project)
  try:
    worker_processes.AwaitCheckpoint(logdir)
    proxies[0].Drop()
    forks.Await('training continues with 1 of 2 workers: 1 x 1 devices')
    worker_processes.AwaitCheckpoint(logdir)
    assert 'task.stack.num_stages : 2\n' in (logdir / 'params.txt').read_text()
    children = worker_processes.Children(trainer)
    os.kill(trainer, signal.SIGKILL)
    worker_processes.AwaitEnd(children)
    before = processes.Messages(forks.Wait().stderr)
    # Like a restart of the whole job while one host is missing.
    trainer = forks.Start('trainer', *args, cwd=project)
    worker_processes.AwaitCheckpoint(logdir)
    proxies[0].Forward()
    (child,) = worker_processes.Await('child', lambda: worker_processes.Children(trainer))
    os.kill(child, signal.SIGKILL)
    worker_processes.AwaitEnd([child])
    worker_processes.AwaitCheckpoint(logdir)
  finally:
    os.kill(trainer, signal.SIGKILL)
    done = forks.Wait()
  assert naming.AnyLineNames(done.stderr, 'worker 0', f'localhost:{proxies[0].port}')
  lines = before + processes.Messages(done.stderr)
  cuts = [line for line in lines if naming.Names(line, 'cut')]
  assert [re.findall(r'\[[\d, ]+\]', cut) for cut in cuts] == [['[2, 4]', '[4]'], ['[4]', '[2, 4]']]
  last = processes.Steps(logdir)[-1]
  processes.Succeeded(forks.Run('trainer', *_Args(tmp_path / 'once', last, more), cwd=project))
  actual, expected = processes.Tensors(logdir, last), processes.Tensors(tmp_path / 'once', last)
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def testAWorkerKilledOrStoppedDuringASaveLosesNoCheckpoint(forks, project, tmp_path):
  ports = worker_processes.FreePorts(2)
  hosts = _Hosts(tmp_path, ports)
  workers = [_StartWorker(forks, hosts, index) for index in range(2)]

  def KillIn(function, step, number):
    text = f'{function} {step} {workers[1]} {ports[1]} {int(number)}'
    (tmp_path / 'kill').write_text(text)
    (tmp_path / 'kill').rename(project / 'kill')

  KillIn('_Save', 3, signal.SIGKILL)
  more = 'task.stack.xla:False;task.train.save_interval_steps:1'
  args = [f'--cluster={hosts}', *_Args(tmp_path / 'killed', 15, more), '--model=toy.KilledInSaves']
  args += ['--step_timeout=100']  # Writing has its own limit.
  trainer = forks.Start('trainer', *args, cwd=project, is_waited_for=False)
  stderr = forks._outputs['stderr']
  try:
    for then in (('_Restore', 6, signal.SIGKILL), ('_Save', 13, signal.SIGSTOP), None):
      worker_processes.Await('kill', lambda: not (project / 'kill').exists())
      if not then:
        worker_processes.Await(
          'write that hangs', lambda: ': a worker may hang' in stderr.read_text()
        )
        os.kill(workers[1], signal.SIGKILL)
      worker_processes.AwaitFree(ports[1])
      workers[1] = _StartWorker(forks, hosts, 1)
      if then:
        KillIn(*then)
    worker_processes.AwaitEnd([trainer])
  finally:
    for pid in (*workers, trainer):
      os.kill(pid, signal.SIGKILL)
  starts = [
    re.search(r'\bstep \d+$', line)[0]
    for line in stderr.read_text().splitlines()
    if naming.Names(line, 'resuming', 'training')
  ]
  # A checkpoint that was written in full was then read back by the trainer.
  assert starts == ['step 2', 'step 6', 'step 12']
  assert naming.Names(stderr.read_text(), 'no checkpoint', 'may hang')
  steps = processes.Steps(tmp_path / 'killed')
  assert steps[-1] == 15
  assert len(list(tmp_path.glob('killed/train/ckpt-*'))) == 2 * len(
    steps
  )  # No partial checkpoints.
  _AssertAsUndisturbed(forks, project, tmp_path, tmp_path / 'killed', more)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
