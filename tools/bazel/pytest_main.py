# SPDX-License-Identifier: Apache-2.0
"""Runs the test file named on the command line with pytest: the main program of Bazel test targets.

The test file cannot be the main program, because pytest has to load first: tests/conftest.py sets
up TensorFlow before the test file imports it.
"""

import os
import sys

import pytest


def Main() -> int:
  """Returns pytest's exit status; reads Bazel's options from environment variables."""
  # Do not write a cache into Bazel's tree of links.
  args = ['-p', 'no:cacheprovider', *sys.argv[1:]]
  if 'XML_OUTPUT_FILE' in os.environ:
    args.append('--junitxml=' + os.environ['XML_OUTPUT_FILE'])
  if 'TESTBRIDGE_TEST_ONLY' in os.environ:  # bazel test --test_filter=...
    args += ['-k', os.environ['TESTBRIDGE_TEST_ONLY']]
  return pytest.main(args)


if __name__ == '__main__':
  raise SystemExit(Main())
