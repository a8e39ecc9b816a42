# SPDX-License-Identifier: Apache-2.0
"""Failures around a real trainer (disk, memory, data, signals) are reported, and lose nothing."""

import contextlib
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from lingvo_gpipe.input.text import sentencepiece_training
from tests import naming, processes
from tests.toys import projects

# Disturbed runs resume and train up to this step.
END = 300


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(tmp_path_factory.mktemp('project'), projects.Experiments('failing'))


@pytest.fixture
def trainer(project, forks):
  """Starts or runs the trainer, or the evaluator, on an experiment of the project."""

  def Call(key, logdir, max_steps, more='', *flags, program='trainer', run=forks.Run):
    flags = [f'--model_params_override={more}', f'--max_steps={max_steps}', *flags]
    return run(program, f'--model=toy.{key}', f'--logdir={logdir}', *flags, cwd=project)

  return Call


@pytest.fixture(scope='module')
def undisturbed(project, forks, tmp_path_factory):
  """Returns the tensors at the end of an undisturbed run to END."""
  logdir = tmp_path_factory.mktemp('undisturbed')
  more = '--model_params_override=task.train.save_interval_steps:0'
  args = ['--model=toy.Toy', f'--logdir={logdir}', f'--max_steps={END}', more]
  processes.Succeeded(forks.Run('trainer', *args, cwd=project))
  return processes.Tensors(logdir, END)


# ---- disk ----------------------------------------------------------------------------------------


def _RunUntilItFails(trainer, forks, logdir, disturb):
  """Disturbs a run after its first checkpoint; returns its last lines on stderr."""
  pid = trainer('Toy', logdir, 10**6, run=forks.Start)
  forks.Await('checkpoint of step 3')
  disturb(pid)
  done = forks.Wait()
  assert done.returncode == 2, done.stderr
  lines = [line for line in processes.Messages(done.stderr) if not re.match(r'[WE]\d{4} ', line)]
  assert len(lines) == 1, done.stderr
  return lines[0]


def _AssertResumes(trainer, logdir, message, undisturbed):
  """Checks that the message names the last good checkpoint, and that the resumed run is exact."""
  last = processes.Steps(logdir)[-1]
  assert re.search(r'after step \d+;', message)
  assert processes.Tensors(logdir, last)['global_step'] == last
  done = trainer('Toy', logdir, END, 'task.train.save_interval_steps:0')
  assert naming.AnyLineNames(processes.Succeeded(done).stdout, 'resuming', f'step {last}')
  processes.AssertSameTensors(processes.Tensors(logdir, END), undisturbed)
  return last


def _Mounted(*args):
  """Mounts, or skips the test if this process lacks the permission."""
  if not shutil.which('mount'):
    pytest.skip('there is no program mount here')
  done = subprocess.run(['mount', *args], capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f'this process may not mount: {done.stderr.strip()}')


@pytest.fixture
def small_disk(tmp_path):
  """Returns a file system of two megabytes."""
  path = tmp_path / 'disk'
  path.mkdir()
  _Mounted('-t', 'tmpfs', '-o', 'size=2m', 'none', str(path))
  yield path
  subprocess.run(['umount', '--lazy', str(path)], check=True)


def testAFullDiskStopsTheRunAndLosesNothing(trainer, forks, small_disk, undisturbed):
  logdir, ballast = small_disk / 'run', small_disk / 'ballast'

  def Fill(pid):
    with open(ballast, 'wb', buffering=0) as f:
      # The run keeps removing older checkpoints.
      while os.path.exists(f'/proc/{pid}'):
        with contextlib.suppress(OSError):
          f.write(bytes(4096))

  message = _RunUntilItFails(trainer, forks, logdir, Fill)
  assert naming.Names(message, f"'{logdir}/train'", 'No space left on device', 'free space')
  assert 'memory' not in message
  ballast.unlink()
  last = _AssertResumes(trainer, logdir, message, undisturbed)
  assert naming.Names(message, f'checkpoint of step {last}')


def testALimitOnFileSizeStopsTheRunAndLosesNothing(trainer, forks, tmp_path, undisturbed):
  """The closest case to a full disk if nothing can be mounted."""

  def Limit(pid):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

  message = _RunUntilItFails(trainer, forks, tmp_path, Limit)
  assert naming.Names(message, f"'{tmp_path}/train'", 'File too large')
  _AssertResumes(trainer, tmp_path, message, undisturbed)


