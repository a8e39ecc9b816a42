# SPDX-License-Identifier: Apache-2.0
"""Runs the tutorials in docs/tutorials, and makes a page and a notebook of each with its outputs.

A tutorial is a Python program in the percent format of Jupytext: `# %%` begins a cell of code,
`# %% [markdown]` one of text in comments. As in a notebook, the value of the last expression of a
cell is shown: as a picture if it has `_repr_html_`.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import pathlib
import subprocess
import sys
from concurrent import futures
from typing import Any, NamedTuple

import lingvo_gpipe

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / 'docs' / 'tutorials'
_MARK = '# %%'
_END = '--- end of a cell ---'
_HTML = '--- picture ---'
_SHOW = f"""
def _Show(value):
  if hasattr(value, '_repr_html_'):
    print({_HTML!r}, value._repr_html_(), sep='')
  elif value is not None:
    print(repr(value))
"""
# The first cell of a notebook. The package is not on PyPI, and some tutorials run programs of the
# checkout: the source archive has both.
_INSTALL = """\
# Installs {name} if it is missing, for example in Colab. It is not on PyPI: run
# `python -m build --sdist` in a checkout, and upload dist/{archive}.tar.gz next to this
# notebook. The cells below then run in the unpacked checkout.
import importlib.util

if importlib.util.find_spec('{name}') is None:
  !tar -xzf {archive}.tar.gz
  %pip install --quiet './{archive}{extras}'
  %cd {archive}
"""


class Cell(NamedTuple):
  """A cell: Markdown or code, the text that the code printed, and its picture as HTML."""

  is_code: bool
  source: str
  output: str = ''
  picture: str = ''


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
  """Runs a tutorial as a program, and returns its cells with their outputs.

  Raises:
    subprocess.CalledProcessError: the program failed.
  """
  cells = Parse(text)
  lines = [f'{_Shown(cell.source)}\nprint({_END!r})\n' for cell in cells if cell.is_code]
  done = subprocess.run(
    [sys.executable, '-'],
    input='\n'.join([_SHOW, *lines]), cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True,
    env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''},
  )  # fmt: skip
  outputs = iter(done.stdout.split(f'{_END}\n'))
  return [_WithOutput(cell, next(outputs)) if cell.is_code else cell for cell in cells]


def _Shown(source: str) -> str:
  """Returns the code of a cell that also shows the value of its last expression."""
  last, lines = ast.parse(source).body[-1], source.splitlines()
  if not isinstance(last, ast.Expr):
    return source
  first = last.lineno - 1
  return '\n'.join([*lines[:first], '_Show(', *lines[first : last.end_lineno], ')'])


def _WithOutput(cell: Cell, output: str) -> Cell:
  text, _, picture = output.partition(_HTML)
  return cell._replace(output=text, picture=picture.strip())


def Page(cells: list[Cell], name: str) -> str:
  """Returns the tutorial as Markdown."""
  parts = []
  for cell in cells:
    parts.append(f'```python\n{cell.source}\n```' if cell.is_code else cell.source)
    if cell.output:
      parts.append(f'```text\n{cell.output.rstrip()}\n```')
    if cell.picture:
      parts.append(f'<div style="overflow-x: auto">{cell.picture}</div>')
  parts.append(f'This page is also a [notebook]({name}.ipynb), for Jupyter and Colab.')
  return '\n\n'.join(parts) + '\n'


def Notebook(cells: list[Cell]) -> str:
  """Returns the tutorial as a Jupyter notebook (nbformat 4.5), whose first cell installs."""

  def ToJson(number: int, cell: Cell) -> dict[str, Any]:
    value = {'id': f'cell{number}', 'metadata': {}, 'source': cell.source}
    if not cell.is_code:
      return {'cell_type': 'markdown', **value}
    outputs: list[dict[str, Any]] = []
    if cell.output:
      outputs.append({'output_type': 'stream', 'name': 'stdout', 'text': cell.output})
    if cell.picture:
      data = {'text/html': cell.picture}
      outputs.append({'output_type': 'display_data', 'data': data, 'metadata': {}})
    return {'cell_type': 'code', 'execution_count': None, 'outputs': outputs, **value}

  kernel = {'name': 'python3', 'language': 'python', 'display_name': 'Python 3'}
  notebook = {
    'nbformat': 4,
    'nbformat_minor': 5,
    'metadata': {'kernelspec': kernel},
    'cells': [ToJson(i, cell) for i, cell in enumerate([_InstallCell(cells), *cells])],
  }
  return json.dumps(notebook, indent=1) + '\n'


def _InstallCell(cells: list[Cell]) -> Cell:
  name = lingvo_gpipe.__name__
  # pip 23 does not find `keras_hub`, with an underscore.
  extras = '[keras-hub]' if any('import keras_hub' in cell.source for cell in cells) else ''
  source = _INSTALL.format(name=name, archive=f'{name}-{lingvo_gpipe.__version__}', extras=extras)
  return Cell(True, source.rstrip())
