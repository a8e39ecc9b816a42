# SPDX-License-Identifier: Apache-2.0
"""Tests of the summary writer, which read its event files."""

import contextlib
import math
import resource
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.proto import event_pb2
from tensorboard.util import tensor_util

from lingvo_gpipe.reporting import summaries
from tests import naming


def _Read(logdir):
  """Returns [(step, name, value)] of all event files in a directory, in the order of writing."""
  summaries_read = []
  for path in sorted(logdir.glob('events.out.tfevents.*')):
    for record in tf.data.TFRecordDataset(str(path)):
      event = event_pb2.Event.FromString(record.numpy())
      for value in event.summary.value:
        array = tensor_util.make_ndarray(value.tensor)
        plugin = value.metadata.plugin_data.plugin_name
        summaries_read.append(
          (event.step, value.tag, array.item().decode() if plugin == 'text' else array.item())
        )
  return summaries_read


def testScalarsAndTextAreWritten(tmp_path):
  logdir = tmp_path / 'made' / 'train'
  writer = summaries.SummaryWriter(logdir)
  writer.Scalars(3, {'loss': 2.5, 'metrics/accuracy': np.float64(0.25)})
  writer.Scalars(tf.constant(10**10), {'loss': tf.constant(1.5, tf.bfloat16), 'n': 7})
  writer.Text(4, 'params', 'a : 1\nb : ü')
  writer.Close()
  assert _Read(logdir) == [
    (3, 'loss', 2.5),
    (3, 'metrics/accuracy', 0.25),
    (10**10, 'loss', 1.5),
    (10**10, 'n', 7.0),
    (4, 'params', 'a : 1\nb : ü'),
  ]


def testHistogramsCountFiniteEntries(tmp_path):
  with summaries.SummaryWriter(tmp_path) as writer:
    values = {'w': tf.constant([[1.0, 2.0], [math.nan, 4.0]], tf.bfloat16), 'b': [math.inf]}
    writer.Histograms(3, values)
  histograms = {}
  for path in tmp_path.glob('events.out.tfevents.*'):
    for record in tf.data.TFRecordDataset(str(path)):
      for value in event_pb2.Event.FromString(record.numpy()).summary.value:
        histograms[value.tag] = tensor_util.make_ndarray(value.tensor)
  # Rows of (left, right, count).
  assert (
    histograms['w'][:, 2].sum() == 3
    and histograms['w'][0, 0] == 1.0
    and histograms['w'][-1, 1] == 4.0
  )
  assert histograms['b'][:, 2].sum() == 0


def testNonFiniteScalarsAreWritten(tmp_path):
  with summaries.SummaryWriter(str(tmp_path)) as writer:
    writer.Scalars(1, {'a': math.inf, 'b': math.nan})
  (_, _, a), (_, _, b) = _Read(tmp_path)
  assert a == math.inf
  assert math.isnan(b)


def testARestartAddsAFile(tmp_path):
  for value in (1.0, 2.0):
    writer = summaries.SummaryWriter(tmp_path)
    writer.Scalars(5, {'loss': value})
    writer.Close()
    writer.Close()
  assert len(list(tmp_path.iterdir())) == 2
  assert sorted(_Read(tmp_path)) == [(5, 'loss', 1.0), (5, 'loss', 2.0)]


def testFlushMakesSummariesReadable(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  writer.Scalars(1, {'loss': 1.0})
  writer.Flush()
  assert _Read(tmp_path) == [(1, 'loss', 1.0)]
  writer.Close()


def testWithoutADirectoryNothingIsWritten(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with summaries.SummaryWriter(None) as writer:
    writer.Scalars(1, {'loss': 1.0})
    writer.Text(1, 'note', 'text')
    writer.Flush()
  assert list(tmp_path.iterdir()) == []


def testMistakesAndUnwritableDirectoriesAreErrors(tmp_path):
  (tmp_path / 'file').write_text('not a directory')
  with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}/file/train'")):
    summaries.SummaryWriter(tmp_path / 'file' / 'train')
  writer = summaries.SummaryWriter(tmp_path)
  with pytest.raises(ValueError, match=naming.Naming("'vector'", '(2,)')):
    writer.Scalars(1, {'vector': [1.0, 2.0]})
  writer.Close()
  with pytest.raises(ValueError, match=naming.Naming(tmp_path, 'closed')):
    writer.Scalars(1, {'loss': 1.0})


def testAFullDiskIsAnError(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    # Imitates a full disk: files may not grow beyond this size.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}'", 'space')):
      for step in range(100):
        writer.Scalars(step, {f'a long name {i}': 1.0 for i in range(20)})
        writer.Flush()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with contextlib.suppress(OSError):
      writer.Close()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
