# SPDX-License-Identifier: Apache-2.0
"""Runs the installed programs as processes, and reads their log directories."""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
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

# The folder of `params` and `tasks` of this repository: the checkout, or Bazel's copy of it.
ROOT = pathlib.Path(lingvo_gpipe.__file__).parents[1]

MODEL = 'lm.stdlib.ByteTransformerGPipe2'
# A model and data so small that starting the process takes most of the time.
TINY = (
  'task.num_layers:1;task.model_dim:16;task.hidden_dim:32;task.num_heads:2;task.stack.xla:False;'
  'task.stack.num_micro_batches:2;'
  'input.max_bytes:5000;input.batch_size:4;input.seq_len:16'
)
TIMEOUT = 120
# Environment with which a program of `Forks` traces and computes as in a process of its own.
OPTIMIZED = {'OPTIMIZE_GRAPHS': '1'}


@functools.cache
def _PackageAlone():
  """Returns a folder for PYTHONPATH that has lingvo_gpipe and nothing else of this repository."""
  folder = tempfile.TemporaryDirectory(prefix='lingvo_gpipe_')
  os.symlink(pathlib.Path(lingvo_gpipe.__file__).parent, os.path.join(folder.name, 'lingvo_gpipe'))
  return folder  # Removed when this process ends.


def Command(program):
  """Returns the installed program if it runs the code under test, or a command for the module."""
  installed = pathlib.Path(sys.executable).with_name(program)
  if installed.exists() and 'TEST_SRCDIR' not in os.environ and _IsInstalledFrom(ROOT):
    return [str(installed)]
  return [sys.executable, '-m', f'lingvo_gpipe.{program}']


@functools.cache
def _IsInstalledFrom(root):
  """Whether this Python imports lingvo_gpipe of `root` by default: Bazel and clones have copies."""
  code = 'import lingvo_gpipe; print(lingvo_gpipe.__file__)'
  done = subprocess.run(
    [sys.executable, '-P', '-c', code], capture_output=True, text=True, timeout=TIMEOUT,
    env=_CleanEnvironment(), cwd='/', check=False,
  )  # fmt: skip
  return done.stdout.strip() == str(root / 'lingvo_gpipe' / '__init__.py')


def Program(name):
  """Returns the path of a program for tests."""
  return str(pathlib.Path(__file__).parent / 'toys' / 'programs' / f'{name}.py')


def _CleanEnvironment():
  """Returns the environment without variables that hide messages from users."""
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


_FORKS = pathlib.Path(__file__).with_name('program_forks.py')
_FAST_TRACING = pathlib.Path(__file__).with_name('fast_tracing.py')


