# SPDX-License-Identifier: Apache-2.0
"""Attacks on a run: whatever happened to it, it ends like an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from tools.chaos_attacks import children, mutation, network

# The last step of a run, and the step up to which the run is trained whose checkpoints are damaged.
_LAST_STEP, _HALF_STEP = 30, 6

_PARAMS = (
  'task.num_layers:2;task.model_dim:16;task.hidden_dim:32;task.num_heads:2;task.stack.xla:False;'
  'input.max_bytes:20000;input.batch_size:4;input.seq_len:16;task.train.eval_datasets:[];'
  'task.train.save_interval_steps:1;task.train.save_max_to_keep:3'
)
_SECONDS = 20.0  # Time in which processes end with the process that started them.
_MIB = 1 << 20


def Kill(draw: random.Random, runner: children.Runner) -> None:
  """Kills, stops and ends a run at random moments."""
  logdir = runner.folder / 'run'
  for _ in range(draw.randint(1, 3)):
    child = runner.Start('trainer', _Args(logdir))
    _WaitAWhile(draw, child, logdir)
    numbers = draw.choice([
      [signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP],
      [signal.SIGSTOP, signal.SIGCONT], [signal.SIGSTOP, signal.SIGKILL],
      [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT, signal.SIGKILL],
    ])  # fmt: skip
    for number in numbers:
      child.Signal(number)
      time.sleep(draw.uniform(0.0, 0.2))
    ended = runner.Wait(child)
    allowed = {0, *(128 + n for n in numbers), *(-n for n in numbers)}
    if ended.status not in allowed or 'Traceback' in ended.stderr:
      raise children.FindingError(f'{numbers}: status {ended.status}: {ended.stderr[-1500:]}')
  _Finish(runner, logdir)


def Workers(draw: random.Random, runner: children.Runner) -> None:
  """Kills and stops the processes of a run on two local workers."""
  logdir, flag = runner.folder / 'run', '--local_workers=2'
  child = runner.Start('trainer', [*_Args(logdir), flag])
  _WaitAWhile(draw, child, logdir)
  processes = _Descendants(child.pid)
  if draw.random() < 0.3:
    child.Signal(signal.SIGKILL)
  elif processes:
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    victim = draw.choice(processes)
    with contextlib.suppress(ProcessLookupError):
      os.kill(victim, number)
    if number == signal.SIGSTOP:
      time.sleep(draw.uniform(0.0, 2.0))
      with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)
  ended = runner.Wait(child)
  children.CheckEnd(ended, (0, -signal.SIGKILL))  # 2 if a worker did not even start.
  deadline = time.monotonic() + _SECONDS
  while orphans := [pid for pid in processes if _IsRunning(pid)]:
    if time.monotonic() > deadline:
      for pid in orphans:
        os.kill(pid, signal.SIGKILL)
      raise children.FindingError(f'{len(orphans)} processes outlive the trainer')
    time.sleep(0.1)
  _Finish(runner, logdir, flag)


def Links(draw: random.Random, runner: children.Runner) -> None:
  """Cuts links between the hosts of a run, or ends a worker's host; without root it does nothing.

  A link is cut for a moment, which connections survive, or until a step takes too long.
  """
  try:
    hosts = network.Network(3)
  except OSError:  # There is no `ip`, or it needs root.
    return
  logdir, spec = runner.folder / 'run', runner.folder / 'hosts.json'
  runner.folder.mkdir(parents=True, exist_ok=True)
  spec.write_text(json.dumps({'worker': [f'{a}:2222' for a in hosts.addresses[1:]]}))

  def StartWorker(i: int) -> children.Child:
    args = [f'--cluster={spec}', f'--task_index={i}', '--trusted_network', '--platform=cpu']
    return runner.Start('worker', args, lambda: hosts.Enter(1 + i))

  flags = [f'--cluster={spec}', '--step_timeout=20']
  with hosts:
    workers = [StartWorker(i) for i in range(2)]
    trainer = runner.Start('trainer', [*_Args(logdir), *flags], lambda: hosts.Enter(0))
    try:
      # Before the first step, a call that got lost is waited for half an hour.
      _WaitForStep(trainer, logdir, draw.randint(1, _LAST_STEP - 1), _SECONDS * 5)
      host = draw.randrange(3)
      hosts.SetLink(host, is_up=False)
      time.sleep(draw.choice([0.3, 3.0, 30.0]) * draw.random())
      if host and draw.random() < 0.3:
        workers[host - 1].Signal(signal.SIGKILL)
        workers[host - 1].Wait(_SECONDS)
        workers[host - 1] = StartWorker(host - 1)
      hosts.SetLink(host, is_up=True)
      # TCP, restarts and the next call that nothing answers take up to a minute each.
      ended = runner.Wait(trainer, _SECONDS * 15)
    finally:
      for child in (trainer, *workers):
        child.Signal(signal.SIGKILL)
        child.Wait(_SECONDS)
  _CheckDone(ended)
  _CheckEqual(runner, logdir, '--local_workers=2')


def Checkpoints(draw: random.Random, runner: children.Runner) -> None:
  """Damages files of the newest checkpoint, or any files of the log directory."""
  logdir = runner.folder / 'run'
  _CheckDone(runner.Run('trainer', _Args(logdir, _HALF_STEP)))
  newest = f'ckpt-{_HALF_STEP:08d}'
  are_of_newest = draw.random() < 0.7
  paths = [
    path for path in sorted(logdir.rglob('*'))
    if path.is_file() and (newest in str(path) or not are_of_newest)
  ]  # fmt: skip
  damages = [mutation.File(draw, path) for path in draw.sample(paths, draw.choice([1, 1, 2]))]
  ended = runner.Run('trainer', _Args(logdir))
  if are_of_newest and ended.status:
    raise children.FindingError(f'{damages}: status {ended.status}: {ended.stderr[-1500:]}')
  children.CheckEnd(ended)
  if draw.random() < 0.3:
    flags = [f'--logdir={logdir}', '--mode=inspect_checkpoint']
    children.CheckEnd(runner.Run('trainer', flags), (0, 1))
  if not ended.status:
    _CheckEqual(runner, logdir)


def Disk(draw: random.Random, runner: children.Runner) -> None:
  """Fills a small disk, or limits the size of files if nothing can be mounted."""
  disk = runner.folder / 'disk'
  disk.mkdir()
  size = f'size={draw.randint(300, 3000)}k'
  is_mounted = (
    shutil.which('mount')
    and not subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', size, 'none', str(disk)], check=False, capture_output=True
    ).returncode
  )
  logdir, ballast = disk / 'run', disk / 'ballast'
  num_bytes = draw.randint(1000, 200_000)
  hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
  prepare = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))  # noqa: E731
  child = runner.Start('trainer', _Args(logdir), None if is_mounted else prepare)
  _WaitAWhile(draw, child, logdir)
  if is_mounted:
    with open(ballast, 'wb', buffering=0) as f:
      while not child.HasEnded():
        with contextlib.suppress(OSError):
          f.write(bytes(4096))
        time.sleep(0.001)
  children.CheckEnd(runner.Wait(child))
  ballast.unlink(missing_ok=True)
  saved = runner.folder / 'run'
  if logdir.exists():
    mutation.CopyTree(logdir, saved)
  _Finish(runner, saved)


def Memory(draw: random.Random, runner: children.Runner) -> None:
  """Limits the address space."""
  logdir = runner.folder / 'run'
  more = int(2.0 ** draw.uniform(0.0, 11.0) * _MIB)

  def Limit() -> None:
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))

  ended = runner.Wait(runner.Start('trainer', _Args(logdir), Limit))
  # Native code that gets no memory ends the process, see docs/failures.md.
  if ended.status not in (0, 1, 2, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
    raise children.FindingError(f'status {ended.status}: {ended.stderr[-1500:]}')
  _Finish(runner, logdir)


def Unmount(folder: pathlib.Path) -> None:
  """Unmounts the small disk of a case, if there is one."""
  if os.path.ismount(folder / 'disk'):
    subprocess.run(['umount', '--lazy', str(folder / 'disk')], check=True)


def _Args(logdir: pathlib.Path, last_step: int = _LAST_STEP) -> list[str]:
  return [
    '--model=lm.stdlib.ByteTransformerGPipe2', '--platform=cpu', f'--logdir={logdir}',
    f'--max_steps={last_step}', f'--model_params_override={_PARAMS}',
  ]  # fmt: skip


def _WaitAWhile(draw: random.Random, child: children.Child, logdir: pathlib.Path) -> None:
  """Waits for a random checkpoint, or for a random time at the start."""
  if draw.random() < 0.3:
    seconds, step = draw.uniform(0.0, 3.0), _LAST_STEP
  else:
    seconds, step = 60.0, draw.randrange(_LAST_STEP)
  _WaitForStep(child, logdir, step, seconds)
  time.sleep(draw.uniform(0.0, 0.05))


def _WaitForStep(child: children.Child, logdir: pathlib.Path, step: int, seconds: float) -> None:
  """Waits for a checkpoint of a step, but not after a time limit or the end of the process."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline and not child.HasEnded():
    commits = [path.stem for path in (logdir / 'train').glob('ckpt-*.json')]
    if commits and int(max(commits).removeprefix('ckpt-')) >= step:
      break
    time.sleep(0.01)


