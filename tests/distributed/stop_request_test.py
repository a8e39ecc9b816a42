# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a program to end; trainer_test and job_output_test cover their effect."""

import signal
import sys

import pytest

from lingvo_gpipe.distributed import stop_request
from tests import naming


@pytest.mark.parametrize('handler, is_taken', [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def testAnIgnoredHangUpStaysIgnored(handler, is_taken):
  """nohup starts its program with SIGHUP ignored."""
  before = signal.signal(signal.SIGHUP, handler)
  try:
    assert (signal.SIGHUP in stop_request.Signals()) == is_taken
  finally:
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
  'number, names',
  [
    (signal.SIGINT, ['SIGINT', 'Ctrl-C again']),
    (signal.SIGTERM, ['SIGTERM', 'SIGTERM again']),
    (signal.SIGHUP, ['SIGHUP', 'SIGTERM']),  # A second SIGHUP is ignored.
  ],
)
def testTheMessageSaysHowToQuitAfterEachSignal(capfd, number, names):
  stop = stop_request.StopRequest()
  stop.signal = number
  stop._Announce()
  (line,) = capfd.readouterr().err.strip().splitlines()
  assert naming.Names(line, *names, 'stopping', 'quit')
  assert naming.Names(line, 'again') == (number != signal.SIGHUP)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
