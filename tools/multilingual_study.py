# SPDX-License-Identifier: Apache-2.0
"""Repeats the GPipe paper's multilingual experiment on a small scale: depth, width and languages.

    python -m tools.multilingual_study --output=runs/study --minutes=60

trains `mt.cldr` models one after another: a bilingual baseline for each of a dozen languages, then
models of all languages (one as large as the baselines, a deep one, a wide one), and the first of
them again with larger batches, by accumulated gradients. It translates the held-out names and
writes into --output:

    results.jsonl   one line for each finished model; an interrupted study resumes after them
    report.md       the tables: the paper's figure 3 by language, and its table 5 by batch size
    gains.png       figure 3: gain over the baselines against the languages' data (matplotlib)
    MODEL/          hypotheses and references, as the evaluator's decode job writes them

A model of all languages gets four times the time of a bilingual model. A model whose loss on Dev
has stopped falling ends early, and its remaining time goes to the models after it.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # noqa: F401  First: it keeps TensorFlow quiet.

# isort: split
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Any

from absl import flags

from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.runners import task_cut
from tasks.mt import cldr_names
from tools import program
from tools.studies import language_report, timed_training

FLAGS = flags.FLAGS
_STUDIES = ('languages', 'batch_sizes', 'many_to_many')
_MODELS = {
  'multilingual': 'mt.cldr.Multilingual',
  'deep': 'mt.cldr.MultilingualDeep',
  'wide': 'mt.cldr.MultilingualWide',
}
# Time of a model of all languages, relative to a bilingual model.
_SHARE = 4.0
_ACCUMULATED = 'task.train.learner.num_accumulated_mini_batches'
_WARMUP = 'task.train.learner.lr_schedule.warmup_steps'
# Fields of a line that a resumed study and its report need, besides its numbers.
_RESULT_TYPES = {'name': str, 'overrides': list, 'is_done': bool, 'metrics': dict}
_RESULT_NUMBERS = ('num_params', 'steps', 'seconds', 'total_seconds', 'dev_loss')


def DefineFlags() -> None:
  """Defines the flags; all but --output have defaults."""
  flags.DEFINE_string('output', None, 'Folder for the results.')
  flags.DEFINE_float('minutes', 60.0, 'Total minutes for all models, including decoding.')
  flags.DEFINE_list('studies', ['languages', 'batch_sizes'], f'Some of {", ".join(_STUDIES)}.')
  flags.DEFINE_list('languages', list(cldr_names.STUDIED), 'The languages to study.')
  flags.DEFINE_list('batch_factors', ['4', '16'], 'Factors by which to enlarge batches.')
  flags.DEFINE_string('model_params_override', '', 'Overrides for every model, as for the trainer.')


def Settings() -> list[timed_training.Setting]:
  """Returns the models in training order; raises ValueError if the value of a flag is invalid."""
  studies = program.Names('studies', _STUDIES)
  Setting = timed_training.Setting
  settings = []
  if 'languages' in studies:
    for language in program.Names('languages', cldr_names.STUDIED):
      override = f"input.languages:['{language}']"
      settings.append(Setting(f'bilingual-{language}', 'mt.cldr.Bilingual', [override]))
    settings += [Setting(name, key, share=_SHARE) for name, key in _MODELS.items()]
  if 'batch_sizes' in studies:
    key = _MODELS['multilingual']
    if 'languages' not in studies:
      settings.append(Setting('multilingual', key, share=_SHARE))
    for factor in program.Numbers('batch_factors', low=2):
      overrides = _LargerBatch(key, factor)
      settings.append(Setting(f'multilingual-batch-x{factor}', key, overrides, _SHARE))
  if 'many_to_many' in studies:
    settings.append(Setting('many-to-many', 'mt.cldr.ManyToMany', share=_SHARE))
  every = FLAGS.model_params_override
  return [dataclasses.replace(s, overrides=[*s.overrides, every]) for s in settings]


def _LargerBatch(key: str, factor: int) -> list[str]:
  """Returns overrides for larger batches, with a warm-up over equally many examples.

  The peak of the schedule is proportional to the inverse square root of the warm-up steps, so the
  learning rate at an example grows with the square root of the batch size.
  """
  updates = timed_training.Setting('', key).Params('Train').Get(_WARMUP)
  return [f'{_ACCUMULATED}:{factor};{_WARMUP}:{max(1, updates // factor)}']


def ReadResults(path: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns {name: line of a finished model}; ignores incomplete lines.

  Raises:
    ValueError: the file cannot be read, or a complete line is not the result of a model.
  """
  results = {}
  text = program.ReadText(str(path), 'output') if os.path.exists(path) else ''
  for number, line in enumerate(text.splitlines(), 1):
    try:
      result = json.loads(line)
    except (ValueError, RecursionError):
      continue
    if not _IsResult(result):
      raise ValueError(
        f'--output: {path}, line {number}: expected the result of a model, got {line[:60]!r}: '
        'restore it, or choose another folder'
      )
    results[result['name']] = result
  return results


