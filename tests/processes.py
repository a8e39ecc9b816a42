# SPDX-License-Identifier: Apache-2.0
"""For tests of the installed programs: runs them as processes and reads what they leave behind."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import lingvo_gpipe
from lingvo_gpipe.checkpoint import checkpointer

# Where `params` and `tasks` of this repository lie: the checkout, or Bazel's copy of it.
ROOT = pathlib.Path(lingvo_gpipe.__file__).parents[1]

MODEL = 'lm.stdlib.ByteTransformerGPipe2'
# A model and data so small that the start of the process is what takes time.
TINY = (
  'task.num_layers:2;task.model_dim:16;task.hidden_dim:32;task.num_heads:2;task.stack.xla:False;'
  'input.max_bytes:20000;input.batch_size:4;input.seq_len:16'
)
TIMEOUT = 120


@functools.cache
def _PackageAlone():
  """A folder for PYTHONPATH that has lingvo_gpipe and nothing else of this repository."""
  folder = tempfile.TemporaryDirectory(prefix='lingvo_gpipe_')
  os.symlink(pathlib.Path(lingvo_gpipe.__file__).parent, os.path.join(folder.name, 'lingvo_gpipe'))
  return folder  # Removed when this process ends.


def Command(program):
  """The installed program beside this Python if it runs the code under test, else the module."""
  installed = pathlib.Path(sys.executable).with_name(program)
  if installed.exists() and 'TEST_SRCDIR' not in os.environ and _IsInstalledFrom(ROOT):
    return [str(installed)]
  return [sys.executable, '-m', f'lingvo_gpipe.{program}']


@functools.cache
def _IsInstalledFrom(root):
  """Whether this Python imports lingvo_gpipe of `root` by itself: Bazel and clones have copies."""
  code = 'import lingvo_gpipe; print(lingvo_gpipe.__file__)'
  done = subprocess.run(
    [sys.executable, '-P', '-c', code], capture_output=True, text=True, timeout=TIMEOUT,
    env=_CleanEnvironment(), cwd='/', check=False,
  )  # fmt: skip
  return done.stdout.strip() == str(root / 'lingvo_gpipe' / '__init__.py')


def _CleanEnvironment():
  """Without what hides messages from a user."""
  drop = {'PYTHONPATH', 'TF_CPP_MIN_LOG_LEVEL', 'PYTHONSAFEPATH', 'PYTHONWARNINGS'}
  return {name: value for name, value in os.environ.items() if name not in drop}


def Environment(**more):
  env = _CleanEnvironment()
  if not _IsInstalledFrom(ROOT):
    env['PYTHONPATH'] = _PackageAlone().name
  return {**env, **more}


def Run(program, *args, cwd=ROOT, timeout=TIMEOUT, command=None, more_environment=None):
  """Runs a program to its end; its output is text. Kills it at the timeout."""
  return subprocess.run(
    [*(command or Command(program)), *args], cwd=cwd, timeout=timeout,
    env=Environment(**(more_environment or {})),
    stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
  )  # fmt: skip


# Imports the programs once; then each line that comes is a call of one or of a file, run by a fork.
_FORKS = """
import json, os, runpy, signal, sys
from lingvo_gpipe import evaluator, trainer, worker
programs = {'trainer': trainer.Run, 'evaluator': evaluator.Run, 'worker': worker.Run}
beside = []
for line in sys.stdin:
  call = json.loads(line)
  pid = os.fork()
  if not pid:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    for fd, path in ((1, call['stdout']), (2, call['stderr'])):
      os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.chdir(call['cwd'])
    os.environ.update(call['environment'])
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # As at the start of a process.
    program = call['program']
    sys.argv = [program, *call['args']]
    programs[program]() if program in programs else runpy.run_path(program, run_name='__main__')
    sys.exit(0)
  print(pid, flush=True)
  if call['is_waited_for']:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
  else:
    beside.append(pid)
for pid in beside:
  os.kill(pid, signal.SIGKILL)
