# SPDX-License-Identifier: Apache-2.0
"""The order of a data set's examples: one seeded permutation per epoch, computable at any position.

Everything here is a pure function of integers, so the position in a run is one integer and seeking
is free. Restarts rely on the values, so a test pins them.
"""

from __future__ import annotations

import tensorflow as tf

# The increment and multipliers of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
# number generators", OOPSLA 2014).
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

# The cipher's key has three words. With its default of four rounds, permutations of neighbouring
# keys are correlated; eight rounds with hashed keys passed all our statistical tests.
_KEY_WORDS = 3
_ROUNDS = 8


def _Uint64(value: int) -> tf.Tensor:
  return tf.constant(value % 2**64, tf.uint64)


def _Finalize(x: tf.Tensor) -> tf.Tensor:
  """Applies the output function of SplitMix64 to uint64."""
  for shift, multiplier in zip(_SHIFTS[:-1], _MULTIPLIERS, strict=True):
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _Uint64(shift))) * _Uint64(multiplier)
  return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _Uint64(_SHIFTS[-1])))


def TensorHash64(seed: int, values: tf.Tensor) -> tf.Tensor:
  """Returns well-mixed 64-bit hashes of the elements of an integer tensor.

  `weight_params.Hash64` hashes Python values instead.

  Args:
    seed: any Python integer (taken modulo 2^64); different seeds give independent hashes.
    values: integers of any shape.

  Returns:
    uint64 of the shape of `values`.
  """
  increment = _Uint64(_INCREMENT)
  key = _Finalize(_Uint64(seed) + increment)
  mixed = _Finalize(tf.cast(values, tf.uint64) * increment + increment)
  return _Finalize(tf.bitwise.bitwise_xor(mixed, key))


def ShuffledIndices(positions: tf.Tensor, num_examples: int, random_seed: int) -> tf.Tensor:
  """Returns the examples at some positions of an endless run over shuffled epochs.

  Epoch e = position // num_examples visits every index once, in an order determined by
  (random_seed, e).

  Args:
    positions: int64 [n], numbers of examples since the start of the run, >= 0.
    num_examples: size of the data set, >= 1.
    random_seed: any Python integer.

  Returns:
    int64 [n], indices in [0, num_examples).
  """
  epochs = positions // num_examples
  offsets = tf.math.floormod(positions, num_examples)
  firsts = epochs * (_KEY_WORDS + 1)
  # One call for all words of the key: operations, not sizes, decide how long tracing takes.
  words = tf.expand_dims(firsts, -1) + tf.range(_KEY_WORDS, dtype=tf.int64)
  keys = tf.cast(TensorHash64(random_seed, words), tf.uint32)
  if not _IsNotPermutation(num_examples - 1):
    return _Shuffle(offsets, keys, num_examples)
  # Shuffle all indices but the last one, after a rotation by a random amount that moves the
  # position of the last one.
  amounts = TensorHash64(random_seed, firsts + _KEY_WORDS)
  rotation = tf.cast(tf.math.floormod(amounts, _Uint64(num_examples)), tf.int64)
  rotated = tf.math.floormod(offsets + rotation, num_examples)
  last = num_examples - 1
  shuffled = _Shuffle(tf.minimum(rotated, last - 1), keys, num_examples - 1)
  return tf.where(rotated == last, tf.constant(last, tf.int64), shuffled)


def _Shuffle(offsets: tf.Tensor, keys: tf.Tensor, size: int) -> tf.Tensor:
  # tf.random.experimental.index_shuffle is this op with four rounds and one word of the key fixed.
  return tf.raw_ops.RandomIndexShuffle(
    index=offsets, seed=keys, max_index=tf.constant(size - 1, tf.int64), rounds=_ROUNDS
  )


def _IsNotPermutation(max_index: int) -> bool:
  """Whether RandomIndexShuffle is not a permutation for this largest index.

  Its block is the smallest even number of bits, at least 16, that is at least log2(max_index): if
  max_index itself is 2^16, 2^18, 2^20, ... it does not fit into the block, and index max_index gets
  the same result as index 0 (TensorFlow 2.21). For other sizes it is a permutation.
  """
  is_power_of_two = max_index & (max_index - 1) == 0
  num_bits = max_index.bit_length() - 1
  return is_power_of_two and num_bits >= 16 and num_bits % 2 == 0
