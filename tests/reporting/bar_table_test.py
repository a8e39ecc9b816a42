# SPDX-License-Identifier: Apache-2.0
"""Tables of bars are drawn to scale, and cut off bars end in an arrow."""

import sys
from xml.etree import ElementTree

import pytest

from lingvo_gpipe.reporting import bar_table, svg

_SVG = '{http://www.w3.org/2000/svg}'


def _Draw(*bars, **options):
  column = bar_table.Column('size', [bar_table.Bar(parts, 'x < y') for parts in bars], **options)
  text = bar_table.Draw('Sizes', [f'row {i}' for i in range(len(bars))], [column])
  return ElementTree.fromstring(text)


def testPartsAreDrawnToScaleOneAfterTheOther():
  root = _Draw([(1.0, svg.BLUE), (3.0, svg.RED)], [(2.0, svg.BLUE)], [(0.0, svg.BLUE)])
  rects = [tuple(float(r.get(a)) for a in ('x', 'width')) for r in root.iter(f'{_SVG}rect')]
  (x, width), (x_2, width_2), (x_of_row, width_of_row) = rects
  assert x_of_row == x and x_2 == pytest.approx(x + width, abs=0.2)
  assert (width_2, width_of_row) == pytest.approx((3 * width, 2 * width), abs=0.5)


def testALongBarIsCutOffAndHasAnArrow():
  root = _Draw([(1.0, svg.BLUE), (7.0, svg.RED)], [(4.0, svg.BLUE)], end=4.0)
  first, second, third = (float(r.get('width')) for r in root.iter(f'{_SVG}rect'))
  assert first + second == pytest.approx(third, abs=0.2)
  assert [path.get('fill') for path in root.iter(f'{_SVG}path')] == [svg.RED]


def testNoTextFollowsARect():
  """It would have the colour of a text on the rect, which is not visible on a dark page."""
  root = _Draw([(1.0, svg.BLUE)], [(2.0, svg.BLUE)], mark=1.5)
  tags = [element.tag.removeprefix(_SVG) for element in root]
  assert 'text' not in tags[tags.index('rect') :]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
