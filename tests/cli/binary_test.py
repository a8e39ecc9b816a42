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
from tests import naming, processes

_ROOT = pathlib.Path(__file__).parents[2]
_MODEL = f'--model={processes.MODEL}'


def _Tiny(more):
  return f'--model_params_override={processes.TINY};{more}'


# Mistake: program, arguments with {} for a valid log directory, and parts of the line.
_MISTAKES = {
  'unknown model': (
    'trainer', ['--model=lm.stdlib.ByteTransformrGPipe2', '--logdir={}'],
    ("ByteTransformrGPipe2'", 'lm.stdlib.ByteTransformerGPipe2'),
  ),
  'unknown key of an override': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_override=task.num_layer:2'],
    ('task.num_layer', 'task.num_layers?'),
  ),
  'ill-typed value': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_override=task.num_layers:two'],
    ('task.num_layers', "'two'"),
  ),
  'log directory below a file': (
    'trainer', [_MODEL, '--logdir=' + __file__ + '/run', _Tiny('')],
    ('Not a directory', __file__ + '/run'),
  ),
  'log directory in /proc': (
    'trainer', [_MODEL, '--logdir=/proc/run', _Tiny('')],
    ("'/proc/run/train'",),
  ),
  'log directory in use': (
    'trainer', [_MODEL, '--logdir={}/held', _Tiny('')],
    ("{}/held/train'", f'process {os.getpid()}'),
  ),
  'too few devices': (
    'trainer', [_MODEL, '--logdir={}', '--num_devices=1'],
    ('2 devices', 'at most 1'),
  ),
  'no device': ('trainer', [_MODEL, '--logdir={}', '--num_devices=0'], ('--num_devices=0',)),
  'devices that are no list of numbers': (
    'trainer', [_MODEL, '--logdir={}', '--devices=0,one'],
    ('--devices', "['0', 'one']"),
  ),
  'a negative device without devices': (
    'trainer', [_MODEL, '--mode=inspect_partition', '--devices=-1'], ('--devices', "['-1']"),
  ),
  'many replicas': ('trainer', [_MODEL, '--num_replicas=99999999999'], ('num_replicas', 4096)),
  'many replicas of many stages': (
    'trainer',
    [_MODEL, '--logdir={}', '--platform=cpu', '--num_replicas=4096', _Tiny('')],
    (4096, 8192),
  ),
  'no input': (
    'trainer', [_MODEL, '--logdir={}', '--platform=cpu', _Tiny('input:None')], ('input', 'None'),
  ),
  'file of flags without an end': ('trainer', ['--flagfile=/dev/zero'], ('/dev/zero', '64 MiB')),
  'devices of the CPU': (
    'trainer', [_MODEL, '--logdir={}', '--platform=cpu', '--devices=0,1', _Tiny('')],
    ('devices 0, 1', 'platform is cpu', 'num_devices'),
  ),
  'GPUs to split while workers compute': (
    'trainer',
    [_MODEL, '--logdir={}', '--local_workers=2', '--logical_devices_per_gpu=2', _Tiny('')],
    ('--logical_devices_per_gpu', '`worker`'),
  ),
  'GPUs that repeat a run while workers compute': (
    'trainer', [_MODEL, '--logdir={}', '--local_workers=2', '--deterministic', _Tiny('')],
    ('--deterministic', '`worker`'),
  ),
  'training in float16': (
    'trainer', [_MODEL, '--logdir={}', '--platform=cpu', _Tiny('task.fprop_dtype:float16')],
    ('float16', 'bfloat16', 'PipelinedModel'),
  ),
  'no model': ('trainer', ['--logdir={}'], ('--model', '--mode=list')),
  'no log directory': ('trainer', [_MODEL], ('--logdir',)),
  'missing file of overrides': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_file_override=/no/such/file'],
    ('--model_params_file_override', "'/no/such/file'"),
  ),
  'file of overrides that is not UTF-8': (
    'trainer', [_MODEL, '--logdir={}', '--model_params_file_override={}/latin'],
    ('--model_params_file_override', "'{}/latin'", 'UTF-8', 'line 2'),
  ),
  'file of flags that is not UTF-8': (
    'trainer', ['--flagfile={}/latin'], ('--flagfile', "'{}/latin'", 'UTF-8', 'line 2'),
  ),
  'file of flags that contains itself': (
    'trainer', ['--flagfile={}/cycle'], ('--flagfile', "'{}/cycle'"),
  ),
  'file of flags without a name': (
    'trainer', ['--mode=list', '--flagfile'], ('--flagfile', 'path'),
  ),
  'file of flags that is missing': (
    'trainer', ['--flagfile', '/no/such/file'], ('--flagfile', "'/no/such/file'"),
  ),
  'path that is not UTF-8': (
    'trainer', [_MODEL, '--logdir={}/\udcff'], ('--logdir', 'UTF-8', 'udcff'),
  ),
  'path with NUL in a file of flags': (
    'trainer', ['--flagfile={}/nul'], ('--logdir', 'NUL'),
  ),
  'cache below a file': (
    'trainer', [_MODEL, '--logdir={}', '--xla_cache=' + __file__, _Tiny('')],
    ('compiled code', __file__),
  ),
  'file of Params that is not UTF-8': (
    'trainer', ['--mode=diff_params', processes.MODEL, '{}/latin'],
    ('--mode=diff_params', "'{}/latin'", 'UTF-8', 'line 2'),
  ),
  'file of workers that is not UTF-8': (
    'trainer', [_MODEL, '--logdir={}', '--cluster={}/latin', _Tiny('')],
    ('--cluster', "'{}/latin'", 'UTF-8', 'line 2'),
  ),
  'what an input of the project refuses': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('input.split:tset')],
    ('split', "'train'", "'dev'", "'test'", "'tset'"),
  ),
  'unknown schedule': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('task.stack.schedule:gpip')],
    ("'gpip'", "'gpipe'?"),
  ),
  'more stages than layers': (
    'trainer', [_MODEL, '--logdir={}', _Tiny('task.stack.num_stages:7')],
    ('7 stages', '5 layers', 'at most 5'),
  ),
  'unknown data set at the end': (
    'trainer', [_MODEL, '--logdir={}', _Tiny("task.train.eval_datasets:['Tset']")],
    ("'Tset'", 'Train, Dev, Test'),
  ),
  'unknown flag': (
    'trainer', [_MODEL, '--logdir={}', '--max_stps=3'],
    ("'max_stps'", 'max_steps', '--help'),
  ),
  'mode with a line separator': (
    'trainer', [_MODEL, '--mode=inspect\u2028params'], ('--mode', 'inspect\\u2028params', 'train'),
  ),
  'unknown flag of a long name': ('trainer', [_MODEL, '--' + 'x' * 2000], ('unknown', 'x' * 78)),
  'negative number of steps': (
    'trainer', [_MODEL, '--logdir={}', '--max_steps=-3'], ('max_steps', -3),
  ),
  'steps to profile that are none': (
    'trainer', [_MODEL, '--logdir={}', '--profile_steps=7'],
    ('--profile_steps=7', '5,7'),
  ),
  'steps to profile after the end': (
    'trainer', [_MODEL, '--logdir={}', '--max_steps=6', '--profile_steps=5,7'],
    ('--profile_steps=5,7', 'step 6'),
  ),
  'export before training': (
    'trainer', [_MODEL, '--logdir={}', '--mode=export', _Tiny('')],
    ('no checkpoint', '{}/train'),
  ),
  'inspection before training': (
    'trainer', ['--logdir={}', '--mode=inspect_checkpoint'],
    ('no checkpoint', '{}/train'),
  ),
  'one argument for two': (
    'trainer', ['--mode=diff_params', processes.MODEL], ('2 arguments', 1),
  ),
  'difference from what is not there': (
    'trainer', ['--mode=diff_params', processes.MODEL, 'no.such.Model'], ("'no.such.Model'",),
  ),
  'argument too many': ('trainer', [_MODEL, 'more'], ("'more'",)),
  'unknown split': (
    'evaluator', [_MODEL, '--logdir={}', '--split=Tst'],
    ("'Tst'", 'Train, Dev, Test'),
  ),
  'no checkpoint': (
    'evaluator', [_MODEL, '--logdir={}', '--once', _Tiny('')],
    ('no checkpoint', '{}/train'),
  ),
  'checkpoint of no kind': (
    'evaluator', [_MODEL, '--logdir={}', '--checkpoint=newest', _Tiny('')],
    ('--checkpoint', 'last, best', "'newest'"),
  ),
  'training from a checkpoint': (
    'trainer', [_MODEL, '--logdir={}', '--checkpoint=best'],
    ('--checkpoint=best', '--mode=export', 'train.init_from_checkpoint_rules'),
  ),
  'a flag of another mode': (
    'trainer', [_MODEL, '--mode=inspect_model', '--profile_steps=5,7'],
    ('--profile_steps', '--mode=train', '--mode=inspect_model'),
  ),
  'where to export without an export': (
    'trainer', [_MODEL, '--logdir={}', '--export_dir={}/model'],
    ('--export_dir', '--mode=export', '--mode=train'),
  ),
  'a limit for workers without workers': (
    'trainer', [_MODEL, '--logdir={}', '--step_timeout=60'],
    ('--step_timeout', '--local_workers', '--cluster'),
  ),
}  # fmt: skip


