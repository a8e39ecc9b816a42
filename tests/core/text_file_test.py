# SPDX-License-Identifier: Apache-2.0
"""Text of settings, from files and pipes."""

import os
import sys

import pytest

from lingvo_gpipe.core import files, text_file
from tests import naming


@pytest.mark.parametrize('read', [text_file.Read, files.ReadText])
def testPipesAreRead(read):
  reader, writer = os.pipe()
  os.write(writer, 'caf\xe9'.encode())
  os.close(writer)
  assert read(f'/dev/fd/{reader}', 'flag') == 'caf\xe9'
  os.close(reader)


@pytest.mark.parametrize('read', [text_file.Read, files.ReadText])
def testTextWithoutAnEndIsRefused(read):
  with pytest.raises(ValueError, match=naming.Naming('flag', '/dev/zero', '64 MiB')):
    read('/dev/zero', 'flag')
  with pytest.raises(OSError, match=naming.Naming('flag', '/dev/zero', 'device')):
    files.ReadBytes('/dev/zero', 'flag')


@pytest.mark.parametrize('path', ['/no/such/file', 'a\0b', '/'])
def testErrorsNameTheFile(path):
  for read in (text_file.Read, files.ReadText, files.ReadBytes):
    with pytest.raises(OSError, match=naming.Naming('flag', repr(path))) as e:
      read(path, 'flag')
    assert '\n' not in str(e.value)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
