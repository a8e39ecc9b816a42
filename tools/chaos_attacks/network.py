# SPDX-License-Identifier: Apache-2.0
"""Hosts on this machine: network namespaces with addresses and links of their own (root only).

    namespace 0   10.77.0.1 --- link ---+
    namespace 1   10.77.0.2 --- link ---+--- bridge in a namespace of its own
    namespace 2   10.77.0.3 --- link ---+

Nothing reaches them from outside, nor do they reach anything outside.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of Linux.


class Network:
  """Namespaces that stand in for hosts; a context manager.

  Attributes:
    addresses: the address of each host.
    namespaces: the name of each host's namespace, for `ip netns exec`.
  """

  def __init__(self, num_hosts: int) -> None:
    """Makes the hosts and connects them; raises OSError if this process may not."""
    prefix = f'gpipe{os.getpid()}'
    self._hub = f'{prefix}hub'
    self.namespaces = [f'{prefix}host{i}' for i in range(num_hosts)]
    self.addresses = [f'10.77.0.{i + 1}' for i in range(num_hosts)]
    try:
      for name in (self._hub, *self.namespaces):
        _Ip('netns', 'add', name)
        _Ip('-n', name, 'link', 'set', 'lo', 'up')
      _Ip('-n', self._hub, 'link', 'add', 'bridge', 'type', 'bridge')
      _Ip('-n', self._hub, 'link', 'set', 'bridge', 'up')
      for i, (name, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
        peer = ['peer', 'name', 'eth0', 'netns', name]
        _Ip('-n', self._hub, 'link', 'add', f'port{i}', 'type', 'veth', *peer)
        _Ip('-n', self._hub, 'link', 'set', f'port{i}', 'master', 'bridge')
        _Ip('-n', name, 'address', 'add', f'{address}/24', 'dev', 'eth0')
        _Ip('-n', name, 'link', 'set', 'eth0', 'up')
        self.SetLink(i, is_up=True)
    except BaseException:
      self.Close()
      raise

  def __enter__(self) -> Network:
    return self

  def __exit__(self, *_: object) -> None:
    self.Close()

  def SetLink(self, host: int, *, is_up: bool) -> None:
    """Connects a host with the others, or cuts its link: what is sent is lost without an error."""
    _Ip('-n', self._hub, 'link', 'set', f'port{host}', 'up' if is_up else 'down')

  def Enter(self, host: int) -> None:
    """Moves the calling thread, of a process that has one, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f'/run/netns/{self.namespaces[host]}') as f:
      if libc.setns(f.fileno(), _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), 'setns')

  def Close(self) -> None:
    """Removes the hosts; their links end with the processes that run there."""
    for name in (self._hub, *self.namespaces):
      subprocess.run(['ip', 'netns', 'delete', name], check=False, capture_output=True)


def _Ip(*args: str) -> None:
  command: Sequence[str] = ['ip', *args]
  done = subprocess.run(command, check=False, capture_output=True, text=True)
  if done.returncode:
    raise OSError(f'{" ".join(command)}: {done.stderr.strip()}')
