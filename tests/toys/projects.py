# SPDX-License-Identifier: Apache-2.0
"""Writes a user's project: experiments, and a task for them."""

import pathlib
import shutil

_FOLDER = pathlib.Path(__file__).parent


def Experiments(name):
  """Returns the text of a file in the folder `experiments`."""
  return (_FOLDER / 'experiments' / f'{name}.py').read_text()


def Write(root, experiments, *more, module='toy', task='regression'):
  """Writes files of `params` and of `tasks`; returns the root.

  Args:
    root: a directory.
    experiments: text of `params/<module>.py`; it may import `<task>` from `tasks`.
    *more: names of files in the folder `experiments`, which keep their names in `params`.
    module: name of the module of experiments.
    task: name of a file next to this one, for `tasks`.
  """
  for folder in ('params', 'tasks'):
    (root / folder).mkdir()
  (root / 'params' / f'{module}.py').write_text(experiments)
  for name in more:
    (root / 'params' / f'{name}.py').write_text(Experiments(name))
  shutil.copy(_FOLDER / f'{task}.py', root / 'tasks')
  return root
