# SPDX-License-Identifier: Apache-2.0
"""`Decoding`: decodes a data set with a runner's present weights, and scores the hypotheses.

<logdir>/decode_<dataset>/decode-<step>.jsonl   one JSON object per line and example, in data order
<logdir>/decode_<dataset>/score-<step>.txt      the scores; TensorBoard events have them too
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import files, nested_map
from lingvo_gpipe.evaluation import dataset_pass
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.reporting import progress

# Examples in the sample of a decoding.
_SAMPLE_SIZE = 3


class Decoding(dataset_pass.DatasetPass):
  """Writes the results of the task's `Decode`, and the scores of its `DecodeFinalize`."""

  @classmethod
  def WhyUnsupported(cls, task: task_lib.BaseTask) -> str | None:
    """Returns a reason if the task does not override `Decode`."""
    if type(task).Decode is not task_lib.BaseTask.Decode:
      return None
    return f'{type(task).__name__} cannot decode: it does not override Decode'

  def Run(self, step: int) -> dict[str, float] | None:
    """Decodes the data set, see `DatasetPass.Run`."""
    with self._runner.AveragedWeights():
      columns = self._DecodeExamples()
    if self._IsStopped(step):
      return None
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = [json.dumps(_Plain(row), ensure_ascii=False, allow_nan=False) for row in rows]
    path = os.path.join(self._dir, f'decode-{step:08d}.jsonl')
    # Written first, so that an error in DecodeFinalize loses only the scores.
    tf.io.gfile.makedirs(self._dir)
    files.WriteWhole(path, ''.join(f'{line}\n' for line in lines))
    self.sample = ''.join(f'{line}\n' for line in lines[:_SAMPLE_SIZE])
    scores = self._runner.task.DecodeFinalize(columns) if rows else {}
    text = progress.FormatMetrics({name: v for name, v in scores.items() if not isinstance(v, str)})
    print(f'{self._name} at step {step}: {len(rows)} examples in {path}  {text}', flush=True)
    return self._Write(step, {'num_examples': len(rows), **scores})

  def _Prefix(self) -> str:
    return 'decode'

  def _DecodeExamples(self) -> dict[str, list[Any]]:
    """Returns {name: one entry per example} in data order, without rows of weight 0."""
    limit = self._runner.task.params.eval.decoder_samples_per_summary
    columns: dict[str, list[Any]] = {}
    indices: list[int] = []
    num_rows = 0  # Number of rows of the earlier batches.
    for batch in self._Batches():
      decoded = self._runner.Decode(batch, self._input, num_rows)
      decoded = _Examples(self._runner.task, batch, decoded)
      if columns and columns.keys() != decoded.keys():
        raise ValueError(
          f'{type(self._runner.task).__name__}.Decode returned {sorted(columns)} for one batch and '
          f'{sorted(decoded)} for another: return the same names for all'
        )
      for name, values in decoded.items():
        columns.setdefault(name, []).extend(values)
      indices += _Indices(batch, num_rows)
      num_rows += batches.NumRows(batch)
      if limit and len(indices) >= limit:
        break
    # Inputs that batch by length change the order, and number their examples.
    order = sorted(range(len(indices))[: limit or None], key=lambda i: indices[i])
    return {name: [values[i] for i in order] for name, values in columns.items()}


def _Examples(
  task: task_lib.BaseTask, batch: nested_map.NestedMap, decoded: Mapping[str, Any]
) -> dict[str, list[Any]]:
  """Removes padded rows from the result of `Decode`; returns {name: one entry per example}.

  Raises:
    ValueError: `Decode` did not return one entry for each row of the batch.
  """
  size = batches.NumRows(batch)
  rows = dataset_pass.RealRows(batch)
  columns = {}
  for name, values in decoded.items():
    values = values.numpy() if tf.is_tensor(values) else values
    if isinstance(values, str) or len(values) != size:
      got = 'a text' if isinstance(values, str) else f'{len(values)} entries'
      raise ValueError(
        f'{type(task).__name__}.Decode: expected a list or array of one entry for each of the '
        f'{size} rows of the batch, got {got} as {name!r}'
      )
    columns[name] = [values[row] for row in rows]
  return columns


def _Indices(batch: nested_map.NestedMap, first: int) -> list[int]:
  """Returns the positions of a batch's examples in the data set.

  Args:
    batch: the batch. Without an `example_index` its rows are numbered in order.
    first: position of its first row.
  """
  indices = batch.get('example_index', first + np.arange(batches.NumRows(batch)))
  positions: list[int] = np.asarray(indices)[dataset_pass.RealRows(batch)].tolist()
  return positions


def _Plain(value: Any) -> Any:
  """Converts a value to JSON types: arrays to lists, numbers that are not finite to None."""
  if isinstance(value, (np.ndarray, np.generic)) or tf.is_tensor(value):
    value = np.asarray(value).tolist()
  if isinstance(value, Mapping):
    return {str(name): _Plain(item) for name, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_Plain(item) for item in value]
  if isinstance(value, bytes):
    return value.decode('utf-8', errors='replace')
  return None if isinstance(value, float) and not math.isfinite(value) else value
