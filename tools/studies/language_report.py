# SPDX-License-Identifier: Apache-2.0
"""Compares translation models with bilingual baselines by language, in tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

METRICS = ('bleu', 'chrf', 'exact')
_FORMATS = {'bleu': '{:.1f}', 'chrf': '{:.1f}', 'exact': '{:.2f}'}

Metrics = Mapping[str, float | str]


def Score(metrics: Metrics, metric: str, language: str) -> float:
  """Returns a model's score from a language into English, or its only score."""
  return float(metrics.get(f'{metric}/{language}-en', metrics[metric]))


def Text(metric: str, value: float | str) -> str:
  """Formats a score for the tables."""
  return _FORMATS[metric].format(float(value))


def LanguageTable(
  metric: str,
  sizes: Mapping[str, int],
  baselines: Mapping[str, Metrics],
  models: Mapping[str, Metrics],
) -> str:
  """Returns a Markdown table with a row for each language: scores of the baseline and each model.

  Args:
    metric: one of METRICS.
    sizes: {language: number of training examples}, in the order of the rows.
    baselines: {language: metrics of the bilingual model}.
    models: {name: metrics of a model of all languages}.
  """
  rows = []
  for language, size in sizes.items():
    if language in baselines:
      scores = [Score(baselines[language], metric, language)]
      scores += [Score(metrics, metric, language) for metrics in models.values()]
      rows.append((language, str(size), *(Text(metric, score) for score in scores)))
  if rows:
    means = [sum(float(row[i]) for row in rows) / len(rows) for i in range(2, len(rows[0]))]
    rows.append(('mean', '', *(Text(metric, mean) for mean in means)))
  return MarkdownTable(('language', 'names', 'bilingual', *models), rows)


def MarkdownTable(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  lines = [header, ['---'] * len(header), *rows]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def Gains(
  metric: str,
  sizes: Mapping[str, int],
  baselines: Mapping[str, Metrics],
  metrics: Metrics,
) -> list[tuple[int, float]]:
  """Returns [(training examples, gain over the baseline)] for languages with a baseline."""
  return [
    (size, Score(metrics, metric, language) - Score(baselines[language], metric, language))
    for language, size in sizes.items()
    if language in baselines
  ]


def PlotGains(
  sizes: Mapping[str, int],
  baselines: Mapping[str, Metrics],
  models: Mapping[str, Metrics],
  path: str,
) -> None:
  """Draws the GPipe paper's figure 3: gain over the baselines, from the most data to the least.

  Raises:
    ImportError: matplotlib is not installed.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, all_axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
  for axes, metric in zip(all_axes, ('bleu', 'chrf'), strict=True):
    for name, metrics in models.items():
      points = Gains(metric, sizes, baselines, metrics)
      axes.plot(*zip(*points, strict=True), marker='o', label=name)
    axes.axhline(0.0, color='black', linewidth=0.8)
    axes.set_xscale('log')
    axes.invert_xaxis()
    axes.set(
      xlabel='names of the language in training',
      ylabel=f'{metric} above the bilingual model',
    )
    for language, size in sizes.items():
      if language in baselines:
        axes.annotate(
          language, (size, 0.01), xycoords=('data', 'axes fraction'), ha='center', fontsize=8
        )
    axes.legend()
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)
