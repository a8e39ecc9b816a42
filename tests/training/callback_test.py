# SPDX-License-Identifier: Apache-2.0
"""Callbacks that an experiment names in its Params."""

import sys

import pytest

from lingvo_gpipe import callback
from tests import naming, processes
from tests.toys import training


class _Recorder(callback.Callback):
  """Records its calls; ends the training when the loss of an evaluation is known."""

  calls: list[tuple] = []  # A class attribute: the program makes the instances.

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('save_after', 2, 'Saves after this step.')
    return p

  def Begin(self, step):
    self.calls.append(('Begin', step))

  def AfterStep(self, step):
    step.needs_save |= step.number == self.params.save_after
    if 'eval_dev' in step.evaluations:
      step.end_reason = 'the recorder'
    self.calls.append(('AfterStep', step.number, step.num_rows, sorted(step.evaluations)))
    step.Print(f'recorded step {step.number} with loss {step.values["loss"]:.3f}')

  def AtEnd(self, step):
    self.calls.append(('AtEnd', step.number, step.end_reason))

  def Close(self):
    self.calls.append(('Close',))


def _Params(**callback_params):
  params = training.Params(
    eval_datasets=['Dev'], eval_interval_steps=4, save_interval_steps=100, max_steps=8
  )
  params.task.train.callbacks = [_Recorder.Params().Set(**callback_params)]
  return params


@pytest.fixture(autouse=True)
def calls():
  _Recorder.calls.clear()
  return _Recorder.calls


def testACallbackSeesEachStepAndCanSaveAndEndTheTraining(tmp_path, calls, capsys):
  training.Train(tmp_path, _Params(), job='train_and_eval')
  assert calls == [
    ('Begin', 0),
    ('AfterStep', 1, 4, []),
    ('AfterStep', 2, 4, []),
    ('AfterStep', 3, 4, []),
    ('AfterStep', 4, 4, ['eval_dev']),
    ('AtEnd', 4, 'the recorder'),
    ('Close',),
  ]
  assert processes.Steps(tmp_path) == [2, 4]
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'the recorder', 'step 4')
  assert 'recorded step 3 with loss ' in out


def testARunResumesWithOtherCallbacks(tmp_path, calls):
  training.Train(tmp_path, _Params(), job='train_and_eval')
  calls.clear()
  training.Train(tmp_path, _Params(save_after=6))
  assert calls[0] == ('Begin', 4) and calls[-2] == ('AtEnd', 8, 'max_steps 8')
  assert processes.Steps(tmp_path) == [2, 4, 6, 8]


def testCallbacksAreClosedWhenAStepFails(tmp_path, calls, monkeypatch):
  def Fail(self, step):
    raise ValueError('no such column')

  monkeypatch.setattr(_Recorder, 'AfterStep', Fail)
  with pytest.raises(ValueError, match='no such column') as e:
    training.Train(tmp_path, _Params())
  assert calls == [('Begin', 0), ('Close',)]
  assert 'step 1' in e.value.__notes__[-1]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
