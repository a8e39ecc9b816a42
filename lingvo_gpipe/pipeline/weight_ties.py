# SPDX-License-Identifier: Apache-2.0
"""Tied weights of a pipeline: pairs of paths, of a tied weight and of its owner."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gpipe.core import weight_params


def CheckTies(
  pairs: Sequence[Any],
  specs: Mapping[str, tuple[weight_params.WeightParams, bool]],
  prefix: str,
) -> dict[str, str]:
  """Returns {path of a tied weight: path of its owner}.

  Args:
    pairs: `ties` of a pipeline's Params.
    specs: {path: (weight, trainable)} of all weights.
    prefix: the beginning of error messages.

  Raises:
    ValueError: two weights cannot be tied.
  """
  ties = {}
  for pair in pairs:
    tied, owner = pair
    for path in (tied, owner):
      if path not in specs:
        close = difflib.get_close_matches(path, specs, n=3)
        hint = f'; did you mean {" or ".join(close)}?' if close else ''
        raise ValueError(f'{prefix}ties name {path!r}, which is not a weight{hint}')
    (a, a_is_trainable), (b, b_is_trainable) = specs[tied], specs[owner]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      raise ValueError(
        f'{prefix}{tied} of shape {a.shape}, {a.dtype.name} cannot be tied to {owner} of shape '
        f'{b.shape}, {b.dtype.name}'
      )
    if a_is_trainable != b_is_trainable:
      names = (tied, owner) if a_is_trainable else (owner, tied)
      raise ValueError(
        f'{prefix}{tied} cannot be tied to {owner}: {names[0]} is trainable and {names[1]} is not'
      )
    ties[tied] = owner
  if both := sorted(ties.keys() & set(ties.values())):
    raise ValueError(
      f'{prefix}{both[0]} is tied and is the owner of another weight; name its owner instead'
    )
  return ties
