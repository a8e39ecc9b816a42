# SPDX-License-Identifier: Apache-2.0
"""Tutorials become pages and notebooks with their outputs; `make docs` runs them."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

import lingvo_gpipe
from tests import processes
from tools.site import tutorials

_PATHS = sorted((processes.ROOT / 'docs' / 'tutorials').glob('*.py'))
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
  types = [cell['cell_type'] for cell in notebook['cells']]
  assert types == ['code', 'markdown', 'code', 'code']
  assert notebook['cells'][2]['outputs'][0]['text'] == '6\n'


_VALUES = """
# %%
class Picture:
  def _repr_html_(self):
    return '<svg/>'


print('before')
Picture()  # A comment.

# %%
[
  1,
  2,
]

# %%
x = 3
"""


def testTheValueOfTheLastExpressionIsShown():
  cells = tutorials.Run(_VALUES)
  assert [cell.output for cell in cells] == ['before\n', '[1, 2]\n', '']
  assert [cell.picture for cell in cells] == ['<svg/>', '', '']
  assert '<svg/>' in tutorials.Page(cells, 'toy')
  _, first, *_ = json.loads(tutorials.Notebook(cells))['cells']
  assert first['outputs'][1]['data'] == {'text/html': '<svg/>'}


_KEYS = {'id', 'cell_type', 'metadata', 'source'}
_OUTPUT_KEYS = {
  'stream': {'output_type', 'name', 'text'},
  'display_data': {'output_type', 'data', 'metadata'},
}


@pytest.mark.parametrize('path', _PATHS, ids=lambda path: path.stem)
def testNotebooksAreValidAndInstallFirst(path):
  """The rules of nbformat 4.5, and a cell that installs the version of this checkout."""
  text = path.read_text()
  cells = [cell._replace(output='6', picture='<svg/>') for cell in tutorials.Parse(text)]
  notebook = json.loads(tutorials.Notebook(cells))
  assert notebook.keys() == {'nbformat', 'nbformat_minor', 'metadata', 'cells'}
  assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
  for cell in notebook['cells']:
    is_code = cell['cell_type'] == 'code'
    assert is_code or cell['cell_type'] == 'markdown'
    assert cell.keys() == _KEYS | ({'execution_count', 'outputs'} if is_code else set())
    assert re.fullmatch('[a-zA-Z0-9_-]{1,64}', cell['id'])
    for output in cell.get('outputs', ()):
      assert output.keys() == _OUTPUT_KEYS[output['output_type']]
  assert len({cell['id'] for cell in notebook['cells']}) == len(notebook['cells'])
  install, *sources = (cell['source'] for cell in notebook['cells'])
  assert sources == [cell.source for cell in cells]
  project = tomllib.loads((processes.ROOT / 'pyproject.toml').read_text())['project']
  archive = f'lingvo_gpipe-{lingvo_gpipe.__version__}'
  assert re.search(rf'tar -xzf {re.escape(archive)}\.tar\.gz$', install, re.MULTILINE)
  (target,) = re.findall(r"%pip install --quiet '\./(\S+)'", install)
  assert target == archive + '[keras-hub]' * ('import keras_hub' in text)
  assert 'keras-hub' in project['optional-dependencies']


def testAnErrorEndsTheBuild():
  with pytest.raises(subprocess.CalledProcessError):
    tutorials.Run('# %%\n1 / 0\n')


@pytest.mark.parametrize('path', _PATHS, ids=lambda path: path.stem)
def testTutorialsUseThePublicNames(path):
  text = path.read_text()
  imports = re.findall(r'^from lingvo_gpipe import (\([^)]*\)|.*)$', text, re.MULTILINE)
  names = set(re.findall(r'\w+', ' '.join(imports)))
  assert 'import lingvo_gpipe' not in text and 'from lingvo_gpipe.' not in text
  assert names and names <= set(lingvo_gpipe.__all__)
  assert f'tutorials/{path.stem}.md' in (processes.ROOT / 'mkdocs.yml').read_text()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
