# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures in SVG that suit light and dark pages.

The text has the colour of the page. Colours of areas and curves have enough contrast to white and
to black.
"""

from __future__ import annotations

import html

BLUE, GREEN, ORANGE, PURPLE, RED, GREY = (
  '#6f9fd8', '#4fa77b', '#e09440', '#a986c4', '#d9665f', '#9a9a9a'
)  # fmt: skip
# A text right after a rect stands on it.
_STYLE = 'svg text{font:11px sans-serif;fill:currentColor}svg rect+text{fill:#222}'
_DARK = '@media (prefers-color-scheme:dark){svg{color:#ddd;background:#222}}'


def Document(
  title: str, size: tuple[float, float], parts: list[str], is_standalone: bool, style: str = ''
) -> str:
  """Returns a picture.

  Args:
    title: the title, for screen readers.
    size: width and height.
    parts: the elements.
    is_standalone: whether the picture is a file of its own, which brings its colours for dark
      screens, and not a part of a page.
    style: further style sheets.
  """
  width, height = size
  head = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
    f'width="100%" role="img"><title>{Escape(title)}</title>'
    f'<style>{_STYLE}{style}{_DARK * is_standalone}</style>'
  )
  return '\n'.join([head, *filter(None, parts), '</svg>']) + '\n'


def Escape(text: str) -> str:
  """Returns a text for HTML and XML, which have no control characters."""
  return html.escape(''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text))


def Text(x: float, y: float, text: str, anchor: str = 'start', css_class: str = '') -> str:
  """Returns a text; `anchor` is start, middle or end."""
  attribute = f' class="{css_class}"' if css_class else ''
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{Escape(text)}</text>'
