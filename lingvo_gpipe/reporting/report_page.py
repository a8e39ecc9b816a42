# SPDX-License-Identifier: Apache-2.0
"""`MakePage`: the report of a run as a page of HTML that loads nothing.

The page is well-formed XML. It has the rows of `RunReport`, the curves of metrics.jsonl, the starts
and failures on an axis of time, the evaluations, and sections that the caller adds.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Mapping, Sequence

from lingvo_gpipe.reporting import line_chart, metrics_log, run_report, svg

# Values of a step whose curves say nothing.
_LEFT_OUT = ('is_finite', 'grad_scale', 'loss_weight', 'steps')
_FIRST, _LAST = ('loss',), ('learning_rate', 'grad_norm', 'num_skipped_steps')
_MOST_EVALUATIONS = 20
_UNITS = (('days', 86400.0), ('hours', 3600.0), ('minutes', 60.0), ('seconds', 1.0))
Escape = svg.Escape
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --bad: #c62828;
  --c0: #2f6fc4; --c1: #b8600b; --c2: #1f8a5b; --c3: #8e4ec6; --c4: #a8325c; --c5: #4d6270; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80;
  --c0: #7fb0f0; --c1: #f0a95c; --c2: #6fd3a4; --c3: #cda2f2; --c4: #f08db0; --c5: #b0c4d0; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem;
  color: CanvasText; background: Canvas; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 0; } figure { margin: 0; min-width: 0; max-width: 36rem; }
figcaption { font-size: 0.8rem; } figcaption .sample { width: 24px; height: 10px; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); }
svg { width: 100%; } svg text { font: 11px sans-serif; fill: currentColor; }
svg rect + text { fill: #222; } svg .bad { fill: var(--bad); font-weight: bold; }
figure path { fill: none; stroke-width: 1.5; }
figure .grid { stroke: var(--line); stroke-width: 1; }
figure .start { stroke: currentColor; stroke-dasharray: 2 3; }
figure .failure { stroke: var(--bad); stroke-width: 2; }
.scroll, pre { overflow-x: auto; } .scroll svg { min-width: 44rem; }
.wrap pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { padding: 0.7rem; border: 1px solid var(--line); font-size: 0.8rem; }
table { border-collapse: collapse; } td, th { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; } td { overflow-wrap: anywhere; } .scroll td { overflow-wrap: normal; }
iframe { width: 100%; height: 24rem; border: 1px solid var(--line); }
""" + ''.join(f'.c{i} {{ stroke: var(--c{i}); }}\n' for i in range(line_chart.NUM_COLOURS))


def MakePage(
  report: run_report.RunReport,
  records: Sequence[metrics_log.Record],
  starts: Sequence[float],
  command: str,
  sections: Mapping[str, str],
) -> str:
  """Returns the page.

  Args:
    report: the report.
    records: the lines of metrics.jsonl.
    starts: times when a call of the trainer began, in seconds of the epoch.
    command: the command line that continues the run.
    sections: {title: HTML} of further sections.
  """
  model = report.model.partition('@')[0]
  further = (
    'Training has ended; with larger limits, such as --max_steps, this continues it:'
    if report.is_finished
    else 'This continues the run from its last checkpoint:'
  )
  rows = ''.join(
    f'<tr><th scope="row">{Escape(name)}</th><td>{Escape(text)}</td></tr>'
    for name, text in report.Rows()
  )
  all_sections = {
    'Summary': f'<table>{rows}</table>',
    'Command': f'<p>{further}</p><div class="wrap">{Preformatted(command)}</div>',
    'Curves': _Curves(records),
    'Time, starts and failures': _TimeAxis(records, starts),
    'Evaluations': _Evaluations(records),
    **sections,
  }
  body = ''.join(
    f'<section><h2>{Escape(title)}</h2>\n{content}</section>\n'
    for title, content in all_sections.items()
  )
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    f'<title>{Escape(model)}</title><style>{_STYLE}</style></head><body>\n'
    f'<h1>{Escape(model)}</h1>\n{body}</body></html>\n'
  )


