# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a model as text: Params and what differs in them, weights, cut into stages."""

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

# The Params of the last call of the trainer, for people.
_PARAMS_FILE = 'params.txt'
# Wider pictures of schedules are not drawn.
_PICTURE_COLUMNS = 160


def ModelText(model: task_lib.BaseTask | model_lib.BaseModel) -> str:
  """Every weight with its shape, dtype and size, and the count of parameters; allocates nothing."""
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
  """The stage table of a model's Params, and a picture of its schedule.

  With the log directory of a run, a cut by measured times is that of its last checkpoint. Replicas
  share a batch, so that micro-batches are smaller.

  Raises:
    ValueError: the Params have no input, or the layers cannot be cut as they say.
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
  """The training schedule as text, a row a device and a column a time; '' where it is too wide."""
  picture = cut.schedule.Picture()
  return picture if max(map(len, picture.splitlines())) <= _PICTURE_COLUMNS else ''


def ReadParams(path: str) -> str | None:
  """The text of the Params in a file, or of a log directory's run; None for another path.

  Those of a run are those of its newest checkpoint; before the first one, its params.txt.

  Raises:
    ValueError: the directory holds neither.
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
  try:
    with tf.io.gfile.GFile(path, 'rb') as f:
      return f.read().decode('utf-8', errors='replace')
  except tf.errors.OpError as e:
    raise OSError(f'{path} cannot be read: {e.message}') from e


def ParamsDiff(old: str, new: str) -> list[str]:
  """Lines on the params that differ between two texts; [] where none do.

  The line of its file on which an experiment stands does not count.

  Raises:
    ValueError: a text does not consist of `path : value` lines.
  """

  def IsOfTheSamePlace(change: params_diff.Change) -> bool:
    keys = [(value or '').partition('@')[0] for value in (change.old, change.new)]
    return change.path == 'model' and keys[0] == keys[1]

  return [
    str(change) for change in params_diff.FindChanges(old, new) if not IsOfTheSamePlace(change)
  ]


def WriteDescription(
  logdir: str,
  params: hyperparams.InstantiableParams,
  model: model_lib.BaseModel,
  plans: Mapping[str, cut_lib.Cut],
) -> None:
  """Writes params.txt and model_analysis.txt into the log directory.

  Args:
    logdir: the log directory.
    params: the experiment's; the model may have another cut.
    model: the model.
    plans: {task: its cut}.
  """
  tf.io.gfile.makedirs(logdir)
  analysis = ''.join(
    f'{text}\n' for text in [ModelText(model), *(f'\n{cut.Table()}' for cut in plans.values())]
  )
  for name, text in ((_PARAMS_FILE, params.ToText()), ('model_analysis.txt', analysis)):
    files.WriteWhole(os.path.join(logdir, name), text)
