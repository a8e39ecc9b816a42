# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl has whole lines, one per step and split, also after kills and restarts."""

import json
import math
import sys

import pytest

from lingvo_gpipe.reporting import metrics_log
from tests import naming


def _Lines(path):
  """Returns [(step, split, values)]; every line is JSON."""
  text = path.read_text()
  assert not text or text.endswith('\n')
  lines = [json.loads(line) for line in text.splitlines()]
  assert all(sorted(line) == ['split', 'step', 'time', 'values'] for line in lines)
  return [(line['step'], line['split'], line['values']) for line in lines]


def _Write(path, steps, last_step=None, value=1.0):
  log = metrics_log.MetricsLog(str(path), last_step)
  for step in steps:
    log.Write(step, 'train', {'loss': value})
  return log


def testEachLineIsWrittenAtOnce(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  log = metrics_log.MetricsLog(str(path))
  assert not path.exists()
  for step in range(1, 4):
    log.Write(step, 'train', {'loss': 1 / step})
    log.Write(step, 'eval_dev', {'loss': 2.0})
    assert len(_Lines(path)) == 2 * step
  assert _Lines(path)[-2:] == [(3, 'train', {'loss': 1 / 3}), (3, 'eval_dev', {'loss': 2.0})]


def testNonFiniteValuesAreNull(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  log = metrics_log.MetricsLog(str(path))
  log.Write(1, 'train', {'a': math.nan, 'b': -math.inf, 'c': 1.0})
  assert _Lines(path) == [(1, 'train', {'a': None, 'b': None, 'c': 1.0})]


def testARestartRemovesTheStepsThatItRepeats(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  _Write(path, range(1, 10))
  _Write(path, range(6, 8), last_step=5, value=2.0)
  assert _Lines(path) == [(s, 'train', {'loss': 1.0 if s < 6 else 2.0}) for s in range(1, 8)]
  # A new run in the directory of a run that was killed before its first checkpoint.
  _Write(path, [1], last_step=0, value=3.0)
  assert _Lines(path) == [(1, 'train', {'loss': 3.0})]


@pytest.mark.parametrize('cut', [1, 20, 60])
def testAKillWithinALineLosesOnlyThatLine(tmp_path, cut):
  path = tmp_path / 'metrics.jsonl'
  _Write(path, range(1, 4))
  path.write_bytes(path.read_bytes()[:-cut])
  _Write(path, [3], last_step=3)
  assert [step for step, _, _ in _Lines(path)] == [1, 2, 3]


def testARepeatedStepReplacesItsLine(tmp_path):
  """As when a finished run is evaluated again."""
  path = tmp_path / 'metrics.jsonl'
  log = _Write(path, range(1, 4))
  log.Write(2, 'train', {'loss': 5.0})
  log.Write(4, 'train', {'loss': 6.0})
  losses = {step: values['loss'] for step, _, values in _Lines(path)}
  assert losses == {1: 1.0, 2: 5.0, 3: 1.0, 4: 6.0} and len(_Lines(path)) == 4


def testFailuresOfEarlierCallsAreKept(tmp_path):
  """After failures at one checkpoint, a call resumes from an earlier one or from scratch."""
  path = tmp_path / 'metrics.jsonl'
  for call in range(3):
    for failures in range(1, 3):
      log = metrics_log.MetricsLog(str(path))
      log.Write(4, 'train', {'loss': call})
      log.Write(4, 'failures', {'worker_failed': failures})
      log.Close()
  failures = [(4, 'failures', {'worker_failed': 1 + i % 2}) for i in range(6)]
  assert _Lines(path) == [*failures[:5], (4, 'train', {'loss': 2.0}), failures[5]]
  for last_step in (2, 0):
    _Write(path, [1], last_step)
    assert _Lines(path) == [*failures, (1, 'train', {'loss': 1.0})]


def testInvalidLinesAreRemovedAndLogged(tmp_path, caplog):
  path = tmp_path / 'metrics.jsonl'
  _Write(path, [1])
  with path.open('ab') as f:
    f.write(b'\xff\x00 no JSON\n[1, 2]\n{"step": "1", "split": "train"}\n')
  _Write(path, [2])
  assert [step for step, _, _ in _Lines(path)] == [1, 2]
  removals = [message for message in caplog.messages if naming.Names(message, path, 'invalid')]
  assert len(removals) == 3


def testAFileThatCannotBeWrittenIsNamed(tmp_path):
  with pytest.raises(OSError, match=naming.Naming('no_folder/metrics.jsonl')):
    _Write(tmp_path / 'no_folder' / 'metrics.jsonl', [1])


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