def Preformatted(text: str) -> str:
  """Returns HTML that shows a text as it is, in a fixed-width font."""
  return f'<pre tabindex="0">{Escape(text)}</pre>'


def _Curves(records: Sequence[metrics_log.Record]) -> str:
  """Returns a chart for each metric, with a curve for each task and data set."""
  charts: dict[str, dict[str, list[tuple[float, float]]]] = collections.defaultdict(dict)
  for record in records:
    for name, value in record.values.items():
      metric, _, member = name.partition('/')
      if record.split != metrics_log.FAILURES and metric not in _LEFT_OUT:
        series = charts[metric].setdefault(f'{record.split} {member}'.strip(), [])
        series.append((record.step, value))
  if not any(value for values in charts['num_skipped_steps'].values() for _, value in values):
    charts.pop('num_skipped_steps')  # The summary says so.

  def Order(metric: str) -> tuple[bool, bool]:
    return metric not in _FIRST, metric in _LAST or metric.endswith('_per_second')

  figures = [
    line_chart.Figure(metric.replace('_', ' '), charts[metric])
    for metric in sorted(charts, key=Order)
  ]
  return (
    f'<div class="charts">{"".join(figures)}</div>' if figures else '<p>No step was logged.</p>'
  )


def _TimeAxis(records: Sequence[metrics_log.Record], starts: Sequence[float]) -> str:
  """Returns the step over time, with the starts and failures as lines and in a table."""
  failures = [record for record in records if record.split == metrics_log.FAILURES]
  steps = [record for record in records if record.split == 'train']
  times = [record.time for record in (*failures, *steps)] + list(starts)
  if not times:
    return '<p>No step was logged.</p>'
  first, last = min(times), max(times)
  unit, seconds = next(u for u in _UNITS if last - first >= 2 * u[1] or u[1] == 1.0)
  events = [(time, 'start of the trainer', 'start') for time in starts]
  for record in failures:
    counts = ', '.join(f'{name} {value:g}' for name, value in record.values.items())
    events.append((record.time, f'failures of a call so far: {counts}', 'failure'))
  events.sort()
  chart = ''
  if steps:
    marks = [line_chart.Mark((time - first) / seconds, *event) for time, *event in events]
    points = [((record.time - first) / seconds, record.step) for record in steps]
    chart = line_chart.Figure('step over time', {'train': points}, unit, marks)
  rows = ''.join(
    f'<tr><td>{_Time(time)}</td><td>{Escape(text)}</td></tr>' for time, text, _ in events
  )
  legend = (
    '<p>Dotted: a start of the trainer. Thick: failures after which training was resumed.</p>'
  )
  return (
    f'{chart}{legend * bool(chart)}<table><tr><th>Time (UTC)</th><th>Event</th></tr>{rows}</table>'
  )


def _Time(seconds: float) -> str:
  return f'{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}'


def _Evaluations(records: Sequence[metrics_log.Record]) -> str:
  """Returns a table of the last evaluations and decodings."""
  passes = [r for r in records if r.split not in ('train', metrics_log.FAILURES)]
  if not passes:
    return '<p>Nothing was evaluated.</p>'
  names = list(dict.fromkeys(name for record in passes for name in record.values))
  head = ''.join(f'<th>{Escape(name)}</th>' for name in ['step', 'data set', *names])
  rows = []
  for record in passes[: -_MOST_EVALUATIONS - 1 : -1]:
    cells = [f'{record.step:,}', record.split]
    numbers = [record.values.get(name) for name in names]
    cells += ['' if number is None else line_chart.Number(number) for number in numbers]
    rows.append('<tr>' + ''.join(f'<td>{Escape(cell)}</td>' for cell in cells) + '</tr>')
  note = f'<p>The last {_MOST_EVALUATIONS} of {len(passes)}.</p>'
  return (
    f'{note * (len(passes) > len(rows))}<div class="scroll"><table><tr>{head}</tr>'
    f'{"".join(rows)}</table></div>'
  )
