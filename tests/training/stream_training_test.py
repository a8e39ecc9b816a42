# SPDX-License-Identifier: Apache-2.0
"""Training from streams: restarts are bit-equal, and streams that cannot be saved are refused."""

import json
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.experiment import model, multi_task_model
from lingvo_gpipe.input import stream_input
from lingvo_gpipe.input.records import tf_record_stream
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.training import stream_states, train_program
from tests import naming, processes
from tests.toys import multi_task, projects, training

END = 20


class _Points(stream_input.BaseStreamInput):
  """Points that the stream numbers in their order."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('num_targets', 2, 'Values to predict.')
    p.Define('seed', 0, 'Other points.')
    return p.Set(batch_size=4, shuffle_buffer_size=7)

  def _Stream(self, epoch):
    p = self.params

    def Point(i):
      draw = lambda size, seed: tf.random.stateless_uniform([size], [p.seed + seed, i])  # noqa: E731
      return nested_map.NestedMap(inputs=draw(4, 1), targets=draw(p.num_targets, 2))

    return tf.data.Dataset.range(30).map(Point)

  def _FingerprintParts(self):
    return ['points', self.params.seed]


class _Generated(_Points):
  """A stream from a Python generator."""

  def _Stream(self, epoch):
    def Point(i):
      return nested_map.NestedMap(inputs=tf.fill([4], i), targets=tf.fill([2], i))

    spec = tf.TensorSpec([], tf.float32)
    return tf.data.Dataset.from_generator(lambda: iter([1.0, 2.0]), output_signature=spec).map(
      Point
    )


class _Others(_Points):
  """Another pipeline with equal Params."""

  def _Stream(self, epoch):
    return super()._Stream(epoch).filter(lambda point: point.inputs[0] > 0.1).skip(2)


class _Ignoring(_Points):
  """May lose points."""

  def _Stream(self, epoch):
    return super()._Stream(epoch).ignore_errors()


def _Params(cls=_Points, **train):
  return training.Params(**train).Set(input=cls.Params())


def _Weights(logdir, step=END):
  """Returns all tensors but the streams' states: how far they read ahead depends on timing."""
  tensors = processes.Tensors(logdir, step)
  return {name: value for name, value in tensors.items() if not name.endswith('/iterator')}


def _AssertSame(logdir, other, step=END):
  processes.AssertSameTensors(_Weights(logdir, step), _Weights(other, step))


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """An uninterrupted run that saves at each step in the background."""
  logdir = tmp_path_factory.mktemp('straight')
  training.Train(logdir, _Params(save_interval_steps=1, save_max_to_keep=END))
  return logdir


@pytest.mark.parametrize('at', [7, 13])  # 7.5 batches are an epoch.
def testARestartAfterAKillEqualsOneRun(straight, tmp_path, at):
  training.Train(processes.CopyAsKilled(straight, tmp_path / 'killed', at), _Params())
  _AssertSame(tmp_path / 'killed', straight)


def testTwoCallsEqualOneRun(straight, tmp_path):
  for max_steps in (8, END):
    training.Train(tmp_path, _Params(max_steps=max_steps, save_async=False))
  _AssertSame(tmp_path, straight)


def testOnlyStreamsAddToACheckpoint(straight, tmp_path, capsys):
  assert processes.Tensors(straight, END).keys() - _Weights(straight).keys() == {'input/iterator'}
  training.Train(tmp_path, training.Params(max_steps=1))
  assert _Weights(tmp_path, 1).keys() == processes.Tensors(tmp_path, 1).keys()
  capsys.readouterr()
  training.Train(straight, _Params())
  assert naming.AnyLineNames(capsys.readouterr().out, 'data', 'Train', 'stream')
  assert re.search(r'examples +80\n', (straight / 'report.txt').read_text())
  # The evaluator needs no stream.
  assert training.Evaluator(straight, training.Params()).Run(once=True) == 0


def testAnEvaluationThatMayLoseExamplesIsRefusedBeforeTraining(tmp_path, monkeypatch):
  params = training.Params(eval_datasets=['Dev'])
  monkeypatch.setattr(training, 'Input', lambda dataset: _Ignoring.Params())
  with pytest.raises(ValueError, match=naming.Naming('_Ignoring', 'ignore_errors')):
    training.Program(tmp_path, params)


def testTheEndOfAStreamEndsTheRunForGood(tmp_path, capsys):
  params = _Params()
  params.input.num_epochs = 1
  for _ in range(2):
    training.Train(tmp_path, params)
    assert naming.AnyLineNames(capsys.readouterr().out, 'data', 'step 8')
    # Two rows of the last batch are padded.
    assert re.search(r'examples +30\n', (tmp_path / 'report.txt').read_text())
  assert processes.Steps(tmp_path) == [8]


