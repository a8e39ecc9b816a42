# SPDX-License-Identifier: Apache-2.0
"""The table of Keras models: its rows are green for equal results and for nothing else."""

import re
import sys
import types

import keras
import pytest
from keras import layers

from tests import naming
from tests.toys import keras_fits, stacks
from tools import keras_models
from tools.keras_zoo import applications, case, shapes, zoo


def _Compare(example):
  return keras_models.Compare(example, stacks.Devices()[:2], xla=False)


def testAWrongModelIsNotGreen():
  """Each call makes other weights, so the pipeline and the plain model differ."""
  seeds = iter(range(100))

  def Make():
    keras.utils.set_random_seed(next(seeds))
    return keras_fits.Mlp(depth=1)

  row = _Compare(case.Case('wrong', Make))
  assert row.note == ''
  assert row.loss > keras_models.LOSS
  assert row.gradient > keras_models.GRADIENT
  assert row.history > keras_models.HISTORY
  assert not row.is_green


def _Stepping():
  class Stepping(keras.Model):
    def __init__(self):
      inputs = keras.Input([5])
      super().__init__(inputs, layers.Dense(3)(inputs))

    def train_step(self, data):
      return super().train_step(data)

  return Stepping()


@pytest.mark.parametrize('reason', ['train_step', '', 'another reason'])
def testOnlyTheExpectedRefusalIsGreen(reason):
  row = _Compare(case.Case('refused', _Stepping, refused=reason))
  assert re.match(naming.Naming('ValueError', 'Stepping', 'train_step'), row.note)
  assert row.is_green == row.is_refused == (reason == 'train_step')


def testEveryFamilyOfKerasApplicationsHasARow():
  functions = [f for f in vars(keras.applications).values() if isinstance(f, types.FunctionType)]
  families = {f.__module__.replace('vgg19', 'vgg16') for f in functions}
  assert len(families) > 10
  assert families == applications.Modules()


def testTheTableOfSomeRows(capsys):
  """With the rows of tests/fit/keras_hub_test.py these are a sample of seven."""
  assert keras_models.main(['Spectral', 'nested models', 'VGG16']) == 0
  header, *rows, last = capsys.readouterr().out.splitlines()
  assert re.match(r'model +calls cells .* history +weights saved', header)
  spectral = rows.pop(1)
  assert re.match(naming.Naming('SpectralNormalization', 'ValueError', 'trained'), spectral)
  for name, row in zip(['nested models', 'VGG16, no head'], rows, strict=True):
    assert re.match(rf'{name} +\d+ +\d+ +\d+%.* yes +- +\d+', row)
  assert last == 'all rows are green'


def testARowThatIsNotGreenFails(capsys, monkeypatch):
  wrong = case.Case('not refused', _Stepping)
  monkeypatch.setattr(zoo, 'Cases', lambda: iter([*shapes.CASES, wrong]))
  assert keras_models.main(['not refused']) == 1
  *_, row, last = capsys.readouterr().out.splitlines()
  assert re.match(r'not refused +! +0 +0', row)
  assert last == 'rows with ! are not green'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
