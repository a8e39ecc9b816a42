# SPDX-License-Identifier: Apache-2.0
"""The operations of a tf.data pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def Trace(make: Callable[[], tf.data.Dataset]) -> Any:
  """Returns the concrete function that makes a pipeline, without reading any data."""
  return tf.function(
    lambda: tf.data.experimental.to_variant(make()), autograph=False
  ).get_concrete_function()


def Operations(traced: Any) -> list[Sequence[Any]]:
  """Returns the node protos of a function from `Trace`, and of each function that it calls."""
  graph_def = traced.graph.as_graph_def()
  return [graph_def.node, *(function.node_def for function in graph_def.library.function)]
