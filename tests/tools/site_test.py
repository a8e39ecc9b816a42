# SPDX-License-Identifier: Apache-2.0
"""Links of the documents lead to pages of the site."""

import re
import sys
import types

import pytest

from lingvo_gpipe.pipeline.schedule import schedules

pytest.importorskip('mkdocs')
from tools.site import hooks, reference


def _Rewritten(path, text):
  page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=path))
  return hooks.on_page_markdown(text, page, None, None)


@pytest.mark.parametrize(
  ('page', 'link', 'expected'),
  [
    ('keras.md', '../README.md#read-on', 'index.md#read-on'),
    ('keras.md', '../tasks/lm/model.py', 'source/tasks/lm/model.py.md'),
    ('keras.md', 'examples/slurm.sh', 'source/docs/examples/slurm.sh.md'),
    ('reference/params.md', '../keras.md', '../keras.md'),
    ('keras.md', 'profiling.md#workers', 'profiling.md#workers'),
    ('keras.md', 'https://keras.io', 'https://keras.io'),
    ('keras.md', '../no/such/file.py', '../no/such/file.py'),  # mkdocs reports it.
  ],
)
def testLinks(page, link, expected):
  assert _Rewritten(page, f'see [it]({link}).') == f'see [it]({expected}).'


def testTheReferenceOfSchedulesIsComplete():
  rows = re.findall(r'^\| \[`(\w+)`\].*\|$', reference.SchedulesPage(), re.M)
  assert rows == 2 * schedules.Names()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
