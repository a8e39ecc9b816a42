# SPDX-License-Identifier: Apache-2.0
"""Trains an experiment for some steps, in this or a new process, and reports their times.

python -m tools.planning.trial '<Trial as JSON>'
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools import program


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run of some steps with one plan.

  Attributes:
    key: key of the experiment.
    packages: packages of experiments to search.
    overrides: overrides of Params.
    num_replicas: R.
    num_devices: number of devices that a new process creates, as for the measurement of layers,
      because devices share the threads; None: as many as the plan uses.
    platform: kind of device.
    repeats: number of timed steps after the first.
  """

  key: str
  packages: Sequence[str]
  overrides: Sequence[str]
  num_replicas: int
  num_devices: int | None
  platform: str
  repeats: int

  def Run(self, timeout_seconds: float) -> list[float]:
    """Calls `Steps` in a new process and returns its result.

    Raises:
      RuntimeError: the process failed.
      subprocess.TimeoutExpired: the process took too long.
    """
    argument = json.dumps(dataclasses.asdict(self))
    seconds: list[float] = program.ResultOf('tools.planning.trial', argument, timeout_seconds)
    return seconds

  def Steps(self, devices: Sequence[str] = ()) -> list[float]:
    """Returns the seconds of each timed step, on the first of these devices or on new devices."""
    from lingvo_gpipe.core import params_text
    from lingvo_gpipe.distributed import cluster
    from lingvo_gpipe.experiment import model as model_lib
    from lingvo_gpipe.experiment import registry
    from lingvo_gpipe.runners import task_cut, train_runner

    params: Any = registry.GetParams(self.key, 'Train', packages=self.packages)
    for text in self.overrides:
      params.ApplyOverrides(params_text.ParseOverrides(text))
    model = model_lib.SingleTaskModel(params)
    assert model.input is not None
    num_stages = task_cut.NumDevices(model.task)
    devices = (
      devices
      or cluster.Cluster.Create(
        num_stages, self.num_devices, platform=self.platform, num_replicas=self.num_replicas
      ).devices
    )
    trained = train_runner.TrainRunner(
      model.task,
      devices[: num_stages * self.num_replicas],
      model.input.BatchSpec(),
      num_replicas=self.num_replicas,
    )
    batches = iter(model.input.Dataset().repeat())
    trained.TrainStep(next(batches))
    steps = []
    for _ in range(self.repeats):
      batch = next(batches)
      start = time.perf_counter()
      trained.TrainStep(batch)
      steps.append(time.perf_counter() - start)
    return steps


def main() -> None:
  """Measures the trial in the first argument."""
  print(json.dumps(Trial(**json.loads(sys.argv[1])).Steps()))


if __name__ == '__main__':
  main()
