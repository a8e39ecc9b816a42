# SPDX-License-Identifier: Apache-2.0
"""Which weights of a pipeline are one: pairs of paths, of a tied weight and of its owner."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gpipe.core import weight_params


def Checked(
  pairs: Sequence[Any],
  specs: Mapping[str, tuple[weight_params.WeightParams, bool]],
  where: str,
) -> dict[str, str]:
  """{path of a tied weight: path of its owner}.

  Args:
    pairs: what the Params of a pipeline have.
    specs: {path: (weight, trainable)} of all weights.
    where: what messages begin with.

  Raises:
    ValueError: what cannot be tied, and why.
  """
  ties = {}
  for pair in pairs:
    if not (isinstance(pair, (list, tuple)) and len(pair) == 2):
      raise ValueError(f'{where}ties are pairs of paths of weights, got {pair!r}')
    tied, owner = pair
    for path in (tied, owner):
      if path not in specs:
        close = difflib.get_close_matches(path, specs, n=3)
        hint = f'; did you mean {" or ".join(close)}?' if close else ''
        raise ValueError(f'{where}ties name {path!r}, which is no weight{hint}')
    (a, a_is_trainable), (b, b_is_trainable) = specs[tied], specs[owner]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise ValueError(
        f'{where}{tied} of shape {a.shape}, {a.dtype.name} cannot be tied to {owner} of shape '
        f'{b.shape}, {b.dtype.name}'
      )
    if a_is_trainable != b_is_trainable:
      names = (tied, owner) if a_is_trainable else (owner, tied)
      raise ValueError(
        f'{where}{tied} cannot be tied to {owner}: {names[0]} is trainable and {names[1]} is not'
      )
    ties[tied] = owner
  if both := sorted(ties.keys() & set(ties.values())):
    raise ValueError(f'{where}{both[0]} is tied and has others tied to it; name its owner')
  return ties
