# SPDX-License-Identifier: Apache-2.0
"""`RunReport`: the result of a call of the trainer, as text and as JSON.

<logdir>/report.txt    the text that is printed at the end
<logdir>/report.json   the report as one object; "is_finished" marks the end of training, until
                       training is resumed in this directory
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.reporting import progress

_TEXT, _JSON = 'report.txt', 'report.json'
PAGE = 'report.html'  # See `report_page`.


@dataclasses.dataclass(frozen=True)
class RunReport:
  """The result of a call of the trainer. A run may take several calls.

  Attributes:
    model: name of the experiment.
    logdir: the log directory.
    ended: reason why training ended.
    is_finished: whether another call would find nothing left to train.
    step: number of steps of the run so far.
    num_steps: number of steps of this call.
    num_skipped_steps: number of steps of the run that were skipped for non-finite gradients.
    examples_consumed: number of examples that the run has consumed.
    num_examples: number of examples of an epoch, or 0 if unknown, as for streams.
    num_damaged_records: number of damaged records left out of the training data.
    train_seconds: training time of the run up to its last checkpoint, over all calls, including the
      work between steps.
    seconds: time of this call, including the work after training.
    train: metrics of the last step.
    passes: {jobname: step, seconds and values} of the last evaluations and decodings.
    best: jobname, metric, value and step of the best evaluation, or None if no metric is followed.
    checkpoints: steps of the existing checkpoints.
    tasks: {name: steps, examples, num_examples} if the model has several tasks.
    failures: {kind: number of failures} after which this call resumed training; see `supervisor`.
  """

  model: str
  logdir: str
  ended: str
  is_finished: bool
  step: int
  num_steps: int
  num_skipped_steps: int
  examples_consumed: int
  num_examples: int
  num_damaged_records: int
  train_seconds: float
  seconds: float
  train: Mapping[str, float]
  passes: Mapping[str, Mapping[str, Any]]
  best: Mapping[str, Any] | None
  checkpoints: list[int]
  tasks: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
  failures: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def Rows(self) -> list[tuple[str, str]]:
    """Returns the report as pairs of a name and a text."""
    damaged = self.num_damaged_records
    rows = [
      ('model', self.model),
      ('ended', f'{self.ended}, after step {self.step:,}'),
      ('steps', f'{self.num_steps:,} in this call; {self.num_skipped_steps:,} of all were skipped'),
      (
        'examples',
        f'{self.examples_consumed:,}'
        + ('' if self.tasks else _Epochs(self.examples_consumed, self.num_examples))
        + (f'; {damaged:,} damaged records were left out' if damaged else ''),
      ),
      *(
        (
          f'task {name}',
          f'{t["steps"]:,} steps, {t["examples"]:,} examples'
          f'{_Epochs(t["examples"], t["num_examples"])}',
        )
        for name, t in self.tasks.items()
      ),
      (
        'time',
        f'{progress.Duration(self.train_seconds)} to the last checkpoint; this call took '
        f'{progress.Duration(self.seconds)}',
      ),
    ]
    if self.failures:
      counts = ', '.join(f'{kind.replace("_", " ")} {n}' for kind, n in self.failures.items())
      rows.append(('failures', f'{counts}; training was resumed each time'))
    if self.train:
      rows.append(('train', progress.FormatMetrics(self.train)))
    for jobname, result in self.passes.items():
      metrics = progress.FormatMetrics(result['values'])
      rows.append((jobname, f'step {result["step"]:,}: {metrics}'))
    if self.best:
      b = self.best
      note = '' if b['step'] in self.checkpoints else ', whose checkpoint no longer exists'
      rows.append(
        ('best', f'step {b["step"]:,}: {b["jobname"]} {b["metric"]} {b["value"]:.4f}{note}')
      )
    steps = ', '.join(map(str, self.checkpoints)) or 'none'
    rows.append(('checkpoints', f'{steps} in {os.path.join(self.logdir, "train")}'))
    rows.append(('files', f'params.txt, metrics.jsonl, report.json, report.html in {self.logdir}'))
    rows.append(('pictures', f'tensorboard --logdir={self.logdir}'))
    return rows

  def Text(self) -> str:
    """Returns the report as human-readable lines."""
    rows = self.Rows()
    width = max(len(name) for name, _ in rows)
    return ''.join(f'{name:{width}}  {text}\n' for name, text in rows)

  def Write(self) -> None:
    """Writes both files.

    Raises:
      OSError: a file cannot be written.
    """
    # Not dataclasses.asdict: it would count the items of a Counter, such as `failures`.
    text = json.dumps(_ReplaceNonFinite(vars(self)), indent=1)
    files.WriteWhole(os.path.join(self.logdir, _TEXT), self.Text())
    files.WriteWhole(os.path.join(self.logdir, _JSON), text + '\n')


def _Epochs(examples: int, num_examples: int) -> str:
  return f', {examples / num_examples:.2f} epochs' if num_examples else ''


def FinishedStep(logdir: str) -> int | None:
  """Returns the step after which training in a log directory ended, or None if it may continue.

  A damaged report counts as none.
  """
  try:
    with tf.io.gfile.GFile(os.path.join(logdir, _JSON)) as f:
      report = json.loads(f.read())
    return int(report['step']) if report['is_finished'] else None
  except (
    tf.errors.OpError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,  # An infinite step.
    RecursionError,  # Too many brackets.
  ):
    return None


def Remove(logdir: str) -> None:
  """Removes the report of an earlier call, because training resumes.

  Raises:
    OSError: a file cannot be removed.
  """
  for name in (_JSON, _TEXT, PAGE):
    path = os.path.join(logdir, name)
    try:
      tf.io.gfile.remove(path)
    except tf.errors.NotFoundError:
      continue
    except tf.errors.OpError as e:
      raise OSError(
        f'Cannot remove {path!r}, the report of an earlier call: {files.OneLine(e)}. Remove '
        'it, or use another --logdir.'
      ) from e


def _ReplaceNonFinite(value: Any) -> Any:
  """Replaces non-finite numbers by None, because JSON has none."""
  if isinstance(value, Mapping):
    return {name: _ReplaceNonFinite(item) for name, item in value.items()}
  return None if isinstance(value, float) and not math.isfinite(value) else value
