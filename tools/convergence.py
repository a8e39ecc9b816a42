# SPDX-License-Identifier: Apache-2.0
"""Trains models on different numbers of stages, and draws their curves of loss.

    python -m tools.convergence --output=docs/convergence.svg

Run it in the checkout. All runs of a model have the same data, initial weights and micro-batches.
`transformer` is lm.stdlib.ByteTransformerTiny with six layers and dropout. `keras` is a
convolutional network on scikit-learn's digits, trained by `PipelinedModel.fit`; its first curve is
Keras without a pipeline. The largest difference is relative to the first curve.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary as binary  # First: it drops the messages of native code.

# isort: split
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from tools import program

FLAGS = flags.FLAGS

_NUM_MICRO_BATCHES = 4
_KEY = 'lm.stdlib.ByteTransformerTiny'
_SIZES = 'task.num_layers:6;task.stack.num_micro_batches:4;task.residual_dropout_prob:0.1'


def DefineFlags() -> None:
  """Defines the flags; all have defaults."""
  flags.DEFINE_list('models', list(_MODELS), f'Models to train: {", ".join(_MODELS)}.')
  flags.DEFINE_list('num_stages', ['1', '2', '4'], 'Numbers of stages K.')
  flags.DEFINE_integer('num_steps', 200, 'Number of training steps.', lower_bound=1)
  program.DefineOutput()


def TrainTransformer(
  num_stages: Sequence[int], num_steps: int, devices: Sequence[str]
) -> dict[str, list[float]]:
  """Returns {curve: loss of each step} of an experiment."""
  from lingvo_gpipe.core import params_text
  from lingvo_gpipe.experiment import model as model_lib
  from lingvo_gpipe.experiment import registry
  from lingvo_gpipe.runners import train_runner

  curves = {}
  for k in num_stages:
    params: Any = registry.GetParams(_KEY, 'Train', packages=['params'])
    params.ApplyOverrides(params_text.ParseOverrides(f'{_SIZES};task.stack.num_stages:{k}'))
    model = model_lib.SingleTaskModel(params)
    assert model.input is not None
    runner = train_runner.TrainRunner(model.task, devices[:k], model.input.BatchSpec())
    values = [runner.TrainStep(batch) for batch in model.input.Dataset().take(num_steps)]
    curves[f'K={k}'] = [metrics['loss'] for metrics in values if metrics]
  return curves


def TrainKeras(
  num_stages: Sequence[int], num_steps: int, devices: Sequence[str]
) -> dict[str, list[float]]:
  """Returns {curve: loss of each step} of a Keras model, plain and as a `PipelinedModel`."""
  import keras
  import tensorflow as tf
  from sklearn import datasets  # type: ignore[import-untyped]

  from lingvo_gpipe.fit import pipelined_model

  def MakeModel() -> keras.Model:
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input([8, 8, 1])
    for filters in (8, 16, 32):
      x = keras.layers.Conv2D(filters, 3, padding='same')(x)
      x = keras.layers.Activation('relu')(keras.layers.LayerNormalization()(x))
    x = keras.layers.Dense(32, activation='relu')(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))

  images, digits = datasets.load_digits(return_X_y=True)
  data = tf.data.Dataset.from_tensor_slices((images.reshape([-1, 8, 8, 1]) / 16, digits))
  batches = data.batch(32, drop_remainder=True).repeat()
  curves = {}
  for name, k in {'Keras': 0, **{f'K={k}': k for k in num_stages}}.items():
    model = MakeModel()
    if k:
      model = pipelined_model.PipelinedModel(
        model, num_stages=k, num_micro_batches=_NUM_MICRO_BATCHES, devices=devices[:k]
      )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    # Epochs of one step: Keras reports means of epochs.
    history = model.fit(batches, epochs=num_steps, steps_per_epoch=1, verbose=0)
    curves[name] = history.history['loss']
  return curves


_MODELS: Mapping[str, Callable[..., dict[str, list[float]]]] = {
  'transformer': TrainTransformer,
  'keras': TrainKeras,
}


def Table(results: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
  """Returns a table in Markdown; differences are from the first curve of each model."""
  lines = [
    '| Model | Curve | First loss | Last loss | Largest difference | at step |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for model, curves in results.items():
    first, *_ = curves.values()
    for name, losses in curves.items():
      differences = [abs(a - b) / b for a, b in zip(losses, first, strict=True)]
      most = max(differences)
      where = f'{most:.1e} | {differences.index(most) + 1}' if losses is not first else ' | '
      lines.append(f'| {model} | {name} | {losses[0]:.6f} | {losses[-1]:.6f} | {where} |')
  return '\n'.join(lines)


def Run() -> int:
  """Trains, prints the table and draws; returns the exit status."""
  names, num_stages = program.Names('models', _MODELS), program.Numbers('num_stages')
  from lingvo_gpipe.distributed import cluster
  from lingvo_gpipe.reporting import line_chart

  devices = cluster.Cluster.Create(max(num_stages), platform='cpu').devices
  results = {name: _MODELS[name](num_stages, FLAGS.num_steps, devices) for name in names}
  print(Table(results))
  charts = {
    f'{model}: loss': {name: list(enumerate(losses, 1)) for name, losses in curves.items()}
    for model, curves in results.items()
  }
  program.WriteOutput(line_chart.Picture(charts))
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
