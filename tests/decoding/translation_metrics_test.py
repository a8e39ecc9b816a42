# SPDX-License-Identifier: Apache-2.0
"""BLEU and chrF equal sacrebleu's, by pair of languages and averaged."""

import builtins
import random
import statistics
import subprocess
import sys

import pytest
import sacrebleu

from lingvo_gpipe.decoding import translation_metrics
from tests import naming

_ENGLISH = [
  'The pipeline is divided into stages, and each of them runs on a device of its own.',
  'A mini-batch is cut into micro-batches that follow each other.',
  'Gradients are added up, so that the result does not depend on the cut.',
  'What is not kept is computed again.',
]
_CHINESE = ['流水线被分成若干阶段。', '每个阶段在自己的设备上运行。', '没有保存的内容会重新计算。']


def _DropWords(texts, seed):
  """Swaps two words of each text and drops some, as a translation might."""
  rng = random.Random(seed)
  damaged = []
  for text in texts:
    words = [word for word in text.split() if rng.random() < 0.85]
    i = rng.randrange(max(1, len(words) - 1))
    words[i : i + 2] = reversed(words[i : i + 2])
    damaged.append(' '.join(words))
  return damaged


@pytest.mark.parametrize('seed', range(5))
def testScoresEqualSacreBleus(seed):
  hypotheses = _DropWords(_ENGLISH, seed)
  hypotheses[0] = hypotheses[0].lower()  # Not the same text.
  scores = translation_metrics.CorpusScores(hypotheses, _ENGLISH, language='en')
  assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [_ENGLISH]).score, abs=1e-9)
  assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [_ENGLISH]).score, abs=1e-9)
  assert 0 < scores.bleu < 100 and 0 < scores.chrf < 100
  assert scores.num_examples == 4
  assert 'tok:13a' in scores.bleu_signature and scores.chrf_signature.startswith('nrefs:1')


def testScoresAreBetween0And100():
  same = translation_metrics.CorpusScores(_ENGLISH, _ENGLISH)
  assert same.bleu == same.chrf == pytest.approx(100.0)
  assert max(same.bleu, same.chrf) <= 100.0
  nothing = translation_metrics.CorpusScores([''] * 4, _ENGLISH)
  assert nothing.bleu == nothing.chrf == 0.0


def testTokenizerFollowsTheTargetLanguage():
  hypotheses = [_CHINESE[0][:-3] + '。', *_CHINESE[1:]]
  expected = sacrebleu.corpus_bleu(hypotheses, [_CHINESE], tokenize='zh').score
  for language in ('zh', 'zh_Hant', 'zh-CN'):
    scores = translation_metrics.CorpusScores(hypotheses, _CHINESE, language=language)
    assert scores.bleu == pytest.approx(expected) and 'tok:zh' in scores.bleu_signature
  assert translation_metrics.CorpusScores(hypotheses, _CHINESE).bleu < expected
  kinds = [translation_metrics.Tokenizer(language) for language in ('ja', 'th', 'de', 'km_KH', '')]
  assert kinds == ['char', 'char', '13a', 'char', '13a']


def testScoresByPairAndAveraged():
  """Each pair has the same weight, whatever its size and the order of the examples."""
  hypotheses = _DropWords(_ENGLISH, 1)
  examples = [(*texts, 'de', 'en') for texts in zip(hypotheses, _ENGLISH, strict=True)]
  examples += [(text, text, 'fr', 'en') for text in _ENGLISH[:2]]
  examples += [(text, text, 'en', 'zh') for text in _CHINESE]
  random.Random(0).shuffle(examples)
  by_pair = translation_metrics.ScoresByPair(*zip(*examples, strict=True))
  assert list(by_pair) == [('de', 'en'), ('en', 'zh'), ('fr', 'en')]
  assert [scores.num_examples for scores in by_pair.values()] == [4, 3, 2]
  metrics = translation_metrics.Metrics(by_pair)
  for name in ('bleu', 'chrf'):
    values = [metrics[f'{name}/{pair}'] for pair in ('de-en', 'en-zh', 'fr-en')]
    assert values[1:] == pytest.approx([100.0, 100.0]) and values[0] < 99
    assert metrics[name] == pytest.approx(statistics.fmean(values))
  tokenizers = [word for word in metrics['bleu_signature'].split('|') if word.startswith('tok:')]
  assert sorted(tokenizers) == ['tok:13a', 'tok:zh']


def testSinglePairHasNoMetricsByPair():
  by_pair = translation_metrics.ScoresByPair(_ENGLISH, _ENGLISH, ['de'] * 4, ['en'] * 4)
  names = sorted(translation_metrics.Metrics(by_pair))
  assert names == ['bleu', 'bleu_signature', 'chrf', 'chrf_signature']


def testLengthsMustAgree():
  with pytest.raises(ValueError, match=naming.Naming("'hypotheses': 1, 'references': 2")):
    translation_metrics.CorpusScores(['a'], ['a', 'b'])
  with pytest.raises(ValueError, match=naming.Naming("'hypotheses': 0", "'references': 0")):
    translation_metrics.CorpusScores([], [])
  with pytest.raises(ValueError, match=naming.Naming("'targets': 2")):
    translation_metrics.ScoresByPair(['a'], ['a'], ['de'], ['en', 'en'])


def testMissingSacreBleuIsExplained(monkeypatch):
  real_import = builtins.__import__

  def Import(name, *args, **kwargs):
    if name.startswith('sacrebleu'):
      raise ImportError(name)
    return real_import(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', Import)
  with pytest.raises(
    ValueError, match=naming.Naming('pip install sacrebleu', "'lingvo_gpipe[mt]'")
  ):
    translation_metrics.CorpusScores(['a'], ['a'])


def testNeedsNoTensorFlow():
  code = (
    'import sys; from lingvo_gpipe.decoding import translation_metrics; '
    'sys.exit("tensorflow" in sys.modules or "sacrebleu" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
