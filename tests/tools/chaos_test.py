# SPDX-License-Identifier: Apache-2.0
"""The chaos suite finds planted faults, and a short run of it finds none."""

import re
import sys

import pytest

from tests import naming, processes

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
run_attacks._LAST_STEP, run_attacks._HALF_STEP = 5, 2
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


def testAShortRunHasNoFindings(chaos):
  kinds = 'overrides,params_file,cluster_file,schedule,token_store,records,checkpoints'
  done = chaos('--cases=7', '--seed=1', f'--attacks={kinds}')
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.count(' 1 cases    0 findings') == 7


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
