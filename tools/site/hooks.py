# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: add generated pages, and turn links to files of the repository into pages.

The documents are written to be read in the repository, too, so they link to its files:

    ../README.md                  -> index.md
    ../lingvo_gpipe/core/x.py     -> source/lingvo_gpipe/core/x.py.md, a page with the code
"""

from __future__ import annotations

import os
import pathlib
import re
import tomllib
from concurrent import futures
from typing import Any

from mkdocs.structure import files as mkdocs_files

from tools.site import pictures, reference, tutorials

_ROOT = pathlib.Path(__file__).parents[2]
# Documents outside of docs/, which become pages.
_PAGES = {'README.md': 'index.md', 'CONTRIBUTING.md': 'contributing.md'}
_LINK = re.compile(r'(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))')
_LANGUAGES = {'.py': 'python', '.sh': 'bash', '.yaml': 'yaml', '': 'text'}


def on_config(config: Any) -> Any:
  """Puts the version of the package at the foot of each page."""
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  config.copyright = f'{project["name"]} {project["version"]}'
  return config


def on_files(files: Any, config: Any) -> Any:
  """Adds the documents outside of docs/, generated pages, and the pages of linked files."""
  pages = {page: (_ROOT / path).read_text() for path, page in _PAGES.items()}
  pages = {page: _FromDocs(text) for page, text in pages.items()}
  with futures.ThreadPoolExecutor(max_workers=1) as pool:
    tutorial_pages = pool.submit(tutorials.Pages)  # Its programs run alongside.
    pages |= reference.Pages() | pictures.Pages()
    pages |= tutorial_pages.result()
  documents = [file for file in files if file.is_documentation_page()]
  texts = [(file.src_uri, file.content_string) for file in documents] + list(pages.items())
  for path, text in texts:
    for match in _LINK.finditer(text):
      if (source := _SourceOf(path, match[2])) is not None:
        pages[f'source/{source}.md'] = _Code(source)
  for path, text in pages.items():
    files.append(mkdocs_files.File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  """Lets links to files of the repository lead to their pages."""
  del config, files
  path = page.file.src_uri

  def Replace(match: re.Match[str]) -> str:
    target = _Resolve(path, match[2])
    if target in _PAGES:
      target = os.path.relpath(_PAGES[target], os.path.dirname(path))
    elif (source := _SourceOf(path, match[2])) is not None:
      target = os.path.relpath(f'source/{source}.md', os.path.dirname(path))
    else:
      target = match[2]
    return match[1] + target + match[3]

  return _LINK.sub(Replace, markdown)


def _FromDocs(text: str) -> str:
  """Rewrites the links of a document of the root as if it lay in docs/."""

  def Replace(match: re.Match[str]) -> str:
    return match[1] + os.path.relpath(match[2], 'docs') + match[3]

  return _LINK.sub(Replace, text)


def _Resolve(page: str, target: str) -> str:
  """Returns the path in the repository to which a link of a page in docs/ leads."""
  return os.path.normpath(os.path.join('docs', os.path.dirname(page), target))


def _SourceOf(page: str, target: str) -> str | None:
  """Returns the path of a file that is not a page or picture, if the link leads to one."""
  path = _Resolve(page, target)
  is_code = not path.endswith(('.md', '.png', '.svg')) and not path.startswith('..')
  return path if is_code and (_ROOT / path).is_file() else None


def _Code(path: str) -> str:
  language = _LANGUAGES[pathlib.Path(path).suffix]
  text = (_ROOT / path).read_text()
  return f'# {path}\n\n````{language} linenums="1"\n{text}````\n'