def testADamagedStateIsReportedAndTheEarlierCheckpointIsUsed(straight, tmp_path, caplog):
  logdir = processes.CopyAsKilled(straight, tmp_path / 'damaged', 9)
  state = processes.Tensors(logdir, 9)['input/iterator'][1]
  (path,) = (logdir / 'train').glob('ckpt-00000009-*/tensors.data-*')
  data = path.read_bytes()
  place = data.index(state) + len(state) // 2
  path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
  training.Train(logdir, _Params())
  assert naming.AnyLineNames(caplog.text, 'damaged', 'ckpt-00000009')
  _AssertSame(logdir, straight)


def testAStreamThatCannotBeSavedIsRefusedBeforeTheFirstStep(tmp_path):
  program = training.Program(tmp_path, _Params(_Generated))
  with pytest.raises(ValueError, match=naming.Naming('_Generated', 'PyFunc')) as e:
    program.Run()
  assert '\n' not in str(e.value)
  assert program._step == 0 and not list((tmp_path / 'train').glob('ckpt*'))


class _Recorded(tf_record_stream.TfRecordStream):
  """Points stored as records."""

  def _Example(self, record):
    values = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [6])
    return nested_map.NestedMap(inputs=values[:4], targets=values[4:])


def testARunEndsAtADamagedRecordAndResumesWithoutIt(tmp_path, capsys):
  """No checkpoint has the failure, although batches are read ahead and each step is saved."""
  path = tmp_path / 'points.tfrecord'
  points = np.random.default_rng(3).uniform(size=[100, 6]).astype(np.float32)
  with tf.io.TFRecordWriter(str(path)) as writer:
    for point in points:
      writer.write(point.tobytes())
  data = bytearray(path.read_bytes())
  data[30 * 40 + 12] ^= 1
  path.write_bytes(data)
  params = _Params(_Recorded, save_interval_steps=1, max_steps=9)
  params.input.Set(batch_size=4, file_pattern=str(path), shuffle_buffer_size=5)
  words = naming.Naming(path, 'record 31', 'byte 1,200', 'damaged_records', 'skip')
  for _ in range(2):
    with pytest.raises(ValueError, match=words) as e:
      training.Train(tmp_path / 'killed', params)
    assert naming.Names(e.value.__notes__[-1], 'after step 6')
    assert processes.Steps(tmp_path / 'killed')[-1] == 6
  params.input.damaged_records = 'skip'
  capsys.readouterr()
  for logdir in ('killed', 'straight'):
    training.Train(tmp_path / logdir, params)
    assert naming.Names(capsys.readouterr().out, '36; 1 damaged records')
  _AssertSame(tmp_path / 'killed', tmp_path / 'straight', 9)


class _Broken(_Points):
  def _Stream(self, epoch):
    raise FileNotFoundError('away')


def testStatesOfOtherTasksStreamsAreStoredUnread():
  inputs = {'a': _Points.Params().Instantiate(), 'b': _Broken.Params().Instantiate()}
  streams = stream_states.StreamStates(inputs, ['a'])
  streams.Variables()['input/b/iterator'].assign(['of b', 'state', '2'])
  streams.AfterRestore('ckpt')
  now = streams.Now()
  assert now['input/b/iterator'].numpy().tolist() == [b'of b', b'state', b'2']
  assert now['input/a/iterator'].numpy()[2] == b'0'


def testAnotherPipelineIsRefusedInOneLine(straight, tmp_path):
  logdir = processes.CopyAsKilled(straight, tmp_path / 'other', 5)
  program = training.Program(logdir, _Params(_Others), allow_params_change=True)
  words = naming.Naming('_Others', 'ckpt-00000005.json', 'input/iterator', '_Stream, batch_size')
  with pytest.raises(ValueError, match=words) as e:
    program.Run()
  assert '\n' not in str(e.value)
  for size, value in (('num_epochs', 3), ('batch_size', 2), ('shuffle_buffer_size', 2)):
    params = _Params()
    params.input.Set(**{size: value})
    with pytest.raises(ValueError, match=naming.Naming('_Points', 'input/iterator', 'sizes', size)):
      training.Program(logdir, params, allow_params_change=True).Run()
  # A stream's checkpoint does not fit an input with an index, nor the reverse.
  with pytest.raises(
    ValueError, match=naming.Naming('ckpt-00000005.json', 'only in', 'input/iterator')
  ):
    training.Program(logdir, training.Params(), allow_params_change=True).Run()
  assert processes.Steps(logdir)[-1] == 5


