# SPDX-License-Identifier: Apache-2.0
"""The configurations of the benchmark, one for each process; does not import TensorFlow."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.planner import plan_choice

# Default sizes of each workload, which flags can change.
WORKLOADS: dict[str, dict[str, int]] = {
  'a': {'layers': 16, 'dim': 1024, 'batch': 256},
  'b': {
    'layers': 8,
    'dim': 512,
    'batch': 32,
    'time': 128,
    'vocab': 4096,
    'heads': 8,
    'chunk': 0,  # Positions whose logits the loss computes at a time; 0: all.
    'shared': 0,  # 1: the vocabulary is shared out over the devices.
    'shards': 1,  # Variables that each weight of embedding and softmax consists of.
  },
  'c': {'layers': 8, 'dim': 256, 'batch': 16, 'time': 128, 'vocab': 1024, 'heads': 4},
  'd': {'cells': 6, 'filters': 32, 'image': 64, 'batch': 32},
}

# Sizes that change how the loss is computed, but not the work.
OPTIONS = ('chunk', 'shared', 'shards')

MAX_STEPS = 50

OURS = 'lingvo_gpipe'
TORCH = 'torch'
KERAS = 'keras'
TORCH_SCHEDULES = ('gpipe', '1f1b')
TORCH_WORKLOADS = ('a', 'b')


@dataclasses.dataclass(frozen=True)
class Configuration:
  """One line of the table, measured in one process (torch: in K processes).

  Attributes:
    system: the library that runs the work, `lingvo_gpipe`, `torch` or `keras`.
    workload: a key of `WORKLOADS`.
    sizes: the workload's sizes by name.
    num_stages: K, one stage per device.
    num_micro_batches: M.
    schedule: name of the schedule; '-' for keras.
    remat_policy: the re-materialisation policy; for torch `stage` (checkpointing) or `none`.
    xla: whether stages are compiled by XLA.
    num_cores: number of cores that the process may use.
    repeats: minimum number of timed steps.
    seconds: minimum duration of the timed steps, of which there are at most `MAX_STEPS`.
    stages_per_device: v; the layers are cut into K v stages on K devices.
    memory_limit: MiB of a device, for the policy `auto`.
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
  memory_limit: int = 0

  def ToJson(self) -> str:
    """Returns the configuration as one line of JSON."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def FromJson(cls, text: str) -> Configuration:
    """Returns the configuration from the result of `ToJson`."""
    return cls(**json.loads(text))

  @property
  def name(self) -> str:
    """Returns a short name for messages."""
    what = f'({self.workload}) {self.system} K={self.num_stages} M={self.num_micro_batches}'
    xla = ' xla' if self.xla else ''
    return f'{what} {self.schedule_text} {self.policy_text}{xla} on {self.num_cores} cores'

  @property
  def policy_text(self) -> str:
    """Returns the policy, with its limit in MiB if it has one."""
    return f'{self.remat_policy} {self.memory_limit}' if self.memory_limit else self.remat_policy

  @property
  def schedule_text(self) -> str:
    """Returns the schedule, with the stages per device if several and the options that are set."""
    several = f' v={self.stages_per_device}' if self.stages_per_device > 1 else ''
    default = WORKLOADS[self.workload]
    options = (
      f' {name}={self.sizes[name]}'
      for name in OPTIONS
      if self.sizes.get(name, default.get(name)) != default.get(name)
    )
    return f'{self.schedule}{several}{"".join(options)}'

  @property
  def work(self) -> dict[str, int]:
    """Returns the sizes without the options; all lines of a table have the same work."""
    return {name: size for name, size in self.sizes.items() if name not in OPTIONS}


def AllSizes(workload: str, texts: Iterable[str]) -> list[dict[str, int]]:
  """Returns the sizes of a workload after overrides such as `b.batch=8` or `b.chunk=0,256`.

  Each combination of the overrides with several values is an element.

  Raises:
    ValueError: an override does not name a size of a workload.
  """
  values = {name: [size] for name, size in WORKLOADS[workload].items()}
  for text in texts:
    match = re.fullmatch(r'(\w+)\.(\w+)=(\d+(?:,\d+)*)', text)
    known = WORKLOADS.get(match[1], {}) if match else {}
    if not match or match[2] not in known:
      names = [f'{w}.{name}' for w, sizes in WORKLOADS.items() for name in sizes]
      raise ValueError(
        f'size {text!r}: expected <name>=<number> or <number>,<number>, name one of '
        f'{", ".join(names)}'
      )
    numbers = list(dict.fromkeys(map(int, match[3].split(','))))
    if min(numbers) < min(known[match[2]], 1):
      raise ValueError(f'size {text!r}: expected numbers of at least 1')
    if match[1] == workload:
      values[match[2]] = numbers
  return [dict(zip(values, sizes, strict=True)) for sizes in itertools.product(*values.values())]


def Sizes(workload: str, texts: Iterable[str]) -> dict[str, int]:
  """Returns the only sizes that the overrides allow.

  Raises:
    ValueError: an override does not name a size of a workload, or has several values.
  """
  sizes, *more_sizes = AllSizes(workload, texts)
  if more_sizes:
    several = [text for text in texts if ',' in text]
    raise ValueError(f'size: expected one value, got {" and ".join(several)}')
  return sizes


def _OnOneCore(xla: Sequence[bool], **common: Any) -> list[Configuration]:
  """Returns workload (c) in plain Keras, and in one stage without micro-batches."""
  return [
    Configuration(
      system=system,
      workload='c',
      num_stages=1,
      num_micro_batches=1,
      schedule=name,
      remat_policy='none',
      xla=use_xla,
      num_cores=1,
      **common,
    )
    for use_xla in xla
    for system, name in ((KERAS, '-'), (OURS, '1f1b_fused'))
  ]


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
  memory_limits: Sequence[int] = (0,),
) -> list[Configuration]:
  """Returns the configurations to measure; configurations to compare follow each other.

  With one stage all schedules except the fused ones do the same work. So one stage is measured only
  under `gpipe`: pinned to one core, and on as many cores as the largest number of stages.
  Only schedules that loop have `stages_per_device`; others have one per device, or two in a V.
  Workload (c) is always measured in plain Keras too, and has no micro-batches in one stage.
  Torch has no options of the loss, so it is measured once for each work.

  Raises:
    ValueError: a size is unknown, or workload (c) lacks KerasHub.
  """
  configurations = []
  policies: list[tuple[str, int]] = []
  for policy in remat_policies:
    limits = memory_limits if policy == rematerialisation.AUTO else [0]
    policies += [(policy, limit) for limit in limits]
  for workload in workloads:
    stages = num_stages
    if workload == 'c':
      if not importlib.util.find_spec('keras_hub'):
        raise ValueError("workload (c) needs KerasHub: pip install 'lingvo_gpipe[keras-hub]'")
      for each in AllSizes('c', sizes):
        configurations += _OnOneCore(xla, sizes=each, repeats=repeats, seconds=seconds)
      stages = [k for k in num_stages if k > 1]
    for m, (policy, limit), k, each in itertools.product(
      num_micro_batches, policies, stages, AllSizes(workload, sizes)
    ):
      common: dict[str, Any] = {
        'workload': workload,
        'sizes': each,
        'num_stages': k,
        'num_micro_batches': m,
        'remat_policy': policy,
        'memory_limit': limit,
        'repeats': repeats,
        'seconds': seconds,
      }
      cores = [k] if k > 1 else sorted({1, max(num_stages)})
      configurations += [
        Configuration(
          system=OURS,
          schedule=name,
          xla=use_xla,
          num_cores=n,
          stages_per_device=_StagesPerDevice(name, stages_per_device),
          **common,
        )
        for name in (schedules if k > 1 else ['gpipe'])
        for use_xla in xla
        for n in cores
      ]
      if peer == TORCH and workload in TORCH_WORKLOADS and k > 1 and policy in ('stage', 'none'):
        default = {name: size for name, size in WORKLOADS[workload].items() if name in OPTIONS}
        for name in TORCH_SCHEDULES:
          peer_common = {**common, 'sizes': {**each, **default}}
          config = Configuration(system=TORCH, schedule=name, xla=False, num_cores=k, **peer_common)
          if config not in configurations:
            configurations.append(config)
  return configurations


def _StagesPerDevice(schedule: str, count: int) -> int:
  """Returns `count` for schedules that take any number, and the number of the others."""
  if schedule in plan_choice.IN_A_V:
    return 2
  return count if schedule in plan_choice.LOOPED else 1
