# SPDX-License-Identifier: Apache-2.0
"""Trains an experiment for some steps and prints how long each took: `Trial.Run`'s process."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def Measure(trial: dict[str, Any]) -> list[float]:
  """The seconds of each timed step of a `target.Trial`."""
  from lingvo_gpipe import cluster, params_text, registry, runner, task_plan
  from lingvo_gpipe import model as model_lib

  params: Any = registry.GetParams(trial['key'], 'Train', packages=trial['packages'])
  for text in trial['overrides']:
    params.ApplyOverrides(params_text.ParseOverrides(text))
  model = model_lib.SingleTaskModel(params)
  assert model.input is not None
  num_replicas = trial['num_replicas']
  devices = cluster.Cluster.Create(
    task_plan.NumDevices(model.task),
    trial['num_devices'],
    platform=trial['platform'],
    num_replicas=num_replicas,
  )
  trained = runner.TaskRunner(
    model.task, devices.devices, model.input.BatchSpec(), num_replicas=num_replicas
  )
  batches = iter(model.input.Dataset().repeat())
  trained.TrainStep(next(batches))
  steps = []
  for _ in range(trial['repeats']):
    batch = next(batches)
    start = time.perf_counter()
    trained.TrainStep(batch)
    steps.append(time.perf_counter() - start)
  return steps


def main() -> None:
  """Measures what the first argument says."""
  print(json.dumps(Measure(json.loads(sys.argv[1]))))


if __name__ == '__main__':
  main()
