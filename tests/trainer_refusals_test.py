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

_EXPERIMENT = """
import tensorflow as tf

from lingvo_gpipe import nested_map, registry, stream_input, synthetic, tf_record_stream
from tasks import regression


class BadFrom6(synthetic.SyntheticRegressionInput):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    bad = tf.where(indices < 6, 0.0, float('nan'))
    return nested_map.NestedMap(examples, targets=examples.targets + bad[:, tf.newaxis])


class Generated(stream_input.BaseStreamInput):
  def _Stream(self, epoch):
    spec = tf.TensorSpec([], tf.float32)
    numbers = tf.data.Dataset.from_generator(lambda: iter([1.0] * 9), output_signature=spec)
    return numbers.map(lambda x: {'inputs': tf.fill([4], x), 'targets': tf.fill([1], x)})

  def _FingerprintParts(self):
    return ['generated']


class Records(tf_record_stream.TfRecordStream):
  def _Example(self, record):
    values = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [5])
    return nested_map.NestedMap(inputs=values[:4], targets=values[4:])


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  INPUT = synthetic.SyntheticRegressionInput

  def Train(self):
    return self.INPUT.Params().Set(batch_size=3, num_examples=50, input_shape=[4])

  def Task(self):
    p = regression.Regression.Params().Set(name='toy', input_dim=4)
    p.train.Set(save_interval_steps=1, summary_interval_steps=10**6, max_nonfinite_steps=2)
    return p


@registry.RegisterSingleTaskModel
class Sampled(Toy):
  def Test(self):
    return self.Train()

  def Task_Test(self):
    return super().Task().Set(**{'eval.samples_per_summary': 3})


@registry.RegisterSingleTaskModel
class NotFinite(Toy):
  INPUT = BadFrom6

  def Train(self):
    return super().Train().Set(shuffle=False)


@registry.RegisterSingleTaskModel
class Unsaveable(Toy):
  def Train(self):
    return Generated.Params().Set(batch_size=3)


@registry.RegisterSingleTaskModel
class Stream(Toy):
  def Train(self):
    return Records.Params().Set(batch_size=3, file_pattern='points.tfrecord', shuffle=False)
"""


@pytest.fixture(scope='module')
def trainer(forks, tmp_path_factory):
  """Runs the trainer on an experiment of the project."""
  project = projects.Write(tmp_path_factory.mktemp('project'), _EXPERIMENT)
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
    assert re.match(
      rf"'{tmp_path}/train' is in use by another trainer \(process {pid} on .*--logdir",
      line,
    )
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
  assert 'resuming from step 1 ' in done.stdout
  steps = re.findall(r'Skipping damaged checkpoint \S*ckpt-0*(\d)-', done.stderr)
  assert steps == ['3', '2']
  # The new checkpoint of this step equals the old one.
  assert processes.Steps(copied)[-1] == 3
  processes.AssertSameTensors(processes.Tensors(copied, 3), processes.Tensors(trained, 3))


def testChangedParamsAreRefusedUnlessAllowed(trainer, trained, copied):
  other = 'task.train.learner.learning_rate:0.5'
  message = r'~ task\.train\.learner\.learning_rate : [\d.e-]+ -> 0\.5'
  line = _RefusedIn(trainer('Toy', copied, 4, other))
  assert re.search(rf'was trained with other Params .*: {message}\. .*--allow_params_change', line)
  assert 'was trained with other Params' in _RefusedIn(trainer('Stream', copied, 4))
  # Weights of another shape never fit.
  line = _RefusedIn(trainer('Toy', copied, 4, 'task.num_targets:2', '--allow_params_change'))
  assert re.search(r'does not fit.*of another shape.* toy\.w ', line)
  assert processes.Steps(copied) == processes.Steps(trained)
  done = processes.Succeeded(trainer('Toy', copied, 4, other, '--allow_params_change'))
  change, rate = processes.Messages(done.stderr)
  assert re.search(message, change) and 'resuming from step 3 ' in done.stdout
  assert re.search(r'learning_rate was [\d.e-]+ at the checkpoint and is 0\.5 now', rate)


def testHarmlessChangesOfParamsPassAndAreLogged(trainer, copied):
  done = processes.Succeeded(trainer('Toy', copied, 4, 'task.train.save_max_to_keep:2'))
  assert 'resuming from step 3 ' in done.stdout and processes.Messages(done.stderr) == []
  assert re.search('other Params: ~ task.train.save_max_to_keep : .* -> 2', done.stderr)


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
  assert re.match(
    r'step 4: the loss or gradients of 2 steps in a row were not finite \(3 to 4; .*training '
    r'stops; updates with non-finite gradients were skipped\. .*--check_numerics to .*layer.*'
    r'\. In the last step the batch is at fault: input of micro-batch 0: 3 NaN and 0 Inf .*targets',
    why,
  )
  assert where == 'training ended after step 4; the next call resumes from the checkpoint of step 3'
  two, three = (processes.Tensors(tmp_path, step)['toy.w'] for step in (2, 3))
  np.testing.assert_array_equal(two, three)


def testAnInputThatCannotBeSavedIsRefusedAtTheStart(trainer, tmp_path):
  line = _RefusedIn(trainer('Unsaveable', tmp_path, 9))
  assert re.match('Generated cannot be saved, so a run could not be resumed.*from_generator', line)
  assert processes.Steps(tmp_path) == []


def testARunEndsAtADamagedRecordOfAStreamAndResumesWithoutIt(trainer, tmp_path):
  line = _RefusedIn(trainer('Stream', tmp_path, 9))
  assert re.match(
    r'points\.tfrecord is damaged, .*: record 21, at byte 720: .*damaged_records to skip.*'
    r'\(while the input Records made the batch that begins at example 18 of the run\) '
    r'\(training ended after step 6; the next call resumes from the checkpoint of step',
    line,
  )
  before = processes.Steps(tmp_path)
  done = processes.Succeeded(trainer('Stream', tmp_path, 9, 'input.damaged_records:skip'))
  assert f'resuming from step {before[-1]} ' in done.stdout
  assert '1 damaged records were left out' in done.stdout


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
