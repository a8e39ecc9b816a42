# SPDX-License-Identifier: Apache-2.0
"""BLEU and chrF of translations by sacrebleu, for each pair of languages and averaged over them.

This module needs no TensorFlow, and sacrebleu only when it is used.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Written without spaces between words: to sacrebleu's default tokenizer a sentence is one word.
_WITHOUT_SPACES = ('bo', 'dz', 'ja', 'km', 'lo', 'my', 'th', 'yue')
_TOKENIZERS = {'zh': 'zh', **dict.fromkeys(_WITHOUT_SPACES, 'char')}


@dataclasses.dataclass(frozen=True)
class Scores:
  """Corpus scores of translations.

  Attributes:
    bleu: BLEU (Papineni et al. 2002) in [0, 100].
    chrf: chrF2 (Popović 2015) in [0, 100].
    bleu_signature: sacrebleu's description of how: version, tokenizer, smoothing.
    chrf_signature: the same of chrF.
    num_examples: how many translations.
  """

  bleu: float
  chrf: float
  bleu_signature: str
  chrf_signature: str
  num_examples: int


def Tokenizer(language: str) -> str:
  """sacrebleu's tokenizer for BLEU of a target language, such as 'de' or 'zh_Hant'; '' is any."""
  return _TOKENIZERS.get(language.replace('-', '_').split('_')[0].lower(), '13a')


def CorpusScores(
  hypotheses: Sequence[str], references: Sequence[str], *, language: str = ''
) -> Scores:
  """Scores of translations into one language, each with one reference.

  Args:
    hypotheses: texts, not tokenized.
    references: as many.
    language: the target language: what BLEU tokenizes by.

  Raises:
    ValueError: no hypothesis, or another number of references; or sacrebleu is not installed.
  """
  _CheckLengths(hypotheses=hypotheses, references=references)
  metrics = _SacreBleu()
  # `force`: texts are never tokenized here, and it would guess from full stops.
  bleu, chrf = metrics.BLEU(tokenize=Tokenizer(language), force=True), metrics.CHRF()

  def Score(metric: Any) -> float:
    # 100 may come out a rounding error above.
    return min(100.0, float(metric.corpus_score(list(hypotheses), [list(references)]).score))

  return Scores(
    bleu=Score(bleu),
    chrf=Score(chrf),
    # After the scores: it counts the references.
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
  """{(source language, target language): scores}, in the order of the languages' names.

  Args:
    hypotheses: texts of all pairs, in any order.
    references: as many texts.
    sources: the language of each source.
    targets: the language of each hypothesis.

  Raises:
    ValueError: as for `CorpusScores`.
  """
  _CheckLengths(hypotheses=hypotheses, references=references, sources=sources, targets=targets)
  by_pair: dict[tuple[str, str], list[tuple[str, str]]] = {}
  for source, target, *texts in zip(sources, targets, hypotheses, references, strict=True):
    by_pair.setdefault((source, target), []).append((texts[0], texts[1]))
  return {
    pair: CorpusScores([h for h, _ in found], [r for _, r in found], language=pair[1])
    for pair, found in sorted(by_pair.items())
  }


def Metrics(by_pair: Mapping[tuple[str, str], Scores]) -> dict[str, float | str]:
  """{name: value} of what `ScoresByPair` returned, for `BaseTask.DecodeFinalize`.

  `bleu` and `chrf` are means over the pairs, each with the same weight, as in the GPipe paper's
  averages over languages; where there are several pairs, `bleu/de-en` and `chrf/de-en` are one's.
  `bleu_signature` and `chrf_signature` are texts.
  """
  metrics: dict[str, float | str] = {}
  for name in ('bleu', 'chrf'):
    values = {pair: getattr(scores, name) for pair, scores in by_pair.items()}
    metrics[name] = statistics.fmean(values.values())
    if len(values) > 1:
      metrics |= {f'{name}/{source}-{target}': value for (source, target), value in values.items()}
    # Languages may differ in their tokenizer.
    signatures = {getattr(scores, f'{name}_signature') for scores in by_pair.values()}
    metrics[f'{name}_signature'] = ' '.join(sorted(signatures))
  return metrics


def _CheckLengths(**texts: Sequence[str]) -> None:
  lengths = {name: len(values) for name, values in texts.items()}
  if len(set(lengths.values())) != 1 or not lengths['hypotheses']:
    raise ValueError(f'expected equally many of each, and at least one, got {lengths}')


def _SacreBleu() -> Any:
  try:
    from sacrebleu import metrics
  except ImportError as e:
    raise ValueError(
      'BLEU and chrF need the package sacrebleu, which is not installed: pip install sacrebleu, or '
      "this project with its extra, pip install 'lingvo_gpipe[mt]'"
    ) from e
  return metrics
