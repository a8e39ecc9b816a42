# SPDX-License-Identifier: Apache-2.0
"""The compilation cache: a second process reuses the code that the first one compiled."""

import os
import sys

import pytest

from lingvo_gpipe.cli import compilation_cache
from tests import naming, processes


@pytest.fixture
def run(forks, tmp_path):
  """Runs a process with the cache; returns it and the time at which each entry was written."""
  program, directory = processes.Program('compile_with_cache'), tmp_path / 'cache'

  def Run():
    done = forks.Run(program, str(directory), more_environment={'TF_XLA_FLAGS': ''})
    return done, {path: path.stat().st_mtime_ns for path in directory.glob('*/*.pb')}

  return Run


def testASecondProcessReusesCompiledCode(run):
  first, times = run()
  assert first.returncode == 0, first.stderr
  assert times
  second, times_after = run()
  assert second.stdout == first.stdout
  assert times_after == times
  # The entry is read: a damaged one is noticed.
  (path,) = times
  path.write_bytes(path.read_bytes()[:100])
  assert run()[0].returncode != 0


def testASecondCacheIsRefused(tmp_path, monkeypatch):
  monkeypatch.setenv('TF_XLA_FLAGS', '--some_flag')
  used = compilation_cache.Use(str(tmp_path))
  assert compilation_cache.Use(str(tmp_path)) == used
  assert os.environ['TF_XLA_FLAGS'].startswith('--some_flag --tf_xla_persistent_cache_directory=')
  with pytest.raises(
    ValueError, match=naming.Naming('TF_XLA_FLAGS', '--tf_xla_persistent_cache_directory')
  ):
    compilation_cache.Use(str(tmp_path / 'other'))


def testSpacesAreRefused(tmp_path):
  with pytest.raises(ValueError, match=naming.Naming(tmp_path / 'a b', 'spaces')):
    compilation_cache.Use(str(tmp_path / 'a b'))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
