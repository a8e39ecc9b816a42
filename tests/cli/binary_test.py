# SPDX-License-Identifier: Apache-2.0
"""A user's mistakes end the programs with one line and status 2; the modes print and exit."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gpipe.checkpoint import logdir_lock
from lingvo_gpipe.cli import interrupts
from lingvo_gpipe.experiment import registry
from tests import processes

_ROOT = pathlib.Path(__file__).parents[2]
_MODEL = f'--model={processes.MODEL}'


def _Tiny(more):
  return f'--model_params_override={processes.TINY};{more}'


# Mistake: program, arguments with {} for a valid log directory, pattern of the line.
_MISTAKES = {
  'unknown model': (
    'trainer', ['--model=lm.stdlib.ByteTransformrGPipe2', '--logdir={}'],
    r'ByteTransformrGPipe2.*Did you mean lm\.stdlib\.ByteTransformerGPipe2 or ',
  ),
  'unknown key of an override': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_override=task.num_layer:2'],
    r'task\.num_layer\b.*did you mean task\.num_layers\?',
  ),
  'ill-typed value': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_override=task.num_layers:two'],
    r"task\.num_layers expects int.*got 'two'",
  ),
  'log directory below a file': (
    'trainer', [_MODEL, '--logdir=' + __file__ + '/run', _Tiny('')],
    r'Cannot write .*Not a directory.*_test\.py.*Give a directory that can be created',
  ),
  'log directory in /proc': (
    'trainer', [_MODEL, '--logdir=/proc/run', _Tiny('')],
    r"Cannot write .*'/proc/run/train'.*Give a directory that can be created and written",
  ),
  'log directory in use': (
    'trainer', [_MODEL, '--logdir={}/held', _Tiny('')],
    rf"/held/train' is in use by another trainer \(process {os.getpid()} on ",
  ),
  'too few devices': (
    'trainer', [_MODEL, '--logdir={}', '--num_devices=1'],
    r'2 devices needed.* at most 1 .*allow 2 devices',
  ),
  'no device': ('trainer', [_MODEL, '--logdir={}', '--num_devices=0'], r'--num_devices=0'),
  'devices that are no list of numbers': (
    'trainer', [_MODEL, '--logdir={}', '--devices=0,one'],
    r"--devices expects a list of indices such as 0,2; got \['0', 'one'\]",
  ),
  'devices of the CPU': (
    'trainer', [_MODEL, '--logdir={}', '--platform=cpu', '--devices=0,1', _Tiny('')],
    r'devices 0, 1: .*the platform is cpu \(no accelerator found\)\. Omit them; num_devices ',
  ),
  'GPUs to split while workers compute': (
    'trainer',
    [_MODEL, '--logdir={}', '--local_workers=2', '--logical_devices_per_gpu=2', _Tiny('')],
    r'--logical_devices_per_gpu is for GPUs of this process.*`worker`',
  ),
  'GPUs that repeat a run while workers compute': (
    'trainer', [_MODEL, '--logdir={}', '--local_workers=2', '--deterministic', _Tiny('')],
    r'--deterministic is for GPUs of this process.*`worker`',
  ),
  'training in float16': (
    'trainer', [_MODEL, '--logdir={}', '--platform=cpu', _Tiny('task.fprop_dtype:float16')],
    r'float16.*bfloat16.*PipelinedModel',
  ),
  'no model': ('trainer', ['--logdir={}'], r'--model is needed.*--mode=list'),
  'no log directory': ('trainer', [_MODEL], r'--logdir is needed'),
  'missing file of overrides': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_file_override=/no/such/file'],
    r"--model_params_file_override: '/no/such/file' cannot be read",
  ),
  'file of overrides that is not UTF-8': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_file_override={}/latin'],
    r"--model_params_file_override: '/\S+/latin' is not in UTF-8: line 2: invalid",
  ),
  'file of flags that is not UTF-8': (
    'trainer', ['--flagfile={}/latin'], '^--flagfile: a file is not in UTF-8: .*0xe9',
  ),
  'file of Params that is not UTF-8': (
    'trainer', ['--mode=diff_params', processes.MODEL, '{}/latin'],
    r"--mode=diff_params: '/\S+/latin' is not in UTF-8: line 2: invalid",
  ),
  'file of workers that is not UTF-8': (
    'trainer', [_MODEL, '--logdir={}', '--cluster={}/latin', _Tiny('')],
    r"--cluster: '/\S+/latin' is not in UTF-8: line 2: invalid",
  ),
  'what an input of the project refuses': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('input.split:tset')],
    r"split expects 'train' or 'dev' or 'test', got 'tset'",
  ),
  'unknown schedule': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('task.stack.schedule:gpip')],
    r"'gpip'.*did you mean 'gpipe'\?",
  ),
  'more stages than layers': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('task.stack.num_stages:7')],
    r'7 stages for 5 layers.*at most 5 stages',
  ),
  'unknown data set at the end': (
    'trainer', [_MODEL, '--logdir={}', _Tiny("task.train.eval_datasets:['Tset']")],
    r"no data set 'Tset'; it has: Train, Dev, Test",
  ),
  'unknown flag': (
    'trainer', [_MODEL, '--logdir={}', '--max_stps=3'],
    r"'max_stps'.*Did you mean: max_steps.*--help",
  ),
  'negative number of steps': ('trainer', [_MODEL, '--logdir={}', '--max_steps=-3'], r'max_steps'),
  'steps to profile that are none': (
    'trainer', [_MODEL, '--logdir={}', '--profile_steps=7'],
    r'--profile_steps=7: expected the first and the last step, such as 5,7',
  ),
  'steps to profile after the end': (
    'trainer', [_MODEL, '--logdir={}', '--max_steps=6', '--profile_steps=5,7'],
    r'--profile_steps=5,7: the run ends at step 6',
  ),
  'export before training': (
    'trainer', [_MODEL, '--logdir={}', '--mode=export', _Tiny('')],
    r'there is no checkpoint in .*/train: train first',
  ),
  'inspection before training': (
    'trainer', ['--logdir={}', '--mode=inspect_checkpoint'],
    r'there is no checkpoint in .*/train: train first',
  ),
  'one argument for two': (
    'trainer', ['--mode=diff_params', processes.MODEL], r'expected 2 arguments .*got 1',
  ),
  'difference from what is not there': (
    'trainer', ['--mode=diff_params', processes.MODEL, 'no.such.Model'], r"No experiment 'no\.such",
  ),
  'argument too many': ('trainer', [_MODEL, 'more'], r"unexpected argument 'more'"),
  'unknown split': (
    'evaluator', [_MODEL, '--logdir={}', '--split=Tst'],
    r"no data set 'Tst'; it has: Train, Dev, Test",
  ),
  'no checkpoint': (
    'evaluator', [_MODEL, '--logdir={}', '--once', _Tiny('')],
    r'there is no checkpoint in .*: train first',
  ),
  'checkpoint of no kind': (
    'evaluator', [_MODEL, '--logdir={}', '--checkpoint=newest', _Tiny('')],
    r"--checkpoint .*last, best .*got 'newest'",
  ),
  'training from a checkpoint': (
    'trainer', [_MODEL, '--logdir={}', '--checkpoint=best'],
    r'--checkpoint=best is for --mode=export; .*init_from_checkpoint_rules',
  ),
  'a flag of another mode': (
    'trainer', [_MODEL, '--mode=inspect_model', '--profile_steps=5,7'],
    r'^--profile_steps is for --mode=train; --mode=inspect_model does not use it$',
  ),
  'where to export without an export': (
    'trainer', [_MODEL, '--logdir={}', '--export_dir={}/model'],
    r'^--export_dir is for --mode=export; --mode=train does not use it$',
  ),
  'a limit for workers without workers': (
    'trainer', [_MODEL, '--logdir={}', '--step_timeout=60'],
    r'--step_timeout detects workers that hang: it needs --local_workers or --cluster',
  ),
}  # fmt: skip


_STARTED = 'too few devices'


@pytest.fixture(scope='module')
def mistaken(tmp_path_factory, forks):
  """{mistake: finished process}; one is a real process that imports TensorFlow."""
  logdir = str(tmp_path_factory.mktemp('run'))
  pathlib.Path(logdir, 'latin').write_bytes(b'task.num_layers:2\ntask.name:caf\xe9\n')
  finished = {}
  with logdir_lock.HoldLock(f'{logdir}/held/train'):
    for what, (program, args, _) in _MISTAKES.items():
      run = processes.Run if what == _STARTED else forks.Run
      finished[what] = run(program, *(arg.replace('{}', logdir) for arg in args))
  return finished


@pytest.mark.parametrize('what', list(_MISTAKES))
def testAMistakeIsReportedInOneLine(mistaken, what):
  done = mistaken[what]
  assert done.returncode == 2, done.stderr
  (line,) = processes.Messages(done.stderr)
  assert re.search(_MISTAKES[what][2], line)
  # Nothing was started.
  assert done.stdout == ''


def testModesPrintAndExit(forks):
  """Without --logdir; one is a real process, of the module instead of the installed program.

  It also takes flags of training that have their default values.
  """
  listed = forks.Run('trainer', '--mode=list')
  assert processes.Succeeded(listed).stdout.splitlines() == registry.ListKeys()
  assert processes.MODEL in listed.stdout
  done = processes.Run(
    'trainer', '--mode=inspect_params', _MODEL, '--model_params_override=task.model_dim:64',
    '--max_steps=7', '--job=train', '--nocheck_numerics', '--checkpoint=last',
    command=[sys.executable, '-m', 'lingvo_gpipe.trainer'],
  )  # fmt: skip
  params = registry.GetParams(processes.MODEL, 'Train')
  params.task.Set(model_dim=64)
  params.task.train.max_steps = 7
  text = processes.Succeeded(done).stdout
  assert params.Copy().FromText(text) == params
  assert re.sub('#.*\n', '', text) == params.ToText()
  assert '# task.num_heads expects an integer' in text
  done = forks.Run('trainer', '--mode=inspect_model', _MODEL)
  lines = processes.Succeeded(done).stdout.splitlines()
  assert re.fullmatch(r'lm\.stack\.layers\[0\]\.\S+ +\[256, 128\] +float32 +32,768', lines[0])
  assert re.fullmatch(r'[\d,]+ parameters', lines[-1])
  done = forks.Run('trainer', '--mode=inspect_partition', '--model=lm.stdlib.ByteTransformerGPipe4')
  assert 'K=4 stages, M=4 micro-batches' in processes.Succeeded(done).stdout
  assert processes.Messages(done.stderr) == []
  assert [line[:5] for line in done.stdout.splitlines()[1:5]] == [f'    {k}' for k in range(4)]


# An error in a supervised process, which hangs after it.
_HANGING = """
import sys, time
from lingvo_gpipe.cli import binary
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import supervisor
supervisor._END_SECONDS = supervisor._PAUSE_SECONDS = 0.01

