# SPDX-License-Identifier: Apache-2.0
"""The language of docstrings, comments, messages, names and documents: the worst habits, counted.

Run this file with a folder or a page to see every place:
`python tests/language_test.py lingvo_gpipe/core`, `python tests/language_test.py docs/*.md`.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from typing import NamedTuple

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

# Further habits of the documents: `for` as because, `where` as if, `else` as otherwise, `of` in
# front of a sentence's subject.
_PAGE_PHRASES = re.compile(
  r"""(
    ,\ for\ (it|they|there|this|that|these|nobody|no|we|you)\b | (?<=[.:;]\ )Else\b | ^Else\b
    | (?<=[.:;]\ )Where\b | ^Where\b(?!.*\?) | (?<=[.:;]\ )Of\ | ^Of\ | \bto\ be\ had\b
    | \bhang(s)?\ (not\ )?on\b | \bgoes\ the\ way\b | \bat\ the\ latest\ by\b
  )""",
  re.X,
)
# The same in docstrings and comments.
_CODE_PHRASES = re.compile(
  r"""(
    ,\s+for\s+(it|they|there|nobody|no|we|you)\b | (?<=[.:;]\s)Else\b | ^Else\b | ;\s+else\b
    | (?<=[.:;]\ )Of\s | ^(\#\ )?Of\s | \bto\s+be\s+had\b
  )""",
  re.X | re.M,
)
# A sentence that is longer is read twice; so is a page whose sentences are long in the mean.
_MOST_WORDS = 30
_MOST_MEAN_WORDS = 16.0
_MOST_PARAGRAPH_WORDS = 100
# `what` and `where` in 1,000 words of a page. Guides need a few more than docstrings.
_MOST_PAGE_FREE_RELATIVES = 6.0

# Names that say nothing about the value.
_EMPTY_NAMES = {
  'found', 'given', 'here', 'kept', 'left', 'made', 'one', 'others', 'own', 'rest', 'said', 'shown',
  'taken', 'there', 'told', 'wanted',
}  # fmt: skip


def _Docstrings(nodes):
  """(line, text) of every docstring."""
  for node in nodes:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      if text := ast.get_docstring(node):
        yield getattr(node, 'lineno', 1), text


def _Comments(source):
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      yield token.start[0], token.string


def _Messages(nodes):
  """(line, text) of strings that people read: all with several words but docstrings."""
  silent = set()
  for node in nodes:
    if isinstance(node, ast.Expr):  # A docstring.
      silent.add(node.value)
    elif isinstance(node, ast.JoinedStr):
      silent.update(node.values)
      parts = (v.value if isinstance(v, ast.Constant) else '{}' for v in node.values)
      yield node.lineno, ''.join(parts)
  for node in nodes:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    if is_text and node not in silent and node.value.count(' ') > 1:
      yield node.lineno, node.value


def _TestNames(nodes):
  """(line, words) of the name of every test."""
  for node in nodes:
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test'):
      yield node.lineno, ' '.join(re.findall('[A-Z0-9][^A-Z]*', node.name)).lower()


def _EmptyNames(nodes):
  """(line, name) of arguments and assigned variables that say nothing about their value."""
  for node in nodes:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _EMPTY_NAMES:
      yield node.lineno, node.id
    elif isinstance(node, ast.arg) and node.arg in _EMPTY_NAMES:
      yield node.lineno, node.arg


class _Habits(NamedTuple):
  """The habits of a Python file; a place is 'path:line: text'."""

  free_relatives: list[str]  # Places of `what` and `where` in docstrings.
  num_words: int  # Of docstrings.
  phrases: list[str]
  names: list[str]


def _HabitsOf(path):
  source = path.read_text(encoding='utf-8')
  nodes = list(ast.walk(ast.parse(source)))
  docstrings = list(_Docstrings(nodes))
  prose = [*docstrings, *_Comments(source)]
  # Strings of tests hold data, too.
  texts = _TestNames(nodes) if path.is_relative_to(_ROOT / 'tests') else _Messages(nodes)
  phrases = [*_Matches(prose, _PHRASES, _CODE_PHRASES), *_Matches(texts, _PHRASES)]
  if path.name == 'language_test.py':
    phrases = []
  return _Habits(
    [f'{path}:{place}' for place in _Matches(docstrings, _FREE_RELATIVE)],
    sum(len(_WORD.findall(text)) for _, text in docstrings),
    [f'{path}:{place}' for place in phrases],
    [f'{path}:{line}: the name {name!r}' for line, name in _EmptyNames(nodes)],
  )


def _Matches(texts, *patterns):
  """Yields 'line: match' of each match in (line, text) pairs."""
  for line, text in texts:
    for pattern in patterns:
      yield from (f'{line}: {match[0]}' for match in pattern.finditer(text))


def _AllHabits(paths):
  """Returns the habits of several files together."""
  habits = [_HabitsOf(path) for path in paths]
  free_relatives, num_words, phrases, names = zip(*habits, strict=True)
  return _Habits(sum(free_relatives, []), sum(num_words), sum(phrases, []), sum(names, []))


# --- pages ---


class _Paragraph(NamedTuple):
  """A paragraph, an item of a list, a heading or a cell of a table, without code and links."""

  lines: list[int]  # The line of each word.
  words: list[str]
  is_text: bool  # Not a heading or cell.

  def Sentences(self):
    """Yields (line, words) of each sentence."""
    start = 0
    for end, word in enumerate(self.words, 1):
      if end == len(self.words) or _SENTENCE_END.search(word):
        yield self.lines[start], self.words[start:end]
        start = end


_SENTENCE_END = re.compile(r"[.!?][)'\"*_]*$")
_FENCE = re.compile(r'^( *)(```+).*?^\1\2`*$', re.DOTALL | re.MULTILINE)
_TAG = re.compile(r'<!--.*?-->|</?[a-z][^<>]*>', re.DOTALL)
_PAGE_LINK = re.compile(r'!?\[([^\]]*)\]\([^)\s]+\)')
_PAGE_CODE = re.compile(r'(`+).+?\1', re.DOTALL)
_ITEM = re.compile(r'^\s*(?:[*+-]|\d+\.) +')


def _Blank(match):
  """Returns as many empty lines as the match has."""
  return '\n' * match[0].count('\n')


def _Paragraphs(text):
  """Returns the paragraphs of a page in Markdown."""
  text = _PAGE_CODE.sub(lambda match: _Blank(match) + 'code', _FENCE.sub(_Blank, text))
  text = _PAGE_LINK.sub(r'\1', _TAG.sub(_Blank, text))
  paragraphs, was_blank, in_list = [], True, False
  for number, line in enumerate(text.splitlines(), 1):
    is_item = bool(_ITEM.match(line))
    if not line.strip():
      was_blank = True
      continue
    if was_blank and not line.startswith(' '):
      in_list = False
    in_list = in_list or is_item
    if line.startswith('    ') and not in_list:
      continue  # Code.
    if line.startswith(('#', '|')):
      cells = line.strip('|# ').split(' | ')
      paragraphs += [_Words(number, cell, is_text=False) for cell in cells]
      was_blank = True
      continue
    part = _Words(number, _ITEM.sub('', line), is_text=True)
    if was_blank or is_item or not paragraphs:
      paragraphs.append(part)
    else:
      paragraphs[-1].lines.extend(part.lines)
      paragraphs[-1].words.extend(part.words)
    was_blank = False
  return [paragraph for paragraph in paragraphs if paragraph.words]


def _Words(number, line, is_text):
  words = [word for word in line.split() if re.search(r'\w', word)]
  return _Paragraph([number] * len(words), words, is_text)


def _Pages():
  """Returns {name: path} of README, the documents and the tutorials."""
  docs = _ROOT / 'docs'
  paths = [_ROOT / 'README.md', _ROOT / 'CONTRIBUTING.md', *sorted(docs.rglob('*.md'))]
  paths += sorted((docs / 'tutorials').glob('*.py'))
  return {path.relative_to(_ROOT).as_posix(): path for path in paths}


def _PageText(path):
  """Returns the Markdown of a page or of a tutorial's cells."""
  text = path.read_text(encoding='utf-8')
  return _TutorialText(text) if path.suffix == '.py' else text


def _TutorialText(source):
  """Returns the Markdown of a tutorial, with an empty line for each line of code."""
  lines, is_text = [], False
  for line in source.splitlines():
    if line.startswith('# %%'):
      is_text, line = line.endswith('[markdown]'), ''
    lines.append(line.removeprefix('#').removeprefix(' ') if is_text else '')
  return '\n'.join(lines)


def _Faults(name, text):
  """Returns 'page:line: fault' of everything on a page that is hard to read."""
  paragraphs = _Paragraphs(text)
  faults, lengths, free_relatives = [], [], []
  for paragraph in paragraphs:
    if paragraph.is_text and len(paragraph.words) > _MOST_PARAGRAPH_WORDS:
      start = f'{name}:{paragraph.lines[0]}: a paragraph of {len(paragraph.words)} words: '
      faults.append(start + ' '.join(paragraph.words[:8]))
    for line, words in paragraph.Sentences():
      sentence, place = ' '.join(words), f'{name}:{line}:'
      if paragraph.is_text:
        lengths.append(len(words))
      if len(words) > _MOST_WORDS:
        faults.append(f'{place} {len(words)} words: {sentence}')
      for pattern in (_PHRASES, _PAGE_PHRASES):
        faults += [f'{place} {m[0].strip()!r}: {sentence}' for m in pattern.finditer(sentence)]
      if not sentence.endswith('?'):
        free_relatives += [f'{place} {m[0]}: {sentence}' for m in _FREE_RELATIVE.finditer(sentence)]
  mean = sum(lengths) / max(len(lengths), 1)
  if mean > _MOST_MEAN_WORDS:
    faults.append(f'{name}:1: {mean:.1f} words a sentence')
  num_words = sum(len(paragraph.words) for paragraph in paragraphs)
  most = max(2, _MOST_PAGE_FREE_RELATIVES * num_words / 1000)
  if len(free_relatives) > most:
    faults += [f'{name}:1: more than {most:.0f} of what and where:', *free_relatives]
  return faults


@pytest.mark.parametrize('package', ['lingvo_gpipe', 'params', 'tasks', 'tests', 'tools'])
def testCodeUsesPlainPhrasesAndNames(package):
  """Docstrings name things by nouns, texts use the trade's phrases, and locals name their value."""
  habits = _AllHabits(sorted((_ROOT / package).rglob('*.py')))
  rate = 1000 * len(habits.free_relatives) / habits.num_words
  assert rate <= _MOST_FREE_RELATIVES, (
    f'{package}: {rate:.1f} of what and where in 1,000 words of docstrings, more than '
    f'{_MOST_FREE_RELATIVES}:\n' + '\n'.join(habits.free_relatives)
  )
  assert not habits.phrases, '\n'.join(habits.phrases)
  assert not habits.names, '\n'.join(habits.names)


@pytest.mark.parametrize('name', list(_Pages()))
def testPagesAreEasyToRead(name):
  faults = _Faults(name, _PageText(_Pages()[name]))
  assert not faults, '\n'.join(faults)


@pytest.mark.parametrize(
  ('text', 'faults'),
  [
    ('Short. ' + 'word ' * 32, ['x.md:1: 32 words', 'x.md:1: 16.5']),
    ('# Title\n\n- Item.\n\n  A\n  `long\n  code`. It is no page.', ['x.md:7: ']),
    ('Where it fails, stop.', ["x.md:1: 'Where'"]),
    ('| A | B |\n| --- | --- |\n| a | is that of a |', ["x.md:3: 'that of'"]),
    ('Two words.\n' * 51, ['x.md:1: a paragraph of 102 words']),
    ('A.\n\n    code is no text\n\n```text\nis no text\n```\n\n[Is](no.md) it `is no` text.', []),
  ],
)
def testThePageCheckNamesThePlace(text, faults):
  places = _Faults('x.md', text)
  assert len(places) == len(faults)
  assert all(place.startswith(fault) for place, fault in zip(places, faults, strict=True)), places


if __name__ == '__main__':
  if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).is_file():
    for path in map(pathlib.Path, sys.argv[1:]):
      print(*_Faults(str(path), _PageText(path)), sep='\n')
    raise SystemExit
  if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).is_dir():
    habits = _AllHabits(sorted(pathlib.Path(sys.argv[1]).rglob('*.py')))
    print(*habits.phrases, *habits.names, *habits.free_relatives, sep='\n')
    rate = 1000 * len(habits.free_relatives) / max(habits.num_words, 1)
    print(f'{rate:.1f} of what and where in 1,000 words')
    raise SystemExit
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
