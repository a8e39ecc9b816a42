# SPDX-License-Identifier: Apache-2.0
"""Completion of command lines, in a real bash, and in zsh if it is installed."""

import os
import pty
import shutil
import subprocess
import sys

import pytest

from lingvo_gpipe.experiment import registry
from tests import processes

# Prints the words for the command line in $1.
_COMPLETE = """
eval "$SCRIPT"
COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDBREAKS="$2"
_trainer_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope='module')
def script(forks):
  return processes.Succeeded(forks.Run('trainer', '--completion=bash')).stdout


@pytest.fixture(scope='module')
def complete(script):
  """Returns a function from the text before the cursor to the words that bash offers."""

  def Complete(line, breaks=' =', cwd=processes.ROOT):
    environment = {**os.environ, 'SCRIPT': script, 'PYTHONPATH': str(processes.ROOT)}
    done = subprocess.run(
      ['bash', '-c', _COMPLETE, 'bash', line, breaks],
      env=environment, cwd=cwd, capture_output=True, text=True, timeout=processes.TIMEOUT,
      check=False,
    )  # fmt: skip
    assert done.stderr == ''
    return done.stdout.split()

  return Complete


@pytest.mark.parametrize(
  'line, words',
  [
    ('trainer --mod', ['--mode=', '--model=', '--model_params_file_override=',
                       '--model_params_override=', '--model_task_name=']),
    ('trainer --mode=inspect_p', ['inspect_params', 'inspect_partition']),
    ('trainer --job=', ['train', 'train_and_eval']),
    ('trainer --job train_', ['train_and_eval']),
    ('trainer --check_numerics --profile', ['--profile_steps=']),
    ('trainer --job=train --once=', []),
    ('trainer --max_steps=', []),
    ('trainer --checkpoint=b', ['best']),
  ],
)  # fmt: skip
def testFlagsAndTheirValues(complete, line, words):
  assert complete(line) == words


def testAValueIsCompletedWithItsFlagIfTheShellDoesNotSplitAtTheEqualsSign(complete):
  """zsh does not split there."""
  assert complete('trainer --job=train_', breaks=' ') == ['--job=train_and_eval']


def testKeysOfExperiments(complete):
  keys = [key for key in registry.ListKeys() if key.startswith('lm.stdlib.')]
  assert complete('trainer --model=lm.stdlib.') == keys


def testKeysComeFromTheDirectoryAndFromNamedPackages(complete, tmp_path):
  for package, name in (('params', 'Toy'), ('others', 'Other')):
    (tmp_path / package).mkdir()
    (tmp_path / package / '__init__.py').write_text('')
    # Keys are read from the text of a module: it is not imported.
    (tmp_path / package / 'toy.py').write_text(
      'import tensorflow\nfrom lingvo_gpipe import registry\nraise ValueError\n\n'
      f'@registry.RegisterSingleTaskModel\nclass {name}(registry.SingleTaskModelParams):\n  pass\n'
    )
  assert complete('trainer --model=', cwd=tmp_path) == ['toy.Toy']
  line = 'trainer --params_package=others --model=toy.'
  assert sorted(complete(line, cwd=tmp_path)) == ['toy.Other', 'toy.Toy']


def testFiles(complete, tmp_path):
  (tmp_path / 'runs' / 'a').mkdir(parents=True)
  (tmp_path / 'runs' / 'b.txt').write_text('')
  assert complete('trainer --logdir=r', cwd=tmp_path) == ['runs/']
  assert complete('trainer --logdir=runs/', cwd=tmp_path) == ['runs/a/', 'runs/b.txt']
  assert complete('trainer --logdir=none', cwd=tmp_path) == []


def testNamesOfFilesAreNotRun(complete, tmp_path):
  (tmp_path / 'a$(touch PWNED)').mkdir()
  (tmp_path / 'shlex.py').write_text('open("PWNED", "w")')
  words = complete('trainer --logdir=a', cwd=tmp_path)
  assert ' '.join(words) == r'a\$\(touch\ PWNED\)/'
  complete('trainer --model=a', cwd=tmp_path)
  assert not (tmp_path / 'PWNED').exists()


def testTheKeyTabCompletesInABashOnATerminal(script, tmp_path):
  (tmp_path / 'script').write_text(script)
  pid, terminal = pty.fork()
  if not pid:
    os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])
  try:
    os.write(terminal, f'source {tmp_path}/script\ntrainer --job=train_\t'.encode())
    output = b''
    while b'train_and_eval' not in output:  # The time limit of the test ends an endless wait.
      output += os.read(terminal, 1 << 12)
  finally:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(terminal)


@pytest.mark.skipif(not shutil.which('zsh'), reason='zsh is not installed')
def testZshTakesTheScript(forks):
  script = processes.Succeeded(forks.Run('trainer', '--completion=zsh')).stdout
  done = subprocess.run(
    ['zsh', '-fc', _COMPLETE, 'zsh', 'trainer --job=', ' '],
    env={**os.environ, 'SCRIPT': script},
    capture_output=True, text=True, timeout=processes.TIMEOUT, check=False,
  )  # fmt: skip
  assert done.stdout.split() == ['--job=train', '--job=train_and_eval']


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
