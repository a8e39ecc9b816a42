# SPDX-License-Identifier: Apache-2.0
"""A trainer that is killed repeatedly ends with the same result as an undisturbed one."""

import os
import random
import signal
import sys
import time

import pytest

from lingvo_gpipe.checkpoint import checkpoint_info, logdir_lock
from tests import naming, processes, worker_processes
from tests.toys import projects

# The least and the largest number of kills; more than the least only until one has hit a save.
KILLS = {'Toy': (4, 20), 'Stream': (3, 3)}


def _Args(model, logdir, max_steps, more=''):
  return [*processes.ToyArgs(logdir, max_steps, more), f'--model=toy.{model}']


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(tmp_path_factory.mktemp('project'), projects.Experiments('restarted'))


def _Commits(directory):
  names = os.listdir(directory) if directory.exists() else []
  return sorted(name for name in names if checkpoint_info.COMMIT.fullmatch(name))


def _HasUncommitted(directory):
  """Whether there is an unfinished checkpoint that no process will complete."""
  steps = {int(checkpoint_info.COMMIT.fullmatch(name)[1]) for name in _Commits(directory)}
  folders = filter(None, map(checkpoint_info.FOLDER.fullmatch, os.listdir(directory)))
  return any(int(folder[1]) not in steps for folder in folders)


def _AwaitNewCommit(directory, before):
  deadline = time.monotonic() + processes.TIMEOUT
  while _Commits(directory)[-1:] == before and time.monotonic() < deadline:
    time.sleep(0.001)


def _RunAndKill(forks, project, model, logdir, rng, *, at_start):
  """Starts the trainer and kills it; returns whether a save was in progress."""
  directory = logdir / 'train'
  before = _Commits(directory)[-1:]
  pid = forks.Start('trainer', *_Args(model, logdir, 10**6), cwd=project)
  try:
    if at_start:
      time.sleep(rng.uniform(0.0, 1.0))
    else:
      # It saves all the time, so most kills hit a save.
      _AwaitNewCommit(directory, before)
      time.sleep(rng.uniform(0.0, 0.05))
      with pytest.raises(
        logdir_lock.InUseError, match=naming.Naming(f'process {pid}', f"'{directory}'")
      ):
        logdir_lock.HoldLock(str(directory)).__enter__()
  finally:
    os.kill(pid, signal.SIGKILL)
    done = forks.Wait()
  assert done.returncode == -signal.SIGKILL, done.stderr
  return directory.exists() and _HasUncommitted(directory)


@pytest.mark.parametrize('model', KILLS)
def testARunKilledRepeatedlyEqualsAnUndisturbedOne(project, forks, tmp_path, model):
  rng = random.Random(11)
  logdir, directory = tmp_path / 'killed', tmp_path / 'killed' / 'train'
  least, most = KILLS[model]
  uncommitted = []
  # A few kills may miss all saves.
  while len(uncommitted) < least or (not any(uncommitted) and len(uncommitted) < most):
    at_start = len(uncommitted) % 5 == 1
    uncommitted.append(_RunAndKill(forks, project, model, logdir, rng, at_start=at_start))
  assert any(uncommitted) or model == 'Stream'
  last = int(checkpoint_info.COMMIT.fullmatch(_Commits(directory)[-1])[1])
  assert last > len(uncommitted) // 2
  done = forks.Run('trainer', *_Args(model, logdir, last + 5), cwd=project)
  assert naming.AnyLineNames(processes.Succeeded(done).stdout, 'resuming', f'step {last}')
  assert not _HasUncommitted(directory)
  once = 'task.train.save_interval_steps:0;task.train.save_async:False'
  done = forks.Run('trainer', *_Args(model, tmp_path / 'once', last + 5, once), cwd=project)
  assert '1 checkpoint: ' in processes.Succeeded(done).stdout
  # Without the state of the stream: how far it is read ahead depends on timing.
  killed, undisturbed = (
    {name: x for name, x in processes.Tensors(path, last + 5).items() if name != 'input/iterator'}
    for path in (logdir, tmp_path / 'once')
  )
  processes.AssertSameTensors(killed, undisturbed)
  assert 'toy.w/ema' in killed  # Averages have one as well.


def testOneLeaseAmongProcesses(project, forks, tmp_path):
  """On a path with a scheme a second trainer is refused, and one whose lease has expired exits."""
  driver = processes.Program('train_with_lease')
  stop, directory = project / 'stop', tmp_path / 'train'

  def Args(max_steps):
    return _Args('Toy', f'file://{tmp_path}', max_steps, 'task.train.save_async:False')

  def AwaitNewCommit():
    _AwaitNewCommit(directory, _Commits(directory)[-1:])

  def Start():
    return forks.Start(driver, *Args(10**6), cwd=project, is_waited_for=False)

  first = Start()
  stderr = forks._outputs['stderr']
  AwaitNewCommit()
  refused = forks.Run(driver, *Args(10**6), cwd=project)
  assert refused.returncode == 2
  (line,) = processes.Messages(refused.stderr)
  assert naming.Names(line, f"'file://{directory}'", f'process {first}')
  AwaitNewCommit()

  stop.touch()
  worker_processes.Await('stop', lambda: worker_processes.IsStopped(first))
  second = Start()
  AwaitNewCommit()
  os.kill(first, signal.SIGCONT)
  worker_processes.AwaitEnd([first])
  assert (project / f'{first}.status').read_text() == '2'
  last = processes.Messages(stderr.read_text())[-1]
  assert naming.Names(last, f"'file://{directory}'", f'process {second}')
  # The other trainer continues, its checkpoints are complete, and its end blocks no other.
  AwaitNewCommit()
  os.kill(second, signal.SIGKILL)
  step = int(checkpoint_info.COMMIT.fullmatch(_Commits(directory)[-1])[1])
  third = processes.Succeeded(forks.Run(driver, *Args(step + 5), cwd=project))
  assert naming.AnyLineNames(third.stdout, 'resuming', f'step {step}')
  assert processes.Messages(third.stderr) == []


def testAnErrorInTheInputIsReportedAndKeepsTheLastCheckpoint(project, forks, tmp_path):
  done = forks.Run('trainer', *_Args('Failing', tmp_path, 100), cwd=project)
  assert done.returncode == 1
  cause, _, *more, trace = processes.Messages(done.stderr)[1:]
  assert naming.Names(cause, 'FailingInput', 'example 12')
  assert cause.endswith(': ValueError: example 13 is bad')
  hint, ended = more
  assert naming.Names(hint, 'Dataset(start=12)')
  assert naming.Names(ended, 'after step 4', 'checkpoint of step 4')
  assert trace == f'stack trace: {tmp_path}/error-trainer.txt'
  assert processes.Steps(tmp_path)[-1] == 4
  assert processes.Tensors(tmp_path, 4)['global_step'] == 4


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
