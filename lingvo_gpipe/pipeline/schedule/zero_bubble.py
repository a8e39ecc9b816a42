# SPDX-License-Identifier: Apache-2.0
"""Zero-bubble schedules: backward is split into I and W, and W fills idle time.

After "Zero Bubble Pipeline Parallelism" (Qi et al. 2023, arXiv:2401.10241); `zb_h1` of the same
paper is in `schedules`.
"""

from __future__ import annotations

from lingvo_gpipe.pipeline.schedule import actions, orders, schedules

Kind = actions.Kind
Schedule = schedules.Schedule


@schedules.Register('zb_2p')
def ZeroBubble2P(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """ZB-H2: 2(K-k)-1 forwards at stage k, then I, W and F in turn, W 2k micro-batches after I.

  A stage holds up to 2K-1 micro-batches, where the paper's ZB-2p may hold 2K. From 2K-1
  micro-batches a device idles (K-1) max(F, I-F, F+I-2W), and F = I = W leave no gap between its
  first and its last action.
  """
  orders.CheckOneStageADevice('zb_2p', num_stages, num_devices)
  rows = []
  for k in range(num_stages):
    forwards, inputs = (
      orders.Series(k, kind, range(num_micro_batches))
      for kind in (Kind.FORWARD, Kind.INPUT_GRADIENT)
    )
    warm_up, row = 2 * (num_stages - k) - 1, []
    for m, action in enumerate(inputs):
      row += [action, *forwards[warm_up + m : warm_up + m + 1]]
    # W stands between I and F.
    rows.append(forwards[:warm_up] + orders.DelayWeightGradients(row, 2 * k))
  return Schedule('zb_2p', num_stages, num_micro_batches, rows, range(num_stages))


@schedules.Register('interleaved_zb')
def InterleavedZeroBubble(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """`zb_h1` for several stages per device: `interleaved_1f1b` with I for B, and W d actions later.

  Device d begins with (v-1)K + K-1-d forwards, fewer than `interleaved_1f1b`. A device
  holds vK stages and micro-batches, and idles K-1 units besides 3vM of work if F = I = W.
  """
  orders.CheckLoops('interleaved_zb', num_stages, num_devices, at_least=2)
  orders.CheckRounds('interleaved_zb', num_micro_batches, num_devices)
  rows = []
  for d in range(num_devices):
    stages = range(d, num_stages, num_devices)
    forwards = orders.Rounds(Kind.FORWARD, stages, num_micro_batches, num_devices)
    inputs = orders.Rounds(Kind.INPUT_GRADIENT, stages[::-1], num_micro_batches, num_devices)
    warm_up = (len(stages) - 1) * num_devices + num_devices - 1 - d
    rows.append(orders.DelayWeightGradients(orders.Alternate(forwards, inputs, warm_up), d))
  owners = orders.LoopOwners(num_stages, num_devices)
  return Schedule('interleaved_zb', num_stages, num_micro_batches, rows, owners)


@schedules.Register('zb_v')
def ZeroBubbleV(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """ZB-V: two stages per device in a V, down the devices and up again.

  A device holds 2K half stages, as much as the first one of `1f1b`, and idles K-1 units besides 6M
  of work if F = I = W. The order is complete from 2K-1 micro-batches on; for fewer, it is the order
  for 2K-1 without the surplus ones.
  """
  orders.CheckTwoStagesADevice('zb_v', num_stages, num_devices)
  total = max(num_micro_batches, 2 * num_devices - 1)
  rows = []
  for d in range(num_devices):
    down, up, row = d, num_stages - 1 - d, orders.Row()
    row.Add(down, 'F' * (2 * (num_devices - d) - 1))
    for _ in range(d):
      row.Add(up, 'F')
      row.Add(down, 'F')
    for _ in range(num_devices - d):
      row.Add(up, 'FIW')
    while row.Count(up, Kind.FORWARD) < total:
      if row.Count(down, Kind.FORWARD) < total:
        row.Add(down, 'F')
      row.Add(down, 'IW')
      row.Add(up, 'FIW')
    for _ in range(d):
      row.Add(down, 'I')
      row.Add(up, 'I')
    row.Add(down, 'IW' * (num_devices - d))
    for stage in (up, down):
      row.Add(stage, 'W' * (total - row.Count(stage, Kind.WEIGHT_GRADIENT)))
    rows.append(row.actions)
  rows = orders.Below(rows, num_micro_batches)
  return Schedule('zb_v', num_stages, num_micro_batches, rows, orders.VOwners(num_devices))
