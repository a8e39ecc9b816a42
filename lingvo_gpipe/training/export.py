# SPDX-License-Identifier: Apache-2.0
"""Writes a trained task as a SavedModel, which plain TensorFlow loads and serves.

The layers are traced in sequence rather than as a pipeline: the graph names no device and contains
only TensorFlow's own operations. It serves the task's `InferenceSignatures`.

    <directory>/saved_model.pb, variables/    the SavedModel
    <directory>/assets.extra/params.txt       the model's Params as text
    <directory>/assets.extra/export.json      step, weights and signatures
    <directory>/assets.extra/...              assets of the run, such as its vocabulary
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

# Directory of the exports in a log directory; each has its step as its name.
FOLDER = 'export'

# Directory that TensorFlow Serving reserves for files that are not part of the graph.
_EXTRA = 'assets.extra'


@dataclasses.dataclass(frozen=True)
class Exported:
  """Description of an export.

  Attributes:
    directory: the SavedModel.
    step: step of the weights.
    num_averages: number of weights that are moving averages.
    signatures: {name: inputs and outputs as text}.
    fixed_batch: why the batch has a fixed size; '' if its size is free.
  """

  directory: str
  step: int
  num_averages: int
  signatures: Mapping[str, str]
  fixed_batch: str = ''

  def Text(self) -> str:
    """Returns a description in a few lines."""
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

  The directory appears when it is complete. If its path has a scheme, such as gs://, it is complete
  when its saved_model.pb appears. Moving averages of weights are exported instead of the weights if
  the checkpoint has them.

  Args:
    params: the model's Params, with an input, for the shapes of a batch.
    logdir: the log directory.
    directory: directory to write, which must not exist; '' means <logdir>/export/<step>, or
      <logdir>/export/<task>/<step> for a model of several tasks.
    checkpoint: the checkpoint, in the form that `checkpoint_choice.Find` takes.
    allow_params_change: export with Params that describe another model, if its weights fit.

  Raises:
    ValueError: there is no such checkpoint, the run has different Params, the Params have no input,
      or a model of several tasks has no task selected.
    FileExistsError: the directory exists.
    OSError: a file cannot be read or written; the partial export is removed.
  """
  model: model_lib.BaseModel = params.Instantiate()
  if model.input is None:
    raise ValueError('an export needs an input, for the shapes of a batch: set params.input')
  saved = checkpointer.Checkpointer(os.path.join(logdir, 'train'))
  info = checkpoint_choice.Find(saved, checkpoint)
  params_change.CheckEvaluated(info, params, allow_params_change)
  # Each of several tasks has a directory.
  directory = directory.rstrip('/') or os.path.join(
    logdir, FOLDER, *model.active_tasks, str(info.step)
  )
  _CheckNew(directory)
  with tf.device('/device:CPU:0'):  # Another program may use the accelerator's memory.
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
  """Returns the signatures' functions, and why the size of the batch is fixed, or ''."""
  free = tf.nest.map_structure(
    lambda s: None if s is None else tf.TensorSpec([None, *s.shape[1:]], s.dtype), batch_spec
  )
  try:
    return _TraceFor(task, free), ''
  except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as e:
    reason = files.OneLine(e)
  return _TraceFor(task, batch_spec), reason


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
  """Writes the export under a temporary name, and then renames it to the directory.

  Object stores cannot rename a directory atomically. There the export has its final name from the
  beginning; TensorFlow writes saved_model.pb, without which nothing loads, after all files except a
  fingerprint.
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
        _CheckNew(directory)  # Another export may have finished first.
        tf.io.gfile.rename(temporary, directory)
    except BaseException:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.rmtree(temporary)
      raise
  except tf.errors.OpError as e:
    raise OSError(f'Cannot write the export {directory!r}: {files.OneLine(e)}') from e


@contextlib.contextmanager
def _Quiet() -> Iterator[None]:
  """Suppresses TensorFlow's log lines, which name the temporary directory."""
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
      f'{directory!r} exists, and an export overwrites nothing: remove it, or give another '
      'directory with --export_dir'
    )
