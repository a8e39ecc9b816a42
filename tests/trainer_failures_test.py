# SPDX-License-Identifier: Apache-2.0
"""Failures around a real trainer (disk, memory, data, signals) are reported, and lose nothing."""

import contextlib
import os
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
from tests import processes
from tests.toys import projects

# Disturbed runs resume and train up to this step.
END = 300

_EXPERIMENT = """
import os
import time

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe import nested_map, registry, synthetic, task, weight_params
from lingvo_gpipe.input.text import parallel_files
from tasks import regression


def Wait(value):
  print('waiting', flush=True)
  time.sleep(60.0)
  return value


class Wide(regression.Regression):
  @classmethod
  def Params(cls):
    return super().Params().Set(num_targets=500)


class Hungry(Wide):
  def ComputeLoss(self, theta, predictions, batch):
    size = tf.reduce_max(batch.size)
    loss = tf.reduce_mean(tf.square(predictions - batch.targets))
    return {'loss': (loss + tf.reduce_sum(tf.zeros([size, size])), self.LossWeight(batch))}, {}


class SlowToTrace(Wide):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('until', '', 'A file: tracing takes until it exists.')
    return p

  def ComputeLoss(self, theta, predictions, batch):
    print('tracing', flush=True)
    while not os.path.exists(self.params.until):
      time.sleep(0.01)
    return super().ComputeLoss(theta, predictions, batch)


class Words(task.BaseTask):
  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([300]))

  def ComputePredictions(self, theta, batch):
    return tf.gather(theta.w, batch.tgt_ids)

  def ComputeLoss(self, theta, predictions, batch):
    return {'loss': (tf.reduce_mean(tf.square(predictions - 1.0)), self.LossWeight(batch))}, {}


class TooLarge(Wide):
  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('large', weight_params.WeightParams([1 << 25, 1 << 25]))


class Data(synthetic.SyntheticRegressionInput):
  def _ExampleSpec(self):
    return nested_map.NestedMap(super()._ExampleSpec(), size=tf.TensorSpec([], tf.int32))

  def _Examples(self, indices):
    examples = super()._Examples(indices)
    examples.size = tf.where(indices < 12, 1, 1 << 20)
    return examples


class SlowData(Data):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    targets = tf.numpy_function(Wait, [examples.targets], tf.float32)
    examples.targets = tf.ensure_shape(targets, examples.targets.shape)
    return examples


class FailingData(Data):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    targets = tf.numpy_function(self._Check, [indices, examples.targets], tf.float32)
    examples.targets = tf.ensure_shape(targets, examples.targets.shape)
    return examples

  def _Check(self, indices, targets):
    if 7 in indices:
      raise ValueError('example 7 is bad')
    return targets


def Input(cls):
  return cls.Params().Set(batch_size=3, num_examples=50, num_targets=500)


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  TASK = Wide
  DATASETS = ('Slow', 'Failing')

  def Train(self):
    return Input(Data)

  def Slow(self):
    return Input(SlowData)

  def Failing(self):
    return Input(FailingData)

  def Task(self):
    p = self.TASK.Params().Set(name='toy')
    p.train.Set(save_interval_steps=1, save_max_to_keep=2, summary_interval_steps=10**6)
    return p


@registry.RegisterSingleTaskModel
class Memory(Toy):
  TASK = Hungry

  def Train(self):
    return super().Train().Set(shuffle=False)


@registry.RegisterSingleTaskModel
class Large(Toy):
  TASK = TooLarge


@registry.RegisterSingleTaskModel
class Tracing(Toy):
  TASK = SlowToTrace


@registry.RegisterSingleTaskModel
class SlowDisk(Toy):
  def Task(self):
    sync = files.Sync
    files.Sync = lambda path: sync(path) or ('00000003' in path and Wait(path))
    return super().Task()


@registry.RegisterSingleTaskModel
class Pairs(Toy):
  TASK = Words

  def Train(self):
    return parallel_files.TfRecordPairs.Params().Set(
      file_pattern='pairs.tfrecord', vocab_filepath='v.model', bucket_upper_bound=[16],
      bucket_batch_limit=2,
    )
"""


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(tmp_path_factory.mktemp('project'), _EXPERIMENT)


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
  assert re.search(r'training ended after step \d+; the next call ', message)
  assert processes.Tensors(logdir, last)['global_step'] == last
  done = trainer('Toy', logdir, END, 'task.train.save_interval_steps:0')
  assert f'resuming from step {last} ' in processes.Succeeded(done).stdout
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
  assert re.search(rf"Cannot save the checkpoint of step \d+ in '{logdir}/train': .*No space left",
                   message)  # fmt: skip
  assert 'free space' in message and 'Earlier checkpoints are untouched' in message
  assert not re.search('out of memory', message)
  ballast.unlink()
  last = _AssertResumes(trainer, logdir, message, undisturbed)
  assert f'from the checkpoint of step {last}' in message


