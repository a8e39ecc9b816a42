# SPDX-License-Identifier: Apache-2.0
"""Forges TFRecord files."""

import struct

from lingvo_gpipe.input.records import tf_records


def SetLength(path, first_byte, length):
  """Sets the length of the record that begins at a byte, with the right checksum."""
  header = struct.pack('<Q', length)
  with open(path, 'r+b') as f:
    f.seek(first_byte)
    f.write(header + struct.pack('<I', tf_records.MaskedChecksum(header)))
