# SPDX-License-Identifier: Apache-2.0
"""Measures the activation memory of one device in a new process, and compares it with the formula.

All devices of a process share its memory. So only the stages of one device of the measured pipeline
are wide; all other activations are a single column.

python -m tools.benchmarking.stage_memory '<Setting as JSON>'
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import sys
from typing import Any

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import schedules

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>.


@dataclasses.dataclass(frozen=True)
class Setting:
  """One measurement.

  Attributes:
    num_stages: K, the number of devices, with one stage or `stages_per_device` each.
    num_micro_batches: M.
    schedule: name of the schedule.
    remat_policy: the re-materialisation policy.
    stage: index of a wide stage, at least 1, because stage 0 always has all of its input. Other
      stages of its device are wide, too.
    num_layers: number of layers of a wide stage.
    rows: number of examples per micro-batch.
    dim: width of the layers of a wide stage.
    xla: whether the stages are compiled by XLA.
    stages_per_device: v.
  """

  num_stages: int
  num_micro_batches: int
  schedule: str
  stage: int
  remat_policy: str = 'stage'
  num_layers: int = 2
  rows: int = 2048
  dim: int = 1024
  xla: bool = False
  stages_per_device: int = 1

  @property
  def made_schedule(self) -> schedules.Schedule:
    """The schedule of this size."""
    num_stages = self.num_stages * self.stages_per_device
    return schedules.Get(self.schedule, num_stages, self.num_micro_batches, self.num_stages)

  @property
  def is_wide(self) -> list[bool]:
    """For each stage whether it is on the measured device."""
    owners = self.made_schedule.stage_to_device
    return [owner == owners[self.stage] for owner in owners]

  def ToJson(self) -> str:
    """Returns the setting as one line of JSON, for a separate process."""
    return json.dumps(dataclasses.asdict(self))

  @property
  def mib(self) -> float:
    """Returns the size of one wide tensor in MiB."""
    return self.rows * self.dim * 4 / 2**20


def Predict(setting: Setting) -> float:
  """Returns the simulated peak of the wide stages' activations in MiB (GPipe, section 2.3).

  A layer relu(x w) keeps its output, which is the input of the next layer. The output of the last
  layer is only averaged.
  """
  schedule, wide = setting.made_schedule, [setting.mib * is_wide for is_wide in setting.is_wide]
  inner = [setting.num_layers * size for size in wide]
  sizes = simulator.ActivationSizes(
    stage_input=wide,
    inner=inner,
    layer_inputs=[max(0, setting.num_layers - 1) * size for size in wide],
    largest_layer=wide,
  )
  result = simulator.Simulate(
    schedule, simulator.Costs(1), remat_policy=setting.remat_policy, sizes=sizes
  )
  assert result.device_peak_bytes is not None
  return result.device_peak_bytes[schedule.stage_to_device[setting.stage]]


def Measure(setting: Setting) -> float:
  """Returns the MiB by which the first step raises the peak resident memory of this process.

  The increase includes the memory that TensorFlow needs to set up the step; with few rows it
  consists of nothing else.
  """
  # Otherwise glibc keeps freed tensors for the thread that allocated them, and the peak depends on
  # which thread runs an operation: it was up to 100 MiB higher with tensors of 16 MiB.
  if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18):
    raise OSError('mallopt cannot set M_MMAP_THRESHOLD')

  import tensorflow as tf

  from lingvo_gpipe.core import base_layer, weight_params
  from lingvo_gpipe.distributed import cluster
  from lingvo_gpipe.pipeline import pipelining_layer
  from lingvo_gpipe.pipeline.stages import micro_batch

  dim = setting.dim

  class Wide(base_layer.BaseLayer):
    """Maps [rows, dim] to relu(x w), [rows, dim]."""

    def __init__(self, params: Any) -> None:
      super().__init__(params)
      self.CreateVariable('w', weight_params.WeightParams([dim, dim]))

    def FProp(self, theta: Any, x: tf.Tensor) -> tf.Tensor:
      return tf.nn.relu(tf.matmul(x, theta.w))

  class Widen(base_layer.BaseLayer):
    """Maps [rows, 1] to [rows, dim]."""

    def FProp(self, theta: Any, x: tf.Tensor) -> tf.Tensor:
      del theta
      return tf.tile(x, [1, dim])

  class Narrow(base_layer.BaseLayer):
    """Maps [rows, dim] to [rows, 1]."""

    def FProp(self, theta: Any, x: tf.Tensor) -> tf.Tensor:
      del theta
      return tf.reduce_mean(x, axis=1, keepdims=True)

  class Scale(base_layer.BaseLayer):
    """Multiplies x by one weight."""

    def __init__(self, params: Any) -> None:
      super().__init__(params)
      self.CreateVariable('w', weight_params.WeightParams([1]))

    def FProp(self, theta: Any, x: tf.Tensor) -> tf.Tensor:
      return x * theta.w

  sub, splits = [], []
  is_wide = [*setting.is_wide, False]
  for k in range(len(setting.is_wide)):
    if is_wide[k]:
      sub += [Wide.Params() for _ in range(setting.num_layers)] + [Narrow.Params()]
    else:
      sub.append(Scale.Params())
    if is_wide[k + 1]:
      sub.append(Widen.Params())
    splits.append(len(sub))
  layer = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    sub=sub,
    splits=splits,
    num_stages=len(setting.is_wide),
    stages_per_device=setting.stages_per_device,
    num_micro_batches=setting.num_micro_batches,
    schedule=setting.schedule,
    remat_policy=setting.remat_policy,
    xla=setting.xla,
  )
  stack = layer.Instantiate()
  devices = cluster.Cluster.Create(setting.num_stages, platform='cpu', threads_per_device=1)
  x = tf.ones([setting.rows * setting.num_micro_batches, 1])

  def Loss(theta: Any, outputs: Any, side: tf.Tensor) -> dict[str, Any]:
    del theta
    return {'loss': (tf.reduce_mean(outputs[0]), tf.reduce_sum(side))}

  stack.Place(devices.devices, tf.TensorSpec(x.shape), loss_fn=Loss)
  stack.engine.MakeAccumulators()

  @tf.function(autograph=False)
  def Step(x: tf.Tensor) -> Any:
    pieces = stack.SplitBatch(x)
    # The weights depend on the data, because TensorFlow would keep constant gradients.
    weights = [piece[0, 0] for piece in pieces]
    micro_batches = [
      micro_batch.MicroBatch((p,), p, weight) for p, weight in zip(pieces, weights, strict=True)
    ]
    return stack.engine.Accumulate(micro_batches, tf.constant(0, tf.int64)).metrics

  step = Step.get_concrete_function(x)
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as f:
    f.write('5')  # Reset the peak resident memory.
  before = _Status('VmRSS')
  step(x)
  return _Status('VmHWM') - before


def _Status(name: str) -> float:
  """Returns an entry of /proc/self/status in MiB."""
  with open('/proc/self/status', encoding='ascii') as f:
    match = re.search(rf'^{name}:\s*(\d+) kB', f.read(), re.MULTILINE)
  assert match is not None
  return int(match[1]) / 1024


if __name__ == '__main__':
  print(json.dumps(Measure(Setting(**json.loads(sys.argv[1])))))
