# SPDX-License-Identifier: Apache-2.0
"""Synthetic data with a learnable rule, for tests and benchmarks.

Every example is a function of its index and `p.data_seed`, in exact arithmetic, so it is
bit-for-bit equal in any batch and on any machine. Inputs with the same `p.data_seed` follow the
same rule. Disjoint ranges of indices (`p.first_example`) serve as training data and held-out data.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.distributed import host_memory
from lingvo_gpipe.input import base_input_generator, index_order


class _SyntheticInput(base_input_generator.BaseInputGenerator):
  """Base of the synthetic inputs: the range of examples and the seed of the rule."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('num_examples', 1024, 'Size of the data set.', domain.EXAMPLES)
    p.Define(
      'first_example',
      0,
      'Index of the first example: other data with the same rule.',
      domain.EXAMPLES,
    )
    p.Define('data_seed', 0, 'Seed of the rule and of the examples (random_seed: of the order).')
    return p

  def NumExamples(self) -> int:
    return self.params.num_examples

  def _Hashes(self, purpose: int, indices: tf.Tensor, width: int) -> tf.Tensor:
    """Returns uint64 [n, width], random numbers of the examples `indices`, int64 [n]."""
    places = (indices + self.params.first_example)[:, tf.newaxis] * width
    seed = self.params.data_seed * _NUM_PURPOSES + purpose
    return index_order.TensorHash64(seed, places + tf.range(width, dtype=tf.int64))

  def _RuleHashes(self, purpose: int, size: int) -> np.ndarray:
    """Returns uint64 [size], random numbers of the rule."""
    self._CheckRule(8 * size)
    with tf.init_scope(), tf.device('/device:CPU:0'):
      seed = self.params.data_seed * _NUM_PURPOSES + purpose
      return index_order.TensorHash64(seed, tf.range(size, dtype=tf.int64)).numpy()

  def _CheckRule(self, num_bytes: int) -> None:
    """Raises ValueError if the numbers of the rule exceed the memory."""
    content = f'the numbers of the rule of {type(self).__name__} {self.params.name!r}'
    host_memory.CheckBytes(content, num_bytes, 'take smaller sizes')


# Purposes of random numbers; each one has its own seed.
_FIRST_IDS, _NEXT_ID, _INPUTS, _HIDDEN_WEIGHTS, _TARGET_WEIGHTS = range(5)
_NUM_PURPOSES = 8


