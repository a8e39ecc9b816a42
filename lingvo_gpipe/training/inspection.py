# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a model as text: its Params and their changes, its weights, its stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer, params_change
from lingvo_gpipe.core import files, hyperparams, params_diff, shapes
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.runners import task_cut

# Params of the last call of the trainer, in readable form.
_PARAMS_FILE = 'params.txt'
# Pictures of schedules with more columns are not drawn.
_PICTURE_COLUMNS = 160


def ModelText(model: task_lib.BaseTask | model_lib.BaseModel) -> str:
  """Returns the shape, dtype and size of each weight, and the total; allocates no weights."""
  specs = model.WeightSpecs()
  width = max((len(path) for path in specs), default=0)
  lines = []
  fixed = 0
  for path, (weight, trainable) in specs.items():
    mark = '' if trainable else '  (not trained)'
    fixed += 0 if trainable else weight.num_elements
    shape = str(list(weight.shape))
    lines.append(f'{path:{width}}  {shape:16}  {weight.dtype.name}  {weight.num_elements:,}{mark}')
  lines.append(f'{model.NumParams():,} parameters' + (f', {fixed:,} not trained' if fixed else ''))
  return '\n'.join(lines)


def PartitionText(
  params: hyperparams.InstantiableParams, logdir: str = '', num_replicas: int = 1
) -> str:
  """Returns the stage table of a model and a picture of its schedule.

  Args:
    params: Params of the model, with an input.
    logdir: log directory of a run, whose last checkpoint has the cut if it was chosen by measured
      times; '' for none.
    num_replicas: number of replicas, which share the micro-batches of a batch.

  Raises:
    ValueError: the Params have no input, or the layers cannot be cut as the Params ask.
  """
  model: model_lib.BaseModel = params.Instantiate()
  names = model.active_tasks
  if any(model.inputs.get(name) is None for name in names):
    raise ValueError('the partition needs an input, for the shapes of a batch: set params.input')
  model.CheckReplicas(num_replicas)
  saved = checkpointer.Checkpointer(os.path.join(logdir, 'train')) if logdir else None
  texts: list[str] = []
  cuts: dict[str, Sequence[int]] = {}
  for name in names:
    task, source = model.tasks[name], model.inputs[name]
    spec, num_shapes = source.BatchSpec(), len(source.BatchSpecs())
    splits = task_cut.SavedCut(saved, task, name) or model.SharedCut(name, cuts)
    cut = task_cut.CutTask(task, spec, splits, num_replicas)
    cuts[name] = cut.ends
    text = f'task {name}:\n{cut.Table()}' if name else cut.Table()
    if num_shapes > 1:
      text += f'\n\nfor the largest of {num_shapes} shapes of batches: {shapes.FormatNest(spec)}'
    if task.pipeline is not None and (picture := SchedulePicture(cut)):
      text += f'\n\n{picture}'
    texts.append(text)
  return '\n\n'.join(texts)


def SchedulePicture(cut: cut_lib.Cut) -> str:
  """Returns the schedule as text, a row per device and a column per time; '' if it is too wide."""
  picture = cut.schedule.Picture()
  return picture if max(map(len, picture.splitlines())) <= _PICTURE_COLUMNS else ''


def ReadParams(path: str) -> str | None:
  """Returns the text of the Params in a file or in a log directory; None for any other path.

  In a log directory these are the Params of the newest checkpoint or, without a checkpoint, the
  contents of params.txt.

  Raises:
    ValueError: the directory has neither a checkpoint nor params.txt.
    OSError: a file cannot be read.
  """
  if not tf.io.gfile.exists(path):
    return None
  if tf.io.gfile.isdir(path):
    saved = checkpointer.Checkpointer(os.path.join(path, 'train')).All()
    text = saved[-1].metadata.get(params_change.KEY) if saved else None
    if isinstance(text, str):
      return text
    path = os.path.join(path, _PARAMS_FILE)
    if not tf.io.gfile.exists(path):
      raise ValueError(f'there is no {path}: name a log directory, a file of Params or a key')
  return files.ReadText(path, '--mode=diff_params')


def ParamsText(params: hyperparams.Params) -> str:
  """Returns `Params.ToText`, with a comment above each param that declares its domain."""
  text, types = params.ToText(include_types=True)
  lines = []
  for path, line in zip(types, text.splitlines(), strict=True):
    domain = params.GetDomain(path)
    lines += [f'# {path} expects {domain.text}'] if domain else []
    lines.append(line)
  return ''.join(f'{line}\n' for line in lines)


def ParamsDiff(old: str, new: str) -> list[str]:
  """Returns a line for each param that differs between two texts; [] if they are equal.

  Ignores a change of the line number at which an experiment is defined.

  Raises:
    ValueError: a text does not consist of `path : value` lines.
  """

  def IsOnlyMoved(change: params_diff.Change) -> bool:
    keys = [(value or '').partition('@')[0] for value in (change.old, change.new)]
    return change.path == 'model' and keys[0] == keys[1]

  return [str(change) for change in params_diff.FindChanges(old, new) if not IsOnlyMoved(change)]


def WriteDescription(
  logdir: str,
  params: hyperparams.InstantiableParams,
  model: model_lib.BaseModel,
  cuts: Mapping[str, cut_lib.Cut],
) -> None:
  """Writes params.txt and model_analysis.txt into the log directory.

  Args:
    logdir: the log directory.
    params: Params of the experiment; the model may have another cut.
    model: the model.
    cuts: {task: its cut}.
  """
  tf.io.gfile.makedirs(logdir)
  analysis = ''.join(
    f'{text}\n' for text in [ModelText(model), *(f'\n{cut.Table()}' for cut in cuts.values())]
  )
  for name, text in ((_PARAMS_FILE, params.ToText()), ('model_analysis.txt', analysis)):
    files.WriteWhole(os.path.join(logdir, name), text)
