# SPDX-License-Identifier: Apache-2.0
"""What one process of the benchmark measures, and the list of them; no TensorFlow here."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lingvo_gpipe.planner import plan_choice

# What each workload's sizes are, unless flags say otherwise (design, section 4).
WORKLOADS: dict[str, dict[str, int]] = {
  'a': {'layers': 16, 'dim': 1024, 'batch': 256},
  'b': {'layers': 8, 'dim': 512, 'batch': 32, 'time': 128, 'vocab': 4096, 'heads': 8},
  'c': {'cells': 6, 'filters': 32, 'image': 64, 'batch': 32},
}

MAX_STEPS = 50

OURS = 'lingvo_gpipe'
TORCH = 'torch'
TORCH_SCHEDULES = ('gpipe', '1f1b')
TORCH_WORKLOADS = ('a', 'b')


@dataclasses.dataclass(frozen=True)
class Configuration:
  """One line of the table: what runs in one process (torch: in K processes).

  Attributes:
    system: who does the work, `lingvo_gpipe` or `torch`.
    workload: a key of `WORKLOADS`.
    sizes: the workload's sizes by name.
    num_stages: K, a device each.
    num_micro_batches: M.
    schedule: name of the schedule.
    remat_policy: what backward recomputes; for torch `stage` (checkpointing) or `none`.
    xla: whether stages are compiled by XLA.
    num_cores: how many cores the process may use.
    repeats: at least so many steps are timed,
    seconds: and more, up to `MAX_STEPS`, until they took so long.
    stages_per_device: v: the layers are cut into K v stages; K are what is else called stages.
  """

  system: str
  workload: str
  sizes: dict[str, int]
  num_stages: int
  num_micro_batches: int
  schedule: str
  remat_policy: str
  xla: bool
  num_cores: int
  repeats: int
  seconds: float
  stages_per_device: int = 1

  def ToJson(self) -> str:
    """The configuration as one line."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def FromJson(cls, text: str) -> Configuration:
    """Undoes `ToJson`."""
    return cls(**json.loads(text))

  @property
  def name(self) -> str:
    """A short name for messages."""
    what = f'({self.workload}) {self.system} K={self.num_stages} M={self.num_micro_batches}'
    xla = ' xla' if self.xla else ''
    return f'{what} {self.schedule_text} {self.remat_policy}{xla} on {self.num_cores} cores'

  @property
  def schedule_text(self) -> str:
    """The schedule with its stages a device, where these are several."""
    several = f' v={self.stages_per_device}' if self.stages_per_device > 1 else ''
    return f'{self.schedule}{several}'


def Sizes(workload: str, texts: Iterable[str]) -> dict[str, int]:
  """The sizes of a workload, changed by texts such as `b.batch=8`.

  Raises:
    ValueError: a text that is no size of any workload.
  """
  sizes = dict(WORKLOADS[workload])
  for text in texts:
    match = re.fullmatch(r'(\w+)\.(\w+)=([1-9]\d*)', text)
    if not match or match[2] not in WORKLOADS.get(match[1], {}):
      known = [f'{w}.{name}' for w, names in WORKLOADS.items() for name in names]
      raise ValueError(f'size {text!r}: expected <name>=<number>, name one of {", ".join(known)}')
    if match[1] == workload:
      sizes[match[2]] = int(match[3])
  return sizes


def Grid(
  *,
  workloads: Sequence[str],
  sizes: Sequence[str],
  num_stages: Sequence[int],
  num_micro_batches: Sequence[int],
  schedules: Sequence[str],
  remat_policies: Sequence[str],
  xla: Sequence[bool],
  repeats: int,
  seconds: float,
  peer: str | None,
  stages_per_device: int = 1,
) -> list[Configuration]:
  """The configurations to be measured, those to be compared close to each other.

  With one stage all schedules are the same work but for the fused ones: it is measured under
  `gpipe` alone, pinned to one core, and free on as many cores as the most stages have. Schedules
  that do not loop have one stage a device, whatever `stages_per_device` is.
  """
  found = []
  for workload in workloads:
    for m in num_micro_batches:
      for policy in remat_policies:
        for k in num_stages:
          common: dict[str, Any] = {
            'workload': workload,
            'sizes': Sizes(workload, sizes),
            'num_stages': k,
            'num_micro_batches': m,
            'remat_policy': policy,
            'repeats': repeats,
            'seconds': seconds,
          }
          cores = [k] if k > 1 else sorted({1, max(num_stages)})
          for name in schedules if k > 1 else ['gpipe']:
            for use_xla in xla:
              found += [
                Configuration(
                  system=OURS,
                  schedule=name,
                  xla=use_xla,
                  num_cores=n,
                  stages_per_device=stages_per_device if name in plan_choice.LOOPED else 1,
                  **common,
                )
                for n in cores
              ]
          if (
            peer == TORCH and workload in TORCH_WORKLOADS and k > 1 and policy in ('stage', 'none')
          ):
            found += [
              Configuration(system=TORCH, schedule=name, xla=False, num_cores=k, **common)
              for name in TORCH_SCHEDULES
            ]
  return found
