# SPDX-License-Identifier: Apache-2.0
"""A user's project outside the checkout, run with the installed programs."""

import os
import pathlib
import re
import signal
import sys

import pytest

from tests import naming, processes
from tests.toys import projects


def _Write(root, with_init):
  projects.Write(root, projects.Experiments('doubled'), module='mine', task='doubling')
  for folder in ('params', 'tasks') if with_init else ():
    (root / folder / '__init__.py').write_text('')
  return root


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return _Write(tmp_path_factory.mktemp('project'), with_init=True)


@pytest.mark.parametrize('with_init', [True, False])
def testAProjectTrainsInItsDirectory(tmp_path, forks, with_init):
  project = _Write(tmp_path, with_init)
  done = forks.Run('trainer', '--model=mine.Doubling2', '--logdir=run', cwd=project)
  lines = processes.Succeeded(done).stdout.splitlines()
  assert lines[0].startswith('mine.Doubling2@params/mine.py:')
  (evaluated,) = [line for line in lines if line.startswith('Test at step 40: loss ')]
  (first,) = [line for line in lines if line.startswith('step 1/40  loss ')]
  assert float(evaluated.split()[-1]) < 0.5 * float(first.split()[-1])
  assert any(re.search(r' examples/s  lr \S+  bubble \d+%  0:00 left$', line) for line in lines)
  assert processes.Steps(project / 'run') == [40]
  assert 'mine.stack.layers[0].w' in processes.Tensors(project / 'run', 40)


def testTheExperimentsOfTheCheckoutAreNotAvailable(project, forks):
  """Neither through the installation nor through a PYTHONPATH that the user sets."""
  done = forks.Run('trainer', '--mode=list', cwd=project)
  keys = 'Broken Diverging Doubling2 Failing Ill Misspelt Slow Unequal'
  mine = [f'mine.{key}' for key in keys.split()]
  assert processes.Succeeded(done).stdout.splitlines() == mine


@pytest.mark.parametrize(
  'key, cause',
  [
    ('Broken', 'ValueError: out of my own file'),
    # The library reports a mistake in this file: the message needs its line.
    ('Misspelt', r'AttributeError: .*\bnmae\b.*\bname\b'),
  ],
)
def testAnExceptionInAnExperimentNamesItsLineAndAFileWithTheStackTrace(project, forks, key, cause):
  done = forks.Run('trainer', f'--model=mine.{key}', '--logdir=other', cwd=project)
  assert done.returncode == 1
  error, line, trace = processes.Messages(done.stderr)[-3:]
  assert re.match(cause, error)
  assert line.startswith(f'File "{project}/params/mine.py", line ')
  assert 'Traceback' in pathlib.Path(trace.removeprefix('stack trace: ')).read_text()
  assert not (project / 'other').exists()


@pytest.mark.parametrize(
  'key, status, message',
  [
    # A check by the project itself: one line.
    ('Ill', 2, naming.Naming('only 3 columns', 'mine.stack.layers[1] (Strict)', 'float32[4, 6]',
                             'mine.stack.layers[0] (Widens)')),
    # A mistake in the code of the project: the message needs its line.
    ('Unequal', 1, naming.Naming('mine.stack.layers[1] (Scale)', 'float32[4, 6]',
                                 'mine.stack.layers[0] (Widens)')),
    ('Failing', 1, r'stage 0 \(mine\.stack\.layers\[0\] to mine\.stack\.layers\[2\]\), '
     r'micro-batch ([01]), .* 0F\1'),
  ],
)  # fmt: skip
def testALayerThatFailsIsNamed(project, forks, tmp_path, key, status, message):
  args = [f'--model=mine.{key}', f'--logdir={tmp_path}']
  if key == 'Failing':
    # With what TensorFlow prints. The working directory comes before PYTHONPATH, with other params.
    (tmp_path / 'params').mkdir()
    (tmp_path / 'params' / '__init__.py').write_text('')
    path = f'{processes.Environment().get("PYTHONPATH", "")}:{tmp_path}:{project}'
    done = processes.Run('trainer', *args, cwd=project, more_environment={'PYTHONPATH': path})
  else:
    done = forks.Run('trainer', *args, cwd=project)
  assert done.returncode == status, done.stderr
  if status == 2:
    (line,) = processes.Messages(done.stderr)
    assert re.search(message, line)
    return
  # The cause comes last, its name first; everything else is in a file.
  line, code, *more, trace = processes.Messages(done.stderr)[1:]
  assert re.match(r'\w+Error ', line) and re.search(message, line)
  file = f'{project}/tasks/doubling.py'
  assert re.fullmatch(rf'File "{file}", line \d+, in FProp', code)
  assert trace == f'stack trace: {tmp_path}/error-trainer.txt'
  text = (tmp_path / 'error-trainer.txt').read_text()
  assert text.startswith('Traceback') and f'File "{file}"' in text
  if key == 'Failing':
    assert naming.Names(line, 'layer', 'mine.stack.layers[1] (Bounded)', 'out of bounds')
    match = re.fullmatch(r'.*\bafter step (\d+)\b.*\bover', *more)
    assert match and f'step {int(match[1]) + 1}/40' not in done.stdout


def testCheckNumericsNamesTheLayer(project, forks, tmp_path):
  args = ['--model=mine.Diverging', f'--logdir={tmp_path}', '--check_numerics']
  done = forks.Run('trainer', *args, cwd=project)
  assert done.returncode == 1
  line, resume = processes.Messages(done.stderr)
  assert re.fullmatch(r'.*\bafter step \d+\b.*\bover', resume)
  assert re.match(r'step \d+ .* micro-batch [01]: \d+ NaN and \d Inf ', line)
  assert naming.Names(line, 'mine.stack.layers[1] (Logarithm)', 'stage 0', 'float32[4, 3]')
  assert naming.Names(line, 'output', 'inputs are finite', 'weights finite')
  assert 'step 1/40' in done.stdout


def testASecondSignalEndsTheTrainerAtOnceInAnyStep(project, forks):
  pid = forks.Start('trainer', '--model=mine.Slow', '--logdir=slow', cwd=project)
  forks.Await('waiting\n')
  os.kill(pid, signal.SIGTERM)
  forks.Await('SIGTERM: finishing')
  os.kill(pid, signal.SIGINT)
  done = forks.Wait()
  assert done.returncode == 128 + signal.SIGINT, done.stderr
  assert processes.Steps(project / 'slow') == []


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