def _CheckDone(ended: children.Ended) -> None:
  if ended.status:
    raise children.FindingError(f'a run does not resume: {ended.status}: {ended.stderr[-1500:]}')


def _Finish(runner: children.Runner, logdir: pathlib.Path, *flags: str) -> None:
  """Trains to the end and compares with an undisturbed run."""
  _CheckDone(runner.Run('trainer', [*_Args(logdir), *flags]))
  _CheckEqual(runner, logdir, *flags)


def _CheckEqual(runner: children.Runner, logdir: pathlib.Path, *flags: str) -> None:
  undisturbed = runner.folder.parent / '_'.join(['undisturbed', *(x.strip('-') for x in flags)])
  if not undisturbed.exists():
    _CheckDone(runner.Run('trainer', [*_Args(undisturbed), *flags]))

  def Compare() -> None:
    expected, actual = _Tensors(undisturbed), _Tensors(logdir)
    different = [name for name in expected if expected[name] != actual.get(name)]
    if different or expected.keys() != actual.keys():
      raise children.FindingError(f'other values than undisturbed: {different or actual.keys()}')

  runner.Call(Compare)


def _Tensors(logdir: pathlib.Path) -> dict[str, bytes]:
  """Returns all tensors of the last checkpoint."""
  info = checkpointer.Checkpointer(str(logdir / 'train')).All()[-1]
  reader = tf.train.load_checkpoint(info.prefix)
  return {name: reader.get_tensor(name).tobytes() for name in info.tensors}


def _Parent(pid: int) -> int:
  """Returns the id of a process's parent; 0 if the process has ended."""
  with contextlib.suppress(OSError):
    fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    if fields[0] != 'Z':
      return int(fields[1])
  return 0


def _IsRunning(pid: int) -> bool:
  return _Parent(pid) > 0


def _Descendants(pid: int) -> list[int]:
  """Returns the ids of all processes below a process."""
  parents = {int(name): _Parent(int(name)) for name in os.listdir('/proc') if name.isdecimal()}
  below = [pid]
  for process in below:
    below += [child for child, parent in parents.items() if parent == process]
  return below[1:]


Attack = Callable[[random.Random, children.Runner], None]
