# SPDX-License-Identifier: Apache-2.0
"""A training step takes the routes of docs/architecture.md."""

import os
import pathlib
import re
import sys
import traceback

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gpipe
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.stages import stage_math
from lingvo_gpipe.runners import train_runner
from tests.toys import stacks, tasks

_ROOT = pathlib.Path(__file__).parents[2]
_LIBRARY = f'{pathlib.Path(lingvo_gpipe.__file__).parent}{os.sep}'


def _Routes():
  """Returns for each row of the table the modules on the way."""
  text = (_ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
  rows = text.partition('### Two routes')[2].partition('## ')[0].strip().split('\n')
  cells = [row.split('|')[3] for row in rows if row.startswith('| `')]
  return [re.findall(r'`(\w+)`', cell) for cell in cells]


def testAStepTakesTheRoutesInTheDocs(monkeypatch):
  routes = []

  def Record(owner, name):
    original = getattr(owner, name)

    def Recording(*args, **kwargs):
      frames = [f for f in traceback.extract_stack() if f.filename.startswith(_LIBRARY)]
      functions = [f.name for f in frames]
      if 'TrainStep' in functions:
        frames = frames[functions.index('TrainStep') :]
        last = original.__code__.co_filename
        modules = [pathlib.Path(path).stem for path in [*(f.filename for f in frames), last]]
        route = list(dict.fromkeys(modules))
        routes.append(route[:-1] if name == 'FProp' else route)
      return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, Recording)

  Record(linear.ProjectionLayer, 'FProp')
  Record(stage_math, 'Accumulate')
  Record(optimizer.StageOptimizer, 'Apply')
  task = tasks.TiedNet.Params().Set(name='net', dtype=tf.float64).Instantiate()
  run = train_runner.TrainRunner(task, stacks.Devices(), tasks.BatchSpec(4))
  run.TrainStep(tasks.Batch(np.random.default_rng(0), 4))
  assert [list(route) for route in dict.fromkeys(map(tuple, routes))] == _Routes()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
