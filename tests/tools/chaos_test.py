# SPDX-License-Identifier: Apache-2.0
"""The chaos suite finds planted faults, and a short run of it finds none."""

import re
import sys

import pytest

from tests import naming, processes
from tools.chaos_attacks import network


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
  _CheckNoFindings(chaos('files', '--seed=1'), least=19)


# Seeds with which each attack comes soon, and once.
@pytest.mark.parametrize(
  ('names', 'seed'), [(['kill', 'checkpoints', 'disk', 'memory'], 7), (['workers', 'links'], 82)]
)
def testRunsEndLikeUndisturbedOnes(chaos, names, seed):
  missing = ''
  if 'links' in names:
    try:
      with network.Network(1):
        pass
    except OSError as e:
      names, missing = names[:-1], f'links cannot be cut: {e}'
  done = chaos(f'--attacks={",".join(names)}', f'--cases={len(names)}', f'--seed={seed}')
  _CheckNoFindings(done, least=len(names))
  if missing:
    pytest.skip(missing)


def _CheckNoFindings(done, least):
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.count(' 1 cases    0 findings') == done.stdout.count('\n') >= least


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
