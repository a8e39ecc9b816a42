# SPDX-License-Identifier: Apache-2.0
"""The registry of experiments: a key such as `lm.stdlib.ByteTransformerGPipe2` leads to a class.

An experiment is a class that derives from `SingleTaskModelParams` and is decorated with
`RegisterSingleTaskModel`, or, of several tasks, from `MultiTaskModelParams` and is decorated with
`RegisterMultiTaskModel`. Its key is the path of its module below a package of experiments, and the
name of the class: class X of `params/lm/stdlib.py` is `lm.stdlib.X`, and class X of
`mycompany/models/params/mt/big.py` is `mt.big.X` if `mycompany.models.params` is such a package. A
class of a file whose name ends in `_test` is `test.X`, one of a notebook or script `__main__.X`;
these two kinds are found once they are defined.

Packages are searched in this order, and the first that has the experiment wins: those the caller
names (`params` of the working directory if none), then those that installed distributions declare
under the entry-point group `lingvo_gpipe.params`, whose value is the package's name. A look-up
imports the one module that its key names (and the packages around that), so an error in another
file, or what it imports, matters to nobody else. Lists and hints read the sources without running
them. This module imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import inspect
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.experiment import experiment_sources

ENTRY_POINT_GROUP = 'lingvo_gpipe.params'
# First parts of keys that belong to no package of experiments.
_TEST = 'test'
_MAIN = '__main__'


class BaseModelParams:
  """Base class of experiments: what to train, on what, and how to do it in seconds.

  Sizes (BATCH_SIZE, NUM_LAYERS, ...) are class attributes by convention: a variant is a subclass
  that overrides some of them. Datasets are the methods `Train`, `Dev` and `Test`, as far as a class
  defines them, and those whose names the class lists in `DATASETS`. No other method is taken for a
  dataset, so helper methods may have any name.
  """

  DATASETS: tuple[str, ...] = ()

  def Train(self) -> hyperparams.Params:
    """Returns the params of the input generator for training."""
    raise self._NoDataset('Train')

  def Dev(self) -> hyperparams.Params:
    """Returns the params of the input generator for the development set."""
    raise self._NoDataset('Dev')

  def Test(self) -> hyperparams.Params:
    """Returns the params of the input generator for the test set."""
    raise self._NoDataset('Test')

  def Model(self) -> hyperparams.Params:
    """Returns the params of the model."""
    raise NotImplementedError(
      f'{_Name(type(self))} defines no Model(): return model params from it.'
    )

  def Smoke(self) -> dict[str, Any] | str | None:
    """Returns the overrides of model params which make the experiment run in seconds.

    Either a dict {'task.x.y': value} or the text that --model_params_override takes; None: it does
    already.
    """
    return None

  @classmethod
  def DatasetNames(cls) -> list[str]:
    """Returns the names of the datasets: Train, Dev, Test as far as defined, then `DATASETS`."""
    defined = [
      name
      for name in ('Train', 'Dev', 'Test')
      if callable(getattr(cls, name)) and getattr(cls, name) is not _BASE_METHODS[name]
    ]
    return defined + [name for name in cls.DATASETS if name not in defined]

  def _NoDataset(self, name: str) -> NotImplementedError:
    return NotImplementedError(
      f'{_Name(type(self))} defines no {name}(): return input params from it. '
      f'Its datasets: {", ".join(self.DatasetNames()) or "none"}.'
    )


class SingleTaskModelParams(BaseModelParams):
  """Base class of experiments of one task: define `Task` and `Train`."""

  def Task(self) -> hyperparams.Params:
    """Returns the params of the task. A method `Task_<Dataset>` replaces it for one dataset."""
    raise NotImplementedError(f'{_Name(type(self))} defines no Task(): return task params from it.')

  def Model(self) -> hyperparams.Params:
    """Returns the params of the model: `Task()` in a SingleTaskModel."""
    # Imported late: it loads TensorFlow, and it stands above this module.
    from lingvo_gpipe.experiment import model

    return model.SingleTaskModel.Params().Set(task=self.Task())


class MultiTaskModelParams(BaseModelParams):
  """Base class of experiments of several tasks: define `Tasks` and `Train`.

  A dataset's method returns {task: params of its input}; tasks that it leaves out are not evaluated
  on it.
  """

  def Tasks(self) -> dict[str, hyperparams.Params]:
    """Returns {name: params of the task}."""
    raise NotImplementedError(
      f'{_Name(type(self))} defines no Tasks(): return {{name: task params}}.'
    )

  def TaskProbs(self) -> dict[str, float]:
    """Returns {name: how likely a step trains it}; here all are alike."""
    return dict.fromkeys(self.Tasks(), 1.0)

  def Model(self) -> hyperparams.Params:
    """Returns the params of the model: `Tasks()` and `TaskProbs()` in a MultiTaskModel.

    A subclass adds to them: `train`, and `variable_renaming_rules` for weights in common.
    """
    from lingvo_gpipe.experiment import multi_task_model

    return multi_task_model.MultiTaskModel.Params().Set(
      task_params=_AsParams(self.Tasks()), task_probs=_AsParams(self.TaskProbs())
    )


_BASE_METHODS = {name: getattr(BaseModelParams, name) for name in ('Train', 'Dev', 'Test')}
_NO_DATASETS = frozenset(
  name
  for base in (SingleTaskModelParams, MultiTaskModelParams)
  for name in dir(base)
  if name not in _BASE_METHODS
)

_Class = TypeVar('_Class', bound=type[BaseModelParams])


@dataclasses.dataclass(frozen=True)
class _Entry:
  """A registered class and the place of its decorator."""

  cls: type[BaseModelParams]
  file: str
  line: int
  module: types.ModuleType | None  # As it stood in sys.modules at registration.

  def __str__(self) -> str:
    return f'{self.file}:{self.line}'


# By module name and class name, or 'test' and class name.
_ENTRIES: dict[tuple[str, str], _Entry] = {}


def RegisterSingleTaskModel(cls: _Class) -> _Class:
  """Class decorator: makes an experiment known under its key. Returns the class unchanged.

  Raises:
    TypeError: `cls` is no subclass of SingleTaskModelParams.
    ValueError: another class has the same key, or `DATASETS` names something that is no dataset.
  """
  return _Register(cls, SingleTaskModelParams)


def RegisterMultiTaskModel(cls: _Class) -> _Class:
  """The same for an experiment of several tasks, a subclass of MultiTaskModelParams."""
  return _Register(cls, MultiTaskModelParams)


def _Register(cls: _Class, base: type[BaseModelParams]) -> _Class:
  if not (isinstance(cls, type) and issubclass(cls, base)):
    raise TypeError(
      f'{cls!r} is not a {base.__name__}: an experiment is a class that derives from it.'
    )
  _CheckDatasets(cls)
  caller = inspect.currentframe()
  for _ in range(2):
    caller = caller.f_back if caller else None
  file, line = (caller.f_code.co_filename, caller.f_lineno) if caller else ('<unknown>', 0)
  entry = _Entry(cls, file, line, sys.modules.get(cls.__module__))
  is_test = os.path.splitext(os.path.basename(file))[0].endswith('_test')
  index = (_TEST if is_test else cls.__module__, cls.__name__)
  old = _ENTRIES.get(index)
  if old and _IsAnother(old, entry):
    raise ValueError(
      f'Two experiments have the key {".".join(index)}: {old} and {entry}. Rename one of them.'
    )
  _ENTRIES[index] = entry
  return cls


def GetClass(key: str, packages: Sequence[str] = ('params',)) -> type[BaseModelParams]:
  """Returns the experiment `key` from the first package that has it; imports its module only.

  Args:
    key: for example 'lm.stdlib.ByteTransformerGPipe2'.
    packages: names of packages of experiments, in the order of search. The packages that installed
      distributions declare are searched after these.

  Raises:
    ValueError: `key` or a package's name is not made of identifiers joined by dots.
    LookupError: there is no such experiment; the text, one line, says where it was looked for and
      which keys are close. This is never a subclass such as KeyError.
    Exception: whatever the module of the experiment raises while it is imported.
  """
  return _Find(key, packages)[0].cls


def GetParams(key: str, dataset: str, packages: Sequence[str] = ('params',)) -> hyperparams.Params:
  """Returns the model params of the experiment `key` with `input` set for `dataset`.

  A method `Task_<Dataset>` of the experiment, if there is one, replaces the task. If the model
  params define `model`, it becomes 'key@file:line'. Overrides are the caller's business.

  Args:
    key: see `GetClass`.
    dataset: one of the experiment's datasets; case does not matter ('test' for 'Test').
    packages: see `GetClass`.

  Raises:
    LookupError: unknown experiment, or unknown dataset (the text lists those there are).
    TypeError: a method of the experiment returns something other than Params.
    ValueError: see `GetClass`.
    Exception: whatever the methods of the experiment raise.
  """
  entry, file = _Find(key, packages)
  experiment = entry.cls()
  name = _DatasetName(key, experiment, dataset)

  def Call(method: str) -> hyperparams.Params:
    params = getattr(experiment, method)()
    if isinstance(params, dict) and isinstance(experiment, MultiTaskModelParams):
      params = _AsParams(params)
    if not isinstance(params, hyperparams.Params):
      raise TypeError(
        f'{key}.{method}() ({entry}) must return Params, got {type(params).__name__}.'
      )
    return params.Copy()  # Not to change what the experiment may keep.

  params = Call('Model')
  params.input = Call(name)
  if hasattr(entry.cls, f'Task_{name}'):
    params.task = Call(f'Task_{name}')
  if 'model' in params:
    params.model = f'{key}@{file}:{entry.line}'
  return params


def ListKeys(packages: Sequence[str] = ('params',)) -> list[str]:
  """Returns the sorted keys of all experiments in the given and the declared packages.

  Reads the sources for decorated classes and runs none of them; files that are not valid Python are
  left out. Experiments that a module registers by a call, without the decorator's syntax, are in
  the list once that module was imported.
  """
  keys: set[str] = set()
  for package in _Packages(packages):
    prefix = package + '.'
    for module, path in experiment_sources.SourceFiles(package):
      names = [name for name, _ in experiment_sources.FindRegistrations(path) if name]
      keys.update(f'{module[len(prefix) :]}.{name}' for name in names)
    for (module, name), entry in _ENTRIES.items():
      if module.startswith(prefix) and not _IsStale(entry):
        keys.add(f'{module[len(prefix) :]}.{name}')
  return sorted(keys)


# --- look-up ---


def _Find(key: str, packages: Sequence[str]) -> tuple[_Entry, str]:
  """Returns the entry of `key` and its file as the key's reader knows it: 'params/lm/stdlib.py'."""
  searched = _Packages(packages)
  if not isinstance(key, str):
    raise ValueError(f'Invalid experiment key {key!r}: expected a str, got {type(key).__name__}.')
  parts = key.split('.')
  if len(parts) < 2 or not _IsDotted(key):
    raise ValueError(
      f'Invalid experiment key {key!r}: expected module.Class, e.g. lm.stdlib.MyModel.'
      + _Hint(key, packages)
    )
  if len(parts) == 2 and parts[0] in (_TEST, _MAIN):
    if entry := _ENTRIES.get((parts[0], parts[1])):
      return entry, os.path.basename(entry.file)
  places = []
  for package in searched:
    module = '.'.join([package, *parts[:-1]])
    found = experiment_sources.FindModule(module)
    if found is None:
      places.append(f'{package} ({experiment_sources.DescribeLocation(package)})')
      continue
    # From here on every error is the module's own.
    importlib.import_module(module)
    if entry := _ENTRIES.get((module, parts[-1])):
      depth = module.count('.') + (2 if experiment_sources.IsPackage(found) else 1)
      return entry, '/'.join(entry.file.replace(os.sep, '/').split('/')[-depth:])
    value = getattr(sys.modules.get(module), parts[-1], None)
    if isinstance(value, type) and value.__module__ == module:
      decorators = ' or @'.join(experiment_sources.DECORATORS)
      places.append(f'{found.origin} (which has the class, but without @{decorators})')
    else:
      places.append(f'{found.origin} (which has no such class)')
  raise LookupError(
    f'No experiment {key!r} in {", ".join(places) or "no package"}.' + _Hint(key, packages)
  )


