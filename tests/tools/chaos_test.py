# SPDX-License-Identifier: Apache-2.0
"""The chaos suite finds planted faults, and a short run of it finds none."""

import re
import sys

import pytest

from tests import naming, processes


@pytest.fixture
def chaos(forks, tmp_path):
  program = processes.Program('attack_with_faults')
  return lambda *args: forks.Run(program, str(processes.ROOT), *args, cwd=tmp_path)


def testFindingsAreCountedAndCanBeRepeated(chaos):
  done = chaos('planted', '--cases=6', '--seed=7')
  assert done.returncode == 1, done.stderr
  assert re.search(naming.Naming('Wrong', 'case 0', 'wrong'), done.stdout)
  assert 'ZeroDivisionError' in done.stdout
  for name, findings in (('Wrong', 2), ('Raising', 2), ('Right', 0)):
    assert re.search(rf'^{name} +2 cases +{findings} findings$', done.stdout, re.MULTILINE)
  commands = re.findall(r'repeat: python -m tools\.chaos (.*)', done.stdout)
  again = chaos('planted', *commands[2].split())
  (line,) = re.findall(r'^Wrong, case 3: .*', done.stdout, re.MULTILINE)
  assert line in again.stdout.splitlines()


def testACaseThatDoesNotEndIsAFinding(chaos):
  done = chaos('planted', '--cases=1', '--attacks=Hanging')
  assert done.returncode == 1 and naming.AnyLineNames(done.stdout, 'no end', '0.1 s')


def testEachKindOfFileIsReadOrRefused(chaos):
  _CheckNoFindings(chaos('files', '--seed=1'), least=22)


def testRunsEndLikeUndisturbedOnes(chaos):
  """Attacks on workers and links take most of a minute; `tests/distributed` makes such attacks."""
  names = ['kill', 'checkpoints', 'disk', 'memory']
  # With this seed each attack comes soon, and once.
  done = chaos(f'--attacks={",".join(names)}', f'--cases={len(names)}', '--seed=7')
  _CheckNoFindings(done, least=len(names))


def _CheckNoFindings(done, least):
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.count(' 1 cases    0 findings') == done.stdout.count('\n') >= least


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
