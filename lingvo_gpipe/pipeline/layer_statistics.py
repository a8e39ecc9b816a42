# SPDX-License-Identifier: Apache-2.0
"""State that layers derive from sums over a mini-batch, such as BatchNorm's moving averages.

Forward actions report the sums (`FPropContext.AddSums`), the engine adds them over micro-batches
and replicas, and the update assigns the new state together with the weights, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import layer_state, nested_map
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline import replicas

# {path of a layer: {name: value of its weight}}.
State = dict[str, dict[str, tf.Tensor]]


def Next(
  engine: engine_lib.PipelineEngine,
  layer_sums: Mapping[str, nested_map.NestedMap],
  state: Mapping[str, Mapping[str, tf.Tensor]] | None = None,
) -> State:
  """Returns the state of layers after a mini-batch; see `BaseLayer.StateFromSums`.

  Args:
    engine: the engine that ran the mini-batch.
    layer_sums: the sums that `PipelineEngine.Accumulate` returned.
    state: the state after the mini-batch before, if that was not assigned yet.

  Returns:
    The state, on the devices of the weights.
  """
  layers = {
    layer.path: layer for s in engine.stages for top in s.layers for layer in top.Descendants()
  }
  state = state or {}
  return {p: layer_state.NextState(layers[p], sums, state.get(p)) for p, sums in layer_sums.items()}


def Assign(
  engine: engine_lib.PipelineEngine, state: Mapping[str, Mapping[str, Any]], is_wanted: Any = None
) -> None:
  """Assigns a state in all replicas.

  Args:
    engine: the engine.
    state: as `Next` returned it.
    is_wanted: bool scalar; if it is false, nothing changes.
  """
  variables = engine.replicas[0].variables
  for path, values in state.items():
    for name, value in values.items():
      variable = variables[f'{path}.{name}']
      with tf.device(variable.device):
        variable.assign(value if is_wanted is None else tf.where(is_wanted, value, variable))
  replicas.SyncWeights(
    engine.replicas, [f'{path}.{name}' for path, values in state.items() for name in values]
  )