def testEachTaskHasItsOwnState(tmp_path):
  def Params(max_steps, task_name='', b=None, **train):
    inputs = {'a': _Points.Params(), 'b': b or _Points.Params().Set(seed=5)}
    p = multi_task_model.MultiTaskModel.Params().Set(
      task_params=multi_task.AsParams(
        {name: training.Regression.Params().Set(name=name) for name in inputs}
      ),
      input=multi_task.AsParams(inputs),
      task_name=task_name,
    )
    for key in inputs:
      p.task_params.Get(key).train.learner.Set(learning_rate=0.01, optimizer=optimizer.SGD.Params())
    p.train.Set(max_steps=max_steps, summary_interval_steps=100, **train)
    return p

  training.Train(tmp_path / 'once', Params(12, save_interval_steps=1, save_max_to_keep=12))
  instance = Params(12).Instantiate()
  turns = [instance.TaskAtStep(step) for step in range(12)]
  first = next(step for step in range(12) if turns[step] != turns[0])
  # Task b, whose turn it is, is trained alone for a step; the stream of task a keeps its position.
  processes.CopyAsKilled(tmp_path / 'once', tmp_path / 'calls', first)
  for max_steps, task_name in ((first + 1, turns[first]), (12, '')):
    training.Train(tmp_path / 'calls', Params(max_steps, task_name), allow_params_change=True)
  _AssertSame(tmp_path / 'calls', tmp_path / 'once', 12)
  states = {n for n in processes.Tensors(tmp_path / 'once', 12) if n.endswith('/iterator')}
  assert states == {'input/a/iterator', 'input/b/iterator'}
  # The total number of examples is unknown.
  training.Train(tmp_path / 'mixed', Params(1, b=training.Input('Train')))
  report = json.loads((tmp_path / 'mixed' / 'report.json').read_text())
  assert report['num_examples'] == 0


def testReplicasShareTheStreamSoTheirNumberMayChange(straight, tmp_path, monkeypatch):
  def Seen(logdir, num_replicas, max_steps):
    p = model.SingleTaskModel.Params().Set(
      task=multi_task.Task(2, optimizer=optimizer.SGD.Params()), input=_Points.Params()
    )
    p.task.Set(name='net', **{'stack.num_micro_batches': 2, 'stack.num_stages': 1})
    p.task.train.Set(max_steps=max_steps, summary_interval_steps=100)
    program = train_program.TrainProgram(
      p,
      str(logdir),
      cluster.Cluster(multi_task.Devices()[:num_replicas], num_replicas=num_replicas),
      training.Input,
      stop_request.StopRequest(),
    )
    seen, step = [], program._runner.TrainStep
    monkeypatch.setattr(
      program._runner, 'TrainStep', lambda batch: seen.append(batch.inputs) or step(batch)
    )
    assert program.Run() == 0
    return seen

  expected = [b.inputs for b in _Points.Params().Instantiate().Dataset().take(9)]
  np.testing.assert_array_equal(Seen(tmp_path, 1, 4) + Seen(tmp_path, 2, 9), expected)


def testTwoCallsOfTheTrainerEqualOne(tmp_path, forks):
  project = projects.Write(tmp_path, projects.Experiments('text_stream'))
  points = np.random.default_rng(3).uniform(size=[50, 6])
  (project / 'points.txt').write_text(
    ''.join(' '.join(f'{x:.6f}' for x in row) + '\n' for row in points)
  )

  def Run(logdir, max_steps):
    args = ['--model=toy.Toy', f'--logdir={logdir}', f'--max_steps={max_steps}']
    return processes.Succeeded(forks.Run('trainer', *args, cwd=project))

  Run('once', 8)
  Run('calls', 5)
  done = Run('calls', 8)
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 5', '40 examples')
  _AssertSame(project / 'calls', project / 'once', 8)
  # Evaluations go through all 50 points once, from the beginning.
  assert naming.AnyLineNames(done.stdout, 'data', 'Dev', 'stream')
  assert naming.AnyLineNames(done.stdout, 'Dev', 'step 8', 'loss')
  (project / 'points.txt').unlink()
  done = forks.Run('trainer', '--model=toy.Toy', f'--logdir={project / "other"}', cwd=project)
  assert done.returncode == 2
  line = processes.Messages(done.stderr)[-1]
  assert naming.Names(line, 'Points', 'points.txt', 'No such file')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
