# SPDX-License-Identifier: Apache-2.0
"""Decoding a data set: written files, their order, and values that a task may return."""

import contextlib
import functools
import json
import math
import os
import signal
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import decode_pass
from lingvo_gpipe.experiment import task
from lingvo_gpipe.runners import eval_runner
from tests import naming, processes
from tests.toys import number_decoding


def _Decoding(
  logdir,
  decode,
  finalize=None,
  limit=0,
  stop=None,
  source=number_decoding.Numbers,
  batch_size=2,
  cls=number_decoding.Decoder,
):
  instance = cls.Params().Set(name='t', **{'eval.decoder_samples_per_summary': limit}).Instantiate()
  instance.decode, instance.finalize = decode, finalize
  fake = types.SimpleNamespace(
    task=instance,
    ExpectBatches=lambda batch_specs: None,
    _CheckBatch=lambda batch: None,
    AveragedWeights=contextlib.nullcontext,
  )
  fake.Decode = functools.partial(eval_runner.EvalRunner.Decode, fake)
  input_params = source.Params().Set(batch_size=batch_size)
  return decode_pass.Decoding(
    fake, input_params, 'Dev', str(logdir), stop or stop_request.StopRequest()
  )


def _Lines(logdir, step=7):
  path = logdir / 'decode_dev' / f'decode-{step:08d}.jsonl'
  return [json.loads(line) for line in path.read_text(encoding='utf-8').split('\n')[:-1]]


def _Texts(numbers):
  return {'hypothesis': [f'it is {n}' for n in numbers], 'reference': [str(n) for n in numbers]}


@pytest.mark.parametrize('limit, count', [(0, 5), (3, 3), (4, 4), (9, 5)])
def testEveryExampleIsDecodedOnceInOrderWithoutPadding(tmp_path, capsys, limit, count):
  seen = []

  def Finalize(decoded):
    seen.append(decoded)
    return {'right': 0.5, 'right/a-b': 0.25, 'how': 'as ever'}

  values = _Decoding(tmp_path, _Texts, Finalize, limit).Run(7)
  expected = _Texts(range(count))
  assert seen == [expected]
  rows = [{'hypothesis': f'it is {n}', 'reference': str(n)} for n in range(count)]
  assert _Lines(tmp_path) == rows
  assert values == {'num_examples': count, 'right': 0.5, 'right/a-b': 0.25}
  folder = tmp_path / 'decode_dev'
  score = f'how: as ever\nnum_examples: {count}\nright: 0.5\nright/a-b: 0.25\n'
  assert (folder / 'score-00000007.txt').read_text() == score
  assert processes.Scalars(folder)['right/a-b'] == [(7, np.float32(0.25))]
  line = f'Dev at step 7: {count} examples in {folder}/decode-00000007.jsonl  right 0.5000\n'
  assert capsys.readouterr().out == line
  assert not [name for name in os.listdir(folder) if '.tmp' in name]


def testResultsAreInDataOrderIfBatchesAreNot(tmp_path):
  _Decoding(tmp_path, _Texts, source=number_decoding.Shuffled).Run(7)
  assert [line['reference'] for line in _Lines(tmp_path)] == list('01234')
  _Decoding(tmp_path, _Texts, source=number_decoding.Shuffled, limit=3).Run(7)
  assert [line['reference'] for line in _Lines(tmp_path)] == list('034')


@pytest.mark.parametrize('source', [number_decoding.Numbers, number_decoding.Shuffled])
@pytest.mark.parametrize('batch_size', [1, 2, 8])
def testATaskGetsThePositionOfEachExample(tmp_path, source, batch_size):
  """Random draws then neither repeat from batch to batch nor depend on the batch size."""
  decoder = _Decoding(
    tmp_path, None, source=source, batch_size=batch_size, cls=number_decoding.PositionDecoder
  )
  decoder.Run(7)
  assert _Lines(tmp_path) == [{'got': n, 'number': n} for n in range(5)]