def _IsResult(result: Any) -> bool:
  """Whether parsed JSON is the result of a model."""
  if not isinstance(result, dict):
    return False
  if not all(isinstance(result.get(name), kind) for name, kind in _RESULT_TYPES.items()):
    return False
  metrics = result['metrics']
  numbers = [result.get(name) for name in _RESULT_NUMBERS]
  numbers += [metrics.get(name) for name in language_report.METRICS]
  return all(map(_IsNumber, [*numbers, *metrics.values()]))


def _IsNumber(value: Any) -> bool:
  """Whether a value is a number that can be divided: a long integer exceeds all floats."""
  return type(value) is float or (type(value) is int and abs(value) < 2**63)


def CheckResults(
  settings: Iterable[timed_training.Setting], results: dict[str, dict[str, Any]]
) -> None:
  """Raises ValueError if a finished model was trained with different overrides."""
  for setting in settings:
    done = results.get(setting.name, {}).get('overrides', list(setting.overrides))
    if done != list(setting.overrides):
      raise ValueError(
        f'--output has a {setting.name} with the overrides {done}, not {list(setting.overrides)}; '
        'choose another folder'
      )


def Report(results: dict[str, dict[str, Any]]) -> str:
  """Returns the tables in Markdown."""
  baselines, models = _Split(results)
  parts = []
  if baselines and models:
    for metric in language_report.METRICS:
      table = language_report.LanguageTable(metric, cldr_names.STUDIED, baselines, models)
      parts.append(f'{metric} of held-out names, into English:\n\n{table}')
  header = ['model', 'parameters', 'steps', 'time', 'loss on Dev', *language_report.METRICS]
  rows = []
  for name, result in results.items():
    end = ', no more gain' if result['is_done'] else ''
    row = [
      name,
      f'{result["num_params"] / 1e6:.2f}M',
      f'{result["steps"]:,}',
      f'{result["seconds"]:.0f} s{end}',
      f'{result["dev_loss"]:.3f}',
    ]
    scores = [language_report.Text(m, result['metrics'][m]) for m in language_report.METRICS]
    rows.append([*row, *scores])
  parts.append(f'All models:\n\n{language_report.MarkdownTable(header, rows)}')
  return '\n'.join(parts)


def _Split(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns metrics of the baselines by language, and of the models of all languages by name."""
  metrics = {name: result['metrics'] for name, result in results.items()}
  baselines = {
    language: metrics[f'bilingual-{language}']
    for language in cldr_names.STUDIED
    if f'bilingual-{language}' in metrics
  }
  return baselines, {name: metrics[name] for name in _MODELS if name in metrics}


def Run() -> int:
  """Trains the models that are not finished and writes the report."""
  settings = Settings()
  if not FLAGS.output:
    raise ValueError('--output is needed: the folder of the results')
  if not FLAGS.minutes > 0:
    raise ValueError(f'--minutes must be positive, got {FLAGS.minutes}')
  folder = pathlib.Path(FLAGS.output).expanduser()
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'results.jsonl'
  results = ReadResults(path)
  CheckResults(settings, results)
  remaining = [s for s in settings if s.name not in results]
  used = sum(result['total_seconds'] for result in results.values())
  devices = _Devices(remaining)
  for i, setting in enumerate(remaining):
    share = setting.share / sum(s.share for s in remaining[i:])
    seconds = max(0.0, 60 * FLAGS.minutes - used) * share
    print(f'{setting.name}: at most {seconds:.0f} s', flush=True)
    start = time.monotonic()
    outcome = timed_training.Train(setting, devices, seconds, str(folder / setting.name))
    total = time.monotonic() - start
    used += total
    results[setting.name] = {**dataclasses.asdict(outcome), 'total_seconds': round(total, 1)}
    with path.open('a', encoding='utf-8') as f:
      f.write(json.dumps(results[setting.name]) + '\n')
    print(f'{setting.name}: {outcome.steps} steps in {outcome.seconds} s', flush=True)
  in_order = {s.name: results[s.name] for s in settings}
  report = Report(in_order)
  (folder / 'report.md').write_text(report, encoding='utf-8')
  print(report)
  baselines, models = _Split(in_order)
  if baselines and models:
    try:
      language_report.PlotGains(cldr_names.STUDIED, baselines, models, str(folder / 'gains.png'))
    except ImportError:
      print('matplotlib is not installed, so there is no picture')
  return 0


def _Devices(settings: Iterable[timed_training.Setting]) -> list[str]:
  tasks = [model_lib.SingleTaskModel(s.Params('Train')).task for s in settings]
  numbers = [task_cut.NumDevices(task) for task in tasks]
  return list(cluster.Cluster.Create(max(numbers)).devices) if numbers else []


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
