# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of `PipelinedModel.fit` with plain Keras `fit` of the same model.

    python -m tools.fit_benchmark             # GPT-2 of KerasHub, 8 blocks of width 256
    python -m tools.fit_benchmark --xla

All rows run in one process, an epoch of each in turn, and the table has the medians over the
rounds. Plain Keras and one stage run on one core, two stages on two.
Needs the extra `lingvo_gpipe[keras_hub]` and a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import keras
import numpy as np

from lingvo_gpipe import PipelinedModel, cluster


def _Model(blocks: int, width: int, length: int, vocabulary: int) -> Any:
  import keras_hub  # An extra.

  keras.utils.set_random_seed(1)
  backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=vocabulary,
    num_layers=blocks,
    num_heads=4,
    hidden_dim=width,
    intermediate_dim=4 * width,
    max_sequence_length=length,
    dropout=0.0,
  )
  return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def _UseCores(cores: Collection[int]) -> None:
  """Lets all threads of this process run on these cores only."""
  for task in os.listdir('/proc/self/task'):
    try:
      os.sched_setaffinity(int(task), cores)
    except ProcessLookupError:  # The thread has ended.
      pass


def main(args: Sequence[str] | None = None) -> int:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
  parser.add_argument('--xla', action='store_true', help='compile the stages, and plain Keras')
  parser.add_argument('--rounds', type=int, default=5, help='epochs of each row')
  parser.add_argument('--steps', type=int, default=4, help='steps of an epoch')
  parser.add_argument('--batch_size', type=int, default=16)
  parser.add_argument('--blocks', type=int, default=8)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--length', type=int, default=128)
  parser.add_argument('--vocabulary', type=int, default=1024)
  parser.add_argument('--num_micro_batches', type=int, default=8, help='with two stages')
  options = parser.parse_args(args)
  cores = sorted(os.sched_getaffinity(0))[:2]
  if len(cores) < 2:
    parser.error('two stages need two cores')
  devices = cluster.Cluster.Create(2, platform='cpu').devices

  def Pipe(num_stages: int, num_micro_batches: int) -> Any:
    return PipelinedModel(
      Make(), num_stages, num_micro_batches=num_micro_batches, xla=options.xla, devices=devices
    )

  def Make() -> Any:
    return _Model(options.blocks, options.width, options.length, options.vocabulary)

  rows = [
    ('plain Keras', Make(), cores[:1]),
    ('K=1, M=1', Pipe(1, 1), cores[:1]),
    (f'K=2, M={options.num_micro_batches}', Pipe(2, options.num_micro_batches), cores),
  ]
  random = np.random.RandomState(0)
  ids = random.randint(
    0, options.vocabulary, [options.steps * options.batch_size, options.length + 1]
  )
  x = {'token_ids': ids[:, :-1], 'padding_mask': np.ones_like(ids[:, :-1])}
  for _, model, _ in rows:
    model.compile(
      optimizer=keras.optimizers.Adam(1e-4),
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      weighted_metrics=[],
      jit_compile=options.xla,
    )
  seconds: dict[str, list[float]] = {name: [] for name, _, _ in rows}
  losses: dict[str, list[float]] = {name: [] for name, _, _ in rows}
  for number in range(options.rounds + 1):
    for name, model, allowed in rows:
      _UseCores(allowed)
      start = time.perf_counter()
      history = model.fit(x, ids[:, 1:], batch_size=options.batch_size, shuffle=False, verbose=0)
      if number:  # The first epoch compiles.
        seconds[name].append((time.perf_counter() - start) / options.steps)
      losses[name].append(history.history['loss'][0])
  plain = statistics.median(seconds['plain Keras'])
  print(f'{"row":12} {"s/step":>8} {"speed":>6}   loss of the last epoch')
  for name, times in seconds.items():
    median = statistics.median(times)
    print(f'{name:12} {median:8.3f} {plain / median:6.2f}   {losses[name][-1]:.6f}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