def _DatasetName(key: str, experiment: BaseModelParams, dataset: str) -> str:
  names = experiment.DatasetNames()
  if dataset in names:
    return dataset
  same = [name for name in names if name.lower() == str(dataset).lower()]
  if len(same) == 1:
    return same[0]
  raise LookupError(
    f'Experiment {key!r} has no dataset {dataset!r}; it has: {", ".join(names) or "none"}.'
  )


def _Hint(key: str, packages: Sequence[str]) -> str:
  """Returns a sentence with the closest keys."""
  keys = ListKeys(packages)
  keys += ['.'.join(index) for index in _ENTRIES if index[0] in (_TEST, _MAIN)]
  if not keys:
    return (
      ' There are no experiments there at all: run in a directory that has a package `params`, or'
      ' name a package with --params_package.'
    )

  def Likeness(other: str) -> float:
    # The class alone may be right where the module is wrong or missing.
    a, b = key.lower(), other.lower()
    whole = difflib.SequenceMatcher(None, a, b).ratio()
    last = difflib.SequenceMatcher(None, a.rpartition('.')[2], b.rpartition('.')[2]).ratio()
    return max(whole, 0.95 * last)

  close = sorted((-Likeness(other), other) for other in keys)
  close_keys = [other for likeness, other in close[:3] if -likeness >= 0.6]
  if close_keys:
    return f' Did you mean {" or ".join(close_keys)}?'
  return f' None of the {len(keys)} known keys is close; --mode=list prints them.'


