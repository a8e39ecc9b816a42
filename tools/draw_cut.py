# SPDX-License-Identifier: Apache-2.0
"""Draws the cut of an experiment as SVG: the work, weights and activations of each stage.

    python -m tools.draw_cut --model=lm.stdlib.ByteTransformerGPipe4 --output=cut.svg

The numbers are also in the table of `trainer --mode=inspect_partition`. No weight is allocated.
"""

from __future__ import annotations

from absl import flags

from lingvo_gpipe.cli import binary, device_flags
from lingvo_gpipe.core import hyperparams, text_table
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.reporting import bar_table, line_chart, svg
from lingvo_gpipe.runners import task_cut
from tools import program

FLAGS = flags.FLAGS


def Cut(params: hyperparams.InstantiableParams) -> cut_lib.Cut:
  """Returns the cut of a model's task.

  Raises:
    ValueError: the model has several tasks, no pipeline or no input.
  """
  model: model_lib.BaseModel = params.Instantiate()
  if model.task.pipeline is None or model.input is None:
    raise ValueError('a picture of the cut needs a task with a pipeline, and an input')
  return task_cut.CutTask(model.task, model.input.BatchSpec())


def Draw(cut: cut_lib.Cut, title: str, *, is_standalone: bool = False) -> str:
  """Returns the picture of a cut; a line in the first column marks the mean of the stages."""
  stages = cut.stages
  columns = [
    bar_table.Column(
      f'work of a micro-batch: {line_chart.Number(sum(s.flops for s in stages) / 1e9)} GFLOPs',
      [bar_table.Bar([(s.share, svg.BLUE)], f'{s.share:.1%}') for s in stages],
      mark=1 / len(stages),
    )
  ]
  for name, colour, sizes in (
    ('weights, gradients, slots', svg.ORANGE, [m.state for m in cut.memory]),
    ('activations at the peak', svg.GREEN, [m.activations for m in cut.memory]),
  ):
    total = text_table.FormatBytes(sum(sizes))
    bars = [bar_table.Bar([(n, colour)], text_table.FormatBytes(n)) for n in sizes]
    columns.append(bar_table.Column(f'{name}: {total}', bars))
  rows = [f'stage {k}: layers {s.start}-{s.end - 1}' for k, s in enumerate(stages)]
  return bar_table.Draw(title, rows, columns, is_standalone=is_standalone)


def _Run() -> int:
  params = binary.ModelParams('Train')
  device_flags.OneDevice()
  picture = Draw(Cut(params), f'{FLAGS.model}, cut into stages', is_standalone=True)
  program.WriteOutput(picture)
  return 0


def Run() -> None:
  """Entry point."""
  binary.DefineFlags()
  program.DefineOutput()
  binary.Run(_Run, __doc__ or '')


if __name__ == '__main__':
  Run()
