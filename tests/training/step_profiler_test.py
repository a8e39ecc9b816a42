# SPDX-License-Identifier: Apache-2.0
"""--profile_steps: a trace, a picture with each action, equal weights, and refused values."""

import dataclasses
import re
import socket
import sys

import pytest

from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.experiment import model
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.profiling import profiler_trace
from lingvo_gpipe.training import step_profiler, train_program, worker_profiles
from tests import naming, processes
from tests.toys import tasks

_DIM = 4


def _Train(logdir, steps, max_steps=5, epochs=0, num_replicas=1, workers=(), **learner):
  p = model.SingleTaskModel.Params().Set(task=tasks.Stacked.Params().Set(name='toy'))
  p.task.stack = tasks.Stack(dim=_DIM, num_micro_batches=3)
  p.input = synthetic.SyntheticRegressionInput.Params().Set(
    batch_size=6, num_examples=48, num_epochs=epochs, input_shape=[_DIM], num_targets=_DIM
  )
  p.task.train.Set(max_steps=max_steps, eval_datasets=[])
  p.task.train.learner.Set(optimizer=optimizer.SGD.Params(), **learner)
  devices = cluster.Cluster.Create(2, platform='cpu', num_replicas=num_replicas)
  devices = dataclasses.replace(devices, workers=dict(enumerate(workers)))
  program = train_program.TrainProgram(
    p,
    str(logdir),
    devices,
    lambda _: p.input,
    stop_request.StopRequest(),
    train_program.RunOptions(profile_steps=steps),
  )
  assert program.Run() == 0


def _Pages(logdir):
  return sorted(path.name for path in logdir.glob('timeline*.html'))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of five steps, two of them profiled, that later resumes to step eight."""
  logdir = tmp_path_factory.mktemp('run')
  _Train(logdir, (3, 4))
  return logdir


def testThePictureHasEachActionOfEachStep(run):
  (trace,) = run.glob('train/plugins/profile/*/*.xplane.pb')
  parsed = profiler_trace.Trace(trace.read_bytes())
  assert [step.step for step in parsed.steps] == [3, 4]
  (plane,) = [plane for plane in parsed._space.planes if plane.lines]
  assert [line.name for line in plane.lines[-2:]] == [f'pipeline device:CPU:{d}' for d in range(2)]
  page = (run / 'timeline_3_4.html').read_text()
  actions = {f'{k}{kind}{m}' for k in range(2) for kind in 'FB' for m in range(3)}
  for row in ('measured', 'simulated'):
    for step in (3, 4):
      pattern = rf'<rect class="{row}" data-action="(\w+)" data-step="{step}"'
      drawn = re.findall(pattern, page)
      assert sorted(drawn) == sorted(actions)
  assert re.findall('<h2>(.*?): ', page) == ['step 3', 'step 4'] and 'replica' not in page


def testProfilingChangesNoWeights(run, tmp_path):
  _Train(tmp_path, None)
  assert not (tmp_path / 'train' / 'plugins').exists() and _Pages(tmp_path) == []
  processes.AssertSameTensors(processes.Tensors(tmp_path, 5), processes.Tensors(run, 5))


def testAResumedRunProfilesOnlyItsRemainingSteps(run, capsys):
  """Calls have equal flags, steps that are partly done, or the first step of a call."""
  _Train(run, (3, 4), max_steps=6)
  assert naming.AnyLineNames(capsys.readouterr().out, '--profile_steps=3,4', 'nothing', 'step 5')
  _Train(run, (6, 8), max_steps=8)
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, '--profile_steps=6,8', 'step 7', 'compiles')
  match = re.search(
    r'^profiled steps 7 to 8: [\d.]+ ms\b.* [\d.]+% measured, [\d.]+% simulated\b'
    # TensorFlow may leave an action of a step that compiles out of its trace.
    r'[^;\d]* [\d.]+% predicted\b[^;\d]*(; .*\bmissing\b.*: \d+)?\n'
    rf'picture: {run}/timeline_6_8.html; ',
    out,
    re.MULTILINE,
  )
  assert match, out
  assert len(list(run.glob('train/plugins/profile/*/*.xplane.pb'))) == 2


def testAPictureThatCannotBeWrittenDoesNotEndTheTraining(tmp_path, capsys):
  (tmp_path / 'train').mkdir()
  (tmp_path / 'train' / 'plugins').write_text('')
  _Train(tmp_path, (2, 2), max_steps=2)
  assert naming.AnyLineNames(capsys.readouterr().out, '--profile_steps=2,2', 'no picture')
  assert processes.Steps(tmp_path) == [2] and _Pages(tmp_path) == []


def testAWorkerWithoutATraceDoesNotEndTheTraining(tmp_path, capsys, monkeypatch):
  """Nothing listens at the first address; at the other one, calls never get an answer."""
  for name in ('_BEGIN_SECONDS', '_REQUEST_SECONDS', '_END_SECONDS'):
    monkeypatch.setattr(worker_profiles, name, 0.5)
  with socket.create_server(('localhost', 0)) as silent, socket.socket() as closed:
    closed.bind(('localhost', 0))
    addresses = [f'localhost:{s.getsockname()[1]}' for s in (closed, silent)]
    _Train(tmp_path, (2, 2), 2, workers=addresses)
  out = capsys.readouterr().out
  first, second = (line for line in out.splitlines() if line.startswith('--profile_steps=2,2: '))
  assert naming.Names(first, 'worker 0', 'unavailable') and naming.Names(
    second, 'worker 1', '0.5 s'
  )
  # The actions of this process are drawn.
  assert processes.Steps(tmp_path) == [2] and _Pages(tmp_path) == ['timeline_2_2.html']


def testMiniBatchesOfAnUpdateAreDrawnOneByOne(tmp_path, capsys):
  """The run ends before the last step to profile."""
  _Train(tmp_path, (2, 3), 3, epochs=1, num_accumulated_mini_batches=4)
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'profiled', 'step 2')
  page = (tmp_path / 'timeline_2_3.html').read_text()
  assert page.count('<rect class="measured" data-action="1B2" data-step="2"') == 4
  assert re.findall('<h2>(.*?): ', page) == [f'step 2, mini-batch {i}' for i in range(1, 5)]


def testTheFirstReplicaIsDrawn(tmp_path, capsys):
  _Train(tmp_path, (2, 2), 2, num_replicas=2)
  for text in (capsys.readouterr().out, (tmp_path / 'timeline_2_2.html').read_text()):
    assert naming.AnyLineNames(text, 'first of 2 replicas')


@pytest.mark.parametrize(
  'text', ['', '5', '5,', '7,5', '0,3', '1,2,3', '-1,4', 'a,b', '1.5,2', '2,10']
)
def testMistakesInTheFlagAreRefused(text):
  with pytest.raises(ValueError, match=rf'^--profile_steps={text}: '):
    step_profiler.ParseSteps(text, 9)


def testStepsAreParsed():
  assert step_profiler.ParseSteps(' 2, 9', 9) == (2, 9)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
