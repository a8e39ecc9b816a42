# SPDX-License-Identifier: Apache-2.0
"""A network that can fail: forwards bytes from its own port to another local port."""

import contextlib
import socket
import threading


class TcpProxy:
  """A proxy that runs in threads of this process; a context manager.

  Attributes:
    port: the port on the loopback interface on which it listens.
  """

  def __init__(self, target):
    """Forwards connections to a port."""
    self._target = target
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]
    self._lock = threading.Lock()
    self._pairs = []
    self._black = []  # Connections whose bytes are lost for good.
    self._is_black = self._is_shut = False
    threading.Thread(target=self._Accept, daemon=True).start()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    # Only this wakes a thread in `accept`.
    self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.Drop()

  def Drop(self):
    """Closes all connections, and from now on closes new connections at once."""
    with self._lock:
      self._is_shut = True
      pairs, self._pairs, self._black = self._pairs, [], []
    for pair in pairs:
      _Close(pair)

  def Swallow(self):
    """Loses all bytes from now on, without an error on either side."""
    with self._lock:
      self._is_black = True
      self._black = list(self._pairs)

  def Forward(self):
    """Forwards new connections; connections that lost bytes stay as they are."""
    with self._lock:
      self._is_black = self._is_shut = False

  def _Accept(self):
    while True:
      try:
        near, _ = self._listener.accept()
      except OSError:
        return
      try:
        far = socket.create_connection(('localhost', self._target))
      except OSError:
        near.close()
        continue
      pair = near, far
      for s in pair:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Or each message waits 40 ms.
      with self._lock:
        if self._is_shut:
          _Close(pair)
          continue
        self._pairs.append(pair)
        if self._is_black:
          self._black.append(pair)
      for source, sink in (pair, pair[::-1]):
        threading.Thread(target=self._Pass, args=(pair, source, sink), daemon=True).start()

  def _Pass(self, pair, source, sink):
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        if pair not in self._black:
          sink.sendall(data)
    if pair not in self._black:  # The other side does not see the end of a lost connection either.
      _Close(pair)


def _Close(pair):
  for s in pair:
    with contextlib.suppress(OSError):
      s.shutdown(socket.SHUT_RDWR)
    s.close()
