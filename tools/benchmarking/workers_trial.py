# SPDX-License-Identifier: Apache-2.0
"""A process of `tools.workers_benchmark`: trains some steps, in this process or on new workers.

python -m tools.benchmarking.workers_trial '<Trial as JSON>'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools import program
from tools.benchmarking import socket_bytes, worker

# The first step compiles; the loss of the second step is the first after an update.
_WARM_UP_STEPS = 2
_MAX_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run to measure.

  Attributes:
    key: key of the experiment.
    packages: packages of experiments to search.
    overrides: overrides of Params, including those for the attributes below.
    num_replicas: R.
    num_stages: K, one stage per device.
    all_reduce: method to sum gradients over replicas; '' if there is one replica.
    on_workers: whether each device is a worker; otherwise all devices are in one process.
    num_cores: number of cores that all processes together may use.
    repeats: minimum number of timed steps.
    seconds: minimum duration of the timed steps, of which there are at most `_MAX_STEPS`.
  """

  key: str
  packages: Sequence[str]
  overrides: Sequence[str]
  num_replicas: int
  num_stages: int
  all_reduce: str
  on_workers: bool
  num_cores: int
  repeats: int
  seconds: float

  def ToJson(self) -> str:
    """Returns the trial as one line of JSON, for a separate process."""
    return json.dumps(dataclasses.asdict(self))

  @property
  def name(self) -> str:
    """Returns a short name for messages."""
    where = 'workers' if self.on_workers else 'one process'
    sums = f' {self.all_reduce}' if self.all_reduce else ''
    return f'R={self.num_replicas} K={self.num_stages}{sums} in {where}, {self.num_cores} cores'

  def Run(self, timeout_seconds: float) -> dict[str, Any]:
    """Calls `Measure` in a new process and returns its result.

    Raises:
      RuntimeError: the process failed.
      subprocess.TimeoutExpired: the process took too long.
    """
    result: dict[str, Any] = program.ResultOf(
      'tools.benchmarking.workers_trial', self.ToJson(), timeout_seconds
    )
    return result


def Measure(trial: Trial) -> dict[str, Any]:
  """Trains and returns the measurements.

  Returns:
    steps: seconds of each timed step.
    loss: loss of the second step, the first after an update.
    start_mib, peak_mib: [this process, worker, ...]: peak resident memory before the model is
      created and at the end.
    between, with_trainer: bytes per step between workers, and between workers and this process;
      None if they were not counted.
    between_theory, with_trainer_theory: bytes that have to be sent (see `_Theory`).
  """
  from lingvo_gpipe.core import params_text
  from lingvo_gpipe.distributed import cluster, local_workers
  from lingvo_gpipe.experiment import model as model_lib
  from lingvo_gpipe.experiment import registry
  from lingvo_gpipe.runners import train_runner

  params: Any = registry.GetParams(trial.key, 'Train', packages=trial.packages)
  for text in trial.overrides:
    params.ApplyOverrides(params_text.ParseOverrides(text))
  workers = None
  if trial.on_workers:
    count = trial.num_replicas * trial.num_stages
    workers = local_workers.LocalWorkers(count, ['--platform=cpu', '--threads_per_device=1'])
  try:
    if workers is None:
      devices = cluster.Cluster.Create(
        trial.num_stages, platform='cpu', threads_per_device=1, num_replicas=trial.num_replicas
      )
    else:
      devices = cluster.Cluster.Connect(
        workers.spec, trial.num_stages, trial.num_replicas, platform='cpu'
      )
    processes = [os.getpid(), *(p.pid for p in (workers.processes if workers else ()))]
    counts = workers is not None and socket_bytes.IsThere()
    start_mib = [worker.PeakMemory(process) for process in processes]
    model = model_lib.SingleTaskModel(params)
    assert model.input is not None
    run = train_runner.TrainRunner(
      model.task, devices.devices, model.input.BatchSpec(), num_replicas=trial.num_replicas
    )
    batches = iter(model.input.Dataset().repeat())
    for _ in range(_WARM_UP_STEPS):
      values = run.TrainStep(next(batches))
    assert values is not None
    steps: list[float] = []
    before = socket_bytes.SentBytes() if counts else {}
    while len(steps) < trial.repeats or (sum(steps) < trial.seconds and len(steps) < _MAX_STEPS):
      batch = next(batches)
      start = time.perf_counter()
      run.TrainStep(batch)
      steps.append(time.perf_counter() - start)
    after = socket_bytes.SentBytes() if counts else {}
    sent = {False: 0, True: 0}
    for ends, num_bytes in socket_bytes.Difference(after, before).items():
      if set(ends) <= set(processes):
        sent[processes[0] in ends] += num_bytes
    between_theory, with_trainer_theory = _Theory(run, trial, batch)
    return {
      'steps': steps,
      'loss': values['loss'],
      'start_mib': start_mib,
      'peak_mib': [worker.PeakMemory(process) for process in processes],
      'between': sent[False] / len(steps) if counts else None,
      'with_trainer': sent[True] / len(steps) if counts else None,
      'between_theory': between_theory,
      'with_trainer_theory': with_trainer_theory,
    }
  finally:
    if workers is not None:
      workers.Close()


def _Theory(run: Any, trial: Trial, batch: Any) -> tuple[int, int]:
  """Returns the bytes that a step has to send if each device is a process: (between, with trainer).

  Devices send the tensors that cross the boundaries of stages, and their gradients. Replicas also
  send the gradients of G bytes of weights, each of R in the mean 2 (R-1)/R G. The trainer sends the
  inputs of the first stages and of the loss.
  """
  import tensorflow as tf

  from lingvo_gpipe.pipeline.cutting import layer_costs
  from lingvo_gpipe.pipeline.stages import leaves
  from lingvo_gpipe.runners import task_cut

  task, stages = run.task, run.engine.stages
  specs = task_cut.PipelineInputSpecs(task, run.batch_spec)
  # The sizes of all micro-batches add up to the size of the whole batch.
  calls = layer_costs.LayerCosts(task.pipeline.layers, specs).calls
  between = 0
  ends = run.cut.ends
  for s, start, end in zip(stages[1:], ends[:-1], ends[1:], strict=True):
    skips = {name: spec for call in calls[start:end] for name, spec in call.skips.items()}
    inputs = calls[start].specs, [skips[name] for name in s.imports]
    between += layer_costs.SpecBytes(inputs)
    if s.needs_dx:
      between += layer_costs.SpecBytes(leaves.Floats(inputs))
  gradients = layer_costs.SpecBytes([a for s in run.engine.holders for a in s.accumulators])
  between += 2 * (trial.num_replicas - 1) * gradients
  needed = tf.nest.flatten((task.PipelineInputs(batch), task.LossInputs(batch)))
  return between, layer_costs.SpecBytes(needed)


def main() -> None:
  """Measures the trial in the first argument."""
  trial = Trial(**json.loads(sys.argv[1]))
  # Set the cores before TensorFlow creates its threads and workers start, which inherit them.
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: trial.num_cores])
  print(json.dumps(Measure(trial)), flush=True)
  # TensorFlow's shutdown would wait for the workers, which have ended.
  os._exit(0)


if __name__ == '__main__':
  main()
