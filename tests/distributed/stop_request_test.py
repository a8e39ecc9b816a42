# SPDX-License-Identifier: Apache-2.0
"""Which signals ask a program to end; what they do is in trainer_test and job_output_test."""

import signal
import sys

import pytest

from lingvo_gpipe.distributed import stop_request


@pytest.mark.parametrize('handler, is_taken', [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def testAHangUpThatIsIgnoredStaysIgnored(handler, is_taken):
  """So nohup starts its program."""
  before = signal.signal(signal.SIGHUP, handler)
  try:
    assert (signal.SIGHUP in stop_request.Signals()) == is_taken
  finally:
    signal.signal(signal.SIGHUP, before)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
