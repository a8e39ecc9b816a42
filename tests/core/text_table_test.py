# SPDX-License-Identifier: Apache-2.0
"""Tables as text."""

import sys

import pytest

from lingvo_gpipe.core import text_table


def testTextAlignsLeftAndNumbersAlignRight():
  rows = [('name', 'steps', 'state'), ('a', '7', 'yes'), ('longer', '1,234', '')]
  assert text_table.FormatTable(rows, text_columns={0, 2}) == [
    'name    steps  state',
    'a           7  yes',
    'longer  1,234',
  ]
  with pytest.raises(ValueError):
    text_table.FormatTable([('a', 'b'), ('c',)], text_columns=())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
