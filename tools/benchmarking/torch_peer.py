# SPDX-License-Identifier: Apache-2.0
"""Runs the same work with torch.distributed.pipelining: K processes over gloo, one thread each.

    <python with torch> torch_peer.py '<configuration as JSON>'

prints the result as a JSON line. It imports nothing of this project, because it runs in an
environment with torch and with NumPy, which torch's pipelining needs.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from typing import Any

_PROCESS_SECONDS = 900
_MAX_STEPS = 50  # As in tools/benchmarking/worker.py.


def _PeakMemory() -> float:
  with open('/proc/self/status', encoding='ascii') as f:
    match = re.search(r'^VmHWM:\s*(\d+) kB', f.read(), re.MULTILINE)
  return int(match[1]) / 1024 if match else 0.0


def StageEnds(costs: list[int], num_stages: int) -> list[int]:
  """Returns the ends of the stages that make the most expensive stage as cheap as possible."""

  @functools.cache
  def Cut(start: int, num_left: int) -> tuple[int, int, list[int]]:
    """Returns the largest cost of a stage, the sum of squares, which breaks ties, and the ends."""
    if num_left == 1:
      cost = sum(costs[start:])
      return cost, cost**2, [len(costs)]
    cuts = []
    for end in range(start + 1, len(costs) - num_left + 2):
      cost = sum(costs[start:end])
      largest, squares, ends = Cut(end, num_left - 1)
      cuts.append((max(cost, largest), squares + cost**2, [end, *ends]))
    return min(cuts)

  return Cut(0, num_stages)[2]


def _Stages(workload: str, sizes: dict[str, int], num_stages: int, checkpointing: bool) -> Any:
  """Returns num_stages modules, balanced by the multiplications of their matrices."""
  import torch
  from torch import nn
  from torch.nn import functional
  from torch.utils import checkpoint

  dim = sizes['dim']

  class Residual(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.w = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)

    def Run(self, x: Any) -> Any:
      return x + torch.relu(x @ self.w)

    forward = Run

  class Embedding(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.table = nn.Embedding(sizes['vocab'], dim)
      position = torch.arange(sizes['time'])[:, None]
      angle = position / 10000 ** (torch.arange(0, dim, 2) / dim)
      self.register_buffer('positions', torch.cat([angle.sin(), angle.cos()], 1), persistent=False)

    def Run(self, ids: Any) -> Any:
      return self.table(ids) * dim**0.5 + self.positions

    forward = Run

  class Block(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
      self.qkv, self.post = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
      self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def Run(self, x: Any) -> Any:
      batch, length, _ = x.shape
      heads = sizes['heads']
      qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, dim // heads)
      q, k, v = qkv.permute(2, 0, 3, 1, 4)
      y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      x = x + self.post(y.transpose(1, 2).reshape(batch, length, dim))
      return x + self.down(torch.relu(self.up(self.norm2(x))))

    forward = Run

  class Stage(nn.Module):
    def __init__(self, layers: list[Any]) -> None:
      super().__init__()
      self.layers = nn.Sequential(*layers)

    def Run(self, x: Any) -> Any:
      if checkpointing and torch.is_grad_enabled():
        return checkpoint.checkpoint(self.layers, x, use_reentrant=False)
      return self.layers(x)

    forward = Run

  torch.manual_seed(1)
  num_layers = sizes['layers']
  if workload == 'a':
    layers: list[Any] = [Residual() for _ in range(num_layers)]
  else:
    layers = [Block() for _ in range(num_layers)]
  costs = [1] * num_layers
  if workload == 'b':
    # The embedding and the norm cost next to nothing: they go with a block and with the softmax.
    layers[0] = nn.Sequential(Embedding(), layers[0])
    layers.append(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, sizes['vocab'])))
    costs = [12 * dim + 2 * sizes['time']] * num_layers + [sizes['vocab']]
  stages = [layers[i:j] for i, j in itertools.pairwise([0, *StageEnds(costs, num_stages)])]
  return [Stage(members) for members in stages]


def _Measure(config: dict[str, Any], rank: int) -> dict[str, Any]:
  import torch
  from torch import distributed
  from torch.distributed import pipelining
  from torch.nn import functional

  torch.set_num_threads(1)
  sizes, num_stages = config['sizes'], config['num_stages']
  distributed.init_process_group('gloo', rank=rank, world_size=num_stages)
  before = _PeakMemory()
  checkpointing = config['remat_policy'] == 'stage'
  module = _Stages(config['workload'], sizes, num_stages, checkpointing)[rank]
  if config['workload'] == 'a':
    inputs = target = torch.randn(sizes['batch'], sizes['dim'])

    def Loss(outputs: Any, target: Any) -> Any:
      del target
      return outputs.square().mean()
  else:
    shape = (sizes['batch'], sizes['time'])
    inputs, target = (torch.randint(sizes['vocab'], shape) for _ in range(2))

    def Loss(outputs: Any, target: Any) -> Any:
      return functional.cross_entropy(outputs.flatten(0, 1), target.flatten())

  stage = pipelining.PipelineStage(module, rank, num_stages, torch.device('cpu'))
  chosen = {'gpipe': pipelining.ScheduleGPipe, '1f1b': pipelining.Schedule1F1B}
  schedule = chosen[config['schedule']](stage, config['num_micro_batches'], loss_fn=Loss)
  optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

  def Step() -> float:
    distributed.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    args = (inputs,) if rank == 0 else ()
    if rank == num_stages - 1:
      losses: list[Any] = []
      schedule.step(*args, target=target, losses=losses)
      sum(loss.item() for loss in losses)
    else:
      schedule.step(*args)
    optimizer.step()
    distributed.barrier()
    return time.perf_counter() - start

  first = Step()
  steps = [Step()]
  # All processes run the same number of steps.
  number = max(config['repeats'], min(_MAX_STEPS, round(config['seconds'] / steps[0])))
  agreed = torch.tensor([number])
  distributed.broadcast(agreed, src=0)
  steps += [Step() for _ in range(int(agreed.item()) - 1)]
  result = {
    'steps': steps,
    'trace_seconds': 0.0,
    'compile_seconds': max(0.0, first - min(steps)),
    'memory_mib': _PeakMemory(),
    'memory_before_mib': before,
    'cores': len(os.sched_getaffinity(0)),
  }
  distributed.destroy_process_group()
  return result


def _Spawn(text: str, config: dict[str, Any]) -> dict[str, Any]:
  """Starts a process per rank; returns the steps of the slowest rank and the total memory."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = str(s.getsockname()[1])
  env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port, 'OMP_NUM_THREADS': '1'}
  processes = [
    subprocess.Popen(
      [sys.executable, str(pathlib.Path(__file__).resolve()), text, str(rank)],
      env=env, stdout=subprocess.PIPE, text=True,
    )
    for rank in range(config['num_stages'])
  ]  # fmt: skip
  try:
    outputs = [p.communicate(timeout=_PROCESS_SECONDS)[0] for p in processes]
  finally:
    for p in processes:
      if p.poll() is None:
        p.kill()
      p.wait()
  if any(p.returncode for p in processes):
    raise SystemExit('a process of torch failed; its message stands above')
  results = [json.loads(out.splitlines()[-1]) for out in outputs]
  merged = dict(results[-1])
  merged['steps'] = [max(times) for times in zip(*(r['steps'] for r in results), strict=True)]
  for name in ('memory_mib', 'memory_before_mib'):
    merged[name] = sum(r[name] for r in results)
  return merged


def main() -> None:
  """Measures the configuration in the first argument, as the rank in the second argument if any."""
  text = sys.argv[1]
  config = json.loads(text)
  if len(sys.argv) > 2:
    print(json.dumps(_Measure(config, int(sys.argv[2]))))
    return
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config['num_cores']])
  print(json.dumps(_Spawn(text, config)))


if __name__ == '__main__':
  main()
