# SPDX-License-Identifier: Apache-2.0
"""The trainer: `trainer --model=KEY --logdir=DIR`; --mode=list and inspect_* print and leave."""

from __future__ import annotations

import os
import sys
from typing import Any

from absl import flags

from lingvo_gpipe import (
  binary,
  inspection,
  logdir_lock,
  registry,
  runner,
  stop_request,
  train_program,
)
from lingvo_gpipe import model as model_lib

FLAGS = flags.FLAGS


def _List() -> int:
  keys = registry.ListKeys(binary.Packages())
  for key in keys:
    print(key)
  if not keys:
    print(
      'no experiments here: run in a directory that has a package `params`, or name a package with '
      '--params_package',
      file=sys.stderr,
    )
  return 0


def _InspectParams() -> int:
  print(binary.ModelParams('Train').ToText(), end='')
  return 0


def _InspectModel() -> int:
  print(inspection.ModelText(model_lib.SingleTaskModel(binary.ModelParams('Train')).task))
  return 0


def _InspectPartition() -> int:
  params = binary.ModelParams('Train')
  binary.Devices(1)
  print(inspection.PartitionText(params, binary.LogDir() if FLAGS.logdir else ''))
  return 0


def _Train() -> int:
  stop = stop_request.StopRequest()
  stop.Install()
  params = binary.ModelParams('Train')
  logdir = binary.LogDir()
  num_devices = runner.NumDevices(model_lib.SingleTaskModel(params).task)

  def InputParams(dataset: str) -> Any:
    return binary.ModelParams(dataset).input

  # Before the devices: a second trainer would find their memory taken.
  with logdir_lock.Held(os.path.join(logdir, 'train')) as lock:
    return train_program.TrainProgram(
      params,
      logdir,
      binary.Devices(num_devices),
      InputParams,
      stop,
      job=FLAGS.job,
      check_numerics=FLAGS.check_numerics,
      allow_params_change=FLAGS.allow_params_change,
      lock=lock,
    ).Run()


_MODES = {
  'train': _Train,
  'list': _List,
  'inspect_params': _InspectParams,
  'inspect_model': _InspectModel,
  'inspect_partition': _InspectPartition,
}


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineFlags()
  flags.DEFINE_enum('mode', 'train', list(_MODES), 'What to do.')
  flags.DEFINE_enum(
    'job',
    'train',
    list(train_program.JOBS),
    'train, or train_and_eval: evaluate and decode between steps, as task.train says.',
  )
  flags.DEFINE_bool(
    'check_numerics', False, 'Stop at the first step that is not finite and name the layer.'
  )
  flags.DEFINE_bool(
    'allow_params_change', False, 'Go on with a run whose Params were others, if its weights fit.'
  )
  binary.Run(lambda: _MODES[FLAGS.mode](), __doc__ or '')


if __name__ == '__main__':
  Run()