def testAReadOnlyDiskStopsTheRunAndLosesNothing(trainer, forks, tmp_path, undisturbed):
  logdir = tmp_path / 'run'
  train = logdir / 'train'

  def MakeReadOnly(pid):
    if os.geteuid():
      os.chmod(train, 0o555)
      return
    # Only a read-only mount stops root.
    _Mounted('--bind', str(train), str(train))
    command, deadline = ['mount', '-o', 'remount,bind,ro', str(train)], time.monotonic() + 60
    # Remounting fails while the trainer has a file open there.
    while subprocess.run(command, check=False, capture_output=True).returncode:
      assert time.monotonic() < deadline
      time.sleep(0.01)

  try:
    message = _RunUntilItFails(trainer, forks, logdir, MakeReadOnly)
  finally:
    if not os.geteuid():
      subprocess.run(['umount', '--lazy', str(train)], check=False, capture_output=True)
    os.chmod(train, 0o755)
  assert naming.Names(message, f"'{train}'")
  assert re.search('Read-only|ermission', message)
  last = _AssertResumes(trainer, logdir, message, undisturbed)
  assert naming.Names(message, f'checkpoint of step {last}')


def testARemovedLogDirectoryStopsTheRunAndIsNotCreatedAgain(trainer, forks, tmp_path, undisturbed):
  logdir, elsewhere = tmp_path / 'run', tmp_path / 'elsewhere'
  message = _RunUntilItFails(trainer, forks, logdir, lambda pid: logdir.rename(elsewhere))
  # Either the lock or the next checkpoint is missed first.
  assert f"'{logdir}/train" in message and naming.Names(message, 'starts over')
  assert not logdir.exists()
  _AssertResumes(trainer, elsewhere, message, undisturbed)


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def impatient(tmp_path_factory):
  """Returns forks that name lines, and have no oneDNN: its allocator waits 10 s for memory."""
  environment = {'TF_ENABLE_ONEDNN_OPTS': '0', **processes.OPTIMIZED}
  runner = processes.Forks(tmp_path_factory.mktemp('impatient'), more_environment=environment)
  yield runner
  runner.Close()


def testAStepThatNeedsTooMuchMemoryIsReported(trainer, impatient, tmp_path):
  pid = trainer('Memory', tmp_path, 100, run=impatient.Start)
  # The step asks for four terabytes; some systems would grant them.
  resource.prlimit(pid, resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
  done = impatient.Wait()
  assert done.returncode == 1
  cause, code, where, hint, _ = processes.Messages(done.stderr)[-5:]
  assert cause.startswith('ResourceExhaustedError ')
  assert naming.Names(cause, 'loss', 'stage 0', 'shape[1048576,1048576]')
  assert code.endswith(', in ComputeLoss')
  for what in ('num_micro_batches', 'num_stages', 'remat_policy', 'batch_size'):
    assert what in hint
  assert naming.Names(where, 'after step 4', 'checkpoint of step 4')
  assert processes.Tensors(tmp_path, 4)['global_step'] == 4


def testAWeightThatNeedsTooMuchMemoryIsReported(trainer, impatient, tmp_path):
  pid = trainer('Large', tmp_path, 4, run=impatient.Start)
  # The weight takes 4 GiB. The machine has them, or it would be refused at once.
  num_pages = int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[0])
  limit = num_pages * resource.getpagesize() + (2 << 30)
  resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
  done = impatient.Wait()
  assert done.returncode == 1
  which, hint, _ = processes.Messages(done.stderr)[-3:]
  assert naming.Names(which, 'weight', 'toy.large', '[32768, 32768]')
  assert naming.Names(hint, 'memory', 'num_micro_batches')


# ---- data ----------------------------------------------------------------------------------------


def _Pair(i):
  fields = {'source_language': 'de', 'target_language': 'en', 'source': f'eins {i}'}
  fields['target'] = f'one {i}'
  features = {
    name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
    for name, text in fields.items()
  }
  return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def testARecordThatIsDamagedDuringTheRun(trainer, project, tmp_path):
  """First with the policy stop, then skip."""
  pairs = [_Pair(i) for i in range(20)]
  with tf.io.TFRecordWriter(str(project / 'pairs.tfrecord')) as writer:
    for pair in pairs:
      writer.write(pair)
  sentencepiece_training.Train(['eins one', '0123456789'], str(project / 'v'), 276)
  first = processes.Succeeded(trainer('Pairs', tmp_path, 4))
  assert naming.AnyLineNames(first.stdout, 'data', 'Train 20 examples')
  assert 'damaged' not in first.stdout
  data = bytearray((project / 'pairs.tfrecord').read_bytes())
  offset = sum(16 + len(pair) for pair in pairs[:5])
  data[offset + 20] ^= 1
  (project / 'pairs.tfrecord').write_bytes(data)
  stopped = trainer('Pairs', tmp_path, 8)
  assert stopped.returncode == 2
  (line,) = processes.Messages(stopped.stderr)[-1:]
  assert naming.Names(
    line, 'pairs.tfrecord', 'record 6', f'byte {offset}', 'damaged_records', 'skip'
  )
  assert processes.Steps(tmp_path)[-1] == 4
  # With and without a cache of the tokens; with it the file is not read again.
  cached = 'input.cache_dir:cache'
  for start, end, more in ((4, 8, ''), (8, 10, cached), (10, 12, cached)):
    done = trainer('Pairs', tmp_path, end, f'input.damaged_records:skip;{more}')
    assert naming.AnyLineNames(processes.Succeeded(done).stdout, 'resuming', f'step {start}')
    assert naming.AnyLineNames(done.stdout, 'Train', '19 examples', '1 damaged records')
    assert naming.Names((tmp_path / 'report.txt').read_text(), '1 damaged records')
    assert '"num_damaged_records": 1' in (tmp_path / 'report.json').read_text()


