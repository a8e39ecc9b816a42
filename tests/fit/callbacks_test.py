# SPDX-License-Identifier: Apache-2.0
"""Keras's callbacks see and change a pipeline as they do a plain model."""

import csv
import sys

import keras
import numpy as np
import pytest

from tests.toys import keras_fits

CALLBACKS = keras.callbacks
X, Y = keras_fits.Floats(12, 5), keras_fits.Floats(12, 3, seed=1)
FIT = {'batch_size': 6, 'shuffle': False, 'verbose': 0}


def _Compiled(kind, learning_rate=0.1):
  """Returns a compiled model, plain or as a pipeline."""
  model = keras_fits.Seeded(keras_fits.Mlp)
  if kind == 'pipeline':
    model = keras_fits.Pipe(model, 2, 2)
  optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
  model.compile(optimizer=optimizer, loss='mse', metrics=['mae'], run_eagerly=kind == 'plain')
  return model


def _CheckWeights(actual, expected):
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def _Rates(epoch, rate):
  """A schedule that makes the loss grow after two epochs."""
  return rate * (0.5 if epoch < 2 else 4.0)


def _RunAll(kind, folder):
  """Fits with many callbacks at once; returns the history, the weights and the calls."""
  model, calls = _Compiled(kind), []
  folder = folder / kind
  callbacks = [
    CALLBACKS.LearningRateScheduler(_Rates),
    CALLBACKS.ReduceLROnPlateau(monitor='val_loss', patience=1, factor=0.3),
    CALLBACKS.ModelCheckpoint(str(folder / 'best.keras'), save_best_only=True),
    CALLBACKS.ModelCheckpoint(str(folder / '{epoch}.weights.h5'), save_weights_only=True),
    CALLBACKS.CSVLogger(str(folder / 'log.csv')),
    CALLBACKS.TensorBoard(str(folder / 'board'), histogram_freq=1),
    CALLBACKS.LambdaCallback(
      on_train_begin=lambda logs: calls.append('begin'),
      on_train_batch_end=lambda batch, logs: calls.append((batch, sorted(logs))),
      on_epoch_end=lambda epoch, logs: calls.append((epoch, sorted(logs))),
    ),
    CALLBACKS.EarlyStopping(monitor='val_loss', patience=2, restore_best_weights=True),
  ]
  folder.mkdir()
  data = (X[:5] + 1, Y[:5])
  history = model.fit(X, Y, epochs=8, validation_data=data, callbacks=callbacks, **FIT).history
  return keras_fits.Result(history, model.get_weights()), calls


def _Files(folder):
  """Returns the files of a run, without the hosts and times in the names of TensorBoard's."""
  files = [p.relative_to(folder) for p in folder.rglob('*') if p.is_file()]
  return sorted(str(p.parent if 'tfevents' in p.name else p) for p in files)


def testCallbacksSeeThePlainModel(tmp_path):
  expected, expected_calls = _RunAll('plain', tmp_path)
  actual, calls = _RunAll('pipeline', tmp_path)
  keras_fits.CheckEqual(actual, expected)
  assert calls == expected_calls
  # It was stopped, and its best weights are not the last ones.
  num_epochs = len(expected.history['loss'])
  best = int(np.argmin(expected.history['val_loss'])) + 1
  assert best < num_epochs < 8
  plain, pipeline = tmp_path / 'plain', tmp_path / 'pipeline'
  assert _Files(pipeline) == _Files(plain)
  model = keras.models.load_model(pipeline / 'best.keras')
  assert model.optimizer.iterations == 2 * best
  _CheckWeights(model.get_weights(), actual.weights)
  for epoch in (1, num_epochs):
    weights = []
    for folder in (pipeline, plain):
      model.load_weights(folder / f'{epoch}.weights.h5')
      weights.append(model.get_weights())
    _CheckWeights(*weights)
  logs = []
  for folder in (pipeline, plain):
    with (folder / 'log.csv').open() as f:
      logs.append([{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)])
  assert len(logs[0]) == num_epochs
  for row, other in zip(*logs, strict=True):
    assert row == pytest.approx(other, rel=1e-4)


def testBackupAndRestore(tmp_path):
  """A run that fails in its third epoch continues there, with the optimizer's slots."""
  undisturbed = _Compiled('pipeline')
  history = undisturbed.fit(X, Y, epochs=5, **FIT).history

  def Backup():
    return CALLBACKS.BackupAndRestore(str(tmp_path / 'backup'))

  def Fail(epoch, logs):
    if epoch == 2:
      raise RuntimeError('interrupted')

  failing = CALLBACKS.LambdaCallback(on_epoch_begin=Fail)
  with pytest.raises(RuntimeError, match='interrupted'):
    _Compiled('pipeline').fit(X, Y, epochs=5, callbacks=[Backup(), failing], **FIT)
  resumed = _Compiled('pipeline')
  actual = resumed.fit(X, Y, epochs=5, callbacks=[Backup()], **FIT).history
  assert actual['loss'] == pytest.approx(history['loss'][2:], rel=1e-5)
  _CheckWeights(resumed.get_weights(), undisturbed.get_weights())
  assert resumed.optimizer.iterations == undisturbed.optimizer.iterations == 10


def testTerminateOnNaN():
  lengths = []
  for kind in ('plain', 'pipeline'):
    model = _Compiled(kind, learning_rate=1e30)
    history = model.fit(X, Y, epochs=5, callbacks=[CALLBACKS.TerminateOnNaN()], **FIT)
    lengths.append(len(history.history.get('loss', [])))
    assert model.stop_training
    assert model.optimizer.iterations < 10
  assert lengths[0] == lengths[1]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
