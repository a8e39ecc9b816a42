# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that processes of this machine sent each other over TCP, with `ss`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

# `ss` of iproute2 prints a line for each end of a connection, without a count if nothing was sent.
_COMMAND = ('ss', '-tinpH', 'state', 'established')
_SOCKET = re.compile(
  r'^\d+\s+\d+\s+\S+:(?P<port>\d+)\s+\S+:(?P<peer>\d+)\s+users:\(\("[^"]*",pid=(?P<pid>\d+),'
)
_SENT = re.compile(r'\bbytes_sent:(\d+)')


def IsThere() -> bool:
  """Whether this machine has the program `ss`."""
  return shutil.which(_COMMAND[0]) is not None


def SentBytes() -> dict[tuple[int, int], int]:
  """Returns {(sender, receiver): bytes} of open connections, without headers."""
  done = subprocess.run(_COMMAND, capture_output=True, text=True, check=True, timeout=60)
  return Parse(done.stdout)


def Parse(text: str) -> dict[tuple[int, int], int]:
  """Parses the output of `ss` for `SentBytes`; ignores connections of other users' processes."""
  ends: dict[tuple[str, str], tuple[int, int]] = {}
  for line in text.replace('\n\t', ' ').splitlines():
    if socket := _SOCKET.match(line):
      sent = _SENT.search(line)
      ends[socket['port'], socket['peer']] = int(socket['pid']), int(sent[1]) if sent else 0
  totals: dict[tuple[int, int], int] = {}
  for (port, peer), (process, num_bytes) in ends.items():
    # Find the other end, which is on this machine. Its address may be of another family.
    other, _ = ends.get((peer, port), (process, 0))
    if other != process:
      totals[process, other] = totals.get((process, other), 0) + num_bytes
  return totals


def Difference(
  after: Mapping[tuple[int, int], int], before: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
  """Returns the bytes sent between two calls of `SentBytes`."""
  return {ends: num_bytes - before.get(ends, 0) for ends, num_bytes in after.items()}