class SyntheticLmInput(_SyntheticInput):
  """Sequences in which each id is a seeded permutation of the id `p.order` positions before it.

  The first `p.order` ids of a sequence are random. A batch has the fields of TextBytesInput: `ids`,
  `labels` int32 [batch, time] (labels[:, t] is the id after ids[:, t]), `weights` float32 [batch,
  time], all 1, and `example_weights`. A model that knows the rule reaches the loss `LossFloor()`,
  an untrained one log(vocab_size).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('seq_len', 32, 'Number of ids that an example predicts.', domain.SIZE)
    p.Define('vocab_size', 64, 'Ids are 0 ... vocab_size - 1.', domain.Size(2))
    p.Define('order', 1, 'Distance to the earlier id that determines an id.', domain.SIZE)
    return p

  def LossFloor(self) -> float:
    """Returns the minimum mean cross-entropy in nats per id; random labels cost log(vocab_size)."""
    p = self.params
    num_random = min(p.order - 1, p.seq_len)
    return num_random * math.log(p.vocab_size) / p.seq_len

  @functools.cached_property
  def _powers(self) -> tf.Tensor:
    """int32 [j, vocab_size]: the permutation applied j times, for all j that a sequence needs."""
    p = self.params
    self._CheckRule(20 * p.vocab_size * (p.seq_len // p.order + 1))  # Three copies exist at once.
    # Sorts hashes, as the streams of NumPy's generators change with its versions.
    permutation = np.argsort(self._RuleHashes(_NEXT_ID, p.vocab_size), kind='stable')
    powers = [np.arange(p.vocab_size)]
    for _ in range(p.seq_len // p.order):
      powers.append(permutation[powers[-1]])
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tf.constant(np.stack(powers), tf.int32)

  def _ExampleSpec(self) -> nested_map.NestedMap:
    shape = [self.params.seq_len]
    return nested_map.NestedMap(
      ids=tf.TensorSpec(shape, tf.int32),
      labels=tf.TensorSpec(shape, tf.int32),
      weights=tf.TensorSpec(shape, tf.float32),
    )

  def _Examples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    p = self.params
    hashes = self._Hashes(_FIRST_IDS, indices, p.order)
    first_ids = tf.cast(tf.math.floormod(hashes, tf.constant(p.vocab_size, tf.uint64)), tf.int32)
    times = tf.range(p.seq_len + 1)
    from_ids = tf.gather(first_ids, times % p.order, axis=1)
    exponents = tf.broadcast_to(times // p.order, tf.shape(from_ids))
    ids = tf.gather_nd(self._powers, tf.stack([exponents, from_ids], axis=-1))
    return nested_map.NestedMap(
      ids=ids[:, :-1],
      labels=ids[:, 1:],
      weights=tf.ones_like(ids[:, 1:], tf.float32),
    )

  def _FingerprintParts(self) -> list[Any]:
    p = self.params
    return ['synthetic_lm', p.data_seed, p.first_example, p.seq_len, p.vocab_size, p.order]


class SyntheticRegressionInput(_SyntheticInput):
  """Dense inputs, and targets computed from them by a seeded network with one hidden layer.

  `inputs` are float32 [batch, *p.input_shape], uniform in [-2, 2); `targets` float32 [batch,
  p.num_targets] = relu(inputs A) B with about unit scale.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'input_shape',
      [32],
      'Shape of one example, such as [32] or [8, 8, 3].',
      domain.ListOf(domain.SIZE, not_empty=True),
    )
    p.Define('num_targets', 1, 'Number of values to predict.', domain.SIZE)
    p.Define('num_hidden', 8, 'Hidden units of the rule.', domain.SIZE)
    return p

  @functools.cached_property
  def _rule(self) -> tuple[tf.Tensor, tf.Tensor]:
    """float64 A [inputs, hidden] and B [hidden, targets]."""
    p = self.params
    num_inputs = math.prod(p.input_shape)
    hidden = _EighthsFromHashes(self._RuleHashes(_HIDDEN_WEIGHTS, num_inputs * p.num_hidden))
    target = _EighthsFromHashes(self._RuleHashes(_TARGET_WEIGHTS, p.num_hidden * p.num_targets))
    hidden = hidden.reshape([num_inputs, p.num_hidden]) * _PowerOfTwoNear(num_inputs**-0.5)
    target = target.reshape([p.num_hidden, p.num_targets]) * _PowerOfTwoNear(p.num_hidden**-0.5)
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tf.constant(hidden, tf.float64), tf.constant(target, tf.float64)

  def _ExampleSpec(self) -> nested_map.NestedMap:
    return nested_map.NestedMap(
      inputs=tf.TensorSpec(self.params.input_shape, tf.float32),
      targets=tf.TensorSpec([self.params.num_targets], tf.float32),
    )

  def _Examples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    p = self.params
    hidden_weights, target_weights = self._rule
    hashes = self._Hashes(_INPUTS, indices, math.prod(p.input_shape))
    # Inputs are multiples of 2^-8 and weights of 2^-3 times a power of two: every sum below is
    # exact in float64, so the result does not depend on the order of summation, which may differ
    # between batches.
    steps = tf.cast(tf.math.floormod(hashes, tf.constant(1024, tf.uint64)), tf.float64)
    inputs = (steps - 512.0) / 256.0
    targets = tf.nn.relu(inputs @ hidden_weights) @ target_weights
    return nested_map.NestedMap(
      inputs=tf.reshape(tf.cast(inputs, tf.float32), [-1, *p.input_shape]),
      targets=tf.cast(targets, tf.float32),
    )

  def _FingerprintParts(self) -> list[Any]:
    p = self.params
    parts = [p.data_seed, p.first_example, list(p.input_shape), p.num_targets, p.num_hidden]
    return ['synthetic_regression', *parts]


def _EighthsFromHashes(hashes: np.ndarray) -> np.ndarray:
  """Returns float64 multiples of 1/8 in [-2, 2)."""
  return (hashes % 32).astype(np.float64) / 8.0 - 2.0


def _PowerOfTwoNear(value: float) -> float:
  return 2.0 ** round(math.log2(value))
