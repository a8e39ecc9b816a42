# SPDX-License-Identifier: Apache-2.0
"""`tools.convergence` reproduces the table of the page of convergence, and draws its picture."""

import platform
import re
import sys
from xml.etree import ElementTree

import pytest

from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.reporting import line_chart
from tests import processes
from tools import convergence

_DOCS = processes.ROOT / 'docs'
_NUM_STEPS = 3


@pytest.fixture(scope='module')
def devices():
  return cluster.Cluster.Create(2, platform='cpu').devices


@pytest.fixture(scope='module')
def results(devices):
  """The curves of the page's models; of the transformer only one, which takes long to trace."""
  return {
    'transformer': convergence.TrainTransformer([2], _NUM_STEPS, devices),
    'keras': convergence.TrainKeras([2], _NUM_STEPS, devices),
  }


def testCurvesAreEqual(results, devices, monkeypatch):
  monkeypatch.setattr(convergence, '_SIZES', re.sub('(num_layers):6', r'\1:1', convergence._SIZES))
  shallow = convergence.TrainTransformer([1, 2], _NUM_STEPS, devices)
  assert shallow['K=2'] != results['transformer']['K=2']
  for first, *curves in (list(curves.values()) for curves in (shallow, results['keras'])):
    assert len(first) == _NUM_STEPS and curves
    for curve in curves:
      assert curve == pytest.approx(first, rel=1e-5)


def testTheTableEqualsThePage(results):
  """The first losses are equal, and so is the form of each line.

  The losses of the transformer depend on the sources of Python.
  """
  page = (_DOCS / 'convergence.md').read_text()
  python = re.search(r'Python ([\d.]+\d)', page)[1]
  first_loss = re.compile(r'^(\| \w+ \| [\w=]+ \|) (\d\.\d{6}) \| \d\.\d{6} \|.*\|$', re.M)
  on_page = {name: float(loss) for name, loss in first_loss.findall(page)}
  now = {name: float(loss) for name, loss in first_loss.findall(convergence.Table(results))}
  assert len(now) == 3
  now['| transformer | K=1 |'] = now['| transformer | K=2 |']  # Not trained again, but equal.
  is_same_python = python == platform.python_version()
  for name, loss in now.items():
    bound = 1e-5 if is_same_python or 'transformer' not in name else 0.01
    assert loss == pytest.approx(on_page[name], rel=bound)


def testThePictureHasTheFormOfThePage():
  """It is the same but for the paths of the curves and the numbers."""
  picture = (_DOCS / 'convergence.svg').read_text()
  shape = {'transformer': ['K=1', 'K=2', 'K=4'], 'keras': ['Keras', 'K=1', 'K=2', 'K=4']}
  curves = {
    f'{model}: loss': {name: [(1, 2.0), (200, 1.0)] for name in names}
    for model, names in shape.items()
  }
  drawn = line_chart.Picture(curves)
  roots = [ElementTree.fromstring(text) for text in (picture, drawn)]
  styles, sizes = ([root[1].text for root in roots], [root.get('viewBox') for root in roots])
  assert styles[0] == styles[1] and sizes[0] == sizes[1]
  classes = [[e.get('class') for e in root.iter() if e.get('class') != 'grid'] for root in roots]
  assert [c for c in classes[0] if c] == [c for c in classes[1] if c]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
