# SPDX-License-Identifier: Apache-2.0
"""`RunReport`: what came of a call of the trainer, for people and for programs.

<logdir>/report.txt    the text that is printed at the end
<logdir>/report.json   the same as one object; with "is_finished" it marks the end of the training,
                       unless somebody trains there again
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


@dataclasses.dataclass(frozen=True)
class RunReport:
  """What came of it.

  Attributes:
    model: the experiment.
    logdir: the log directory.
    ended: why training ended.
    is_finished: whether another call would find nothing left to train.
    step: steps of the run so far.
    num_steps: those of this call.
    num_skipped_steps: of the run, whose gradients were not finite.
    examples_consumed: of the run.
    num_examples: of an epoch; 0 where nobody knows, as with a stream among the inputs.
    num_damaged_records: left out of the training data.
    train_seconds: the time of the run's training to its last checkpoint, over all calls, with what
      came between steps.
    seconds: the time of this call, with what came after.
    train: the last step's metrics.
    passes: {jobname: step, seconds and values} of the last evaluations and decodings.
    best: jobname, metric, value and step of the best evaluation; None where none is followed.
    checkpoints: the steps of those that are there.
    tasks: {name: steps, examples, num_examples} where a model has several.
    failures: how often this call began training again, by why; see `supervisor`.
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

  def Text(self) -> str:
    """Lines for people."""
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
      told = ', '.join(f'{kind.replace("_", " ")} {n}' for kind, n in self.failures.items())
      rows.append(('failures', f'{told}; training began again each time'))
    if self.train:
      rows.append(('train', progress.FormatMetrics(self.train)))
    for jobname, found in self.passes.items():
      rows.append((jobname, f'step {found["step"]:,}: {progress.FormatMetrics(found["values"])}'))
    if self.best:
      b = self.best
      there = '' if b['step'] in self.checkpoints else ', whose checkpoint is not there'
      rows.append(
        ('best', f'step {b["step"]:,}: {b["jobname"]} {b["metric"]} {b["value"]:.4f}{there}')
      )
    steps = ', '.join(map(str, self.checkpoints)) or 'none'
    rows.append(('checkpoints', f'{steps} in {os.path.join(self.logdir, "train")}'))
    rows.append(('files', f'params.txt, metrics.jsonl, report.json in {self.logdir}'))
    rows.append(('pictures', f'tensorboard --logdir={self.logdir}'))
    width = max(len(name) for name, _ in rows)
    return ''.join(f'{name:{width}}  {text}\n' for name, text in rows)

  def Write(self) -> None:
    """Writes both files.

    Raises:
      OSError: one cannot be written.
    """
    text = json.dumps(_Finite(dataclasses.asdict(self)), indent=1)
    files.WriteWhole(os.path.join(self.logdir, _TEXT), self.Text())
    files.WriteWhole(os.path.join(self.logdir, _JSON), text + '\n')


def _Epochs(examples: int, of: int) -> str:
  return f', {examples / of:.2f} epochs' if of else ''


def FinishedStep(logdir: str) -> int | None:
  """The step after which the training of a log directory ended; None where it may go on."""
  try:
    with tf.io.gfile.GFile(os.path.join(logdir, _JSON)) as f:
      found = json.loads(f.read())
    return int(found['step']) if found['is_finished'] else None
  except (tf.errors.OpError, ValueError, KeyError, TypeError):
    return None


def Remove(logdir: str) -> None:
  """Removes the report of an earlier call: the training goes on.

  Raises:
    OSError: it cannot be removed.
  """
  for name in (_JSON, _TEXT):
    path = os.path.join(logdir, name)
    try:
      tf.io.gfile.remove(path)
    except tf.errors.NotFoundError:
      continue
    except tf.errors.OpError as e:
      raise OSError(
        f'Cannot remove {path!r}, the report of an earlier call: {files.OneLine(e)}. Remove '
        'it, or give another --logdir.'
      ) from e


def _Finite(value: Any) -> Any:
  """As JSON has it: what is not finite is null."""
  if isinstance(value, Mapping):
    return {name: _Finite(item) for name, item in value.items()}
  return None if isinstance(value, float) and not math.isfinite(value) else value
