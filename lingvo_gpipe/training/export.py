# SPDX-License-Identifier: Apache-2.0
"""Writes a trained task as a SavedModel, which plain TensorFlow loads and serves.

The layers are traced one after the other, not as a pipeline: the graph names no device, and holds
TensorFlow's own operations alone. What is served are the task's `InferenceSignatures`.

    <directory>/saved_model.pb, variables/    the SavedModel
    <directory>/assets.extra/params.txt       the model's Params as text
    <directory>/assets.extra/export.json      step, weights and signatures
    <directory>/assets.extra/...              files that the run keeps, such as its vocabulary
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.checkpoint import (
  assets,
  checkpoint_choice,
  checkpointer,
  params_change,
)
from lingvo_gpipe.core import (
  files,
  fprop_context,
  hyperparams,
  nested_map,
  shapes,
)
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.learning import ema

# Where exports go in a log directory, each under its step.
FOLDER = 'export'

# Where TensorFlow Serving leaves room for files that are not the graph's.
_EXTRA = 'assets.extra'


@dataclasses.dataclass(frozen=True)
class Exported:
  """What was written.

  Attributes:
    directory: the SavedModel.
    step: of the weights.
    num_averages: how many weights are moving averages.
    signatures: {name: its inputs and outputs as text}.
    fixed_batch: why the batch has a fixed size; '' where it is free.
  """

  directory: str
  step: int
  num_averages: int
  signatures: Mapping[str, str]
  fixed_batch: str = ''

  def Text(self) -> str:
    """Some lines for people."""
    weights = ema.DescribeWeights(self.num_averages)
    lines = [f'exported the {weights} of step {self.step} to {self.directory}']
    lines += [f'  {name}: {text}' for name, text in self.signatures.items()]
    if self.fixed_batch:
      lines.append(f'the size of the batch is fixed: {self.fixed_batch}')
    return '\n'.join(lines)


def Export(
  params: hyperparams.InstantiableParams,
  logdir: str,
  directory: str = '',
  *,
  checkpoint: str = checkpoint_choice.LAST,
  allow_params_change: bool = False,
) -> Exported:
  """Exports a checkpoint of a log directory.

  The directory appears when it is whole; where paths have a scheme, such as gs://, it is whole when
  its saved_model.pb appears. Moving averages of weights are exported in place of the weights where
  the checkpoint has them.

  Args:
    params: the model's Params, with an input, for the shapes of a batch.
    logdir: the log directory.
    directory: where to; '' is <logdir>/export/<step>, or, where the model has several tasks,
      <logdir>/export/<task>/<step>. It must not exist.
    checkpoint: which one, as `checkpoint_choice.Find` takes it.
    allow_params_change: export with Params that do not mean the run's model, if its weights fit.

  Raises:
    ValueError: there is no such checkpoint, or the run has other Params, or they have no input, or
      name no task where there are several.
    FileExistsError: the directory exists.
    OSError: something cannot be read or written; nothing is left behind.
  """
  model: model_lib.BaseModel = params.Instantiate()
  if model.input is None:
    raise ValueError('an export needs an input, for the shapes of a batch: set params.input')
  saved = checkpointer.Checkpointer(os.path.join(logdir, 'train'))
  info = checkpoint_choice.Find(saved, checkpoint)
  params_change.CheckEvaluated(info, params, allow_params_change)
  # Of several tasks each has a folder.
  directory = directory.rstrip('/') or os.path.join(
    logdir, FOLDER, *model.active_tasks, str(info.step)
  )
  _CheckNew(directory)
  with tf.device('/device:CPU:0'):  # An accelerator's memory may be another program's.
    model.task.InstantiateVariables()
    variables = model.task.VariablesByPath()
    num_averages = ema.Restore(saved, info, model.ByCheckpointName(variables))
  functions, fixed = _Trace(model.task, model.input.BatchSpec())
  exported = Exported(
    directory,
    info.step,
    num_averages,
    {name: _SignatureText(function) for name, function in functions.items()},
    fixed,
  )
  module = tf.Module()
  module.weights = dict(variables)
  extra = {
    'params.txt': params.ToText(),
    'export.json': json.dumps({'model': params.model, **dataclasses.asdict(exported)}, indent=1),
  }
  _Write(module, functions, directory, extra, os.path.join(logdir, assets.FOLDER))
  return exported


def _Trace(task: task_lib.BaseTask, batch_spec: nested_map.NestedMap) -> tuple[dict[str, Any], str]:
  """The concrete functions of the signatures, and why the batch is fixed if it is."""
  free = tf.nest.map_structure(
    lambda s: None if s is None else tf.TensorSpec([None, *s.shape[1:]], s.dtype), batch_spec
  )
  try:
    return _TraceFor(task, free), ''
  except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as e:
    why = files.OneLine(e)
  return _TraceFor(task, batch_spec), why


def _TraceFor(task: task_lib.BaseTask, batch_spec: nested_map.NestedMap) -> dict[str, Any]:
  with fprop_context.Scope(do_eval=True):
    signatures = task.InferenceSignatures(batch_spec)
    return {name: _Function(task, signature) for name, signature in signatures.items()}


def _Function(task: task_lib.BaseTask, signature: task_lib.Signature) -> Any:
  def Serve(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    return dict(signature.function(task.theta, nested_map.NestedMap(inputs)))

  specs = {name: tf.TensorSpec(s.shape, s.dtype, name) for name, s in signature.inputs.items()}
  return tf.function(Serve, autograph=False).get_concrete_function(**specs)


def _SignatureText(function: Any) -> str:
  inputs = shapes.FormatNest(function.structured_input_signature[1])
  return f'{inputs} -> {shapes.FormatNest(function.structured_outputs)}'


def _Write(
  module: tf.Module,
  functions: Mapping[str, Any],
  directory: str,
  extra: Mapping[str, str],
  assets_folder: str,
) -> None:
  """Writes everything under another name, and then gives it the name of the directory.

  Object stores rename no folder at once, if at all: there it has its name from the beginning, and
  TensorFlow writes saved_model.pb, without which nothing loads, after all but a fingerprint.
  """
  is_local = files.IsLocal(directory)
  temporary = f'{directory}.tmp-{secrets.token_hex(4)}' if is_local else directory
  try:
    try:
      folder = os.path.join(temporary, _EXTRA)
      tf.io.gfile.makedirs(folder)
      if tf.io.gfile.isdir(assets_folder):
        for name in tf.io.gfile.listdir(assets_folder):
          tf.io.gfile.copy(os.path.join(assets_folder, name), os.path.join(folder, name))
      for name, text in extra.items():
        files.WriteWhole(os.path.join(folder, name), text)
      options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
      with _Quiet():
        tf.saved_model.save(module, temporary, dict(functions), options)
      if is_local:
        _CheckNew(directory)  # Somebody may have been faster.
        tf.io.gfile.rename(temporary, directory)
    except BaseException:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.rmtree(temporary)
      raise
  except tf.errors.OpError as e:
    raise OSError(f'Cannot write the export {directory!r}: {files.OneLine(e)}') from e


@contextlib.contextmanager
def _Quiet() -> Iterator[None]:
  """Drops what TensorFlow logs of the temporary name."""
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel('WARNING')
  try:
    yield
  finally:
    logger.setLevel(level)


def _CheckNew(directory: str) -> None:
  if tf.io.gfile.exists(directory):
    raise FileExistsError(
      f'{directory!r} exists, and an export overwrites nothing: remove it, or name another '
      'directory by --export_dir'
    )
