# SPDX-License-Identifier: Apache-2.0
"""The registry of experiments: maps a key such as `lm.stdlib.ByteTransformerGPipe2` to a class.

An experiment with one task is a class that derives from `SingleTaskModelParams` and is decorated
with `RegisterSingleTaskModel`:

    @registry.RegisterSingleTaskModel
    class Toy(registry.SingleTaskModelParams):
      def Train(self):
        return synthetic.SyntheticRegressionInput.Params().Set(batch_size=64)

      def Task(self):
        return toy.Regression.Params().Set(name='toy')

An experiment with several tasks derives from `MultiTaskModelParams` and is decorated with
`RegisterMultiTaskModel`.

The key of an experiment is the path of its module below a package of experiments, followed by the
class name. The class X in `params/lm/stdlib.py` has the key `lm.stdlib.X`. The class X in
`mycompany/models/params/mt/big.py` has the key `mt.big.X` if `mycompany.models.params` is a package
of experiments. In a file whose name ends in `_test` the key is `test.X`, and in a notebook or
script it is `__main__.X`; both kinds exist only after their class definition has run.

Packages of experiments are searched in order, and the first that has the experiment wins: first the
packages that the caller names (by default `params` in the working directory), then the packages
that installed distributions declare under the entry-point group `lingvo_gpipe.params`. A look-up
imports only the module that the key names (and its parent packages), so errors and heavy imports in
other files do not affect it. Listings and hints read the sources without running them. This module
does not import TensorFlow.
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

from lingvo_gpipe.core import hyperparams, literals
from lingvo_gpipe.experiment import experiment_sources

ENTRY_POINT_GROUP = 'lingvo_gpipe.params'
# First parts of the keys that do not belong to a package of experiments.
_TEST = 'test'
_MAIN = '__main__'


class BaseModelParams:
  """Base class of experiments: a model, its data sets, and a quick variant for tests.

  By convention sizes (BATCH_SIZE, NUM_LAYERS, ...) are class attributes, and a variant is a
  subclass that overrides some of them. The data sets of an experiment are the methods among
  `Train`, `Dev` and `Test` that the class defines, and the methods that it lists by name in
  `DATASETS`. No other method is treated as a data set, so helper methods may have any name.
  """

  DATASETS: tuple[str, ...] = ()

  def Train(self) -> hyperparams.Params:
    """Returns the Params of the input generator for training."""
    raise self._NoDataset('Train')

  def Dev(self) -> hyperparams.Params:
    """Returns the Params of the input generator for the development set."""
    raise self._NoDataset('Dev')

  def Test(self) -> hyperparams.Params:
    """Returns the Params of the input generator for the test set."""
    raise self._NoDataset('Test')

  def Model(self) -> hyperparams.Params:
    """Returns the Params of the model."""
    raise NotImplementedError(
      f'{_Name(type(self))} defines no Model(): define it to return model Params.'
    )

  def Smoke(self) -> dict[str, Any] | str | None:
    """Returns overrides of the model's Params that make the experiment run in seconds.

    The overrides are a dict {'task.x.y': value} or a text in the format of --model_params_override.
    None means that the experiment already runs in seconds.
    """
    return None

  @classmethod
  def DatasetNames(cls) -> list[str]:
    """Returns the names of the data sets: Train, Dev and Test if defined, then `DATASETS`."""
    defined = [
      name
      for name in ('Train', 'Dev', 'Test')
      if callable(getattr(cls, name)) and getattr(cls, name) is not _BASE_METHODS[name]
    ]
    return defined + [name for name in cls.DATASETS if name not in defined]

  def _NoDataset(self, name: str) -> NotImplementedError:
    return NotImplementedError(
      f'{_Name(type(self))} defines no {name}(): define it to return input Params. '
      f'Its data sets: {", ".join(self.DatasetNames()) or "none"}.'
    )


class SingleTaskModelParams(BaseModelParams):
  """Base class of experiments with one task: define `Task` and `Train`."""

  def Task(self) -> hyperparams.Params:
    """Returns the Params of the task. A method `Task_<Dataset>` replaces it for one data set.

    A trainer evaluates with the task that it trains, so it refuses to evaluate a data set whose
    task would have other results. An evaluator takes the task of the data set.
    """
    raise NotImplementedError(
      f'{_Name(type(self))} defines no Task(): define it to return task Params.'
    )

  def Model(self) -> hyperparams.Params:
    """Returns the Params of the model: `Task()` in a `SingleTaskModel`."""
    # Imported late because it loads TensorFlow.
    from lingvo_gpipe.experiment import model

    return model.SingleTaskModel.Params().Set(task=self.Task())


class MultiTaskModelParams(BaseModelParams):
  """Base class of experiments with several tasks: define `Tasks` and `Train`.

  The method of a data set returns {task name: Params of the task's input}. A task without an entry
  is not evaluated on that data set.
  """

  def Tasks(self) -> dict[str, hyperparams.Params]:
    """Returns {task name: Params of the task}."""
    raise NotImplementedError(
      f'{_Name(type(self))} defines no Tasks(): define it to return {{name: task Params}}.'
    )

  def TaskProbs(self) -> dict[str, float]:
    """Returns {task name: relative probability that a step trains it}; by default all are equal."""
    return dict.fromkeys(self.Tasks(), 1.0)

  def Model(self) -> hyperparams.Params:
    """Returns the Params of the model: `Tasks()` and `TaskProbs()` in a `MultiTaskModel`.

    A subclass may override this method to set `train`, and `variable_renaming_rules` to share
    weights.
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
  """A registered class and the file and line of its decorator."""

  cls: type[BaseModelParams]
  file: str
  line: int
  module: types.ModuleType | None  # The module in sys.modules at registration.

  def __str__(self) -> str:
    return f'{self.file}:{self.line}'


# Keyed by module name, or 'test', and class name.
_ENTRIES: dict[tuple[str, str], _Entry] = {}


def RegisterSingleTaskModel(cls: _Class) -> _Class:
  """Registers an experiment with one task under its key; returns the class unchanged.

  Use it as a class decorator.

  Raises:
    TypeError: `cls` is not a subclass of SingleTaskModelParams.
    ValueError: another class has the same key, or `DATASETS` names something other than a method
      that takes no argument.
  """
  return _Register(cls, SingleTaskModelParams)


def RegisterMultiTaskModel(cls: _Class) -> _Class:
  """Registers an experiment with several tasks under its key; returns the class unchanged.

  Use it as a class decorator.

  Raises:
    TypeError: `cls` is not a subclass of MultiTaskModelParams.
    ValueError: another class has the same key, or `DATASETS` names something other than a method
      that takes no argument.
  """
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
  literals.AllowPackageOf(cls)
  return cls


def GetClass(key: str, packages: Sequence[str] = ('params',)) -> type[BaseModelParams]:
  """Returns the class of an experiment from the first package that has it.

  Only the module of the experiment and its parent packages are imported.

  Args:
    key: the key of the experiment, for example 'lm.stdlib.ByteTransformerGPipe2'.
    packages: names of packages of experiments, in search order. The packages that installed
      distributions declare are searched after them.

  Raises:
    ValueError: `key` or the name of a package does not consist of identifiers joined by dots.
    LookupError: the experiment does not exist; the one-line message lists the places searched and
      similar keys. The error is never a subclass of LookupError such as KeyError.
    Exception: any error that the module of the experiment raises on import.
  """
  return _Find(key, packages)[0].cls


def GetParams(key: str, dataset: str, packages: Sequence[str] = ('params',)) -> hyperparams.Params:
  """Returns the Params of an experiment's model with `input` set to one data set.

  If the experiment has a method `Task_<Dataset>`, its result replaces the task. If the model's
  Params define `model`, it is set to 'key@file:line'. Applying overrides is up to the caller.

  Args:
    key: the key of the experiment, for example 'lm.stdlib.ByteTransformerGPipe2'.
    dataset: the name of one of the experiment's data sets; case does not matter ('test' for
      'Test').
    packages: names of packages of experiments, in search order. The packages that installed
      distributions declare are searched after them.

  Raises:
    LookupError: the experiment or the data set does not exist; the message lists similar keys, or
      the data sets of the experiment.
    TypeError: a method of the experiment returns something other than Params.
    ValueError: `key` or the name of a package does not consist of identifiers joined by dots; or
      results of another data set would be in the same directory.
    Exception: any error that the module or the methods of the experiment raise.
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
    return params.Copy()  # The experiment may keep a reference to its Params.

  params = Call('Model')
  params.input = Call(name)
  directories = _Directories(experiment, name, params.input)
  for other in _DatasetsLike(experiment, name):
    if shared := directories & _Directories(experiment, other, Call(other)):
      raise ValueError(
        f'{key}: evaluations of the data sets {name} and {other} would both write into '
        f'eval_{min(shared)}: rename one of them. Names of directories are in lower case, and join '
        'the data set and its task, if there are several, by _'
      )
  if hasattr(entry.cls, f'Task_{name}'):
    params.task = Call(f'Task_{name}')
  if 'model' in params:
    params.model = f'{key}@{file}:{entry.line}'
  return params


def ListKeys(packages: Sequence[str] = ('params',)) -> list[str]:
  """Returns the sorted keys of all experiments in these and in the declared packages.

  Reads the sources for decorated classes without running them, and skips files that are not valid
  Python. Experiments registered by a call rather than with the decorator syntax are listed after
  their module has been imported.

  Args:
    packages: names of packages of experiments, in addition to the packages that installed
      distributions declare.
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
  """Returns the entry of `key` and its file relative to the project: 'params/lm/stdlib.py'."""
  searched = _Packages(packages)
  if not isinstance(key, str):
    raise ValueError(f'Invalid experiment key {key!r}: expected a str, got {type(key).__name__}.')
  parts = key.split('.')
  if len(parts) < 2 or not _IsDotted(key):
    raise ValueError(
      f'Invalid experiment key {key!r}: expected module.Class, for example lm.stdlib.MyModel.'
      + _Hint(key, packages)
    )
  if len(parts) == 2 and parts[0] in (_TEST, _MAIN):
    if entry := _ENTRIES.get((parts[0], parts[1])):
      return entry, os.path.basename(entry.file)
  places = []
  for package in searched:
    module = '.'.join([package, *parts[:-1]])
    spec = experiment_sources.FindModule(module)
    if spec is None:
      places.append(f'{package} ({experiment_sources.DescribeLocation(package)})')
      continue
    # Any error from here on is raised by the code of the module.
    importlib.import_module(module)
    if entry := _ENTRIES.get((module, parts[-1])):
      depth = module.count('.') + (2 if experiment_sources.IsPackage(spec) else 1)
      return entry, '/'.join(entry.file.replace(os.sep, '/').split('/')[-depth:])
    value = getattr(sys.modules.get(module), parts[-1], None)
    if isinstance(value, type) and value.__module__ == module:
      decorators = ' or @'.join(experiment_sources.DECORATORS)
      places.append(f'{spec.origin} (which has the class, but without @{decorators})')
    else:
      places.append(f'{spec.origin} (which has no such class)')
  raise LookupError(
    f'No experiment {key!r} in {", ".join(places) or "no package"}.' + _Hint(key, packages)
  )


def _DatasetName(key: str, experiment: BaseModelParams, dataset: str) -> str:
  names = experiment.DatasetNames()
  if dataset in names:
    return dataset
  matches = [name for name in names if name.lower() == str(dataset).lower()]
  if len(matches) == 1:
    return matches[0]
  raise LookupError(
    f'Experiment {key!r} has no data set {dataset!r}; it has: {", ".join(names) or "none"}.'
  )


def _DatasetsLike(experiment: BaseModelParams, dataset: str) -> list[str]:
  """Returns the other data sets that may share a directory: one name begins with the other."""

  def MayShare(other: str) -> bool:
    a, b = sorted([f'{dataset}_'.lower(), f'{other}_'.lower()], key=len)
    return other != dataset and b.startswith(a)

  return list(filter(MayShare, experiment.DatasetNames()))


def _Directories(
  experiment: BaseModelParams, dataset: str, input_params: hyperparams.Params
) -> set[str]:
  """Returns the names of the directories of a data set's results, without the job."""
  if not isinstance(experiment, MultiTaskModelParams):
    return {dataset.lower()}
  return {f'{dataset}_{task}'.lower() for task, p in input_params.IterParams() if p is not None}


def _Hint(key: str, packages: Sequence[str]) -> str:
  """Returns a sentence that suggests the closest keys."""
  keys = ListKeys(packages)
  keys += ['.'.join(index) for index in _ENTRIES if index[0] in (_TEST, _MAIN)]
  if not keys:
    return (
      ' No experiments were found: run in a directory that has a package `params`, or name a'
      ' package with --params_package.'
    )

  def Similarity(other: str) -> float:
    # The class may be right even if the module is wrong or missing.
    a, b = key.lower(), other.lower()
    whole = difflib.SequenceMatcher(None, a, b).ratio()
    last = difflib.SequenceMatcher(None, a.rpartition('.')[2], b.rpartition('.')[2]).ratio()
    return max(whole, 0.95 * last)

  closest = sorted((-Similarity(other), other) for other in keys)
  close_keys = [other for negative, other in closest[:3] if -negative >= 0.6]
  if close_keys:
    return f' Did you mean {" or ".join(close_keys)}?'
  return f' None of the {len(keys)} known keys is similar; --mode=list prints them.'


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
  """Returns Params with one param for each task."""
  p = hyperparams.Params()
  for name, value in values.items():
    p.Define(name, value, f'Value for the task {name}.')
  return p


def _Name(cls: type) -> str:
  return f'{cls.__module__}.{cls.__qualname__}'


def _CheckDatasets(cls: type[BaseModelParams]) -> None:
  """Raises ValueError unless all data sets are methods that can be called without arguments."""
  if isinstance(cls.DATASETS, str):
    raise ValueError(f'{_Name(cls)}.DATASETS must be a tuple of names, got {cls.DATASETS!r}.')
  for name in cls.DatasetNames():
    method = getattr(cls, name, None) if isinstance(name, str) else None
    if not callable(method) or name in _NO_DATASETS or name.startswith('_'):
      raise ValueError(
        f'{_Name(cls)}.DATASETS names {name!r}, which is not a method that returns input Params.'
      )
    static = inspect.getattr_static(cls, name)
    needed = 0 if isinstance(static, (classmethod, staticmethod)) else 1
    try:
      inspect.signature(method).bind(*[None] * needed)
    except TypeError as e:
      raise ValueError(f'Data set {_Name(cls)}.{name} must take no argument: {e}.') from None


def _IsStale(entry: _Entry) -> bool:
  """Whether the module of the entry has since been removed from sys.modules or imported again."""
  return entry.module is not sys.modules.get(entry.cls.__module__)


def _IsAnother(old: _Entry, new: _Entry) -> bool:
  """Whether `old` is a different experiment, not an earlier version of the same class.

  After an edit and a reload the line differs, but then the old line no longer registers anything.
  """
  if (old.file, old.line) == (new.file, new.line) or _IsStale(old):
    return False
  registrations = experiment_sources.FindRegistrations(old.file)
  return any(line == old.line and name in (None, old.cls.__name__) for name, line in registrations)
