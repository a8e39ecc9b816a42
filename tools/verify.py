# SPDX-License-Identifier: Apache-2.0
"""Compares pipelined and unpipelined losses and gradients of one training step of an experiment.

`python -m tools.verify --model=KEY` exits with 0 if they are equal, and with 1 if they differ.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.pipeline import verify
from lingvo_gpipe.runners import task_cut, train_runner

FLAGS = flags.FLAGS


def _Verify() -> int:
  params = binary.ModelParams('Train')
  if FLAGS.dtype != 'as_is':
    for p in model_lib.FindTaskParams(params).values():
      p.Set(dtype=FLAGS.dtype, fprop_dtype=None)
  model: model_lib.BaseModel = params.Instantiate()
  task = model.task
  if task.pipeline is None:
    raise binary.UsageError(f'{FLAGS.model} has no pipeline: there is nothing to compare')
  if model.input is None:
    raise binary.UsageError(f'{FLAGS.model} has no input')
  devices = device_flags.Devices(task_cut.NumDevices(task))

  def Loss(theta: Any, outputs: tuple[Any, ...], side: Any) -> Any:
    del theta  # The weights of a pipelined task belong to its layers.
    predictions = outputs[0] if len(outputs) == 1 else outputs
    return task.ComputeLoss(nested_map.NestedMap(), predictions, side)[0]

  # Creates the variables on the devices of their stages, and returns which are trained.
  built = train_runner.TrainRunner(
    task, devices.devices, model.input.BatchSpec(), num_replicas=devices.num_replicas
  )
  batch = next(iter(model.input.Dataset().skip(FLAGS.step)))
  task.CheckBatch(batch)
  p, xla = task.pipeline.params, built.engine.xla
  print(built.cut.Table(devices.devices))
  print(f'schedule {p.schedule}, remat_policy {p.remat_policy}, xla {xla}, step {FLAGS.step}\n')
  report = verify.VerifyEngine(
    built.engine,
    built.MicroBatches(batch),
    (task.PipelineInputs(batch), task.LossInputs(batch)),
    loss_fn=Loss,
    step=FLAGS.step,
  )
  print(report.Text(FLAGS.num_worst))
  return 1 if report.Failures() else 0


def Run() -> None:
  """Entry point."""
  binary.DefineFlags()
  flags.DEFINE_enum(
    'dtype',
    'as_is',
    ['as_is', 'float32', 'float64'],
    'Dtype to compute in; float64 separates errors from rounding.',
  )
  flags.DEFINE_integer('step', 0, 'The training step: its batch and random numbers.', lower_bound=0)
  flags.DEFINE_integer('num_worst', 5, 'Number of worst variables to print.', lower_bound=1)
  binary.Run(_Verify, __doc__ or '')


if __name__ == '__main__':
  Run()
