# SPDX-License-Identifier: Apache-2.0
"""BLEU and chrF of translations by sacrebleu, for each pair of languages and averaged over them.

This module needs no TensorFlow, and loads sacrebleu when it is first used.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Languages written without spaces between words: sacrebleu's default tokenizer would take a
# sentence for one word.
_WITHOUT_SPACES = ('bo', 'dz', 'ja', 'km', 'lo', 'my', 'th', 'yue')
_TOKENIZERS = {'zh': 'zh', **dict.fromkeys(_WITHOUT_SPACES, 'char')}


@dataclasses.dataclass(frozen=True)
class Scores:
  """Corpus scores of translations.

  Attributes:
    bleu: BLEU (Papineni et al. 2002) in [0, 100].
    chrf: chrF2 (Popović 2015) in [0, 100].
    bleu_signature: sacrebleu's description of how BLEU was computed: version, tokenizer, smoothing.
    chrf_signature: sacrebleu's description of how chrF was computed.
    num_examples: number of translations.
  """

  bleu: float
  chrf: float
  bleu_signature: str
  chrf_signature: str
  num_examples: int


def Tokenizer(language: str) -> str:
  """Returns sacrebleu's BLEU tokenizer for a language such as 'zh_Hant'; '' is any language."""
  return _TOKENIZERS.get(language.replace('-', '_').split('_')[0].lower(), '13a')


def CorpusScores(
  hypotheses: Sequence[str], references: Sequence[str], *, language: str = ''
) -> Scores:
  """Scores translations into one language, each with one reference.

  Args:
    hypotheses: translations, not tokenized.
    references: one reference per hypothesis.
    language: the target language, which determines the tokenizer of BLEU.

  Raises:
    ValueError: there is no hypothesis, or the number of references differs; or sacrebleu is not
      installed.
  """
  _CheckLengths(hypotheses=hypotheses, references=references)
  metrics = _SacreBleu()
  # `force`: the texts are never tokenized, and sacrebleu would guess otherwise from full stops.
  bleu, chrf = metrics.BLEU(tokenize=Tokenizer(language), force=True), metrics.CHRF()

  def Score(metric: Any) -> float:
    # Rounding may give a little more than 100.
    return min(100.0, float(metric.corpus_score(list(hypotheses), [list(references)]).score))

  return Scores(
    bleu=Score(bleu),
    chrf=Score(chrf),
    # Computed after the scores, because the signature counts the references.
    bleu_signature=str(bleu.get_signature()),
    chrf_signature=str(chrf.get_signature()),
    num_examples=len(hypotheses),
  )


def ScoresByPair(
  hypotheses: Sequence[str],
  references: Sequence[str],
  sources: Sequence[str],
  targets: Sequence[str],
) -> dict[tuple[str, str], Scores]:
  """Returns {(source language, target language): scores}, sorted by the names of the languages.

  Args:
    hypotheses: translations of all pairs, in any order.
    references: one reference per hypothesis.
    sources: the source language of each hypothesis.
    targets: the target language of each hypothesis.

  Raises:
    ValueError: there is no hypothesis, or the lengths differ; or sacrebleu is not installed.
  """
  _CheckLengths(hypotheses=hypotheses, references=references, sources=sources, targets=targets)
  by_pair: dict[tuple[str, str], list[tuple[str, str]]] = {}
  for source, target, hypothesis, reference in zip(
    sources, targets, hypotheses, references, strict=True
  ):
    by_pair.setdefault((source, target), []).append((hypothesis, reference))
  return {
    pair: CorpusScores([h for h, _ in texts], [r for _, r in texts], language=pair[1])
    for pair, texts in sorted(by_pair.items())
  }


def Metrics(by_pair: Mapping[tuple[str, str], Scores]) -> dict[str, float | str]:
  """Returns {name: value} of the scores by pair, for `BaseTask.DecodeFinalize`.

  `bleu` and `chrf` are means over the pairs, each with the same weight, as in the GPipe paper's
  averages over languages. If there are several pairs, `bleu/de-en` and `chrf/de-en` are the values
  of a pair. `bleu_signature` and `chrf_signature` are texts.

  Args:
    by_pair: from `ScoresByPair`.
  """
  metrics: dict[str, float | str] = {}
  for name in ('bleu', 'chrf'):
    values = {pair: getattr(scores, name) for pair, scores in by_pair.items()}
    metrics[name] = statistics.fmean(values.values())
    if len(values) > 1:
      metrics |= {f'{name}/{source}-{target}': value for (source, target), value in values.items()}
    # Pairs may have different tokenizers.
    signatures = {getattr(scores, f'{name}_signature') for scores in by_pair.values()}
    metrics[f'{name}_signature'] = ' '.join(sorted(signatures))
  return metrics


def _CheckLengths(**texts: Sequence[str]) -> None:
  lengths = {name: len(values) for name, values in texts.items()}
  if len(set(lengths.values())) != 1 or not lengths['hypotheses']:
    raise ValueError(f'expected at least one hypothesis and lists of equal lengths, got {lengths}')


def _SacreBleu() -> Any:
  try:
    from sacrebleu import metrics
  except ImportError as e:
    raise ValueError(
      'BLEU and chrF need the package sacrebleu, which is not installed: pip install sacrebleu, or '
      "this project with its extra, pip install 'lingvo_gpipe[mt]'"
    ) from e
  return metrics
