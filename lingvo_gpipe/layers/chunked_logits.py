# SPDX-License-Identifier: Apache-2.0
"""`ChunkedLogits`: logits that a loss computes for some positions at a time, and then drops.

With a large vocabulary the logits of a micro-batch take more memory than everything else in the
last stage, and their gradient as much again. A loss needs only a few numbers for each position:

    inputs [n, dim] ──chunk of positions──> logits [chunk, vocab] ──> xent, total, hits [chunk]

Backward recomputes the logits of each chunk, and adds up the gradients of the weights over the
chunks. So a softmax costs one more product of matrices, and memory for one chunk.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe.core import shapes

# Maps weights and inputs [..., dim] to logits [..., num_classes].
LogitsFn = Callable[[Any, tf.Tensor], tf.Tensor]


class Statistics(NamedTuple):
  """The numbers that a loss needs from the logits of each position, [...], float32 or float64.

  Attributes:
    xent: the cross entropy with the right class, in nats.
    total: the sum of the cross entropies with all classes.
    hits: 1 if the right class has the largest logit, else 0; without a gradient.
  """

  xent: tf.Tensor
  total: tf.Tensor
  hits: tf.Tensor


class SliceStatistics(NamedTuple):
  """The numbers that a loss needs from the logits of a slice of the vocabulary.

  Each is [...] in float32 or float64. Class ids count from the first class of the slice, so the
  right class may be out of range.

  Attributes:
    log_sum: the logarithm of the sum of the exponentials of the logits.
    total: the sum of the logits.
    label: the logit of the right class if it is in the slice, else 0.
    top: the largest logit; without a gradient.
    hits: 1 if the right class has the largest logit of the slice, else 0; without a gradient.
  """

  log_sum: tf.Tensor
  total: tf.Tensor
  label: tf.Tensor
  top: tf.Tensor
  hits: tf.Tensor


def FromLogits(logits: tf.Tensor, class_ids: tf.Tensor) -> Statistics:
  """Returns the statistics of logits [..., num_classes] for class ids [...]."""
  if logits.dtype.size < 4:
    logits = tf.cast(logits, tf.float32)
  xent = tf.nn.sparse_softmax_cross_entropy_with_logits(class_ids, logits)
  num_classes = tf.cast(tf.shape(logits)[-1], logits.dtype)
  total = num_classes * tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_sum(logits, axis=-1)
  hits = tf.equal(tf.argmax(logits, axis=-1, output_type=class_ids.dtype), class_ids)
  return Statistics(xent, total, tf.cast(hits, logits.dtype))


def FromSlice(logits: tf.Tensor, class_ids: tf.Tensor) -> SliceStatistics:
  """Returns the statistics of logits [..., classes of the slice] for class ids [...]."""
  if logits.dtype.size < 4:
    logits = tf.cast(logits, tf.float32)
  is_right = tf.equal(tf.range(logits.shape[-1], dtype=class_ids.dtype), class_ids[..., tf.newaxis])
  hits = tf.equal(tf.argmax(logits, axis=-1, output_type=class_ids.dtype), class_ids)
  return SliceStatistics(
    tf.reduce_logsumexp(logits, axis=-1),
    tf.reduce_sum(logits, axis=-1),
    tf.reduce_sum(tf.where(is_right, logits, tf.zeros_like(logits)), axis=-1),
    tf.stop_gradient(tf.reduce_max(logits, axis=-1)),
    tf.cast(hits, logits.dtype),
  )


def Join(slices: Sequence[SliceStatistics], class_ids: tf.Tensor, num_classes: int) -> Statistics:
  """Returns the statistics of all classes.

  Args:
    slices: the statistics of all slices, in the order of their classes.
    class_ids: [...], counted from the first class of all.
    num_classes: the number of classes in all.
  """
  log_sum = tf.reduce_logsumexp(tf.stack([s.log_sum for s in slices]), axis=0)
  xent = log_sum - tf.add_n([s.label for s in slices])
  is_class = (class_ids >= 0) & (class_ids < num_classes)
  total = tf.cast(num_classes, log_sum.dtype) * log_sum - tf.add_n([s.total for s in slices])
  # The first of equal logits counts, like in tf.argmax.
  top = tf.one_hot(tf.argmax(tf.stack([s.top for s in slices])), len(slices), axis=0)
  hits = tf.reduce_sum(tf.cast(top, log_sum.dtype) * tf.stack([s.hits for s in slices]), axis=0)
  nan = tf.fill(tf.shape(xent), tf.constant(float('nan'), xent.dtype))
  return Statistics(tf.where(is_class, xent, nan), total, tf.stop_gradient(hits))


class ChunkedLogits:
  """The logits of a softmax that were not computed yet.

  TensorFlow converts it into a tensor, the whole logits, if an operation needs one.

  Attributes:
    inputs: [..., dim].
    shape: the shape of the logits, [..., num_classes].
    _keras_mask: what Keras attaches to a tensor: which positions count, [...]; None: all.
  """

  def __init__(
    self,
    logits_fn: LogitsFn,
    weights: Any,
    inputs: tf.Tensor,
    *,
    num_classes: int,
    chunk_size: int,
  ) -> None:
    """Computes nothing.

    Args:
      logits_fn: computes logits; changes nothing, and draws no random numbers. A graph holds the
        object of a method only weakly.
      weights: the nest of variables or tensors that `logits_fn` takes.
      inputs: [..., dim].
      num_classes: size of the last axis of the logits.
      chunk_size: the number of positions whose logits exist at a time; 0: all.
    """
    self._logits_fn = logits_fn
    self._weights = weights
    self.inputs = inputs
    self._chunk_size = chunk_size
    self.shape = inputs.shape[:-1] + [num_classes]
    self._statistics: tuple[tf.Tensor, Statistics] | None = None
    self._keras_mask: tf.Tensor | None = None

  def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
    """Returns the whole logits, [..., num_classes]."""
    return tf.convert_to_tensor(self._logits_fn(self._weights, self.inputs), dtype, name=name)

  def StatisticsOf(self, class_ids: tf.Tensor) -> Statistics:
    """Returns the statistics for class ids [...] or [..., 1], once for each tensor of ids."""
    if self._statistics is None or self._statistics[0] is not class_ids:
      self._statistics = class_ids, self._Compute(class_ids)
    return self._statistics[1]

  def SliceStatisticsOf(self, class_ids: tf.Tensor) -> SliceStatistics:
    """Returns the statistics for class ids [...] with the weights of a slice."""
    return SliceStatistics(*self._Reduce(FromSlice, class_ids))

  def _Compute(self, class_ids: tf.Tensor) -> Statistics:
    return Statistics(*self._Reduce(FromLogits, class_ids))

  def _Reduce(
    self,
    from_logits: Callable[[tf.Tensor, tf.Tensor], Sequence[tf.Tensor]],
    class_ids: tf.Tensor,
  ) -> list[tf.Tensor]:
    """Returns numbers [...] that follow from logits [..., classes] and class ids [...]."""
    ids = tf.reshape(tf.cast(class_ids, tf.int64), [-1])
    rows = tf.reshape(self.inputs, [-1, self.inputs.shape[-1]])
    tensors = [tf.convert_to_tensor(w) for w in tf.nest.flatten(self._weights)]
    floating = [i for i, w in enumerate(tensors) if w.dtype.is_floating]
    # Without the weights themselves: see `_Weakly`.
    structure = tf.nest.map_structure(lambda _: 0, self._weights)
    logits_fn = _Weakly(self._logits_fn)

    def ChunkStatistics(
      weights: Sequence[tf.Tensor], rows: tf.Tensor, ids: tf.Tensor
    ) -> Sequence[tf.Tensor]:
      weight_of = dict(zip(floating, weights, strict=True))  # The others have no gradient.
      leaves = [weight_of.get(i, w) for i, w in enumerate(tensors)]
      packed = tf.nest.pack_sequence_as(structure, leaves)
      return from_logits(logits_fn(packed, rows), ids)

    weights = [tensors[i] for i in floating]
    if self._chunk_size:
      chunk_size = min(self._chunk_size, max(rows.shape[0] or self._chunk_size, 1))
      statistics = _InChunks(ChunkStatistics, weights, rows, ids, chunk_size)
    else:
      statistics = list(ChunkStatistics(weights, rows, ids))
    return [tf.reshape(x, shapes.GetShape(self.inputs)[:-1]) for x in statistics]


class SharedLogits(ChunkedLogits):
  """Logits whose statistics are computed slice by slice, on several devices."""

  def __init__(
    self,
    logits: ChunkedLogits,
    statistics_of: Callable[[tf.Tensor, ChunkedLogits], Statistics],
  ) -> None:
    """Computes nothing.

    Args:
      logits: the logits, which are not computed.
      statistics_of: returns the statistics for int64 class ids [...] and these logits.
    """
    self.inputs = logits.inputs
    self.shape = logits.shape
    self._keras_mask = logits._keras_mask
    self._statistics = None
    self._statistics_of = statistics_of

  def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
    """Raises ValueError."""
    raise ValueError(
      "vocabulary='shared': the loss takes the logits as a tensor, but no device has all of them; "
      'use embedding.XentLossFromLogits and embedding.Hits, or SparseCategoricalCrossentropy('
      "from_logits=True) and accuracy of Keras, or vocabulary='one'"
    )

  def _Compute(self, class_ids: tf.Tensor) -> Statistics:
    ids = tf.reshape(tf.cast(class_ids, tf.int64), tf.shape(self.inputs)[:-1])
    return self._statistics_of(ids, self)


def _Weakly(function: LogitsFn) -> LogitsFn:
  """Returns the function; within a graph one that does not hold the object of a method.

  TensorFlow keeps the gradient functions of graphs as long as the process runs. What they hold, a
  layer with its weights, would stay in memory.
  """
  if tf.executing_eagerly() or not inspect.ismethod(function):
    return function
  method = weakref.WeakMethod(function)

  def Call(weights: Any, inputs: tf.Tensor) -> tf.Tensor:
    held = method()
    assert held is not None
    return held(weights, inputs)

  return Call


def _InChunks(
  function: Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor], Sequence[tf.Tensor]],
  weights: Sequence[tf.Tensor],
  rows: tf.Tensor,
  ids: tf.Tensor,
  chunk_size: int,
) -> list[tf.Tensor]:
  """Returns `function(weights, rows, ids)`, chunk by chunk, also when it is differentiated.

  Args:
    function: computes numbers of one dtype for each row; the last one has no gradient.
    weights: the weights, floating tensors.
    rows: [n, dim].
    ids: [n].
    chunk_size: number of rows of a chunk.
  """
  num_rows = shapes.GetShape(rows)[0]
  num_chunks = -(-num_rows // chunk_size)
  num_padded = num_chunks * chunk_size
  is_whole = isinstance(num_rows, int) and num_rows == num_padded

  def Split(x: tf.Tensor) -> tf.Tensor:
    """Returns [chunks, chunk_size, ...], with zeros after the last row."""
    shape = [num_chunks, chunk_size, *shapes.GetShape(x)[1:]]
    if not is_whole:
      x = tf.pad(x, [[0, num_padded - num_rows]] + [[0, 0]] * (x.shape.rank - 1))
    return tf.reshape(x, shape)

  def Join(x: tf.Tensor) -> tf.Tensor:
    """Undoes `Split`."""
    x = tf.reshape(x, [num_padded, *shapes.GetShape(x)[2:]])
    return x if is_whole else x[:num_rows]

  ids = Split(ids)

  @tf.custom_gradient
  def Run(rows: tf.Tensor, *weights: tf.Tensor) -> Any:
    chunks = Split(rows)

    def Forward(i: tf.Tensor) -> tf.Tensor:
      return tf.stack(function(weights, chunks[i], ids[i]), axis=-1)

    def Gradient(*upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
      # Many small numbers would be lost in a sum of bfloat16.
      sums = [tf.zeros_like(w, tf.float32 if w.dtype.size < 4 else w.dtype) for w in weights]
      grads = tf.TensorArray(chunks.dtype, num_chunks, element_shape=chunks.shape[1:])
      dy = Split(tf.stack(upstream[:-1], axis=-1))

      def Body(i: tf.Tensor, grads: Any, *sums: tf.Tensor) -> Any:
        chunk = chunks[i]
        with tf.GradientTape() as tape:
          tape.watch([chunk, *weights])
          y = function(weights, chunk, ids[i])[:-1]
        dx, *dw = tape.gradient(
          y,
          [chunk, *weights],
          output_gradients=tf.unstack(dy[i], axis=-1),
          unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        dw = [tf.cast(tf.convert_to_tensor(g), s.dtype) for g, s in zip(dw, sums, strict=True)]
        return [i + 1, grads.write(i, dx), *map(tf.add, sums, dw)]

      _, grads, *sums = tf.while_loop(
        lambda i, *_: i < num_chunks, Body, [0, grads, *sums], parallel_iterations=1
      )
      return Join(grads.stack()), *(tf.cast(s, w.dtype) for s, w in zip(sums, weights, strict=True))

    # A call without rows tells the dtype of the numbers, which are one tensor in the loop: each
    # tensor costs a dozen operations.
    dtype = function(weights, rows[:0], ids[0, :0])[0].dtype
    outputs = tf.map_fn(
      Forward, tf.range(num_chunks), parallel_iterations=1, fn_output_signature=dtype
    )
    return tuple(tf.unstack(Join(outputs), axis=-1)), Gradient

  return list(Run(rows, *weights))
