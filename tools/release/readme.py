# SPDX-License-Identifier: Apache-2.0
"""Gives the package its description: README without links and pictures of the source tree.

A package index shows the description at an address of its own, where they would be broken.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from hatchling.metadata.plugin import interface

_PICTURE = re.compile(
  r'^(?:!\[[^]]*\]\((?!https?:)[^)]*\)|<picture>.*?</picture>)\n\n?', re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r'(?<!!)\[([^]]*)\]\((?!https?:)[^)]*\)')


def Description(text: str) -> str:
  """Returns Markdown text in which links into the source tree are plain text."""
  return _LINK.sub(r'\1', _PICTURE.sub('', text))


class ReadmeHook(interface.MetadataHookInterface):
  """Sets the readme of the project; pyproject.toml names this file."""

  def update(self, metadata: dict[str, Any]) -> None:
    text = (pathlib.Path(self.root) / 'README.md').read_text(encoding='utf-8')
    metadata['readme'] = {'content-type': 'text/markdown', 'text': Description(text)}
