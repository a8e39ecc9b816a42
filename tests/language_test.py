# SPDX-License-Identifier: Apache-2.0
"""The language of docstrings, comments and names: the worst habits, counted.

Run this file with a folder to see every place: `python tests/language_test.py lingvo_gpipe/core`.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

import pytest

_ROOT = pathlib.Path(__file__).parents[1]

# At most this many of `what` and `where` in 1,000 words of docstrings. Codebases that read well
# have 0.3 to 3.
_MOST_FREE_RELATIVES = 5.0
_FREE_RELATIVE = re.compile(r'\b(what|where)\b', re.I)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")

# Phrases that are not used in the trade, or make the reader look for the noun.
_PHRASES = re.compile(
  r"""\b(
    anew | beforehand | the\ like | all\ the\ same | to\ the\ bit | so\ many | so\ much\ as
    | (go|goes|going|went|gone)\ on | (hang|hangs|hung)\ on | told | mend(s|ed|ing)? | dear(er|est)?
    | at\ the\ least | of\ one's\ own | for\ people | those\ (of|that|which) | that\ of
    | (?<!there\ )(is|are|was|were)\ (no|(?-i:none)) | in\ the\ stead | for\ want\ of | lest
  )\b""",
  re.I | re.X,
)

# Names that say nothing about the value.
_EMPTY_NAMES = {
  'found', 'given', 'here', 'kept', 'left', 'made', 'one', 'others', 'own', 'rest', 'said', 'shown',
  'taken', 'there', 'told', 'wanted',
}  # fmt: skip


def _Files(*packages):
  return [p for name in packages for p in sorted((_ROOT / name).rglob('*.py'))]


def _Docstrings(tree):
  """(line, text) of every docstring."""
  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      if text := ast.get_docstring(node):
        yield getattr(node, 'lineno', 1), text


def _Comments(source):
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      yield token.start[0], token.string


def _EmptyNames(tree):
  """(line, name) of arguments and assigned variables that say nothing about their value."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _EMPTY_NAMES:
      yield node.lineno, node.id
    elif isinstance(node, ast.arg) and node.arg in _EMPTY_NAMES:
      yield node.lineno, node.arg


def _FreeRelatives(paths):
  """(places of `what` and `where` in docstrings, count of words)."""
  places, words = [], 0
  for path in paths:
    for line, text in _Docstrings(ast.parse(path.read_text(encoding='utf-8'))):
      words += len(_WORD.findall(text))
      places += [f'{path}:{line}: {match[0]}' for match in _FREE_RELATIVE.finditer(text)]
  return places, words


def _Phrases(paths):
  for path in paths:
    if path.name == 'language_test.py':
      continue
    source = path.read_text(encoding='utf-8')
    for line, text in [*_Docstrings(ast.parse(source)), *_Comments(source)]:
      for match in _PHRASES.finditer(text):
        yield f'{path}:{line}: {match[0]}'


def _Names(paths):
  for path in paths:
    for line, name in _EmptyNames(ast.parse(path.read_text(encoding='utf-8'))):
      yield f'{path}:{line}: the name {name!r}'


@pytest.mark.parametrize('package', ['lingvo_gpipe', 'params', 'tasks', 'tests', 'tools'])
def testDocstringsNameThingsByNouns(package):
  places, words = _FreeRelatives(_Files(package))
  rate = 1000 * len(places) / words
  assert rate <= _MOST_FREE_RELATIVES, (
    f'{package}: {rate:.1f} of what and where in 1,000 words of docstrings, more than '
    f'{_MOST_FREE_RELATIVES}:\n' + '\n'.join(places)
  )


@pytest.mark.parametrize('package', ['lingvo_gpipe', 'params', 'tasks', 'tests', 'tools'])
def testDocstringsAndCommentsUsePlainPhrases(package):
  places = list(_Phrases(_Files(package)))
  assert not places, '\n'.join(places)


@pytest.mark.parametrize('package', ['lingvo_gpipe', 'params', 'tasks', 'tests', 'tools'])
def testLocalsNameTheirValue(package):
  places = list(_Names(_Files(package)))
  assert not places, '\n'.join(places)


if __name__ == '__main__':
  if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).is_dir():
    files = sorted(pathlib.Path(sys.argv[1]).rglob('*.py'))
    places, words = _FreeRelatives(files)
    print(*_Phrases(files), *_Names(files), *places, sep='\n')
    print(f'{1000 * len(places) / max(words, 1):.1f} of what and where in 1,000 words')
    raise SystemExit
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
