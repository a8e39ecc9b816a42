# SPDX-License-Identifier: Apache-2.0
"""Tutorials become pages and notebooks with their outputs; `make docs` runs them."""

import json
import re
import subprocess
import sys

import pytest

import lingvo_gpipe
from tests import processes
from tools.site import tutorials

_TEXT = """# A licence.

# %% [markdown]
# # Title
#
# Text, and `code`.

# %%
def Double(x):
  return 2 * x


print(Double(3))

# %%
print(Double(x=4))
"""


def testCellsKeepTheirNamesAndOutputs():
  cells = tutorials.Run(_TEXT)
  assert [cell.output for cell in cells] == ['', '6\n', '8\n']
  assert cells[0].source == '# Title\n\nText, and `code`.'
  page = tutorials.Page(cells, 'toy')
  assert page.startswith('# Title\n') and '```text\n6\n```' in page and 'toy.ipynb' in page
  notebook = json.loads(tutorials.Notebook(cells))
  assert [cell['cell_type'] for cell in notebook['cells']] == ['markdown', 'code', 'code']
  assert notebook['cells'][1]['outputs'][0]['text'] == '6\n'


def testAnErrorEndsTheBuild():
  with pytest.raises(subprocess.CalledProcessError):
    tutorials.Run('# %%\n1 / 0\n')


@pytest.mark.parametrize(
  'path', sorted((processes.ROOT / 'docs' / 'tutorials').glob('*.py')), ids=lambda path: path.stem
)
def testTutorialsUseThePublicNames(path):
  text = path.read_text()
  imports = re.findall(r'^from lingvo_gpipe import (\([^)]*\)|.*)$', text, re.MULTILINE)
  names = set(re.findall(r'\w+', ' '.join(imports)))
  assert 'import lingvo_gpipe' not in text and 'from lingvo_gpipe.' not in text
  assert names and names <= set(lingvo_gpipe.__all__)
  assert f'tutorials/{path.stem}.md' in (processes.ROOT / 'mkdocs.yml').read_text()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