@pytest.mark.parametrize('program', ['trainer', 'evaluator'])
def testAnErrorInTheDataOfAnEvaluationIsReported(trainer, tmp_path, program):
  more = "task.train.eval_datasets:['Failing']" if program == 'trainer' else ''
  done = trainer('Toy', tmp_path, 4, more)
  if program == 'evaluator':
    processes.Succeeded(done)
    done = trainer('Toy', tmp_path, 4, '', '--split=Failing', '--once', program='evaluator')
  assert done.returncode == 1
  cause, code, hint, *where, trace = processes.Messages(done.stderr)[1:]
  assert naming.Names(cause, 'FailingData', 'example 6', 'data set')
  assert cause.endswith(': ValueError: example 7 is bad')
  assert re.search(r'/tasks/regression\.py", line \d+, in _Check$', code)
  assert naming.Names(hint, 'Dataset(start=6)')
  assert trace == f'stack trace: {tmp_path}/error-{program}.txt'
  if program == 'trainer':
    (ended,) = where
    assert naming.Names(ended, 'after step 4', 'checkpoint of step 4')
  else:
    assert naming.Names(cause, 'eval_failing', 'checkpoint of step 4')
  assert processes.Tensors(tmp_path, 4)['global_step'] == 4


# ---- signals -------------------------------------------------------------------------------------


def testASignalWhileTheFirstStepIsTracedSavesThatStep(trainer, forks, tmp_path):
  until = tmp_path / 'until'
  pid = trainer('Tracing', tmp_path, 10**6, f'task.until:{until}', run=forks.Start)
  forks.Await('tracing')
  os.kill(pid, signal.SIGTERM)
  forks.Await('SIGTERM: finishing')
  until.touch()
  done = forks.Wait()
  assert done.returncode == 128 + signal.SIGTERM
  assert naming.AnyLineNames(done.stdout, 'stopped', 'SIGTERM', 'step 1')
  assert processes.Steps(tmp_path) == [1]
  assert any(
    naming.Names(line, 'SIGTERM: finishing', 'SIGTERM again')
    for line in processes.Messages(done.stderr)
  )


# The moment of the signal, and the steps saved after it.
_BUSY = {
  'tracing': (('Tracing', 'task.until:never'), 'tracing', []),
  'saving': (('SlowDisk',), 'waiting', [1, 2]),
  'evaluating': (
    ('Toy', "task.train.eval_datasets:['Slow'];task.train.eval_interval_steps:2",
     '--job=train_and_eval'),
    'waiting', [1],
  ),
}  # fmt: skip


@pytest.mark.parametrize('when', _BUSY)
def testASecondSignalEndsTheTrainerAtOnce(trainer, forks, tmp_path, when):
  (key, *flags), printed, steps = _BUSY[when]
  pid = trainer(key, tmp_path, 10**6, *flags, run=forks.Start)
  forks.Await(printed)
  for step in steps:
    forks.Await(f'checkpoint of step {step}')
  os.kill(pid, signal.SIGTERM)
  forks.Await('SIGTERM: finishing')
  os.kill(pid, signal.SIGINT)
  assert forks.Wait().returncode == 128 + signal.SIGINT
  assert processes.Steps(tmp_path) == steps


def testASecondSignalEndsTheEvaluatorAtOnce(trainer, forks, tmp_path):
  processes.Succeeded(trainer('Toy', tmp_path, 1))
  pid = trainer('Toy', tmp_path, 1, '', '--split=Slow', program='evaluator', run=forks.Start)
  forks.Await('waiting')
  os.kill(pid, signal.SIGINT)
  forks.Await('SIGINT: finishing')
  os.kill(pid, signal.SIGTERM)
  assert forks.Wait().returncode == 128 + signal.SIGTERM


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
