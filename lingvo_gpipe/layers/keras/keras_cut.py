# SPDX-License-Identifier: Apache-2.0
"""Cuts a live Keras model into the layers of a pipeline.

    p = pipelining_layer.PipeliningLayer.Params().Set(name='net', num_stages=2)
    stack = p.Set(**keras_cut.Cut(model)).Instantiate()
    stack.Place(devices, tf.TensorSpec([batch, dim]))

The weights are the variables of the model itself, which `Place` moves to the devices of the stages.
`PipelinedModel` does all this for `fit`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lingvo_gpipe.layers.keras import keras_cell_layer, keras_cells, keras_graph


@contextlib.contextmanager
def InitialValues(seed: int) -> Iterator[None]:
  """Makes the enclosed Keras code draw initial values that follow from a seed.

  Keras's initializers without a seed take one from Python's random generator.
  """
  state = random.getstate()
  random.seed(seed)
  try:
    yield
  finally:
    random.setstate(state)


def Cut(model: Any, x: Any = None) -> dict[str, Any]:
  """Returns {'sub': Params of the cells, 'ties': pairs of weights} for a PipeliningLayer.

  The first layer takes the model's inputs, flat and in the order of `model.inputs`, and the last
  layer returns a tuple of its outputs.

  Args:
    model: a built keras.Model: Sequential, Functional, a subclass of them, or a subclassed model
      whose `call` uses layers and keras.ops only.
    x: an example of the inputs `[batch, ...]`, needed for a subclassed model only.

  Raises:
    TypeError: it is not a keras.Model.
    ValueError: it has no graph of layers; the message says why.
  """
  return Params(keras_cells.Cut(keras_graph.FromModel(model, x)))


def Params(cells: Sequence[keras_cells.Cell]) -> dict[str, Any]:
  """Returns the result of `Cut` for cells."""
  ties = keras_cells.Ties(cells)
  reused: list[list[str]] = [[] for _ in cells]
  for k, name in ties:
    reused[k].append(name)
  sub = [
    keras_cell_layer.KerasCellLayer.Params().Set(
      name=f'cell_{k}', cell=cell, reused=tuple(reused[k])
    )
    for k, cell in enumerate(cells)
  ]
  pairs = [
    [f'layers[{k}].{name}', f'layers[{owner}].{of_owner}']
    for (k, name), (owner, of_owner) in ties.items()
  ]
  return {'sub': sub, 'ties': pairs}
