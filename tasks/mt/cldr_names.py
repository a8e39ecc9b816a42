# SPDX-License-Identifier: Apache-2.0
"""Names of territories, languages, currencies and scripts in 200 languages: CLDR by way of Babel.

The data are part of the package Babel (`pip install babel`); nothing is downloaded. They change a
little with its versions.
"""

from __future__ import annotations

import functools
import hashlib
import types
import unicodedata
from collections.abc import Sequence

ENGLISH = 'en'

SPLITS = ('train', 'dev', 'test')

# Upper ends of the splits' ranges of hash values modulo 100.
_SPLIT_ENDS = {'train': 80, 'dev': 85, 'test': 100}

_KINDS = ('territories', 'languages', 'currencies', 'scripts')

# The languages that the study of params/mt/cldr.py compares with bilingual models, and how many of
# their names are used in training: less by a factor of about 1.5 from one to the next, so that
# resources differ by two orders of magnitude.
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
  """The languages other than English with at least so many names that English has too, sorted.

  Variants of a language by country or script, such as pt_PT or zh_Hant, are left out.
  """
  babel = _Babel()
  codes = sorted(code for code in babel.localedata.locale_identifiers() if '_' not in code)
  english = Names(ENGLISH).keys()
  return tuple(
    code for code in codes if code != ENGLISH and len(Names(code).keys() & english) >= min_names
  )


@functools.cache
def Names(language: str) -> types.MappingProxyType[str, str]:
  """{entry: name} in a language, sorted by entry, such as {'territories/DE': 'Germany'}.

  Names are in Unicode's form NFKC, as SentencePiece makes them. What has no name but its code is
  left out.

  Raises:
    ValueError: Babel does not know the language, or is not installed.
  """
  babel = _Babel()
  if '_' in language or language not in babel.localedata.locale_identifiers():
    raise ValueError(
      f'the CLDR data of Babel {babel.__version__} have no language {language!r}; '
      'babel.localedata.locale_identifiers() are all it has'
    )
  locale = babel.Locale(language)
  found = {}
  for kind in _KINDS:
    for code, name in getattr(locale, kind).items():
      text = unicodedata.normalize('NFKC', ' '.join(str(name).split()))
      if text and text != code:
        found[f'{kind}/{code}'] = text
  return types.MappingProxyType(dict(sorted(found.items())))


def Entries(language: str, split: str, max_names: int | None = None) -> list[str]:
  """The entries of one split that both the language and English have a name for.

  Args:
    language: not English.
    split: one of SPLITS.
    max_names: keep this many only: a random choice, and part of that for any larger number.

  Returns:
    Sorted entries.
  """
  english = Names(ENGLISH).keys()
  entries = [e for e in Names(language) if e in english and SplitOf(language, e) == split]
  if max_names is not None:
    entries = sorted(entries, key=lambda entry: _Hash('choice', language, entry))[:max_names]
  return sorted(entries)


def SplitOf(language: str, entry: str) -> str:
  """The split of a pair (language, entry): 'train', 'dev' or 'test', by a hash of the two.

  An entry held out in one language may be in another language's train, as a sentence of English
  may be the translation of many: a model of all languages may have met the English name.
  """
  value = _Hash('split', language, entry) % 100
  return next(split for split, end in _SPLIT_ENDS.items() if value < end)


def Fingerprint(languages: Sequence[str]) -> str:
  """16 hexadecimal digits that change with any name of these languages or of English."""
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
      "the names come from the package babel, which is not installed: pip install 'babel', or this "
      "project with its extra, pip install 'lingvo_gpipe[mt]'"
    ) from e
  return babel