class Hanging:
  def __del__(self):
    time.sleep(100)
  def flush(self):
    time.sleep(100)

def Train(workers, is_again):
  held = Hanging()
  heartbeat.Begin(heartbeat.TRAIN)
  if sys.argv[1] == '--stack_trace':
    sys.stdout = held
  raise ValueError('a mistake')

binary.DefineDeviceFlags()
work = supervisor.Work('training', 'a new checkpoint', lambda: -1)
binary.Run(lambda: supervisor.Supervisor(Train, work, step_timeout=5.0).Run(), '')
"""


@pytest.mark.parametrize('flag, status', [('--nostack_trace', 2), ('--stack_trace', 1)])
def testAHangAfterAnErrorIsNotAHungWorker(forks, tmp_path, flag, status):
  """The objects of the error hang, or the reader of the output."""
  (tmp_path / 'program.py').write_text(_HANGING)
  done = forks.Run(str(tmp_path / 'program.py'), flag, cwd=tmp_path)
  assert done.returncode == status
  lines = processes.Messages(done.stderr)
  assert 'a mistake' in lines[-1] and (status == 1 or len(lines) == 1)


def testHelpAndAnEmptyDirectory(forks, tmp_path):
  """The help is of the module's file; evaluator_test starts the installed program."""
  done = forks.Run(str(_ROOT / 'lingvo_gpipe' / 'evaluator.py'), '--help')
  for flag in ('model', 'logdir', 'split', 'once', 'num_devices', 'max_steps'):
    assert f'  --{flag}: ' in processes.Succeeded(done).stdout
  done = forks.Run('trainer', '--mode=list', cwd=tmp_path)
  assert processes.Succeeded(done).stdout == ''
  (line,) = processes.Messages(done.stderr)
  assert '`params`' in line and '--params_package' in line
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('program', ['trainer', 'evaluator', 'worker'])
def testHelpHasASubjectForEachFlagAndExamplesThatParse(forks, program):
  text = processes.Succeeded(forks.Run(program, '--help')).stdout
  _, *blocks = re.split(r'\n\n(?=\S.*:\n  --)', text)
  flags = [re.findall(r'^  --(\w+):', block, re.MULTILINE) for block in blocks]
  assert sorted(sum(flags, [])) == sorted(re.findall(r'^ *--(\w+):', text, re.MULTILINE))
  all_args = []
  for block, names in zip(blocks, flags, strict=True):
    (example,) = re.findall(rf'^  For example: {program} (.*)', block, re.MULTILINE)
    args = shlex.split(example.partition(' >>')[0])
    assert {arg[2:].partition('=')[0] for arg in args} & set(names)
    all_args += args
  # --completion, the last flag, ends the program after it has parsed all flags.
  assert all_args[-1] == '--completion=bash'
  processes.Succeeded(forks.Run(program, *all_args))


