# SPDX-License-Identifier: Apache-2.0
"""One process of `tools.workers_benchmark`: trains some steps, here or on workers of its own.

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

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from tools import program  # noqa: E402
from tools.benchmarking import socket_bytes, worker  # noqa: E402

# The first one compiles; the second one is the first whose loss comes from an update.
_WARM_UP_STEPS = 2
_MAX_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Trial:
  """What is measured.

  Attributes:
    key: the experiment.
    packages: where to look it up.
    overrides: texts of overrides, of the stages and of what is below among them.
    num_replicas: R.
    num_stages: K, a device each.
    all_reduce: how gradients are added; '' where there is one replica.
    on_workers: whether each device is a worker, or all of them are in one process.
    num_cores: how many cores all processes may use together.
    repeats: at least so many steps are timed,
    seconds: and more, up to `_MAX_STEPS`, until they took so long.
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
    """The trial as one line, for a process of its own."""
    return json.dumps(dataclasses.asdict(self))

  @property
  def name(self) -> str:
    """A short name for messages."""
    where = 'workers' if self.on_workers else 'one process'
    sums = f' {self.all_reduce}' if self.all_reduce else ''
    return f'R={self.num_replicas} K={self.num_stages}{sums} in {where}, {self.num_cores} cores'

  def Run(self, timeout_seconds: float) -> dict[str, Any]:
    """What `Measure` returns, from a fresh process.

    Raises:
      RuntimeError: the process failed.
      subprocess.TimeoutExpired: it took longer.
    """
    result: dict[str, Any] = program.ResultOf(
      'tools.benchmarking.workers_trial', self.ToJson(), timeout_seconds
    )
    return result


def Measure(trial: Trial) -> dict[str, Any]:
  """Trains, and returns what came of it.

  Returns:
    steps: seconds of each timed step.
    loss: of the second step, the first one after an update.
    start_mib, peak_mib: [this process, worker, ...]: the greatest resident memory before the model
      is made and at the end.
    between, with_trainer: bytes a step that workers sent each other, and that went between them and
      this process; None where nothing was counted.
    between_theory, with_trainer_theory: what has to be sent (see `_Theory`).
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
    before = socket_bytes.Sent() if counts else {}
    while len(steps) < trial.repeats or (sum(steps) < trial.seconds and len(steps) < _MAX_STEPS):
      batch = next(batches)
      start = time.perf_counter()
      run.TrainStep(batch)
      steps.append(time.perf_counter() - start)
    after = socket_bytes.Sent() if counts else {}
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
  """What a step has to send if each device is a process: bytes (between them, with the trainer).

  Between them what passes the boundaries of the stages, and the gradients of it. Replicas send the
  gradients of G bytes of weights: by collectives each of R sends 2 (R-1)/R G, by sends (R-1) G. The
  trainer sends what the first stages and the loss take of a batch.
  """
  import tensorflow as tf

  from lingvo_gpipe.pipeline.cutting import layer_costs
  from lingvo_gpipe.pipeline.stages import leaves
  from lingvo_gpipe.runners import task_cut

  task, stages = run.task, run.engine.stages
  specs = task_cut.PipelineInputSpecs(task, run.batch_spec)
  # A micro-batch each would add up to the same as the whole batch at once.
  calls = layer_costs.LayerCosts(task.pipeline.layers, specs).calls
  between = 0
  ends = run.cut.ends
  for s, start, end in zip(stages[1:], ends[:-1], ends[1:], strict=True):
    skips = {name: spec for call in calls[start:end] for name, spec in call.skips.items()}
    taken = calls[start].specs, [skips[name] for name in s.imports]
    between += layer_costs.SpecBytes(taken)
    if s.needs_dx:
      between += layer_costs.SpecBytes(leaves.Floats(taken))
  gradients = layer_costs.SpecBytes([a for s in stages for a in s.accumulators])
  others = trial.num_replicas - 1
  between += others * gradients * (2 if trial.all_reduce == 'collective' else others + 1)
  needed = tf.nest.flatten((task.PipelineInputs(batch), task.LossInputs(batch)))
  return between, layer_costs.SpecBytes(needed)


def main() -> None:
  """Measures what the first argument says."""
  trial = Trial(**json.loads(sys.argv[1]))
  # Before TensorFlow makes its threads and workers start: they inherit it.
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: trial.num_cores])
  print(json.dumps(Measure(trial)), flush=True)
  # TensorFlow's own end would ask for the workers, which are gone.
  os._exit(0)


if __name__ == '__main__':
  main()
