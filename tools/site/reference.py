# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code: the API, Params, flags of the programs, and experiments."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lingvo_gpipe
from lingvo_gpipe.core import hyperparams, literals
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.learning import optimizer

_ROOT = pathlib.Path(__file__).parents[2]
_LONGEST_DEFAULT = 60
_PROGRAMS = ('trainer', 'evaluator', 'worker')


def Pages() -> dict[str, str]:
  """Returns {path: Markdown} of the reference."""
  modules = _PublicModules()
  pages = {f'reference/api/{name}.md': _ApiPage(name, path) for name, path in modules.items()}
  pages['reference/api/index.md'] = _ApiIndex(modules)
  pages['reference/params.md'] = _ParamsPage([*modules.values(), *_TaskModules()])
  pages['reference/programs.md'] = _ProgramsPage()
  pages['reference/experiments.md'] = _ExperimentsPage()
  return pages


def _PublicModules() -> dict[str, str]:
  """Returns {public name: path of its module}."""
  values = {name: getattr(lingvo_gpipe, name) for name in lingvo_gpipe.__all__}
  return {
    name: value.__module__ if inspect.isclass(value) else value.__name__
    for name, value in values.items()
  }


def _TaskModules() -> list[str]:
  paths = sorted((_ROOT / 'tasks').rglob('[!_]*.py'))
  return ['.'.join(path.relative_to(_ROOT).with_suffix('').parts) for path in paths]


# ---- API ----------------------------------------------------------------------------------------


def _ApiPage(name: str, path: str) -> str:
  is_class = not path.endswith(f'.{name}')
  return f'# {name}\n\n`from lingvo_gpipe import {name}`\n\n::: {path}{f".{name}" * is_class}\n'


def _ApiIndex(modules: dict[str, str]) -> str:
  lines = ['# API', '', 'The names of `lingvo_gpipe.__all__`; all else is private and may change.']
  folder = None
  for name, path in sorted(modules.items(), key=lambda item: item[1].split('.')[1:-1]):
    if (room := '.'.join(path.split('.')[1:-1])) != folder:
      folder = room
      lines += ['', f'## {folder}', '', '| Name | |', '| --- | --- |']
    lines.append(f'| [{name}]({name}.md) | {_FirstSentence(importlib.import_module(path))} |')
  return '\n'.join(lines) + '\n'


def _FirstSentence(thing: Any) -> str:
  paragraph = (inspect.getdoc(thing) or '').split('\n\n')[0]
  return _Cell(' '.join(paragraph.split()))


# ---- Params -------------------------------------------------------------------------------------


def _ParamsPage(paths: list[str]) -> str:
  lines = [
    '# Params', '',
    'The Params of every layer, task and input, with their defaults. A class also has those of '
    'the class that it names. `trainer --mode=inspect_params` prints the Params of an experiment.',
  ]  # fmt: skip
  for cls in _ClassesWithParams(paths):
    lines += _ParamsOf(cls)
  return '\n'.join(lines) + '\n'


def _ClassesWithParams(paths: list[str]) -> Iterator[type]:
  for path in dict.fromkeys(paths):
    for cls in vars(importlib.import_module(path)).values():
      if inspect.isclass(cls) and cls.__module__ == path and _HasParams(cls):
        yield cls


def _HasParams(cls: Any) -> bool:
  is_public = not cls.__name__.startswith('_')
  # KerasOptimizer has the Params of the Keras class that a subclass names.
  return is_public and hasattr(cls, 'Params') and cls is not optimizer.KerasOptimizer


def _ParamsOf(cls: Any) -> list[str]:
  params: hyperparams.Params = cls.Params()
  parents = [c for c in cls.__mro__[1:] if _HasParams(c)]
  inherited = parents[0].Params() if parents else hyperparams.Params()
  lines = ['', f'## {_Name(cls)} {{: #{_Name(cls)} }}', '', _FirstSentence(cls), '']
  if parents:
    lines += [f'With the Params of [{_Name(parents[0])}](#{_Name(parents[0])}).', '']
  rows = []
  for name, default in params.IterParams():
    description = params.GetDescription(name)
    is_inherited = name in inherited and inherited.GetDescription(name) == description
    if name != 'cls' and not (is_inherited and inherited.Get(name) == default):
      domain = params.GetDomain(name)
      values = f' Expects {domain.text}.' if domain else ''
      rows.append(f'| `{name}` | {_Default(default)} | {_Cell(description + values)} |')
  return lines + ['| Param | Default | |', '| --- | --- | --- |', *rows] if rows else lines


def _Name(cls: Any) -> str:
  return f'{cls.__module__.split(".")[-1]}.{cls.__name__}'


def _Default(value: Any) -> str:
  if isinstance(value, hyperparams.InstantiableParams):
    return f'`{value.cls.__name__}.Params()`'
  if isinstance(value, hyperparams.Params):
    return '`Params`'
  text = literals.WriteValue(value)
  return f'`{_Cell(text if len(text) <= _LONGEST_DEFAULT else text[:_LONGEST_DEFAULT] + " ...")}`'


def _Cell(text: str) -> str:
  """Returns text for a cell of a table."""
  return text.replace('|', '\\|').replace('<', '&lt;')


# ---- Programs and experiments -------------------------------------------------------------------


def _ProgramsPage() -> str:
  lines = ['# Programs', '', 'The output of `--help`.']
  environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
  for name in _PROGRAMS:
    done = subprocess.run(
      [sys.executable, '-m', f'lingvo_gpipe.{name}', '--help'],
      check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    lines += ['', f'## {name}', '', '```text', done.stdout.strip(), '```']
  return '\n'.join(lines) + '\n'


def _ExperimentsPage() -> str:
  lines = [
    '# Experiments', '',
    'The output of `trainer --mode=list`, with the text of each class.', '',
    '| Key | |', '| --- | --- |',
  ]  # fmt: skip
  for key in registry.ListKeys():
    lines.append(f'| `{key}` | {_FirstSentence(registry.GetClass(key))} |')
  return '\n'.join(lines) + '\n'
