# SPDX-License-Identifier: Apache-2.0
"""`tools.draw_cut` draws the numbers of the stage table."""

import sys
from xml.etree import ElementTree

import pytest

from tests import processes

_PROGRAM = str(processes.ROOT / 'tools' / 'draw_cut.py')
_MODEL = [f'--model={processes.MODEL}', f'--model_params_override={processes.TINY}']


def testTheNumbersEqualTheTableOfThePartition(forks, tmp_path):
  path = tmp_path / 'cut.svg'
  processes.Succeeded(forks.Run(_PROGRAM, *_MODEL, f'--output={path}'))
  texts = [e.text for e in ElementTree.parse(path).iter('{http://www.w3.org/2000/svg}text')]
  done = processes.Succeeded(forks.Run('trainer', '--mode=inspect_partition', *_MODEL))
  table = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (['0'], ['1'])]
  assert len(table) == 2
  for row in table:
    for number in (row[6], row[8], row[9]):  # Share, weights, activations.
      assert number in texts, (number, texts)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