@pytest.mark.parametrize('batch_size', [2, 3])
def testAnExampleOfWeightZeroIsLeftOutAndKeepsPositions(tmp_path, batch_size):
  decoder = _Decoding(
    tmp_path,
    None,
    source=number_decoding.Weighted,
    batch_size=batch_size,
    cls=number_decoding.PositionDecoder,
  )
  decoder.Run(7)
  assert _Lines(tmp_path) == [{'got': n, 'number': n} for n in (0, 2, 3, 4)]


def testValuesOfALine(tmp_path):
  def Decode(numbers):
    size = len(numbers)
    return {
      'text': ['é\u2028"\n\ud800'] * size,
      'score': np.array([-math.inf, 0.5][:size]),
      'ids': tf.constant([[1, 2]] * size),
      'ragged': [np.array([3]), [4.5, math.nan]][:size],
      'flag': [np.bool_(True)] * size,
      'none': [None] * size,
    }

  _Decoding(tmp_path, Decode, limit=2).Run(7)
  common = {'text': 'é\u2028"\n\ud800', 'ids': [1, 2], 'flag': True, 'none': None}
  assert _Lines(tmp_path) == [
    {**common, 'score': None, 'ragged': [3]},
    {**common, 'score': 0.5, 'ragged': [4.5, None]},
  ]


def testDecodingAgainOverwrites(tmp_path):
  for limit in (4, 2):
    _Decoding(tmp_path, _Texts, limit=limit).Run(7)
  assert len(_Lines(tmp_path)) == 2


def testSignalLeavesNothing(tmp_path, capsys):
  stop = stop_request.StopRequest()

  def Decode(numbers):
    stop.signal = signal.SIGINT
    return _Texts(numbers)

  assert _Decoding(tmp_path, Decode, stop=stop).Run(7) is None
  (line,) = capsys.readouterr().out.splitlines()
  assert naming.Names(line, 'Dev', 'step 7', 'SIGINT')
  assert os.listdir(tmp_path) == []


def testHypothesesSurviveAnErrorInTheScores(tmp_path):
  with pytest.raises(ZeroDivisionError):
    _Decoding(tmp_path, _Texts, lambda decoded: 1 / 0).Run(7)
  assert len(_Lines(tmp_path)) == 5
  assert os.listdir(tmp_path / 'decode_dev') == ['decode-00000007.jsonl']


@pytest.mark.parametrize(
  'decode, names',
  [
    (lambda numbers: {'a': ['x']}, ('2 rows', '1 entries', "'a'")),
    (lambda numbers: {'a': 'xy'}, ('2 rows', 'text', "'a'")),
    (lambda numbers: {f'a{numbers[0]}': numbers}, ("['a0']", "['a2']")),
  ],
)
def testAWrongNumberOfEntriesIsAnError(tmp_path, decode, names):
  with pytest.raises(ValueError, match=naming.Naming('Decoder.Decode', *names)):
    _Decoding(tmp_path, decode).Run(7)


def testATaskWithoutDecodeIsRefused(tmp_path):
  instance = task.BaseTask.Params().Set(name='t').Instantiate()
  with pytest.raises(ValueError, match=naming.Naming('BaseTask', 'Decode')):
    decode_pass.Decoding(
      types.SimpleNamespace(task=instance, ExpectBatches=lambda batch_specs: None),
      number_decoding.Numbers.Params().Set(batch_size=2),
      'Dev',
      str(tmp_path),
      stop_request.StopRequest(),
    )


def testFilesAreWrittenCompletelyOrNotAtAll(tmp_path, monkeypatch):
  path = str(tmp_path / 'x.txt')
  files.WriteWhole(path, 'old')

  def Rename(*unused_args, **unused_kwargs):
    raise tf.errors.ResourceExhaustedError(None, None, 'disk full')

  monkeypatch.setattr(tf.io.gfile, 'rename', Rename)
  with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}/x.txt'", 'disk full')):
    files.WriteWhole(path, 'new')
  assert os.listdir(tmp_path) == ['x.txt'] and (tmp_path / 'x.txt').read_text() == 'old'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
