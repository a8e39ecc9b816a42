# SPDX-License-Identifier: Apache-2.0
"""Checks this library on the accelerators of this machine, or on two logical CPU devices.

    python -m tools.accelerator_check --output_dir=DIR

writes DIR/report.json, DIR/report.md and DIR/report.html, and prints a table of PASS and FAIL; the
exit status is 1 if a check failed. Each check runs in a process with a time limit, so a check that
crashes or hangs is a line of the table. On two CPU cores it takes less than five minutes.
"""

from __future__ import annotations

import contextlib
import glob
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from lingvo_gpipe.core import text_table
from tools import program

FLAGS = flags.FLAGS

_TO_SEND = (
  'With a bug report, send report.json, which has the versions, the devices and all figures, and '
  'the file CHECK.log of each check that failed.'
)
_MARKS = {True: 'PASS', False: 'FAIL'}


def DefineFlags() -> None:
  """Defines the flags; --output_dir is needed."""
  flags.DEFINE_string('output_dir', None, 'Directory of the report; existing files are replaced.')
  flags.DEFINE_list('checks', [], 'Names of the checks to run; all by default.')
  flags.DEFINE_enum('platform', 'auto', ['auto', 'cpu', 'gpu', 'tpu'], 'Kind of device.')
  flags.DEFINE_integer('timeout', 300, 'Time limit in seconds for one check.', lower_bound=1)


def RunCheck(name: str, environment: Mapping[str, str], folder: str) -> list[dict[str, Any]]:
  """Runs a check in a new process and returns its rows; a failure of the process is a last row.

  Args:
    name: the check.
    environment: its environment variables.
    folder: directory of the output, which gets `<name>.log`.
  """
  argument = json.dumps({'check': name, 'platform': FLAGS.platform, 'folder': folder})
  path = os.pathsep.join(filter(None, [str(program.ROOT), os.environ.get('PYTHONPATH')]))
  log, problem, start = os.path.join(folder, f'{name}.log'), '', time.monotonic()
  with open(log, 'wb') as stderr, tempfile.TemporaryFile('w+') as stdout:
    process = subprocess.Popen(
      [sys.executable, '-m', 'tools.accelerators.checks', argument],
      env={**os.environ, 'PYTHONPATH': path, **environment},
      stdout=stdout,
      stderr=stderr,
      start_new_session=True,  # A check may start processes, which end with it.
    )
    try:
      status = process.wait(FLAGS.timeout)
      problem = f'the process ended with status {status}: see {name}.log' if status else ''
    except subprocess.TimeoutExpired:
      problem = f'not done after {FLAGS.timeout} s (--timeout)'
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    stdout.seek(0)
    rows = [json.loads(line) for line in stdout if line.startswith('{"row"')]
  if problem or not rows:
    rows.append({'row': name, 'pass': False, 'text': problem or 'no row', 'figures': {}})
  seconds = time.monotonic() - start
  return [{'check': name, **row, 'seconds_of_check': round(seconds, 1)} for row in rows]


def Markdown(rows: Sequence[Mapping[str, Any]], pictures: Sequence[str]) -> str:
  """Returns the page as Markdown.

  Args:
    rows: rows of `RunCheck`.
    pictures: names of the pages with timelines, in the same directory.
  """
  lines = ['# Accelerator check', '', _Verdict(rows), '', '| | check | row | result |']
  lines.append('| --- ' * 4 + '|')
  for row in rows:
    text = row['text'].replace('|', '/')
    lines.append(f'| {_MARKS[row["pass"]]} | {row["check"]} | {row["row"]} | {text} |')
  lines += ['', *(f'Timeline: [{name}]({name})' for name in pictures), '', _TO_SEND, '']
  return '\n'.join(lines)


def Html(rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
  """Returns the page as HTML, with the timelines in it.

  Args:
    rows: rows of `RunCheck`.
    pictures: {name: HTML} of the timelines.
  """
  body = []
  for row in rows:
    cells = (_MARKS[row['pass']], row['check'], row['row'], row['text'])
    colour = 'inherit' if row['pass'] else '#fcc'
    text = ''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)
    body.append(f'<tr style="background: {colour}">{text}</tr>')
  frames = [
    f'<h2>{html.escape(name)}</h2>\n<iframe srcdoc="{html.escape(page)}" '
    'style="width: 100%; height: 40em"></iframe>'
    for name, page in pictures.items()
  ]
  return '\n'.join(
    [
      '<!DOCTYPE html>',
      '<html lang="en"><meta charset="utf-8"><title>Accelerator check</title>',
      '<body style="font-family: sans-serif"><h1>Accelerator check</h1>',
      f'<p>{_Verdict(rows)}</p>',
      '<table>',
      *body,
      '</table>',
      *frames,
      f'<p>{_TO_SEND}</p></body></html>',
      '',
    ]
  )


def _Verdict(rows: Sequence[Mapping[str, Any]]) -> str:
  failed = sum(not row['pass'] for row in rows)
  return f'{len(rows) - failed} PASS, {failed} FAIL'


def Run() -> int:
  """Runs the checks and writes the report; returns 1 if a check failed."""
  from tools.accelerators import checks  # Loads TensorFlow, which --help does not need.

  if not FLAGS.output_dir:
    raise ValueError('--output_dir is needed: the directory of the report')
  names = program.Names('checks', checks.CHECKS) if FLAGS.checks else list(checks.CHECKS)
  folder = os.path.abspath(FLAGS.output_dir)
  for name in checks.RUNS:  # Runs of an earlier call would resume.
    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
  os.makedirs(folder, exist_ok=True)
  rows: list[dict[str, Any]] = []
  start = time.monotonic()
  for name in names:
    new = RunCheck(name, checks.CHECKS[name][1], folder)
    rows += new
    print(f'{name}: {_Verdict(new)}, {new[0]["seconds_of_check"]:.0f} s', flush=True)
  pictures = {}
  for path in sorted(glob.glob(os.path.join(folder, '*', 'timeline_*.html'))):
    with open(path, encoding='utf-8') as f:
      pictures[os.path.relpath(path, folder)] = f.read()
  files = {
    'report.json': json.dumps({'seconds': time.monotonic() - start, 'rows': rows}, indent=1) + '\n',
    'report.md': Markdown(rows, list(pictures)),
    'report.html': Html(rows, pictures),
  }
  for name, content in files.items():
    with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
      f.write(content)
  table = [(_MARKS[row['pass']], row['check'], row['row'], row['text']) for row in rows]
  print('\n' + '\n'.join(text_table.FormatTable(table, range(4))))
  print(f'{_Verdict(rows)}; report: {os.path.join(folder, "report.html")}')
  print(_TO_SEND)
  return 0 if all(row['pass'] for row in rows) else 1


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
