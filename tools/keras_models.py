# SPDX-License-Identifier: Apache-2.0
"""Trains many Keras models as pipelines, and compares each with plain Keras.

    python -m tools.keras_models            # all of them, about half an hour
    python -m tools.keras_models gpt-2 t5   # the rows whose names contain one of these words
    python -m tools.keras_models --remat_policy=layer  # all, recomputed layer by layer

For each model the table has the numbers of its calls and of its cells, the share of the ideal
speed that the best cut reaches with two and four stages (by FLOPs), and the largest differences to
plain Keras: of the loss of a batch, of its gradient (relative to its norm), of the history of one
epoch of `fit` with two stages and two micro-batches, and of the weights after it. `saved` says
whether the model read back from its file is the same, `tokens` whether a causal language model
generates the same greedy tokens in two stages. The last column says what is special. Where
BatchNormalization would magnify the rounding of float32, all is in float64. Models of KerasHub need
the extra `lingvo_gpipe[keras-hub]`.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # noqa: F401  First: it keeps TensorFlow quiet.

# isort: split
import argparse
import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import PipelinedModel, cluster
from lingvo_gpipe.pipeline.schedule import rematerialisation
from tools.keras_zoo import zoo
from tools.keras_zoo.case import Case

# TensorFlow keeps the graphs of custom gradients: all rows in one process would need 20 GB.
_ROWS_OF_PROCESS = 12
# Bounds of a green row, relative.
LOSS, GRADIENT, HISTORY = 1e-5, 1e-4, 1e-4


@dataclasses.dataclass(frozen=True)
class Row:
  """The comparison of one model; None for what was not compared.

  Attributes:
    name: the model's.
    calls: number of calls of layers and operations, nested models opened.
    cells: number of cells.
    balance: {number of stages: mean over largest cost of a stage}.
    loss: relative difference of the loss of one batch, one stage and one micro-batch.
    gradient: norm of the gradient's difference over its norm, there.
    history: largest relative difference of a figure of one epoch, two stages and micro-batches.
    weights: largest difference of a weight after that epoch.
    saved: whether the model read back from its file has the weights bit by bit.
    tokens: whether a causal model of KerasHub generates the same tokens; None for another model.
    is_refused: whether the model is one that a pipeline refuses, and says why.
    tolerance: factor of the bounds.
    note: why a comparison is missing, or the error.
  """

  name: str
  calls: int = 0
  cells: int = 0
  balance: dict[int, float] = dataclasses.field(default_factory=dict)
  loss: float | None = None
  gradient: float | None = None
  history: float | None = None
  weights: float | None = None
  saved: bool | None = None
  tokens: bool | None = None
  is_refused: bool = False
  tolerance: float = 1.0
  note: str = ''

  @property
  def is_green(self) -> bool:
    """Whether every comparison that was made is within its bound."""
    bounds = ((self.loss, LOSS), (self.gradient, GRADIENT), (self.history, HISTORY))
    is_equal = all(value is not None and value <= bound * self.tolerance for value, bound in bounds)
    return self.is_refused or (is_equal and self.saved is True and self.tokens is not False)


def Compare(case: Case, devices: Sequence[str], **options: Any) -> Row:
  """Returns the row of a case with options of PipelinedModel; an exception becomes its note."""
  row = Row(case.name, note=case.note, tolerance=case.tolerance)
  floatx = keras.config.floatx()
  keras.config.set_floatx(case.dtype)
  try:
    plain = _Model(case)
    _Compile(plain, 'sgd')
    x = case.Inputs(plain, 8, seed=1)
    outputs = plain.predict(x, batch_size=8, verbose=0)
    y = case.Targets(plain, outputs, seed=2)

    def Pipe(num_stages: int, num_micro_batches: int) -> Any:
      return PipelinedModel(
        _Model(case),
        num_stages,
        num_micro_batches=num_micro_batches,
        devices=devices[:num_stages],
        **options,
      )

    before = plain.get_weights()
    expected = plain.train_on_batch(x, y, return_dict=True)['loss']
    pipe = Pipe(1, 1)
    _Compile(pipe, 'sgd')
    loss = pipe.train_on_batch(x, y, return_dict=True)['loss']
    row = dataclasses.replace(
      row,
      calls=len(pipe._placed.graph.nodes),
      cells=len(pipe._placed.cells),
      loss=abs(loss - expected) / max(abs(expected), 1e-6),
      gradient=_Difference(before, plain.get_weights(), pipe.model.get_weights()),
    )
    balance = {k: _Balance(pipe.stack, k, x, pipe._placed.graph) for k in (2, 4) if k <= row.cells}
    row = dataclasses.replace(row, balance=balance)
    plain = _Model(case)
    _Compile(plain, 'adam')
    plain.optimizer.build(plain.trainable_variables)  # Otherwise Keras traces the step twice.
    expected = plain.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0).history
    pipe = Pipe(min(2, row.cells), case.num_micro_batches)
    _Compile(pipe, 'adam')
    history = pipe.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0).history
    row = dataclasses.replace(
      row,
      history=max(_Relative(history[name][0], v[0]) for name, v in expected.items()),
      weights=_Largest(plain.get_weights(), pipe.model.get_weights()),
      saved=_AreWeightsSaved(pipe, plain),
      tokens=_Tokens(pipe, plain, x) if hasattr(plain, 'call_with_cache') else None,
    )
  except Exception as e:
    if os.environ.get('RAISE'):
      raise
    note = f'{type(e).__name__}: {e}'.replace('\n', ' ')[:300]
    is_expected = isinstance(e, ValueError) and bool(case.refused) and case.refused in note
    row = dataclasses.replace(row, is_refused=is_expected, note=note)
  finally:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)  # Keras has made it from floatx.
  return row


def _Model(case: Case) -> Any:
  keras.utils.set_random_seed(7)
  model = case.make()
  for layer in model._flatten_layers():  # Dropout draws other masks in a pipeline.
    for name in ('rate', 'dropout', '_dropout'):
      if isinstance(getattr(layer, name, None), float):
        with contextlib.suppress(AttributeError):  # An LSTM reads the dropout of its cell.
          setattr(layer, name, 0.0)
  return model


def _Compile(model: Any, optimizer: str) -> None:
  # Adam's division would magnify the rounding of a small gradient.
  rule = (
    keras.optimizers.SGD(1.0) if optimizer == 'sgd' else keras.optimizers.Adam(1e-3, epsilon=1e-3)
  )
  # The empty lists replace the metrics that KerasHub's tasks begin with.
  model.compile(
    rule,
    'mse',
    metrics=[],
    weighted_metrics=[],
    jit_compile=False,
    # Plain Keras would be traced twice, which takes longer than these few steps.
    run_eagerly=not isinstance(model, PipelinedModel),
  )


def _Balance(stack: Any, num_stages: int, x: Any, graph: Any) -> float:
  p = stack.params.Copy().Set(num_stages=num_stages, splits=[])
  specs = [None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in graph.FlatInputs(x)]
  cut = p.Instantiate().MakeCut(*specs)
  costs = [s.flops for s in cut.stages]
  return sum(costs) / len(costs) / max(costs)


def _Difference(before: Any, expected: Any, actual: Any) -> float:
  """Returns the norm of the difference of two steps over the norm of the expected step."""
  steps = [(b - a, c - a) for a, b, c in zip(before, expected, actual, strict=True)]
  squares = sum(float(np.sum(np.square(e, dtype='float64'))) for e, _ in steps)
  errors = sum(float(np.sum(np.square(e - a, dtype='float64'))) for e, a in steps)
  return (errors / max(squares, 1e-30)) ** 0.5


def _Relative(a: float, b: float) -> float:
  return abs(a - b) / max(abs(b), 1e-6)


def _Largest(a: Any, b: Any) -> float:
  return max((float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True) if x.size), default=0)


def _AreWeightsSaved(pipe: Any, plain: Any) -> bool:
  """Whether saved and loaded weights equal plain Keras's, bit by bit.

  Keras saves LoRA's weights merged into the others, so they need not be the ones before.
  """
  before = pipe.model.get_weights()
  plain.set_weights(before)
  loaded = []
  with tempfile.TemporaryDirectory() as folder:
    for i, model in enumerate((pipe, plain)):
      path = os.path.join(folder, f'{i}.weights.h5')
      model.save_weights(path)
      model.set_weights([np.zeros_like(w) for w in before])
      model.load_weights(path)
      loaded.append(model.get_weights())
  return all(np.array_equal(a, b) for a, b in zip(*loaded, strict=True))


def _Tokens(pipe: Any, plain: Any, x: Any) -> bool | None:
  """Whether both generate the same greedy tokens; None if the plain model cannot generate."""
  random = np.random.RandomState(1)
  weights = [
    w + 0.3 * random.standard_normal(w.shape) if w.dtype.kind != 'u' else w
    for w in plain.get_weights()  # The first ones are so small that tokens repeat.
  ]
  mask = np.zeros_like(x['padding_mask'])
  mask[:, :2], mask[0, 2] = 1, 1  # Prompts of different lengths.

  def Generate(model: Any) -> Any:
    model.set_weights(weights)
    model.compile(sampler='greedy', jit_compile=False, run_eagerly=model is plain)
    return model.generate({**x, 'padding_mask': mask}, stop_token_ids=None)['token_ids']

  try:
    expected = Generate(plain)
  except ValueError:  # Gemma 3 of KerasHub 0.32 without a preprocessor.
    return None
  return np.array_equal(Generate(pipe), expected)


def main(args: Sequence[str] | None = None) -> int:
  """Prints the table; returns 1 if a row is not green."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('names', nargs='*', help='parts of the names of the rows to print')
  parser.add_argument('--xla', action='store_true', help='compile the stages by XLA (slow)')
  parser.add_argument(
    '--remat_policy',
    default='stage',
    choices=[*rematerialisation.POLICIES, 'auto'],
    help='what backward recomputes',
  )
  parser.add_argument('--rows', help='indices of rows to print, without a heading')
  flags = parser.parse_args(args)
  options = {'xla': flags.xla, 'remat_policy': flags.remat_policy}
  cases = list(zoo.Cases())
  if flags.rows is not None:
    return _PrintRows([cases[int(i)] for i in flags.rows.split(',')], options)
  words = [name.lower() for name in flags.names]
  for word in words:
    if not any(word in case.name.lower() for case in cases):
      names = ', '.join(case.name for case in cases)
      parser.error(f'no row has {word!r} in its name; the rows are {names}')
  chosen = [
    i
    for i, case in enumerate(cases)
    if not words or any(word in case.name.lower() for word in words)
  ]
  print(
    f'{"model":28} calls cells   K=2   K=4     loss gradient  history  weights saved tokens '
    'seconds',
    flush=True,
  )
  groups = [chosen[i : i + _ROWS_OF_PROCESS] for i in range(0, len(chosen), _ROWS_OF_PROCESS)]
  if len(groups) == 1:
    status = _PrintRows([cases[i] for i in chosen], options)
  else:
    status = max(_PrintInProcess(group, options) for group in groups)
  print('rows with ! are not green' if status else 'all rows are green')
  return int(bool(status))


