# SPDX-License-Identifier: Apache-2.0
"""Output of each job on a real terminal and through a pipe; trainer_test has the job train."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time

import pytest

from tests import naming, processes, terminal
from tests.toys import projects

STEPS = 6
_OVERRIDES = (
  "task.train.eval_datasets:['Dev'];task.train.eval_interval_steps:2;"
  "task.train.decode_datasets:['Dev'];task.train.decode_interval_steps:3"
)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(
    tmp_path_factory.mktemp('project'), projects.Experiments('two_weights'), task='training'
  )


@contextlib.contextmanager
def _Reader(kind, tmp_path):
  """Yields (path to write to, function that reads the output until the process is done)."""
  if kind == 'terminal':
    ours, theirs = pty.openpty()
    path = os.ttyname(theirs)
  else:
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    ours, theirs = os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)

  def Read(pid):
    """Returns the output. There is no end of file: the other end is open here as well."""
    output = b''
    deadline = time.monotonic() + processes.TIMEOUT
    while time.monotonic() < deadline:
      is_running = os.path.exists(f'/proc/{pid}')
      if select.select([ours], [], [], 0.05)[0]:
        output += os.read(ours, 1 << 16)
      elif not is_running:
        break
    return output.decode()

  yield path, Read
  os.close(ours)
  os.close(theirs)


@pytest.fixture(scope='module')
def trained(project, forks):
  """A log directory with checkpoints; its project."""
  logdir = project / 'trained'
  args = ['--model=toy.Toy', f'--logdir={logdir}', f'--max_steps={STEPS}']
  processes.Succeeded(forks.Run('trainer', *args, cwd=project, more_environment=_Environment()))
  return logdir


def _Environment():
  return {'TERM': 'xterm', 'COLUMNS': '100', 'LINES': '30'}


def _Run(forks, project, kind, tmp_path, program, *args):
  """Returns the output of the process."""
  with _Reader(kind, tmp_path) as (path, Read):
    args = ['--model=toy.Toy', f'--max_steps={STEPS}', *args]
    pid = forks.Start(program, *args, cwd=project, more_environment=_Environment(), stdout=path)
    text = Read(pid)
  done = processes.Succeeded(forks.Wait())
  assert processes.Messages(done.stderr) == []
  return text


@pytest.mark.parametrize('kind', ['terminal', 'pipe'])
def testTrainAndEval(forks, project, tmp_path, kind):
  args = [
    '--job=train_and_eval',
    f'--logdir={tmp_path}/run',
    f'--model_params_override={_OVERRIDES}',
  ]
  text = _Run(forks, project, kind, tmp_path, 'trainer', *args)
  lines = terminal.Screen(text) if kind == 'terminal' else text.splitlines()
  evaluated = [line for line in lines if line.startswith('Dev at step ')]
  steps = [re.match(r'Dev at step (\d+): (loss|6 examples in)', line) for line in evaluated]
  assert [(int(match[1]), match[2] == 'loss') for match in steps] == [
    (2, True), (3, False), (4, True), (6, True), (6, False)
  ]  # fmt: skip
  progress = [line for line in lines if line.startswith('step ')]
  if kind == 'terminal':
    assert 'evaluating  step 2/6' in text  # During the evaluation.
    (line,) = progress
  else:
    assert '\x1b' not in text and '\r' not in text
    first, line = progress
    assert first.startswith('step 1/6  loss ')
  assert re.match(r'step 6/6  loss [\d.e-]+  [\d,]+ examples/s  lr [\d.e-]+  0:00 left$', line)
  assert lines.index(line) < lines.index('--- run report')


@pytest.mark.parametrize('kind', ['terminal', 'pipe'])
def testARunContinuesAfterItsReaderHasGone(forks, project, tmp_path, kind):
  """Its terminal or the reader of its pipe goes away, and then it gets SIGHUP."""
  log = tmp_path / 'run' / 'metrics.jsonl'

  def Steps():
    return log.read_text().count('\n') if log.exists() else 0

  def AwaitMore(num):
    target, deadline = Steps() + num, time.monotonic() + processes.TIMEOUT
    while Steps() < target and time.monotonic() < deadline:
      time.sleep(0.01)
    assert Steps() >= target

  with _Reader(kind, tmp_path) as (path, _):
    args = ['--model=toy.Toy', f'--logdir={tmp_path}/run', f'--max_steps={10**6}']
    pid = forks.Start('trainer', *args, cwd=project, more_environment=_Environment(), stdout=path)
    AwaitMore(2)
  AwaitMore(20)
  for _ in range(2):  # The shell sends it, and the system again when the shell ends.
    os.kill(pid, signal.SIGHUP)
  done = forks.Wait()
  assert done.returncode == 128 + signal.SIGHUP, done.stderr
  assert processes.Steps(tmp_path / 'run')[-1] == Steps()


# A pipe makes no difference between the jobs, and evaluator_test also has the job eval in one.
@pytest.mark.parametrize(
  'job, kind', [('eval', 'terminal'), ('decode', 'terminal'), ('decode', 'pipe')]
)
def testEvaluator(forks, project, trained, tmp_path, kind, job):
  """Whole lines, equal in both."""
  args = [f'--job={job}', f'--logdir={trained}', '--split=Dev', '--once']
  text = _Run(forks, project, kind, tmp_path, 'evaluator', *args)
  assert '\x1b' not in text
  where, precision, data, weights, line, *sample = text.replace('\r\n', '\n').splitlines()
  assert where.startswith('toy.Toy@') and naming.Names(where, '1 logical CPU device')
  assert precision == 'weights float32, activations float32, XLA off'
  assert naming.Names(data, 'data', 'Dev 6 examples')
  assert naming.Names(weights, f'{job}_dev', 'the weights')
  assert bool(sample) == (job == 'eval') and all(line.isprintable() for line in sample)
  pattern = {'eval': r'loss [\d.]+', 'decode': r'6 examples in \S+\.jsonl  mean -?[\d.]+'}[job]
  assert re.fullmatch(rf'Dev at step {STEPS}: {pattern}', line)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