@pytest.mark.parametrize('module', ['lingvo_gpipe.trainer', 'tools.verify'])
def testCtrlCDuringTheImportsEndsInOneLine(module):
  """Sent as soon as the libraries of TensorFlow are being loaded."""
  with processes.Started(
    '', command=[sys.executable, '-m', module], stderr=subprocess.PIPE
  ) as process:
    while 'libtensorflow' not in pathlib.Path(f'/proc/{process.pid}/maps').read_text():
      assert process.poll() is None
      time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=processes.TIMEOUT)
  assert (process.returncode, stderr) == (128 + signal.SIGINT, 'ended by Ctrl-C\n')


# The first module that a tool imports from another library, in place of that library.
_CTRL_C_AT_IMPORT = 'import os, signal; os.kill(os.getpid(), signal.SIGINT)'
# Python restores the default of all signals before it deletes the modules.
_CTRL_C_AT_EXIT = """
import os
import signal
import sys


class _AtExit:
  def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
    kill(process, number)


sys.at_exit = _AtExit()
"""


@pytest.mark.parametrize(
  ('module', 'source', 'expected'),
  [
    ('absl', _CTRL_C_AT_IMPORT, (128 + signal.SIGINT, 'ended by Ctrl-C\n')),
    ('sitecustomize', _CTRL_C_AT_EXIT, (0, '')),
  ],
)
def testCtrlCInTheFirstOrLastMomentOfAToolPrintsNoStack(tmp_path, module, source, expected):
  (tmp_path / f'{module}.py').write_text(source)
  done = processes.Run(
    '',
    command=[sys.executable, '-m', 'tools.draw_schedule', f'--output={tmp_path}/schedule.svg'],
    more_environment={'PYTHONPATH': f'{tmp_path}{os.pathsep}{processes.ROOT}'},
  )
  assert (done.returncode, done.stderr) == expected


def testCtrlCDoesNotEndAProcessThatImportsAProgram():
  assert signal.getsignal(signal.SIGINT) is not interrupts._Handle
  assert interrupts._stderr == 2


def testProgramsImportBinaryFirst():
  """Its import of TensorFlow is the one that drops the messages of native code.

  It precedes even the standard library in the programs, so that Ctrl-C always ends in one line.
  """
  for path in [*_ROOT.glob('lingvo_gpipe/*.py'), *_ROOT.glob('tools/*.py')]:
    modules = re.findall(r'^from (lingvo_gpipe[\w.]*) import (.*)', path.read_text(), re.MULTILINE)
    names = [f'{module}.{name}' for module, names in modules for name in re.findall(r'\w+', names)]
    if 'lingvo_gpipe.cli.binary' in names:
      assert names[0] == 'lingvo_gpipe.cli.binary', path
      first = re.findall(r'^(?:from|import) (?!__future__)(\S+)', path.read_text(), re.MULTILINE)[0]
      assert path.parent.name == 'tools' or first == 'lingvo_gpipe.cli', path


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
