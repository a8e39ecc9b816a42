# SPDX-License-Identifier: Apache-2.0
"""Writes the Keras model of a run as a preset of KerasHub.

    python -m tools.write_preset --model=KEY --logdir=LOGDIR --preset=DIRECTORY

The experiment's task must have a `keras_model`, as the tasks in tasks/keras have. The preset has
the weights of the newest checkpoint. `keras_hub.models.CausalLM.from_preset(DIRECTORY,
preprocessor=None)` loads it without lingvo_gpipe.
"""

from __future__ import annotations

import os

from absl import flags

from lingvo_gpipe.cli import binary  # First: it drops the messages of native code.

# isort: split
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpoint_choice, checkpointer
from lingvo_gpipe.learning import ema

FLAGS = flags.FLAGS


def _DefineFlags() -> None:
  binary.DefineFlags()
  flags.DEFINE_string('preset', '', 'Directory to write, which must not exist.')


def _Write() -> int:
  for name in ('model', 'logdir', 'preset'):
    if not FLAGS[name].value:
      raise binary.UsageError(f'--{name} is needed')
  if os.path.exists(FLAGS.preset):
    raise binary.UsageError(f'--preset={FLAGS.preset} exists')
  model = binary.ModelParams('Train').Instantiate()
  if not hasattr(model.task, 'keras_model'):
    raise binary.UsageError(f'the task of {FLAGS.model} has no Keras model')
  saved = checkpointer.Checkpointer(os.path.join(FLAGS.logdir, 'train'))
  info = checkpoint_choice.Find(saved, checkpoint_choice.LAST)
  with tf.device('/device:CPU:0'):
    model.task.InstantiateVariables()
    ema.Restore(saved, info, model.ByCheckpointName(model.task.VariablesByPath()))
  model.task.keras_model.save_to_preset(FLAGS.preset)
  print(f'wrote the weights of step {info.step} to {FLAGS.preset}')
  return 0


def Run() -> None:
  """Entry point."""
  _DefineFlags()
  binary.Run(_Write, __doc__ or '')


if __name__ == '__main__':
  Run()
