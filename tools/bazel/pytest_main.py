# SPDX-License-Identifier: Apache-2.0
"""Runs the test file named on the command line with pytest: what every Bazel test target starts.

The file is not started itself, because pytest has to come first: tests/conftest.py sets TensorFlow
up before the file imports it.
"""

import os
import sys

import pytest


def Main() -> int:
  """Returns pytest's exit status; Bazel's wishes come as environment variables."""
  # Bazel's tree of links is no place for a cache.
  args = ['-p', 'no:cacheprovider', *sys.argv[1:]]
  if 'XML_OUTPUT_FILE' in os.environ:
    args.append('--junitxml=' + os.environ['XML_OUTPUT_FILE'])
  if 'TESTBRIDGE_TEST_ONLY' in os.environ:  # bazel test --test_filter=...
    args += ['-k', os.environ['TESTBRIDGE_TEST_ONLY']]
  return pytest.main(args)


if __name__ == '__main__':
  raise SystemExit(Main())