class Forks:
  """Runs programs one after the other, like `Run`, but imports TensorFlow once for all of them.

  For programs, or Python files, that run to their end. They trace as fast as the tests, see
  fast_tracing.py, except with the environment `OPTIMIZED`. The output lacks messages from importing
  TensorFlow, and the children do not import modules that the parent has imported: another test of
  the file should start a real process. Tests share one object as the fixture `forks`.
  """

  def __init__(self, directory, *, modules=(), command=(sys.executable,), more_environment=None):
    """Starts the parent, which imports further `modules`, by the `command` that runs Python."""
    self._directory = directory
    self._count = 0
    self._pid = 0  # The id of the process for which `Wait` waits.
    self._last = 0  # The id of the last process started.
    self._outputs = {}
    self._parent = subprocess.Popen(
      [*command, str(_FORKS), str(_FAST_TRACING), *modules],
      env=Environment(**(more_environment or {})), cwd=directory, text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

  def Run(self, program, *args, cwd=ROOT, more_environment=None):
    self.Start(program, *args, cwd=cwd, more_environment=more_environment)
    return self.Wait()

  def Start(self, program, *args, cwd=ROOT, more_environment=None, stdout=None, is_waited_for=True):
    """Returns the id of the process; call `Wait` before starting the next one.

    `Wait` returns its standard output, unless the caller passes a file `stdout`, which may be a
    terminal or a pipe. With `is_waited_for` False it runs alongside others until `Close`.
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
    """Waits until the last process prints a text to stdout or stderr; fails if it never does."""
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
    """Waits for the process, which is killed at the timeout; returns it."""
    killer = threading.Timer(TIMEOUT, os.kill, (self._pid, signal.SIGKILL))
    killer.start()
    status = int(self._parent.stdout.readline())
    killer.cancel()
    self._pid = 0
    texts = {name: path.read_text() for name, path in self._outputs.items()}
    return subprocess.CompletedProcess([], status, **texts)

  def _End(self):
    """Kills a process that a failed test has left running."""
    if self._pid:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._pid, signal.SIGKILL)
      self.Wait()

  def Close(self):
    self._End()
    self._parent.communicate(timeout=TIMEOUT)


@contextlib.contextmanager
def Started(
  program,
  *args,
  cwd=ROOT,
  stdout=subprocess.PIPE,
  stderr=subprocess.DEVNULL,
  command=None,
  more_environment=None,
):
  """Yields a running program; kills it at the end if it still runs.

  Ctrl-C acts on it as in a terminal, also if the tests run in the background of a shell.
  """
  process = subprocess.Popen(
    [*(command or Command(program)), *args], cwd=cwd, text=True,
    env=Environment(**(more_environment or {})),
    stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )  # fmt: skip
  try:
    yield process
  finally:
    if process.poll() is None:
      process.kill()
    process.wait(TIMEOUT)
    if process.stdout:
      process.stdout.close()


def ToyArgs(logdir, max_steps, more=''):
  """Returns trainer arguments for the experiment Toy of a project; `more` overrides its Params."""
  return [
    '--model=toy.Toy', f'--logdir={logdir}', f'--max_steps={max_steps}',
    f'--model_params_override={more}',
  ]  # fmt: skip


def TrainArgs(logdir, max_steps, *, model=MODEL, more='', evaluate=()):
  """Returns trainer arguments; each step writes summaries."""
  overrides = f'{TINY};task.train.summary_interval_steps:1;task.train.eval_datasets:{[*evaluate]}'
  return [
    f'--model={model}',
    f'--logdir={logdir}',
    f'--max_steps={max_steps}',
    f'--model_params_override={overrides};{more}',
  ]


def Succeeded(done):
  """Checks that a finished process succeeded; returns it."""
  assert done.returncode == 0, f'{done.returncode}\n{done.stdout}\n{done.stderr}'
  return done


def Messages(stderr):
  """Returns the lines for users: all but absl's INFO log."""
  return [line for line in stderr.splitlines() if not re.match(r'I\d{4} ', line)]


def CopyAsKilled(logdir, copy, step):
  """Copies a log directory as a kill after a save leaves it, with later steps in its logs."""
  shutil.copytree(logdir, copy)
  for path in (copy / 'train').glob('ckpt-*'):
    if int(path.name[5:13]) > step:
      path.unlink() if path.is_file() else shutil.rmtree(path)
  return copy


def Steps(logdir):
  """Returns the steps of the committed checkpoints."""
  return [info.step for info in checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()]


def Tensors(logdir, step):
  """Returns {name: array} of all tensors in the checkpoint of a step."""
  infos = checkpointer.Checkpointer(os.path.join(logdir, 'train')).All()
  (info,) = [info for info in infos if info.step == step]
  reader = tf.train.load_checkpoint(info.prefix)
  return {name: reader.get_tensor(name) for name in info.tensors}


def AssertSameTensors(actual, expected):
  """Checks that the tensors are bit-for-bit equal."""
  assert actual.keys() == expected.keys()
  different = [
    name for name, value in expected.items()
    if actual[name].dtype != value.dtype or actual[name].tobytes() != value.tobytes()
  ]  # fmt: skip
  assert not different


def Scalars(directory):
  """Returns {tag: [(step, value), ...]} as TensorBoard reads the directory, unsampled."""
  tensors = Tensorboard(directory)
  return {
    tag: [(step, np.float32(value)) for step, value in pairs]
    for tag, pairs in tensors.items()
    if pairs[0][1].shape == () and pairs[0][1].dtype == np.float32
  }


def Tensorboard(directory):
  """Returns {tag: [(step, array), ...]} of scalars, histograms and texts in order of writing.

  TensorBoard reads the files by name. Two writers of one process and second differ in a counter
  there, and 10 comes before 9.
  """
  events = event_accumulator.EventAccumulator(
    str(directory), size_guidance={event_accumulator.TENSORS: 0}, purge_orphaned_data=False
  )
  events.Reload()
  return {
    tag: [
      (event.step, tf.make_ndarray(event.tensor_proto))
      for event in sorted(events.Tensors(tag), key=lambda event: event.wall_time)
    ]
    for tag in events.Tags()['tensors']
  }