_STARTED = 'too few devices'


@pytest.fixture(scope='module')
def mistaken(tmp_path_factory, forks):
  """({mistake: finished process}, log directory); one process imports TensorFlow itself."""
  logdir = str(tmp_path_factory.mktemp('run'))
  pathlib.Path(logdir, 'latin').write_bytes(b'task.num_layers:2\ntask.name:caf\xe9\n')
  pathlib.Path(logdir, 'cycle').write_text(f'--mode=list\n--flagfile={logdir}/cycle\n')
  pathlib.Path(logdir, 'nul').write_text(f'--logdir={logdir}/a\0b\n')
  finished = {}
  with logdir_lock.HoldLock(f'{logdir}/held/train'):
    for what, (program, args, _) in _MISTAKES.items():
      run = processes.Run if what == _STARTED else forks.Run
      finished[what] = run(program, *(arg.replace('{}', logdir) for arg in args))
  return finished, logdir


@pytest.mark.parametrize('what', list(_MISTAKES))
def testAMistakeIsReportedInOneLine(mistaken, what):
  finished, logdir = mistaken
  done = finished[what]
  assert done.returncode == 2, done.stderr
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, *(str(part).replace('{}', logdir) for part in _MISTAKES[what][2]))
  # Nothing was started.
  assert done.stdout == ''


