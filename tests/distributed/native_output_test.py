# SPDX-License-Identifier: Apache-2.0
"""Output of native code is dropped, unless the code fails or the user wants to see everything."""

import os
import sys

import pytest
from absl import logging

from lingvo_gpipe.distributed import native_output


def _Print(capfd, error=None):
  try:
    with native_output.DropOutput():
      os.write(2, b'native\n')
      print('logged', file=logging.get_absl_handler().python_handler.stream, flush=True)
      if error:
        raise error
  except BaseException as e:
    assert e is error
  return capfd.readouterr().err


def testOnlyTheLogRemains(capfd, monkeypatch):
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')
  text = _Print(capfd)
  assert 'native' not in text and 'logged' in text


@pytest.mark.parametrize('error', [ValueError(), OSError(), KeyboardInterrupt()])
def testErrorsOfThePackageExplainThemselves(capfd, monkeypatch, error):
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')
  assert 'native' not in _Print(capfd, error)


def testTheWholeOutputIsShownAfterAnotherErrorOrOnRequest(capfd, monkeypatch):
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')
  assert 'native' in _Print(capfd, RuntimeError())
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '0')
  assert 'native' in _Print(capfd)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