def testALimitOnFileSizeStopsTheRunAndLosesNothing(trainer, forks, tmp_path, undisturbed):
  """The closest case to a full disk if nothing can be mounted."""

  def Limit(pid):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

  message = _RunUntilItFails(trainer, forks, tmp_path, Limit)
  assert re.search(r'Cannot save the checkpoint of step \d+ .*File too large', message)
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
  assert re.search(r'Cannot save the checkpoint .*(Read-only|ermission)', message)
  last = _AssertResumes(trainer, logdir, message, undisturbed)
  assert f'from the checkpoint of step {last}' in message


def testARemovedLogDirectoryStopsTheRunAndIsNotCreatedAgain(trainer, forks, tmp_path, undisturbed):
  logdir, elsewhere = tmp_path / 'run', tmp_path / 'elsewhere'
  message = _RunUntilItFails(trainer, forks, logdir, lambda pid: logdir.rename(elsewhere))
  assert re.search(rf"lost its directory '{logdir}/train'|Cannot save .* in '{logdir}", message)
  assert 'the next call starts over' in message
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
  assert cause.startswith('ResourceExhaustedError in the loss, in stage 0 (toy')
  assert 'shape[1048576,1048576]' in cause
  assert code.endswith(', in ComputeLoss')
  for what in ('num_micro_batches', 'num_stages', 'remat_policy', 'batch_size'):
    assert what in hint
  assert where == (
    'training ended after step 4; the next call resumes from the checkpoint of step 4'
  )
  assert processes.Tensors(tmp_path, 4)['global_step'] == 4


def testAWeightThatNeedsTooMuchMemoryIsReported(trainer, impatient, tmp_path):
  done = trainer('Large', tmp_path, 4, run=impatient.Run)
  assert done.returncode == 1
  which, hint, _ = processes.Messages(done.stderr)[-3:]
  assert ' the weight toy.large of shape [33554432, 33554432]: ' in which
  assert hint.startswith('out of memory: try more micro-batches')


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
  assert 'data: Train 20 examples\n' in first.stdout and 'damaged' not in first.stdout
  data = bytearray((project / 'pairs.tfrecord').read_bytes())
  offset = sum(16 + len(pair) for pair in pairs[:5])
  data[offset + 20] ^= 1
  (project / 'pairs.tfrecord').write_bytes(data)
  stopped = trainer('Pairs', tmp_path, 8)
  assert stopped.returncode == 2
  (line,) = processes.Messages(stopped.stderr)[-1:]
  assert re.match(
    rf'pairs\.tfrecord is damaged, .*: record 6, at byte {offset}: .*set .*damaged_records to skip',
    line,
  )
  assert processes.Steps(tmp_path)[-1] == 4
  # With and without a cache of the tokens; with it the file is not read again.
  for steps, more in ((8, ''), (10, 'input.cache_dir:cache'), (12, 'input.cache_dir:cache')):
    done = trainer('Pairs', tmp_path, steps, f'input.damaged_records:skip;{more}')
    assert 'resuming from step' in processes.Succeeded(done).stdout
    message = '(1 damaged records were left out)'
    assert f'data: Train 19 examples {message}\n' in done.stdout
    assert '1 damaged records were left out\n' in (tmp_path / 'report.txt').read_text()
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
  note = 'while the input FailingData made the batch that begins at example 6 of the data set'
  assert note in cause and cause.endswith(': ValueError: example 7 is bad')
  assert re.search(r'/params/toy\.py", line \d+, in _Check$', code)
  assert hint.startswith('what to try: ') and 'Dataset(start=6)' in hint
  assert trace == f'stack trace: {tmp_path}/error-{program}.txt'
  if program == 'trainer':
    assert where == [
      'training ended after step 4; the next call resumes from the checkpoint of step 4'
    ]
  else:
    assert ', in eval_failing of the checkpoint of step 4: ' in cause
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
  assert 'stopped by SIGTERM after step 1; ' in done.stdout
  assert processes.Steps(tmp_path) == [1]
  message = 'SIGTERM: finishing this step or batch, then stopping; send SIGTERM again to quit now'
  assert message in processes.Messages(done.stderr)


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
