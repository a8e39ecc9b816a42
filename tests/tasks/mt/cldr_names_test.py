# SPDX-License-Identifier: Apache-2.0
"""Names of CLDR: languages, names and splits."""

import sys

import pytest

from tasks.mt import cldr_names
from tests import naming


def testLanguagesAndNames():
  assert cldr_names.Names('de')['territories/DE'] == 'Deutschland'
  assert cldr_names.Names('fr')['languages/ja'] == 'japonais'
  assert cldr_names.Names('en')['currencies/CHF'] == 'Swiss Franc'
  assert 'scripts/Moon' not in cldr_names.Names('de')  # In CLDR its name is its code.
  languages = cldr_names.Languages(800)
  assert len(languages) > 100 and 'en' not in languages
  assert set(cldr_names.STUDIED) <= set(languages) < set(cldr_names.Languages(300))


def testSplitsPartitionTheNames():
  english = cldr_names.Names('en')
  sizes = dict.fromkeys(cldr_names.SPLITS, 0)
  for language in cldr_names.STUDIED:
    parts = {split: cldr_names.Entries(language, split) for split in cldr_names.SPLITS}
    together = [entry for entries in parts.values() for entry in entries]
    assert sorted(together) == sorted(e for e in cldr_names.Names(language) if e in english)
    for split, entries in parts.items():
      sizes[split] += len(entries)
  total = sum(sizes.values())
  assert [round(sizes[split] / total, 2) for split in ('train', 'dev', 'test')] == pytest.approx(
    [0.8, 0.05, 0.15], abs=0.02
  )


def testFewerNamesAreASubset():
  parts = [set(cldr_names.Entries('fr', 'train', n)) for n in (10, 187, None)]
  assert [len(part) for part in parts[:2]] == [10, 187]
  assert parts[0] < parts[1] < parts[2]


def testStudiedLanguagesDifferByTwoOrdersOfMagnitude():
  sizes = list(cldr_names.STUDIED.values())
  assert sizes == sorted(sizes, reverse=True) and sizes[0] == 100 * sizes[-1]
  for language, size in cldr_names.STUDIED.items():
    assert len(cldr_names.Entries(language, 'train', size)) == size


def testFingerprintDependsOnTheNames():
  assert cldr_names.Fingerprint(['de']) == cldr_names.Fingerprint(('de',))
  assert cldr_names.Fingerprint(['de']) != cldr_names.Fingerprint(['fr'])


@pytest.mark.parametrize('language', ['xx', 'pt_PT', '../en'])
def testUnknownLanguageRaises(language):
  with pytest.raises(ValueError, match=naming.Naming('CLDR', f"'{language}'")):
    cldr_names.Names(language)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
