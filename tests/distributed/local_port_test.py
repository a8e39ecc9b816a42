# SPDX-License-Identifier: Apache-2.0
"""Ports closed to other machines; `hosts_test` tries it from hosts."""

import contextlib
import socket
import sys

import pytest

from lingvo_gpipe.distributed import local_port
from tests import naming


def testOnlyTheLoopbackInterfaceLeadsToAClosedPort():
  with socket.create_server(('', 0)) as server:
    port = server.getsockname()[1]
    local_port.CloseToOthers(port)
    with contextlib.closing(socket.create_connection(('127.0.0.1', port), 10)):
      # Connections from this machine do not matter.
      local_port.CloseToOthers(port)
    interface = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    assert interface.rstrip(b'\0') == b'lo'
    accepted, _ = server.accept()
    accepted.close()
  with pytest.raises(OSError, match=naming.Naming(f'port {port}')):
    local_port.CloseToOthers(port)


@pytest.mark.parametrize(
  'text, address',
  [
    ('0100007F', '127.0.0.1'),
    ('02004D0A', '10.77.0.2'),
    ('0000000000000000FFFF00000100007F', '127.0.0.1'),
    ('00000000000000000000000001000000', '::1'),
    ('B80D0120000000000000000001000000', '2001:db8::1'),
  ],
)
def testReadsTheAddressesOfConnections(text, address):
  """As Linux writes them on x86 and Arm."""
  assert str(local_port._Address(text)) == address


@pytest.mark.parametrize(
  'address, is_local', [('localhost:1', True), ('[::1]:1', True), ('192.0.2.1:1', False)]
)
def testKnowsTheLoopbackInterface(address, is_local):
  assert local_port.IsLocal(address) == is_local


def testTheErrorNamesAHostThatDoesNotResolve(monkeypatch):
  def Fail(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')

  monkeypatch.setattr(socket, 'getaddrinfo', Fail)
  with pytest.raises(OSError, match=naming.Naming("'nowhere'", 'nowhere:1', 'Name or service')):
    local_port.IsLocal('nowhere:1')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
