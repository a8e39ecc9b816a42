# SPDX-License-Identifier: Apache-2.0
"""Names of territories, languages, currencies and scripts in 200 languages, from CLDR.

The data are part of the package Babel (`pip install babel`); nothing is downloaded. They differ
slightly between versions of Babel.
"""

from __future__ import annotations

import functools
import hashlib
import types
import unicodedata
from collections.abc import Sequence

ENGLISH = 'en'

SPLITS = ('train', 'dev', 'test')

# Upper bounds of the hash values, modulo 100, of each split.
_SPLIT_ENDS = {'train': 80, 'dev': 85, 'test': 100}

_KINDS = ('territories', 'languages', 'currencies', 'scripts')

# {language: number of its names in training}, for the languages that the study of params/mt/cldr.py
# compares with bilingual models. Each has about 1.5 times fewer names than the previous, so that
# resources span two orders of magnitude.
STUDIED = types.MappingProxyType(
  {
    'de': 1000,
    'ru': 660,
    'es': 433,
    'el': 285,
    'fr': 187,
    'uk': 123,
    'it': 81,
    'ja': 53,
    'nl': 35,
    'tr': 23,
    'hi': 15,
    'sv': 10,
  }
)


@functools.cache
def Languages(min_names: int) -> tuple[str, ...]:
  """Returns the languages that share at least `min_names` names with English, sorted.

  English itself and variants by country or script, such as pt_PT or zh_Hant, are left out.
  """
  babel = _Babel()
  codes = sorted(code for code in babel.localedata.locale_identifiers() if '_' not in code)
  english = Names(ENGLISH).keys()
  return tuple(
    code for code in codes if code != ENGLISH and len(Names(code).keys() & english) >= min_names
  )


@functools.cache
def Names(language: str) -> types.MappingProxyType[str, str]:
  """Returns {entry: name} of a language, sorted by entry, such as {'territories/DE': 'Germany'}.

  Names are in Unicode's normal form NFKC, as in SentencePiece. Entries whose name is only their
  code are left out.

  Raises:
    ValueError: Babel does not know the language, or Babel is not installed.
  """
  babel = _Babel()
  if '_' in language or language not in babel.localedata.locale_identifiers():
    raise ValueError(
      f'the CLDR data of Babel {babel.__version__} have no language {language!r}; '
      'babel.localedata.locale_identifiers() lists all languages'
    )
  locale = babel.Locale(language)
  names = {}
  for kind in _KINDS:
    for code, name in getattr(locale, kind).items():
      text = unicodedata.normalize('NFKC', ' '.join(str(name).split()))
      if text and text != code:
        names[f'{kind}/{code}'] = text
  return types.MappingProxyType(dict(sorted(names.items())))


def Entries(language: str, split: str, max_names: int | None = None) -> list[str]:
  """Returns the entries of one split that have a name in both the language and English.

  Args:
    language: a language other than English.
    split: one of SPLITS.
    max_names: maximum number of entries, chosen at random; a larger number adds entries to the
      choice.

  Returns:
    The entries, sorted.
  """
  english = Names(ENGLISH).keys()
  entries = [e for e in Names(language) if e in english and GetSplit(language, e) == split]
  if max_names is not None:
    entries = sorted(entries, key=lambda entry: _Hash('choice', language, entry))[:max_names]
  return sorted(entries)


def GetSplit(language: str, entry: str) -> str:
  """Returns the split of a pair (language, entry), 'train', 'dev' or 'test', by its hash.

  An entry held out in one language may be in the train split of another, so a model of all
  languages may have seen its English name, just as an English sentence may translate many
  sentences.
  """
  value = _Hash('split', language, entry) % 100
  return next(split for split, end in _SPLIT_ENDS.items() if value < end)


def Fingerprint(languages: Sequence[str]) -> str:
  """Returns 16 hexadecimal digits that depend on all names of these languages and of English."""
  names = [(code, list(Names(code).items())) for code in (ENGLISH, *languages)]
  return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


def _Hash(*parts: str) -> int:
  return int.from_bytes(hashlib.sha256('\0'.join(parts).encode()).digest()[:8], 'big')


def _Babel() -> types.ModuleType:
  try:
    import babel
    import babel.localedata
  except ImportError as e:
    raise ValueError(
      'the names come from the package babel, which is not installed: run pip install '
      "'lingvo_gpipe[mt]' or pip install 'babel'"
    ) from e
  return babel
