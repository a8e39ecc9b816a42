# SPDX-License-Identifier: Apache-2.0
"""A real trainer reports what it refuses or skips, and keeps the checkpoints."""

import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from tests import naming, processes
from tests.toys import projects


@pytest.fixture(scope='module')
def trainer(forks, tmp_path_factory):
  """Runs the trainer on an experiment of the project."""
  project = projects.Write(tmp_path_factory.mktemp('project'), projects.Experiments('refused'))
  points = np.random.default_rng(3).uniform(size=[40, 5]).astype(np.float32)
  with tf.io.TFRecordWriter(str(project / 'points.tfrecord')) as writer:
    for point in points:
      writer.write(point.tobytes())
  data = bytearray((project / 'points.tfrecord').read_bytes())
  data[20 * 36 + 12] ^= 1
  (project / 'points.tfrecord').write_bytes(data)

  def Call(key, logdir, max_steps, more='', *flags, run=forks.Run, **options):
    args = [f'--model=toy.{key}', f'--logdir={logdir}', f'--max_steps={max_steps}']
    args += [f'--model_params_override={more}', *flags]
    return run('trainer', *args, cwd=project, **options)

  return Call


@pytest.fixture(scope='module')
def trained(trainer, tmp_path_factory):
  """Returns the log directory of a run of 3 steps."""
  logdir = tmp_path_factory.mktemp('trained') / 'run'
  processes.Succeeded(trainer('Toy', logdir, 3))
  return logdir


@pytest.fixture
def copied(trained, tmp_path):
  return shutil.copytree(trained, tmp_path / 'run')


def _RefusedIn(done):
  """Returns the one error line of a refused run, without warnings."""
  assert done.returncode == 2, done.stderr
  (line,) = (s for s in processes.Messages(done.stderr) if not re.match(r'W\d{4} ', s))
  return line


def testASecondTrainerIsRefusedWhileTheFirstRuns(trainer, forks, tmp_path):
  def AwaitStepAfter(step):
    deadline = time.monotonic() + processes.TIMEOUT
    while not (tmp_path / 'train').exists() or max(processes.Steps(tmp_path), default=0) <= step:
      assert time.monotonic() < deadline
      time.sleep(0.01)

  pid = trainer('Toy', tmp_path, 10**6, run=forks.Start, is_waited_for=False)
  try:
    AwaitStepAfter(0)
    line = _RefusedIn(trainer('Toy', tmp_path, 10**6))
    assert naming.Names(line, f"'{tmp_path}/train'", f'process {pid}', '--logdir')
    AwaitStepAfter(processes.Steps(tmp_path)[-1])
  finally:
    os.kill(pid, signal.SIGKILL)


def testDamagedCheckpointsAreNamedAndThePreviousOneIsUsed(trainer, trained, copied):
  (path,) = (copied / 'train').glob('ckpt-00000003-*/*data-*')
  os.truncate(path, path.stat().st_size // 2)
  (path,) = (copied / 'train').glob('ckpt-00000002-*/*data-*')
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  done = processes.Succeeded(trainer('Toy', copied, 3))
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 1')
  steps = re.findall(r'damaged .*\bckpt-0*(\d)-', done.stderr)
  assert steps == ['3', '2']
  # The new checkpoint of this step equals the old one.
  assert processes.Steps(copied)[-1] == 3
  processes.AssertSameTensors(processes.Tensors(copied, 3), processes.Tensors(trained, 3))


def testChangedParamsAreRefusedUnlessAllowed(trainer, trained, copied):
  other = 'task.train.learner.learning_rate:0.5'
  message = r'~ task\.train\.learner\.learning_rate : [\d.e-]+ -> 0\.5'
  line = _RefusedIn(trainer('Toy', copied, 4, other))
  assert re.search(message, line) and naming.Names(
    line, 'ckpt-00000003.json', '--allow_params_change'
  )
  assert naming.Names(_RefusedIn(trainer('Stream', copied, 4)), 'ckpt-00000003.json', 'Params')
  # Weights of another shape never fit.
  line = _RefusedIn(trainer('Toy', copied, 4, 'task.num_targets:2', '--allow_params_change'))
  assert naming.Names(line, 'ckpt-00000003.json', 'shape', 'toy.w')
  assert processes.Steps(copied) == processes.Steps(trained)
  done = processes.Succeeded(trainer('Toy', copied, 4, other, '--allow_params_change'))
  change, rate = processes.Messages(done.stderr)
  assert re.search(message, change) and naming.AnyLineNames(done.stdout, 'resuming', 'step 3')
  assert naming.Names(rate, 'learning_rate', '0.5')


def testHarmlessChangesOfParamsPassAndAreLogged(trainer, copied):
  done = processes.Succeeded(trainer('Toy', copied, 4, 'task.train.save_max_to_keep:2'))
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 3')
  assert processes.Messages(done.stderr) == []
  assert re.search(r'\bParams: ~ task\.train\.save_max_to_keep : .* -> 2\b', done.stderr)


def testATaskThatOnlyAnEvaluatorUsesIsRefused(trainer, tmp_path):
  evaluated = "task.train.eval_datasets:['Test']"
  line = _RefusedIn(trainer('Sampled', tmp_path, 2, evaluated))
  assert re.search(naming.Naming('~ task.eval.samples_per_summary', '--split=Test'), line)
  assert processes.Steps(tmp_path) == []
  same = f'{evaluated};task.eval.samples_per_summary:3'
  processes.Succeeded(trainer('Sampled', tmp_path, 2, same))


def testNonfiniteStepsInARowEndTheRun(trainer, tmp_path):
  done = trainer('NotFinite', tmp_path, 9)
  assert done.returncode == 1
  why, where = processes.Messages(done.stderr)
  assert naming.Names(why, 'step 4', '2 steps', '(3 to 4', 'updates', '--check_numerics')
  assert naming.Names(why, 'input', 'micro-batch 0', '3 NaN', '0 Inf', 'targets')
  assert naming.Names(where, 'after step 4', 'checkpoint of step 3')
  two, three = (processes.Tensors(tmp_path, step)['toy.w'] for step in (2, 3))
  np.testing.assert_array_equal(two, three)


def testAnInputThatCannotBeSavedIsRefusedAtTheStart(trainer, tmp_path):
  line = _RefusedIn(trainer('Unsaveable', tmp_path, 9))
  assert naming.Names(line, 'Generated', 'from_generator')
  assert processes.Steps(tmp_path) == []


def testARunEndsAtADamagedRecordOfAStreamAndResumesWithoutIt(trainer, tmp_path):
  line = _RefusedIn(trainer('Stream', tmp_path, 9))
  assert naming.Names(line, 'points.tfrecord', 'record 21', 'byte 720', 'damaged_records', 'skip')
  assert naming.Names(line, 'Records', 'example 18', 'after step 6', 'checkpoint')
  before = processes.Steps(tmp_path)
  done = processes.Succeeded(trainer('Stream', tmp_path, 9, 'input.damaged_records:skip'))
  assert naming.AnyLineNames(done.stdout, 'resuming', f'step {before[-1]}')
  assert naming.Names(done.stdout, '1 damaged records')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
