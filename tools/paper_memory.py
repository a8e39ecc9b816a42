# SPDX-License-Identifier: Apache-2.0
"""Compares Table 1 of the paper with counted parameters and predicted activation memory.

Run `python -m tools.paper_memory` in the checkout. All figures are computed, not measured. Each
parameter takes 12 bytes: the weight, its gradient and RMSProp's slot. The activations are the
prediction of `lingvo_gpipe.pipeline.cost.stage_memory`, summed over stages. No weight is allocated.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary as binary  # First: it drops the messages of native code.

# isort: split
import dataclasses
import time
from typing import Any, NamedTuple

from absl import flags

from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.experiment import registry
from tools import program

FLAGS = flags.FLAGS

_BYTES_PER_PARAMETER = 12
_GB = 1e9
_GIB = 2.0**30


class _Paper(NamedTuple):
  """A column of Table 1 (arXiv:1811.06965v5) as printed in the paper, in units of `unit` bytes."""

  column: str
  parameters: str
  weights: float
  activations: float
  unit: float


# The paper swaps the two memory figures for Transformer Naive-1: 12 bytes for each of 282.2M
# parameters are 3.15 GiB. Its "G" are GiB for the Transformer and GB for AmoebaNet.
TABLE = {
  'image.imagenet.AmoebaNetD18x208': _Paper('Naive-1', '82M', 1.05, 6.26, _GB),
  'image.imagenet.AmoebaNetD18x416': _Paper('Pipeline-1', '318M', 3.8, 3.46, _GB),
  'image.imagenet.AmoebaNetD18x544': _Paper('Pipeline-2', '542M', 6.45, 8.11, _GB),
  'image.imagenet.AmoebaNetD36x544': _Paper('Pipeline-4', '1.05B', 12.53, 15.21, _GB),
  'image.imagenet.AmoebaNetD72x512': _Paper('Pipeline-8', '1.8B', 24.62, 26.24, _GB),
  'lm.one_billion_wds.Transformer3': _Paper('Naive-1', '282.2M', 3.15, 11.7, _GIB),
  'lm.one_billion_wds.Transformer13': _Paper('Pipeline-1', '785.8M', 8.8, 6.4, _GIB),
  'lm.one_billion_wds.Transformer103': _Paper('Pipeline-8', '5.3B', 59.5, 50.9, _GIB),
  'lm.one_billion_wds.Transformer415': _Paper('Pipeline-32', '21.0B', 235.1, 199.9, _GIB),
  'lm.one_billion_wds.Transformer1663': _Paper('Pipeline-128', '83.9B', 937.9, 796.1, _GIB),
}

_COLUMNS = '{:34} {:12} {:>4} {:>4}  {:>15} {:>7}  {:>8} {:>7}  {:>11} {:>7}  {:>9}'


@dataclasses.dataclass(frozen=True)
class Computed:
  """The computed figures of one experiment.

  Attributes:
    num_stages: number of stages, one per device.
    num_micro_batches: M.
    num_params: number of trained and other weights, without an auxiliary head, as in the paper.
    activations: peak bytes of activations, summed over stages.
    largest_device: bytes of weights and activations of the largest stage.
  """

  num_stages: int
  num_micro_batches: int
  num_params: int
  activations: int
  largest_device: int


def Compute(key: str) -> Computed:
  """Computes the figures of the experiment `key`."""
  # Imported late because they load TensorFlow, and errors in flags should be reported quickly.
  from lingvo_gpipe.experiment import model as model_lib
  from lingvo_gpipe.runners import task_cut

  params: Any = registry.GetParams(key, 'Train')
  if 'aux_loss_weight' in params.task:
    params.task.aux_loss_weight = 0.0
  model = model_lib.SingleTaskModel(params)
  assert model.input is not None
  cut = task_cut.CutTask(model.task, model.input.BatchSpec())
  activations = [needs.activations for needs in cut.memory]
  weights = [_BYTES_PER_PARAMETER * s.num_params for s in cut.stages]
  return Computed(
    num_stages=len(cut.stages),
    num_micro_batches=cut.num_micro_batches,
    num_params=model.task.NumParams(),
    activations=sum(activations),
    largest_device=max(a + w for a, w in zip(activations, weights, strict=True)),
  )


def DefineFlags() -> None:
  """Defines the flags."""
  flags.DEFINE_list('models', list(TABLE), 'The experiments.')


def Run() -> int:
  """Prints a line for each experiment."""
  if wrong := [key for key in FLAGS.models if key not in TABLE]:
    raise ValueError(f'--models: {wrong[0]!r} is not in Table 1; expected some of {list(TABLE)}')
  cluster.Cluster.Create(1, platform='cpu')  # Nothing is computed on an accelerator.
  print('parameters and weights: counted; activations: predicted; paper: as it reports')
  print(
    _COLUMNS.format(
      'experiment', 'column', 'K', 'M', 'parameters', 'paper', 'weights', 'paper', 'activations',
      'paper', 'largest'
    )
  )  # fmt: skip
  start = time.monotonic()
  for key in FLAGS.models:
    paper, figures = TABLE[key], Compute(key)
    unit = 'GB' if paper.unit == _GB else 'GiB'
    print(
      _COLUMNS.format(
        key,
        paper.column,
        figures.num_stages,
        figures.num_micro_batches,
        f'{figures.num_params:,}',
        paper.parameters,
        f'{_BYTES_PER_PARAMETER * figures.num_params / paper.unit:.2f}',
        f'{paper.weights:g}',
        f'{figures.activations / paper.unit:.2f}',
        f'{paper.activations:g}',
        f'{figures.largest_device / paper.unit:.2f} {unit}',
      ),
      flush=True,
    )
  print('largest: weights and activations of the device that needs most, in the unit of its row')
  print(f'computed in {time.monotonic() - start:.0f} s')
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
