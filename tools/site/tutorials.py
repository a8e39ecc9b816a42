# SPDX-License-Identifier: Apache-2.0
"""Runs the tutorials in docs/tutorials, and makes a page and a notebook of each with its outputs.

A tutorial is a Python program in the percent format of Jupytext: `# %%` begins a cell of code,
`# %% [markdown]` one of text in comments.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from concurrent import futures
from typing import Any, NamedTuple

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / 'docs' / 'tutorials'
_MARK = '# %%'
_END = '--- end of a cell ---'


class Cell(NamedTuple):
  """A cell: Markdown or code, and what the code printed."""

  is_code: bool
  source: str
  output: str = ''


def Pages() -> dict[str, str]:
  """Returns {path: text} of the pages and notebooks."""
  paths, pages = sorted(_FOLDER.glob('*.py')), {}
  with futures.ThreadPoolExecutor(max_workers=2) as pool:
    runs = list(pool.map(Run, [path.read_text() for path in paths]))
  for path, cells in zip(paths, runs, strict=True):
    pages[f'tutorials/{path.stem}.md'] = Page(cells, path.stem)
    pages[f'tutorials/{path.stem}.ipynb'] = Notebook(cells)
  return pages


def Parse(text: str) -> list[Cell]:
  """Returns the cells of a tutorial; lines before the first mark belong to none."""
  cells = []
  for part in f'\n{text}'.split(f'\n{_MARK}')[1:]:
    mark, _, body = part.partition('\n')
    if is_code := mark.strip() != '[markdown]':
      cells.append(Cell(is_code, body.strip('\n')))
    else:
      lines = (line.removeprefix('#').removeprefix(' ') for line in body.strip().splitlines())
      cells.append(Cell(is_code, '\n'.join(lines)))
  return cells


@functools.cache  # `mkdocs serve` builds again after each change of a page.
def Run(text: str) -> list[Cell]:
  """Runs a tutorial as a program, and returns its cells with what they printed.

  Raises:
    subprocess.CalledProcessError: the program failed.
  """
  cells = Parse(text)
  lines = [f'{cell.source}\nprint({_END!r})\n' for cell in cells if cell.is_code]
  done = subprocess.run(
    [sys.executable, '-'],
    input='\n'.join(lines), cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True,
    env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''},
  )  # fmt: skip
  outputs = iter(done.stdout.split(f'{_END}\n'))
  return [cell._replace(output=next(outputs)) if cell.is_code else cell for cell in cells]


def Page(cells: list[Cell], name: str) -> str:
  """Returns the tutorial as Markdown."""
  parts = []
  for cell in cells:
    parts.append(f'```python\n{cell.source}\n```' if cell.is_code else cell.source)
    if cell.output:
      parts.append(f'```text\n{cell.output.rstrip()}\n```')
  parts.append(f'This page is also a [notebook]({name}.ipynb).')
  return '\n\n'.join(parts) + '\n'


def Notebook(cells: list[Cell]) -> str:
  """Returns the tutorial as a Jupyter notebook (nbformat 4.5)."""

  def ToJson(number: int, cell: Cell) -> dict[str, Any]:
    value = {'id': f'cell{number}', 'metadata': {}, 'source': cell.source}
    if not cell.is_code:
      return {'cell_type': 'markdown', **value}
    stream = {'output_type': 'stream', 'name': 'stdout', 'text': cell.output}
    outputs = [stream] if cell.output else []
    return {'cell_type': 'code', 'execution_count': None, 'outputs': outputs, **value}

  kernel = {'name': 'python3', 'language': 'python', 'display_name': 'Python 3'}
  notebook = {
    'nbformat': 4,
    'nbformat_minor': 5,
    'metadata': {'kernelspec': kernel},
    'cells': [ToJson(number, cell) for number, cell in enumerate(cells)],
  }
  return json.dumps(notebook, indent=1) + '\n'
