# SPDX-License-Identifier: Apache-2.0
"""ZB-H2 and ZB-V of "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), as users may write them.

The library has neither schedule. A rule returns the actions of device d of p for m micro-batches: B
is the input gradient, W the weight gradient, and lower case marks the second chunk of the device.
"""

import collections

from lingvo_gpipe.pipeline.schedule import schedules


def _ZeroBubbleH2(p, m, d):
  forwards = [f'F{j}' for j in range(m)]
  warm_up = 2 * (p - d) - 1
  row, forwards = forwards[:warm_up], forwards[warm_up:]
  for j in range(m):
    row += [f'B{j}'] + ([f'W{j - 2 * d}'] if j >= 2 * d else []) + forwards[:1]
    forwards = forwards[1:]
  return row + [f'W{j}' for j in range(max(m - 2 * d, 0), m)]


def _ZeroBubbleV(p, m, d):
  n = max(m, 2 * p - 1)
  row, count = [], collections.Counter()

  def Add(letters):
    for letter in letters:
      row.append(f'{letter}{count[letter]}')
      count[letter] += 1

  Add('F' * (2 * (p - d) - 1) + 'fF' * d + 'fbw' * (p - d))
  while count['f'] < count['F'] or count['F'] < n:
    Add(('F' if count['F'] < n else '') + 'BWfbw')
  Add('Bb' * d + 'BW' * (p - d))
  Add('w' * (count['b'] - count['w']))
  Add('W' * (count['B'] - count['W']))
  return [token for token in row if int(token[1:]) < m]


RULES = {'zb_h2': _ZeroBubbleH2, 'zb_v': _ZeroBubbleV}


def Schedule(name, p, m):
  """Returns ZB-H2 or ZB-V as a Schedule."""
  lines = []
  for d in range(p):
    cells = []
    for token in RULES[name](p, m, d):
      stage = 2 * p - 1 - d if token[0].islower() else d
      cells.append(f'{stage}{token[0].upper().replace("B", "I")}{token[1:]}')
    lines.append(','.join(cells))
  return schedules.Schedule.FromText('\n'.join(lines), name)
