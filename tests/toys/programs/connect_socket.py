# SPDX-License-Identifier: Apache-2.0
"""Prints whether an address accepts connections: 'connected', or the name of the error."""

import socket
import sys

try:
  socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
  print('connected')
except OSError as e:
  print(type(e).__name__)
