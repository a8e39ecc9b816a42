# SPDX-License-Identifier: Apache-2.0
"""The screen of a terminal."""

import re


def Screen(text):
  """Returns the lines that a terminal shows after receiving the text."""
  lines, row, column = [''], 0, 0
  for part in re.findall(r'\x1b\[[?\d;]*[A-Za-z]|.|\n', text):
    if part == '\n':
      row, column = row + 1, 0
      if row == len(lines):
        lines.append('')
    elif part == '\r':
      column = 0
    elif part == '\x1b[2K':
      lines[row] = ''
    elif re.fullmatch(r'\x1b\[\d*A', part):
      row = max(0, row - int(part[2:-1] or 1))
    elif part.startswith('\x1b'):
      pass  # Colours and the visibility of the cursor.
    else:
      line = lines[row].ljust(column)
      lines[row] = line[:column] + part + line[column + 1 :]
      column += 1
  return [line.rstrip() for line in lines]