def _PrintInProcess(rows: Sequence[int], options: Mapping[str, Any]) -> int:
  """Prints rows by a new process; returns its exit status."""
  command = [sys.executable, '-m', 'tools.keras_models', '--rows', ','.join(map(str, rows))]
  command += [f'--remat_policy={options["remat_policy"]}', *(['--xla'] if options['xla'] else [])]
  status = subprocess.run(command, check=False).returncode
  if status not in (0, 1):
    print(f'! a process ended with status {status} in the rows after the last one above')
  return abs(status)


def _PrintRows(cases: Sequence[Case], options: Mapping[str, Any]) -> int:
  """Prints rows; returns 1 if one of them is not green."""
  devices = cluster.Cluster.Create(2, platform='cpu').devices
  status = 0
  for case in cases:
    start = time.monotonic()
    row = Compare(case, devices, **options)
    print(_Line(row, time.monotonic() - start), flush=True)
    status |= not row.is_green
    keras.backend.clear_session()
    gc.collect()
  return status


def _Line(row: Row, seconds: float) -> str:
  def Number(value: float | None) -> str:
    return '       -' if value is None else f'{value:8.1e}'

  balance = ' '.join(f'{row.balance[k]:5.0%}' if k in row.balance else '    -' for k in (2, 4))
  saved, tokens = ({None: '-', True: 'yes', False: 'NO'}[x] for x in (row.saved, row.tokens))
  mark = ' ' if row.is_green else '!'
  return (
    f'{row.name:28}{mark}{row.calls:5} {row.cells:5} {balance} {Number(row.loss)} '
    f'{Number(row.gradient)} {Number(row.history)} {Number(row.weights)} '
    f'{saved:5} {tokens:6} {seconds:7.0f}  {row.note}'
  )


if __name__ == '__main__':
  sys.exit(main())
