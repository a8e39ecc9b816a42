# SPDX-License-Identifier: Apache-2.0
"""Globs of text files."""

import sys

import pytest

from lingvo_gpipe.input import file_pattern
from tests import naming


@pytest.mark.parametrize('path', ['/dev/zero', '/dev/null'])
def testDevicesAreRefused(path):
  with pytest.raises(ValueError, match=naming.Naming('param', path, 'device')):
    file_pattern.Files([path], 'param')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
