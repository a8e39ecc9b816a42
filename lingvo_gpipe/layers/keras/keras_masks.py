# SPDX-License-Identifier: Apache-2.0
"""The masks of a model's outputs, computed from its inputs alone before the first forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map, pipeline_element
from lingvo_gpipe.layers.keras import keras_cell_layer

# Computes the masks from the arguments of the first cell.
Masks = Callable[[tuple[Any, ...]], list[tf.Tensor | None]]


@dataclasses.dataclass
class _SeedContext(fprop_context.FPropContext):
  """Gives all layers one seed."""

  seed: tf.Tensor | None = None

  def OpSeed(self, layer: Any, name: str = '') -> tf.Tensor:
    """Returns the seed."""
    del layer, name
    return self.seed


def OutputMasks(layers: Sequence[keras_cell_layer.KerasCellLayer], *, do_eval: bool) -> Masks:
  """Returns a function that computes the masks of the last cell's outputs.

  It runs without the weights, and computes nothing that the masks do not need.

  Args:
    layers: all cells of the model.
    do_eval: whether they compute as in evaluation.

  Raises:
    ValueError: (the function) a mask depends on a weight or on random numbers.
  """

  def Compute(weights: Sequence[Any], seed: tf.Tensor, args: tuple[Any, ...]) -> list[Any]:
    def Run(i: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      return layer.FPropSkips(weights[i], skips, *args)

    # Any step will do: its seeds are not used.
    with fprop_context.Enter(_SeedContext(do_eval, tf.zeros([], tf.int64), seed=seed)):
      outputs, _ = pipeline_element.RunLayers(layers, Run, args)
    return [keras_cell_layer.Parts(x)[1] for x in outputs]

  compute = tf.function(Compute, autograph=False)
  specs = ([layer.WeightTensorSpecs() for layer in layers], tf.TensorSpec([2], tf.int64))
  num_weights = len(tf.nest.flatten(specs[0]))

  def Masks(args: tuple[Any, ...]) -> list[tf.Tensor | None]:
    graph = compute.get_concrete_function(*specs, tf.nest.map_structure(_Spec, args)).graph
    needed = NeededOps(graph.outputs)
    for i, cause in [
      *((i, 'weights') for i in range(num_weights)),
      (num_weights, 'random numbers'),
    ]:
      if graph.inputs[i].op.name in needed:
        raise ValueError(
          f'the mask of an output depends on {cause}, so its size is not known before the forward; '
          'set num_micro_batches=1'
        )
    return list(RunNeeded(compute, *specs, args))

  return Masks


def NeededOps(outputs: Sequence[tf.Tensor]) -> set[str]:
  """Returns the names of the operations that lead to some tensors."""
  waiting, names = [t.op for t in outputs], set()
  while waiting:
    op = waiting.pop()
    if op.name not in names:
      names.add(op.name)
      waiting += [t.op for t in op.inputs]
  return names


def RunNeeded(function: Any, *args: Any) -> Any:
  """Calls a tf.function without the operations that its outputs do not need, such as asserts.

  Args:
    function: the tf.function.
    *args: its arguments, nests of tensors, of specs for tensors that are not needed, and of other
      values.
  """
  concrete = function.get_concrete_function(*tf.nest.map_structure(_Spec, args))
  graph = concrete.graph
  needed = NeededOps(graph.outputs)
  definition = graph.as_graph_def()
  nodes = [node for node in definition.node if node.name in needed]
  for node in nodes:
    node.input[:] = [name for name in node.input if not name.startswith('^')]
  del definition.node[:]
  definition.node.extend(nodes)
  flat = [x for x in tf.nest.flatten(args) if isinstance(x, (tf.Tensor, tf.TensorSpec))]
  inputs = zip(graph.inputs, [*flat, *concrete.captured_inputs], strict=True)
  values = {t.name: x for t, x in inputs if t.op.name in needed}

  def Run(values: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    return tf.graph_util.import_graph_def(
      definition,
      input_map={name: tf.identity(x) for name, x in values.items()},
      return_elements=[t.name for t in graph.outputs],
    )

  outputs = iter(tf.function(Run, autograph=False)(values))
  return tf.nest.map_structure(
    lambda t: None if t is None else next(outputs), concrete.structured_outputs
  )


def _Spec(x: Any) -> Any:
  return tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x
