# SPDX-License-Identifier: Apache-2.0
"""Writes a user's project: experiments, and a task for them."""

import shutil

from tests.toys import regression


def Write(root, experiments):
  """Writes `params/toy.py` and `tasks/regression.py`; returns the root.

  Args:
    root: a directory.
    experiments: text of `params/toy.py`; it may import `regression` from `tasks`.
  """
  for folder in ('params', 'tasks'):
    (root / folder).mkdir()
  (root / 'params' / 'toy.py').write_text(experiments)
  shutil.copy(regression.__file__, root / 'tasks')
  return root
