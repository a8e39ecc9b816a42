# SPDX-License-Identifier: Apache-2.0
"""`StopRequest`: how a signal such as SIGTERM or Ctrl-C ends a program between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection


def Signals() -> tuple[signal.Signals, ...]:
  """Those that ask a program to end: SIGHUP, too, unless it is ignored, as nohup wants it."""
  is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  return (signal.SIGTERM, signal.SIGINT, *(() if is_ignored else (signal.SIGHUP,)))


class StopRequest:
  """Set by one of `Signals`: the loop finishes its step, saves and leaves. Twice: at once."""

  def __init__(self) -> None:
    self.signal: int | None = None

  def Install(self) -> None:
    """Takes over `Signals` for the rest of the process."""
    # Python runs its handlers only between two steps of the main thread, and a step (or the
    # compilation in the first one) may take minutes. The wake-up file is written at once, and a
    # thread of our own reads it meanwhile.
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
        continue  # A shell sends it, and at its end the system once more.
      else:
        os._exit(128 + number)
      # In a thread of its own: a terminal that was halted must not hold back the second signal.
      threading.Thread(target=self._Say, name='says stop', daemon=True).start()

  def _Say(self) -> None:
    """Tells on stderr, past Python's buffers: the main thread may be within a long step."""
    begin = '\n' if os.isatty(2) else ''  # A progress line may stand there.
    text = f'{self.name}: stopping when this step or batch is done; a second one leaves at once'
    with contextlib.suppress(OSError):
      os.write(2, f'{begin}{text}\n'.encode())

  @property
  def name(self) -> str:
    """The signal's, such as SIGTERM; '' before one came."""
    return '' if self.signal is None else signal.Signals(self.signal).name

  @property
  def exit_status(self) -> int:
    """0, or what a shell reports of a process that the signal ended."""
    return 0 if self.signal is None else 128 + self.signal
