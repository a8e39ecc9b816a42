# SPDX-License-Identifier: Apache-2.0
"""`Case`: a small Keras model, and a random batch for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
  """A model and how to feed it.

  Attributes:
    name: its name in the table.
    make: makes the model, with a `call` on tensors `[batch, ...]`.
    length: the size of an axis that the model leaves open.
    vocabulary: integer inputs are below this number.
    inputs: {name: makes an array for (random state, shape)} of inputs that are neither ids, masks
      nor floats.
    num_micro_batches: number of micro-batches of the comparison of `fit`; 1 if the model has
      statistics of the batch.
    note: why `num_micro_batches` is 1, or what else one should know of the row.
    refused: a part of the error, if a pipeline refuses the model.
    dtype: of the comparison, `float32` or `float64`.
    tolerance: factor of the bounds, for models that compute in bfloat16.
  """

  name: str
  make: Callable[[], Any]
  length: int = 8
  vocabulary: int = 20
  inputs: Mapping[str, Callable[[Any, Any], Any]] = dataclasses.field(default_factory=dict)
  num_micro_batches: int = 2
  note: str = ''
  refused: str = ''
  dtype: str = 'float32'
  tolerance: float = 1.0

  def Inputs(self, model: Any, batch_size: int, seed: int) -> Any:
    """Returns random inputs in the structure of the model's inputs."""
    random = np.random.RandomState(seed)

    def Input(tensor: Any) -> Any:
      shape = [batch_size, *(d or self.length for d in tensor.shape[1:])]
      name, dtype = tensor.name, keras.backend.standardize_dtype(tensor.dtype)
      if name in self.inputs:
        return self.inputs[name](random, shape)
      if 'mask' in name:
        mask = random.rand(*shape) < 0.8
        mask[:, :1] = True
        return mask.astype(dtype)
      if dtype.startswith(('int', 'uint')):
        return random.randint(0, self.vocabulary, shape).astype(dtype)
      return random.standard_normal(shape).astype(keras.config.floatx())

    return keras.tree.map_structure(Input, model.input)

  def Targets(self, model: Any, outputs: Any, seed: int) -> Any:
    """Returns random targets in the structure of the model's outputs, for a squared error."""
    random = np.random.RandomState(seed)
    return keras.tree.map_structure(
      lambda t: random.standard_normal(t.shape).astype(keras.config.floatx()), outputs
    )
