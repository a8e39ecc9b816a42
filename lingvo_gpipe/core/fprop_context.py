# SPDX-License-Identifier: Apache-2.0
"""The context of a layer's FProp: evaluation mode, step, seeds, auxiliary losses and sums.

A layer is a pure function of `(theta, inputs)` and of this context. The context is entered around a
trace or an eager call:

    with fprop_context.Scope(do_eval=False, step=step):
      y = layer.FProp(theta, x)

Seeds are integers throughout (see docs/architecture.md). The pair
`[hash64(p.random_seed, layer path), step * 2^20 + micro_batch]` belongs to one layer of a sequence
in one micro-batch. An operation inside that layer adds the hash of its own path within the layer.
So masks do not depend on the cut, a recomputation draws the same mask again, and two equal layers
can share one traced function, which takes their pair as a tensor.

A layer with statistics, such as BatchNorm, reports sums over its micro-batch by `AddSums`. Once a
mini-batch, `BaseLayer.StateFromSums` receives the totals, from the engine when a task trains, or
from `UpdateLayers` in a custom loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import layer_state, nested_map, weight_params

# Bound on the micro-batches of one update, over all replicas and accumulated mini-batches.
MAX_MICRO_BATCHES = 1 << 20


class _Seeded(Protocol):
  """The members of a layer that its seeds depend on."""

  @property
  def path(self) -> str: ...

  @property
  def params(self) -> Any: ...

  @property
  def seed_root(self) -> Any: ...

  def Ancestors(self) -> Iterator[Any]: ...


@dataclasses.dataclass
class FPropContext:
  """The context of the current FProp.

  Attributes:
    do_eval: True in evaluation and inference: no dropout.
    step_counter: int64 scalar tensor, `step * 2^20 + micro_batch`; None if no step is known.
    aux_losses: the auxiliary losses that layers added so far: (layer, name, value, coefficient).
    seed_rows: {id(layer): int64 tensor [2]}, the seed pairs that were passed as tensors.
    layer_sums: {id(layer): (layer, {name: tensor})}, the sums that layers reported by `AddSums`.
    replica_sum: (key, tensor) -> the tensor's sum over the replicas; None with one replica, and
      outside of stages.
    num_replica_sums: number of calls of `replica_sum` so far.
  """

  do_eval: bool = True
  step_counter: tf.Tensor | None = None
  seed_rows: Mapping[int, tf.Tensor] = dataclasses.field(default_factory=dict)
  aux_losses: list[tuple[Any, str, tf.Tensor, float]] = dataclasses.field(default_factory=list)
  layer_sums: dict[int, tuple[layer_state.StatefulLayer, dict[str, tf.Tensor]]] = dataclasses.field(
    default_factory=dict
  )
  replica_sum: Callable[[str, tf.Tensor], tf.Tensor] | None = None
  num_replica_sums: int = 0

  def LayerSeed(self, layer: _Seeded) -> tf.Tensor:
    """Returns the int64 seed pair [2] of one layer of a sequence (see the module's docstring)."""
    if id(layer) in self.seed_rows:
      return self.seed_rows[id(layer)]
    if self.step_counter is None:
      raise ValueError(
        f'{layer.path} draws random numbers, but no step is known; run it under '
        'fprop_context.Scope(step=step), or with do_eval=True'
      )
    return SeedPair(layer.params.random_seed, layer.path, self.step_counter)

  def AddAuxLoss(
    self, layer: _Seeded, value: tf.Tensor, coefficient: float = 1.0, name: str = 'aux_loss'
  ) -> None:
    """Adds `coefficient * value` to the objective; reported as `<layer path>.<name>`.

    Args:
      layer: the layer that adds it.
      value: a scalar, a mean over the micro-batch like the loss.
      coefficient: its weight relative to the loss.
      name: distinguishes several auxiliary losses of one layer.
    """
    self.aux_losses.append((layer, name, value, coefficient))

  def AddSums(self, layer: layer_state.StatefulLayer, sums: Mapping[str, tf.Tensor]) -> None:
    """Reports sums over the micro-batch, for the update of the layer's state after a mini-batch.

    To be called in FProp. Does nothing in evaluation. The sums of a layer that is called several
    times in one micro-batch add up. No gradient flows through sums.

    Args:
      layer: the layer itself; its `StateFromSums` receives the sums over the whole mini-batch.
      sums: float32 or float64 tensors by name. For exact means over micro-batches of unequal size,
        report a sum and a count, not a mean.

    Raises:
      TypeError: a sum has another dtype, which would lose precision.
      ValueError: the names differ from the previous call in the same micro-batch.
    """
    if self.do_eval or not sums:
      return
    for name, value in sums.items():
      if value.dtype not in (tf.float32, tf.float64):
        raise TypeError(
          f'{layer.path}: expected sum {name!r} in float32 or float64, got {value.dtype.name}; '
          'cast before summing up'
        )
    new = {name: tf.stop_gradient(value) for name, value in sums.items()}
    self._MergeSums(layer, new)

  def _MergeSums(self, layer: layer_state.StatefulLayer, new: dict[str, tf.Tensor]) -> None:
    _, old = self.layer_sums.get(id(layer), (layer, {}))
    if old and old.keys() != new.keys():
      raise ValueError(
        f'{layer.path} reports the sums {", ".join(new)}, but reported {", ".join(old)} before'
      )
    added = {name: old[name] + value for name, value in new.items()} if old else new
    self.layer_sums[id(layer)] = (layer, added)

  def SumOverReplicas(self, layer: layer_state.StatefulLayer, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of `value` over the replicas, each at the same micro-batch of its share.

    To be called in FProp, in training. Gradients flow through it. Returns the value itself if the
    layer does not set `sums_over_replicas`, with one replica, and outside of training steps.
    """
    if self.replica_sum is None or not layer.sums_over_replicas:
      return value
    self.num_replica_sums += 1
    return self.replica_sum(f'{layer.path}:{self.num_replica_sums}', value)

  def OpSeed(self, layer: _Seeded, name: str = '') -> tf.Tensor:
    """Returns the int64 seed [2] of a random operation of `layer`.

    Args:
      layer: the layer.
      name: distinguishes several random operations of one layer.

    Raises:
      ValueError: no step is known, so every call would draw the same numbers.
    """
    root = next((a for a in layer.Ancestors() if id(a) in self.seed_rows), layer.seed_root)
    row = self.LayerSeed(root)
    inner = weight_params.Hash64(layer.path[len(root.path) :], name)
    return row + tf.constant([inner, 0], tf.int64)


def SeedPair(random_seed: int, path: str, step_counter: tf.Tensor) -> tf.Tensor:
  """Returns `[hash64(random_seed, path), step_counter]` as an int64 tensor [2]."""
  return tf.stack([tf.constant(weight_params.Hash64(random_seed, path), tf.int64), step_counter])


def StepCounter(step: tf.Tensor | int, micro_batch: tf.Tensor | int = 0) -> tf.Tensor:
  """Returns the int64 scalar `step * 2^20 + micro_batch`."""
  # Numbers stay numbers, which need no operation of their own.
  a, b = (x if isinstance(x, int) else tf.cast(x, tf.int64) for x in (step, micro_batch))
  return tf.convert_to_tensor(a * MAX_MICRO_BATCHES + b, tf.int64)


_stack = threading.local()


def Current() -> FPropContext:
  """Returns the innermost context; without one, evaluation mode and no step."""
  contexts = getattr(_stack, 'contexts', None)
  return contexts[-1] if contexts else FPropContext()


@contextlib.contextmanager
def Enter(context: FPropContext) -> Iterator[FPropContext]:
  """Makes `context` current for the enclosed code of this thread."""
  if not hasattr(_stack, 'contexts'):
    _stack.contexts = []
  _stack.contexts.append(context)
  try:
    yield context
  finally:
    _stack.contexts.pop()


def Part(name: str) -> contextlib.AbstractContextManager[Any]:
  """Names a part of a layer's FProp, which a re-materialisation policy may recompute by itself.

  Worth it for results that take much memory and little time, such as the scores of attention:

      with fprop_context.Part('scores'):
        encoded = tf.matmul(tf.nn.softmax(tf.matmul(query, key, transpose_b=True)), value)

  Results that operations outside of the part take, here `encoded`, are always kept.

  Args:
    name: a word, the same in each place whose results are kept or recomputed together.
  """
  return tf.name_scope(f'part.{name}')


def PartOf(op_name: str) -> str | None:
  """Returns the name of the innermost `Part` in which an operation was made, if any."""
  names = re.findall(r'(?:^|/)part\.(\w+?)(?:_\d+)?(?=/)', op_name)
  return names[-1] if names else None


def UpdateLayers(*contexts: FPropContext) -> None:
  """Updates the state of all layers that reported sums, once for all micro-batches together.

  A custom training loop calls it after each mini-batch; for a task, the engine does. A context
  stands for one micro-batch, or for the pieces into which a PipeliningLayer split it:

      with fprop_context.Scope(step=step) as context:
        ...
      fprop_context.UpdateLayers(context)

  Args:
    *contexts: the contexts of the mini-batch's micro-batches, from `Scope`; each can be used once.
      If FProp ran inside a tf.function, call UpdateLayers in the same function.
  """
  merged = FPropContext(do_eval=False)
  for context in contexts:
    for layer, sums in context.layer_sums.values():
      merged._MergeSums(layer, sums)
  for layer, sums in merged.layer_sums.values():
    layer_state.UpdateFromSums(layer, nested_map.NestedMap(sums))


def Scope(
  *,
  do_eval: bool = False,
  step: tf.Tensor | int | None = None,
  micro_batch: tf.Tensor | int = 0,
) -> contextlib.AbstractContextManager[FPropContext]:
  """Enters a context for the enclosed FProp calls.

  Args:
    do_eval: True for evaluation: no dropout.
    step: the training step, an integer or an int64 scalar tensor. Inside a tf.function it must be a
      tensor, because a Python integer would become a constant of the trace.
    micro_batch: the index of the micro-batch within the step.
  """
  counter = None if step is None else StepCounter(step, micro_batch)
  return Enter(FPropContext(do_eval, counter))