def _Packages(packages: Sequence[str]) -> list[str]:
  """Returns the names of all packages to search, in order."""
  if isinstance(packages, str):
    raise TypeError(f'packages must be a sequence of names, got the str {packages!r}.')
  declared = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
  names = list(dict.fromkeys([*packages, *sorted(point.value for point in declared)]))
  for name in names:
    if not (isinstance(name, str) and _IsDotted(name)):
      raise ValueError(
        f'Invalid package of experiments {name!r}: expected identifiers joined by dots.'
      )
  return names


def _IsDotted(name: str) -> bool:
  return all(part.isidentifier() for part in name.split('.'))


# --- registration ---


def _AsParams(values: Mapping[str, Any]) -> hyperparams.Params:
  """Params that have these values by name, those of a task each."""
  p = hyperparams.Params()
  for name, value in values.items():
    p.Define(name, value, f'Of the task {name}.')
  return p


def _Name(cls: type) -> str:
  return f'{cls.__module__}.{cls.__qualname__}'


def _CheckDatasets(cls: type[BaseModelParams]) -> None:
  """Checks that all datasets are methods that can be called without arguments."""
  if isinstance(cls.DATASETS, str):
    raise ValueError(f'{_Name(cls)}.DATASETS must be a tuple of names, got {cls.DATASETS!r}.')
  for name in cls.DatasetNames():
    method = getattr(cls, name, None) if isinstance(name, str) else None
    if not callable(method) or name in _NO_DATASETS or name.startswith('_'):
      raise ValueError(
        f'{_Name(cls)}.DATASETS names {name!r}, which is not a method that returns input params.'
      )
    static = inspect.getattr_static(cls, name)
    needed = 0 if isinstance(static, (classmethod, staticmethod)) else 1
    try:
      inspect.signature(method).bind(*[None] * needed)
    except TypeError as e:
      raise ValueError(f'Dataset {_Name(cls)}.{name} must take no argument: {e}.') from None


def _IsStale(entry: _Entry) -> bool:
  """Whether the entry's module was thrown away (and maybe imported anew) since."""
  return entry.module is not sys.modules.get(entry.cls.__module__)


def _IsAnother(old: _Entry, new: _Entry) -> bool:
  """Whether `old` is a second experiment of that name, not an earlier import of the same one.

  After an edit and a reload the line differs: then the old place no longer registers anything.
  """
  if (old.file, old.line) == (new.file, new.line) or _IsStale(old):
    return False
  there = experiment_sources.FindRegistrations(old.file)
  return any(line == old.line and name in (None, old.cls.__name__) for name, line in there)
