# SPDX-License-Identifier: Apache-2.0
"""A process of the benchmark: measures one configuration and prints the result as a JSON line.

python -m tools.benchmarking.worker '<configuration as JSON>'
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tools.benchmarking import configuration

# Steps of an epoch of `fit`, which is timed as a whole.
_EPOCH = 4


def PeakMemory(process: int | str = 'self') -> float:
  """Returns the peak resident memory of a process so far in MiB."""
  with open(f'/proc/{process}/status', encoding='ascii') as f:
    match = re.search(r'^VmHWM:\s*(\d+) kB', f.read(), re.MULTILINE)
  return int(match[1]) / 1024 if match else 0.0


def _Times(step: Callable[[], float], config: configuration.Configuration) -> list[float]:
  """Returns the seconds of each timed step."""
  steps: list[float] = []
  while len(steps) < config.repeats or (
    sum(steps) < config.seconds and len(steps) < configuration.MAX_STEPS
  ):
    steps.append(step())
  return steps


def MeasureFit(config: configuration.Configuration) -> dict[str, Any]:
  """Returns the seconds of the steps of `fit` by epoch, the memory, and the first loss."""
  import keras

  from lingvo_gpipe import PipelinedModel, cluster
  from tools.benchmarking import workloads

  devices = cluster.Cluster.Create(config.num_stages, platform='cpu', threads_per_device=1).devices
  before = PeakMemory()
  model = workloads.KerasModel(config.sizes)
  if config.system == configuration.OURS:
    model = PipelinedModel(
      model,
      config.num_stages * config.stages_per_device,
      stages_per_device=config.stages_per_device,
      num_micro_batches=config.num_micro_batches,
      schedule=config.schedule,
      remat_policy=config.remat_policy,
      memory_limit=config.memory_limit * 2**20,
      xla=config.xla,
      devices=devices,
    )
  model.compile(
    optimizer=keras.optimizers.Adam(1e-4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=[],
    jit_compile=config.xla,
  )
  dataset = workloads.KerasData(config.sizes, _EPOCH)
  losses: list[float] = []

  def Epoch() -> float:
    start = time.perf_counter()
    history = model.fit(dataset, verbose=0).history
    losses.append(history['loss'][0])
    return time.perf_counter() - start

  first = Epoch()
  epochs = _Times(Epoch, config)
  return {
    'steps': [seconds / _EPOCH for seconds in epochs],
    'trace_seconds': 0.0,
    'compile_seconds': max(0.0, first - min(epochs)),
    'memory_mib': PeakMemory(),
    'memory_before_mib': before,
    'cores': len(os.sched_getaffinity(0)),
    'loss': losses[0],
  }


def Measure(config: configuration.Configuration) -> dict[str, Any]:
  """Returns the seconds of steps, tracing and compiling, the memory, and the simulated step."""
  import tensorflow as tf

  from lingvo_gpipe.distributed import cluster
  from lingvo_gpipe.pipeline import layer_statistics
  from lingvo_gpipe.pipeline.schedule import schedules
  from lingvo_gpipe.runners import train_runner
  from tools.benchmarking import standalone, workloads

  devices = cluster.Cluster.Create(config.num_stages, platform='cpu', threads_per_device=1)
  stack: dict[str, Any] = {
    'num_stages': config.num_stages * config.stages_per_device,
    'stages_per_device': config.stages_per_device,
    'num_micro_batches': config.num_micro_batches,
    'schedule': config.schedule,
    'remat_policy': config.remat_policy,
    'memory_limit': config.memory_limit * 2**20,
    'xla': config.xla,
  }
  before = PeakMemory()
  task, batch = workloads.Make(config.workload, config.sizes, stack)
  pipeline = task.pipeline
  assert pipeline is not None
  spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
  trained = train_runner.TrainRunner(task, devices.devices, spec)

  def Train(batch: Any) -> tf.Tensor:
    micro_batches = trained.MicroBatches(batch)
    sums, layer_sums, _ = trained.engine.Accumulate(micro_batches, trained.global_step)
    layer_statistics.Assign(trained.engine, layer_statistics.Next(trained.engine, layer_sums))
    trained.learner.Apply(trained.global_step, tf.add_n([b.loss_weight for b in micro_batches]))
    trained.global_step.assign_add(1)
    return sums['loss']

  start = time.perf_counter()
  step = tf.function(Train, autograph=False).get_concrete_function(batch)
  trace_seconds = time.perf_counter() - start

  def Step() -> float:
    start = time.perf_counter()
    step(batch).numpy()
    return time.perf_counter() - start

  first = Step()
  steps = _Times(Step, config)
  memory = PeakMemory()
  result: dict[str, Any] = {
    'steps': steps,
    'trace_seconds': trace_seconds,
    'compile_seconds': max(0.0, first - min(steps)),
    'memory_mib': memory,
    'memory_before_mib': before,
    'cores': len(os.sched_getaffinity(0)),
    'cut': list(trained.cut.ends),
  }
  if trained.cut.vocabulary:  # Slices are not measured alone.
    return result

  # Memory is not measured from here on.
  schedule = schedules.Get(
    config.schedule, stack['num_stages'], config.num_micro_batches, config.num_stages
  )
  piece = trained.MicroBatches(batch)[0]
  times = standalone.Measure(
    trained.engine,
    piece.args,
    piece.side,
    piece.loss_weight,
    schedule,
    task.params.train.learner,
    max(3, config.repeats),
  )
  return {
    **result,
    'actions': times.Summary(),
    'simulated_best': times.Simulate(schedule, min),
    'simulated_median': times.Simulate(schedule, statistics.median),
    'predicted_best': times.Simulate(schedule, min, share_cores=True),
    'predicted_median': times.Simulate(schedule, statistics.median, share_cores=True),
  }


def main() -> None:
  """Measures the configuration in the first argument."""
  config = configuration.Configuration.FromJson(sys.argv[1])
  # Set the cores before TensorFlow creates its threads, which inherit them.
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.num_cores])
  measure = MeasureFit if config.workload == 'c' else Measure
  print(json.dumps(measure(config)))


if __name__ == '__main__':
  main()
