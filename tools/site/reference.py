# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code: the API, Params, flags of the programs, and experiments."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lingvo_gpipe
from lingvo_gpipe.core import hyperparams, literals
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tools import draw_schedule

_ROOT = pathlib.Path(__file__).parents[2]
_LONGEST_DEFAULT = 60
_PROGRAMS = ('trainer', 'evaluator', 'worker')
_ZERO_BUBBLE = '[Zero Bubble](https://arxiv.org/abs/2401.10241)'
_CONTROLLABLE_MEMORY = '[Controllable Memory](https://arxiv.org/abs/2405.15362)'
# The other schedules are this project's.
_SOURCES = {
  'gpipe': '[GPipe](https://arxiv.org/abs/1811.06965)',
  '1f1b': '[PipeDream-Flush](https://arxiv.org/abs/2006.09503), '
  '[DAPPLE](https://arxiv.org/abs/2007.01045)',
  'interleaved_1f1b': '[Megatron-LM](https://arxiv.org/abs/2104.04473)',
  'looped_bfs': '[Breadth-First](https://arxiv.org/abs/2211.05953)',
  'zb_h1': _ZERO_BUBBLE,
  'zb_2p': _ZERO_BUBBLE,
  'zb_v': _ZERO_BUBBLE,
  'interleaved_zb': _ZERO_BUBBLE,
  'v_half': _CONTROLLABLE_MEMORY,
  'v_min': _CONTROLLABLE_MEMORY,
  'dualpipe_v': '[DualPipe](https://github.com/deepseek-ai/DualPipe)',
}


def Pages() -> dict[str, str]:
  """Returns {path: Markdown} of the reference."""
  modules = _PublicModules()
  pages = {f'reference/api/{name}.md': _ApiPage(name, path) for name, path in modules.items()}
  pages['reference/api/index.md'] = _ApiIndex(modules)
  pages['reference/params.md'] = _ParamsPage([*modules.values(), *_TaskModules()])
  pages['reference/programs.md'] = _ProgramsPage()
  pages['reference/experiments.md'] = _ExperimentsPage()
  pages['reference/schedules.md'] = SchedulesPage()
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
  return _FirstParagraph(inspect.getdoc(thing) or '')


def _FirstParagraph(text: str) -> str:
  return _Cell(' '.join(text.split('\n\n')[0].split()))


# ---- Params -------------------------------------------------------------------------------------


def _ParamsPage(paths: list[str]) -> str:
  lines = [
    '# Params', '',
    'The Params of every layer, task and input, with their defaults. A class also has the '
    'Params of the class that it names. `trainer --mode=inspect_params` prints the Params of an '
    'experiment.',
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


# ---- Schedules ----------------------------------------------------------------------------------


def SchedulesPage() -> str:
  """Returns the page of schedules."""
  k, m = 4, 8
  lines = [
    '# Schedules', '',
    'The registered schedules, for S stages on K devices, v = S/K of them on each, and M '
    'micro-batches. Stages count from 0. A name leads to its picture. '
    '[Schedules](../schedules.md) says when to use which.', '',
    '## Order, bubble and activations', '',
    'Idle is the share of a step that a device idles if all stages are equal and B = 2 F = 2 I = 2 '
    'W. Held is the number of micro-batches whose activations stage k, or a device, holds at most. '
    f'The last two columns are simulated with K = {k} and M = {m}, without recomputation.', '',
    f'| Name | Order | Idle | Held | Idle, K={k}, M={m} | Held by a device |',
    '| --- | --- | --- | --- | --- | --- |',
  ]  # fmt: skip
  formulas = re.findall(r'^\| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$', schedules.__doc__ or '', re.M)
  of_name = {name: more for name, *more in formulas}
  rows = []
  for name in schedules.Names():
    per_device = draw_schedule.LeastStages(name, k)
    schedule = schedules.Get(name, per_device * k, m, k)
    link = f'[`{name}`](../schedule_pictures.md#{name})'
    numbers, idle, held = of_name[name]
    bubble = draw_schedule.Simulate(schedule).overall_bubble
    peak = max(schedule.DevicePeakActivations())
    order = _FirstParagraph(schedules.Description(name))
    lines.append(f'| {link} | {order} | {idle} | {held} | {bubble:.1%} | {peak} |')
    multiple = 'a multiple of K' if name in schedules.IN_ROUNDS else 'any'
    kinds = {a.kind.value for row in schedule.actions for a in row}
    source = _SOURCES.get(name, 'this project')
    rows.append(
      f'| {link} | {numbers} | {_Placement(name)} | {multiple} | {", ".join(sorted(kinds))} | '
      f'{_Policies(kinds)} | {source} |'
    )
  lines += [
    '',
    '## Placement, actions and policies', '',
    'F is forward, B backward, I and W its halves, the gradients of the input and of the weights, '
    'and V forward and backward in one. V recomputes nothing under any policy. '
    '[Fit into memory](../memory.md) explains the policies '
    f'{", ".join(f"`{policy}`" for policy in rematerialisation.POLICIES)} and `auto`.', '',
    '| Name | v | Device of stage k | M | Actions | Policies | Source |',
    '| --- | --- | --- | --- | --- | --- | --- |',
    *rows,
  ]  # fmt: skip
  return '\n'.join(lines) + '\n'


def _Placement(name: str) -> str:
  """Returns the device of stage k, as a text."""
  if not schedules.TakesStagesPerDevice(name, 2):
    return 'k'
  is_loop = schedules.Get(name, 4, 2, 2).stage_to_device == (0, 1, 0, 1)
  return 'k mod K' if is_loop else 'a V: k, then 2K-1-k'


def _Policies(kinds: set[str]) -> str:
  """Returns the policies that differ under a schedule with these kinds of actions, as a text."""
  if kinds == {'F'}:
    return 'has no backward'
  return 'all; in I `layer` is as `stage`' if 'I' in kinds else 'all'
