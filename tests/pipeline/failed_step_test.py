# SPDX-License-Identifier: Apache-2.0
"""A failed step runs again within the time limit and the memory; see also `failures_test`."""

import contextlib
import sys
import weakref
from unittest import mock

import pytest
import tensorflow as tf

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.pipeline import failed_step
from tests import naming


def testRunningAgainSuspendsTheTimeout(monkeypatch):
  sent = []
  monkeypatch.setattr(heartbeat, '_Send', sent.append)
  error = tf.errors.InternalError(None, None, 'failed')
  with pytest.raises(tf.errors.InternalError):
    with failed_step.Locate(_Compiled(), lambda: sent.append('again')):
      raise error
  assert sent == [heartbeat.LONG, 'again']


class _Compiled:
  """The part of an engine that `failed_step.Locate` needs."""

  xla, sums_statistics = True, False
  WithoutXla = contextlib.nullcontext


class _Held:
  """Stands for the memory that a step takes."""


@pytest.mark.parametrize(
  'kind, num_runs',
  [
    (tf.errors.ResourceExhaustedError, 2),
    (tf.errors.CancelledError, 1),
    (tf.errors.UnavailableError, 1),
    (ValueError, 1),
  ],
)
def testRunningWithoutXlaHasTheMemoryOfTheFailedRun(monkeypatch, kind, num_runs):
  sent, runs = [], []
  monkeypatch.setattr(heartbeat, '_Send', sent.append)

  def RunAgain():
    held = _Held()
    assert all(before() is None for before in runs)
    runs.append(weakref.ref(held))
    raise kind('mine') if kind is ValueError else kind(None, None, 'mine')

  with pytest.raises(kind, match='mine'), failed_step.Locate(_Compiled(), RunAgain):
    raise tf.errors.InternalError(None, None, 'first')
  assert len(runs) == num_runs
  assert sent == [heartbeat.LONG] * num_runs


def testAStepThatFailsOnlyUnderXla():
  compiled = _Compiled()

  def RunAgain():
    if compiled.xla:
      raise tf.errors.ResourceExhaustedError(None, None, 'OOM')

  compiled.WithoutXla = lambda: mock.patch.object(compiled, 'xla', False)
  with (
    pytest.raises(tf.errors.ResourceExhaustedError) as e,
    failed_step.Locate(compiled, RunAgain),
  ):
    raise tf.errors.InternalError(None, None, 'first')
  (note,) = e.value.__notes__
  assert naming.Names(note, 'without XLA', 'unknown')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