"""


class Forks:
  """Runs programs one after the other as `Run` does, but TensorFlow is imported for all at once.

  For programs that run to their end, a file of Python among them, where another test of the same
  file starts a real process: what importing TensorFlow prints is not in their output, and what the
  parent has imported they do not import. Tests share one as the fixture `forks`.
  """

  def __init__(self, directory):
    self._directory = directory
    self._count = 0
    self._pid = 0  # Of the process that `Wait` waits for.
    self._last = 0  # Of the one that was started last.
    self._outputs = {}
    self._parent = subprocess.Popen(
      [sys.executable, '-c', _FORKS], env=Environment(), cwd=directory, text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

  def Run(self, program, *args, cwd=ROOT, more_environment=None):
    self.Start(program, *args, cwd=cwd, more_environment=more_environment)
    return self.Wait()

  def Start(self, program, *args, cwd=ROOT, more_environment=None, stdout=None, is_waited_for=True):
    """Returns the id of the process; `Wait` is to come before the next one is started.

    Its standard output is kept for `Wait`, unless it is to go to a file `stdout` of the caller's,
    which may be a terminal or a pipe. With `is_waited_for` False it runs beside others, until
    `Close`.
    """
    self._End()
    self._count += 1
    self._outputs = {
      name: self._directory / f'{self._count}.{name}' for name in ('stdout', 'stderr')
    }
    call = {
      'program': program, 'args': args, 'cwd': str(cwd), 'environment': more_environment or {},
      'is_waited_for': is_waited_for,
      **{name: str(path) for name, path in self._outputs.items()},
    }  # fmt: skip
    if stdout is not None:
      self._outputs['stdout'].touch()
      call['stdout'] = str(stdout)
    self._parent.stdin.write(json.dumps(call) + '\n')
    self._parent.stdin.flush()
    self._last = int(self._parent.stdout.readline())
    self._pid = self._last if is_waited_for else 0
    return self._last

  def Await(self, text):
    """Returns once the last process printed a text, be it to stderr; fails where it never does."""
    deadline = time.monotonic() + TIMEOUT
    is_running = True
    while is_running and time.monotonic() < deadline:
      is_running = os.path.exists(f'/proc/{self._last}')
      printed = ''.join(path.read_text() for path in self._outputs.values() if path.exists())
      if text in printed:
        return
      time.sleep(0.005)
    raise AssertionError(f'{text!r} did not come in {printed}')

  def Wait(self):
    """The ended process; it is killed at the timeout."""
    killer = threading.Timer(TIMEOUT, os.kill, (self._pid, signal.SIGKILL))
    killer.start()
    status = int(self._parent.stdout.readline())
    killer.cancel()
    self._pid = 0
    texts = {name: path.read_text() for name, path in self._outputs.items()}
    return subprocess.CompletedProcess([], status, **texts)

  def _End(self):
    """Kills what a test that failed has left running."""
    if self._pid:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._pid, signal.SIGKILL)
      self.Wait()

  def Close(self):
    self._End()
    self._parent.communicate(timeout=TIMEOUT)


@contextlib.contextmanager
def Started(
  program, *args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, command=None
):
  """A running program, which is killed at the end if it still runs."""
  process = subprocess.Popen(
    [*(command or Command(program)), *args], cwd=cwd, env=Environment(), text=True,
    stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
  )  # fmt: skip
  try:
    yield process
  finally:
    if process.poll() is None:
      process.kill()
    process.wait(TIMEOUT)
    if process.stdout:
      process.stdout.close()


def Project(root, experiments):
  """Makes a user's project of a directory: `experiments` is the text of its params/toy.py."""
  (root / 'params').mkdir()
  (root / 'params' / 'toy.py').write_text(experiments)
  return root


def ToyArgs(logdir, max_steps, more=''):
  """Arguments of the trainer for the experiment Toy of a `Project`; `more` overrides its Params."""
  return [
    '--model=toy.Toy', f'--logdir={logdir}', f'--max_steps={max_steps}',
    f'--model_params_override={more}',
  ]  # fmt: skip


def TrainArgs(logdir, max_steps, *, model=MODEL, more='', evaluate=()):
  """Arguments of the trainer: every step has its summary."""
  overrides = f'{TINY};task.train.summary_interval_steps:1;task.train.eval_datasets:{[*evaluate]}'
  return [
    f'--model={model}',
    f'--logdir={logdir}',
    f'--max_steps={max_steps}',
    f'--model_params_override={overrides};{more}',
  ]


def Succeeded(done):
  """Gives a finished process back if it did not fail."""
  assert done.returncode == 0, f'{done.returncode}\n{done.stdout}\n{done.stderr}'
  return done


def Messages(stderr):
  """The lines for people: not those that absl logs for information."""
  return [line for line in stderr.splitlines() if not re.match(r'I\d{4} ', line)]


def Steps(logdir):
  """The steps of the committed checkpoints."""
  return [info.step for info in checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()]


def Tensors(logdir, step):
  """{name: array} of all that the checkpoint of a step holds."""
  infos = checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()
  (info,) = [info for info in infos if info.step == step]
  reader = tf.train.load_checkpoint(info.prefix)
  return {name: reader.get_tensor(name) for name in info.tensors}


def AssertSameTensors(got, expected):
  """Bit by bit."""
  assert got.keys() == expected.keys()
  different = [
    name for name in got
    if got[name].dtype != expected[name].dtype or got[name].tobytes() != expected[name].tobytes()
  ]  # fmt: skip
  assert not different


def Scalars(directory):
  """{tag: [(step, value), ...]} as TensorBoard reads the directory, nothing left out."""
  found = Tensorboard(directory)
  return {
    tag: [(step, np.float32(value)) for step, value in pairs]
    for tag, pairs in found.items()
    if pairs[0][1].shape == () and pairs[0][1].dtype == np.float32
  }


def Tensorboard(directory):
  """{tag: [(step, array), ...]} of scalars, histograms and texts."""
  events = event_accumulator.EventAccumulator(
    str(directory), size_guidance={event_accumulator.TENSORS: 0}, purge_orphaned_data=False
  )
  events.Reload()
  return {
    tag: [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    for tag in events.Tags()['tensors']
  }
