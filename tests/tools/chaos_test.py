# SPDX-License-Identifier: Apache-2.0
"""The chaos suite finds planted faults, and a short run of it finds none."""

import re
import sys

import pytest

from tests import naming, processes
from tools.chaos_attacks import network

_DRIVER = f"""
import sys, time
sys.path.insert(0, {str(processes.ROOT)!r})
from tools import chaos, program
from tools.chaos_attacks import children, run_attacks

def Wrong(draw, runner):
  raise children.FindingError(f'wrong {{draw.random()}}')

def Hanging(draw, runner):
  time.sleep(60.0)

def Raising(draw, runner):
  runner.Call(lambda: 1 / 0)

def Right(draw, runner):
  children.CheckEnd(runner.Run('trainer', ['--mode=list']))
  children.CheckEnd(runner.Run('trainer', ['--model=no.Such']))

if sys.argv[1] == 'planted':
  del sys.argv[1]
  chaos._CASE_SECONDS = 10.0
  chaos._ATTACKS = {{f.__name__: f for f in (Wrong, Raising, Right)}}
  if 'Hanging' in sys.argv[-1]:
    chaos._CASE_SECONDS = 0.1
    chaos._ATTACKS['Hanging'] = Hanging
elif sys.argv[1] == 'files':  # All kinds of texts and files, once each.
  for name in chaos._RUN_ATTACKS:
    del chaos._ATTACKS[name]
  sys.argv[1] = f'--cases={{len(chaos._ATTACKS)}}'
run_attacks._LAST_STEP, run_attacks._HALF_STEP = 4, 2
run_attacks._PARAMS += ';task.num_layers:1;task.stack.num_micro_batches:2'  # Faster to trace.
program.Main(chaos.DefineFlags, chaos.Run, '')
"""


@pytest.fixture
def chaos(forks, tmp_path):
  (tmp_path / 'driver.py').write_text(_DRIVER)
  return lambda *args: forks.Run(str(tmp_path / 'driver.py'), *args, cwd=tmp_path)


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
  assert done.returncode == 1 and 'no end within 0.1 s' in done.stdout


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