def testFilesOfFlagsMayNameOthersAndHaveAByteOrderMark(forks, tmp_path):
  (tmp_path / 'outer').write_text(f'\ufeff# Comment.\n\n --flagfile={tmp_path}/inner\n')
  (tmp_path / 'inner').write_text('// Comment.\n--mode=list\n--num_devices\n')
  done = forks.Run('trainer', '--flagfile=', '--flagfile', f'{tmp_path}/outer', '2')
  assert processes.Succeeded(done).stdout.splitlines() == registry.ListKeys()


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
  assert naming.AnyLineNames(text, '# task.num_heads', 'integer')
  done = forks.Run('trainer', '--mode=inspect_model', _MODEL)
  lines = processes.Succeeded(done).stdout.splitlines()
  assert re.fullmatch(r'lm\.stack\.layers\[0\]\.\S+ +\[256, 128\] +float32 +32,768', lines[0])
  assert re.fullmatch(r'[\d,]+ parameters', lines[-1])
  done = forks.Run('trainer', '--mode=inspect_partition', '--model=lm.stdlib.ByteTransformerGPipe4')
  assert 'K=4 stages, M=4 micro-batches' in processes.Succeeded(done).stdout
  assert processes.Messages(done.stderr) == []
  assert [line[:5] for line in done.stdout.splitlines()[1:5]] == [f'    {k}' for k in range(4)]


@pytest.mark.parametrize('flag, status', [('--nostack_trace', 2), ('--stack_trace', 1)])
def testAHangAfterAnErrorIsNotAHungWorker(forks, flag, status):
  """The objects of the error hang, or the reader of the output."""
  program = pathlib.Path(processes.Program('hang_after_error'))
  # A mistake in the working directory is one of the user.
  done = forks.Run(str(program), flag, cwd=program.parent)
  assert done.returncode == status
  lines = processes.Messages(done.stderr)
  # After a stack trace come the cause and the line of code.
  assert any('a mistake' in line for line in lines[-2:]) and (status == 1 or len(lines) == 1)


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
  """Ctrl-C is sent as soon as the libraries of TensorFlow are being loaded."""
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
_CTRL_C_AT_EXIT = pathlib.Path(processes.Program('interrupt_at_exit')).read_text()


@pytest.mark.parametrize(
  ('module', 'source', 'expected'),
  [
    ('absl', _CTRL_C_AT_IMPORT, (128 + signal.SIGINT, 'ended by Ctrl-C\n')),
    ('sitecustomize', _CTRL_C_AT_EXIT, (0, '')),
  ],
)
def testCtrlCInTheFirstOrLastMomentOfAToolPrintsNoStack(tmp_path, module, source, expected):
  (tmp_path / f'{module}.py').write_text(source)
  with processes.Started(
    '',
    command=[sys.executable, '-m', 'tools.draw_schedule', f'--output={tmp_path}/schedule.svg'],
    stderr=subprocess.PIPE,
    more_environment={'PYTHONPATH': f'{tmp_path}{os.pathsep}{processes.ROOT}'},
  ) as process:
    _, stderr = process.communicate(timeout=processes.TIMEOUT)
  assert (process.returncode, stderr) == expected


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
