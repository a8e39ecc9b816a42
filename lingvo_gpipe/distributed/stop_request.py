# SPDX-License-Identifier: Apache-2.0
"""`StopRequest`: ends a program between two steps after a signal such as SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection

# How to quit without waiting for the step. A second SIGHUP is ignored, see `_Watch`.
_QUIT_NOW = {
  signal.SIGINT: 'press Ctrl-C again',
  signal.SIGTERM: 'send SIGTERM again',
  signal.SIGHUP: 'send SIGTERM',
}


def Signals() -> tuple[signal.Signals, ...]:
  """Returns the signals that ask a program to end; SIGHUP only if it is not ignored (nohup)."""
  is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  return (signal.SIGTERM, signal.SIGINT, *(() if is_ignored else (signal.SIGHUP,)))


class StopRequest:
  """Set by one of `Signals`: the loop finishes its step, saves and ends. A second signal quits.

  Attributes:
    signal: number of the signal, or None before a signal arrived.
  """

  def __init__(self) -> None:
    self.signal: int | None = None

  def Install(self) -> None:
    """Handles `Signals` for the rest of the process."""
    # Python runs signal handlers only between two bytecodes of the main thread, and a step (or the
    # compilation in the first step) may take minutes. The wake-up descriptor is written at once,
    # and a thread reads it meanwhile.
    wake_up, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    numbers = Signals()
    for number in numbers:
      signal.signal(number, lambda number, frame: None)
    watch = threading.Thread(
      target=self._Watch, args=(wake_up, numbers), name='signals', daemon=True
    )
    watch.start()

  def _Watch(self, wake_up: int, numbers: Collection[int]) -> None:
    while received := os.read(wake_up, 1):
      number = received[0]
      if number not in numbers:
        continue
      if self.signal is None:
        self.signal = number
      elif number == signal.SIGHUP:
        continue  # A closing terminal may send it twice: by the shell and by the kernel.
      else:
        os._exit(128 + number)
      # In a separate thread: writing to a halted terminal must not delay the second signal.
      threading.Thread(target=self._Announce, name='announce stop', daemon=True).start()

  def _Announce(self) -> None:
    """Writes to stderr directly, because the main thread may be busy with a long step."""
    assert self.signal is not None
    begin = '\n' if os.isatty(2) else ''  # The cursor may be at the end of a progress line.
    quit_now = _QUIT_NOW[signal.Signals(self.signal)]
    text = f'{self.name}: finishing this step or batch, then stopping; {quit_now} to quit now'
    with contextlib.suppress(OSError):
      os.write(2, f'{begin}{text}\n'.encode())

  @property
  def name(self) -> str:
    """Name of the signal, such as SIGTERM, or '' before a signal arrived."""
    return '' if self.signal is None else signal.Signals(self.signal).name

  @property
  def exit_status(self) -> int:
    """0, or the status that a shell reports for a process ended by the signal."""
    return 0 if self.signal is None else 128 + self.signal
