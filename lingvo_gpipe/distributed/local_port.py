# SPDX-License-Identifier: Apache-2.0
"""Keeps other machines away from a port at which this process listens; needs Linux, but no root.

TensorFlow's server listens on all interfaces, whatever address it gets, and no public option asks
callers for a secret or a certificate. But Linux (5.7 and newer) lets every process restrict its
sockets to an interface, even while they listen.

Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import stat
import struct
import sys

_LOOPBACK = b'lo'
# States of connections in <linux/tcp_states.h>.
_TIME_WAIT, _LISTEN = 6, 10


def IsLocal(address: str) -> bool:
  """Whether 'host:port' is on the loopback interface of this machine.

  Raises:
    OSError: the name of the host does not resolve.
  """
  host = address.rpartition(':')[0].strip('[]')
  try:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except socket.gaierror as e:
    raise OSError(f'the name {host!r} of {address} does not resolve: {e.strerror}') from e
  return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in entries)


def CloseToOthers(port: int) -> None:
  """Lets a port of this process accept connections on the loopback interface only.

  Users of this machine still reach it.

  Raises:
    OSError: this process does not listen at the port, the system allows no such restriction, or
      another machine was quicker and is connected already.
  """
  if not sys.platform.startswith('linux'):
    raise OSError('only Linux restricts a port to the loopback interface')
  listening = _ListeningSockets(port)
  if not listening:
    raise OSError(f'this process does not listen at port {port}')
  for s in listening:
    with s:
      # Several descriptors may name one socket, and only root may restrict a socket again.
      if s.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b'\0') != _LOOPBACK:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
  if strangers := _Strangers(port):
    raise OSError(f'{strangers[0]} connected to port {port} before other machines were kept away')


def _ListeningSockets(port: int) -> list[socket.socket]:
  """Returns duplicates of this process's sockets that listen at the port."""
  listening = []
  for descriptor in os.listdir('/proc/self/fd'):
    with contextlib.suppress(OSError):  # Closed in the meantime.
      if stat.S_ISSOCK(os.stat(f'/proc/self/fd/{descriptor}').st_mode):
        s = socket.socket(fileno=os.dup(int(descriptor)))
        is_listening = s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        is_internet = s.family in (socket.AF_INET, socket.AF_INET6)
        if is_listening and is_internet and s.getsockname()[1] == port:
          listening.append(s)
        else:
          s.close()
  return listening


def _Strangers(port: int) -> list[str]:
  """Returns the addresses of other machines that are connected to the port, accepted or not."""
  strangers = []
  for name in ('tcp', 'tcp6'):
    path = pathlib.Path('/proc/self/net', name)
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    for _, local, remote, state, *_ in map(str.split, lines):
      address, local_port = local.split(':')
      is_open = int(state, 16) not in (_LISTEN, _TIME_WAIT)
      if int(local_port, 16) == port and is_open and not _Address(address).is_loopback:
        strangers.append(str(_Address(remote.split(':')[0])))
  return strangers


def _Address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
  """Reads an address of `/proc/net/tcp`: words of 32 bits in the byte order of the machine."""
  words = struct.unpack(f'>{len(text) // 8}I', bytes.fromhex(text))
  packed = struct.pack(f'={len(words)}I', *words)
  if len(packed) == 4:
    return ipaddress.IPv4Address(packed)
  address = ipaddress.IPv6Address(packed)
  return address.ipv4_mapped or address
