# SPDX-License-Identifier: Apache-2.0
"""Ends a process that waits for a worker which no longer answers.

TensorFlow waits for the answer to a call without a time limit. Steps have limits of their own, but
nobody knows how long it may take to create variables, to restore and to compile. Whether a worker
answers at all can be tested, though. A separate process asks, because some calls of TensorFlow hold
Python's lock while they wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from typing import NoReturn

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import local_workers, worker_connection

# The pause between two questions.
_PAUSE_SECONDS = 5.0


def Start(seconds: float, status: int) -> None:
  """Starts a process that ends this one if a worker does not answer for a time.

  Call it before this process uses TensorFlow. It watches the workers to which this process then
  connects.

  Args:
    seconds: the time.
    status: the exit status that the supervisor gets.
  """
  parent = os.getpid()
  reader, writer = os.pipe()
  if not os.fork():
    os.close(writer)
    _Watch(parent, reader, seconds, status)
  os.close(reader)

  def Announce(addresses: Collection[str]) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, 'w') as file:  # It may be gone.
      json.dump([*addresses], file)

  worker_connection.on_connect = Announce


def _Watch(parent: int, reader: int, seconds: float, status: int) -> NoReturn:
  try:
    local_workers.EndWithParent(parent)
    with os.fdopen(reader) as file:  # Up to the end, when the parent is connected.
      text = file.read()
    if text and (reason := AwaitSilence(json.loads(text), seconds, parent)):
      print(f'a worker failed: {reason}', file=sys.stderr, flush=True)
      heartbeat.End(status)
      os.kill(parent, signal.SIGKILL)
  finally:
    os._exit(0)


def AwaitSilence(addresses: Collection[str], seconds: float, parent: int) -> str | None:
  """Returns a text about the first worker that does not answer for this time.

  Returns None if the process `parent`, which started this one, has ended.
  """
  silent_since: dict[str, float] = {}
  while os.getppid() == parent:
    time.sleep(_PAUSE_SECONDS)
    reasons = worker_connection.WhySilent(addresses)
    for address, reason in zip(addresses, reasons, strict=True):
      now = time.monotonic()
      if reason is None:
        silent_since.pop(address, None)
      elif now - silent_since.setdefault(address, now) >= seconds:
        return f'the worker at {address} has answered nothing for {seconds:g} s ({reason})'
  return None
