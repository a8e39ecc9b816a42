# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation as GPipe has it: micro-batches normalise, mini-batches make the averages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  fprop_context,
  hyperparams,
  nested_map,
  shapes,
  weight_params,
)


class BatchNormLayer(base_layer.BaseLayer):
  """Normalises every channel: (x - mean) / sqrt(variance + epsilon) * gamma + beta.

  In training mean and variance are those of the micro-batch over all axes but the last (Huang et
  al. 2019, section 2.2; Ioffe & Szegedy 2015); with `over_replicas`, those of one micro-batch of
  each replica of the pipeline together. So results depend on the number of micro-batches,
  but not on the cut, the schedule or what is recomputed. Once a mini-batch the moving averages
  follow the mean and the (biased) variance of the whole mini-batch, whatever the sizes of its
  micro-batches; evaluation normalises by them. They follow wherever the layer runs in training
  mode, also where gamma and beta are not trained.

  Statistics are computed in float32, or float64 for float64 activations, the variance from
  deviations from the mean; sums over micro-batches are float64. `gamma` starts at 1 and is applied
  as it is (Lingvo's is 1 + gamma).
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a BatchNormLayer; names as Lingvo's."""
    p = super().Params()
    p.Define('dim', 0, 'Size of the last axis.')
    p.Define(
      'decay',
      0.999,
      'How much of a moving average stays in an update. None: the averages of all mini-batches so '
      'far, each counting the same.',
    )
    p.Define('epsilon', 1e-3, 'Added to the variance.')
    p.Define('center', True, 'Adds a trained beta.')
    p.Define('scale', True, 'Multiplies by a trained gamma.')
    p.Define(
      'use_moving_avg_in_training', False, 'Normalise by the moving averages in training too.'
    )
    p.Define('set_padded_output_to_zero', True, 'Outputs at padded positions are 0.')
    p.Define(
      'over_replicas',
      False,
      'Normalise by the micro-batches of all replicas together. Needs stages without XLA.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'dim')
    if not p.epsilon > 0:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: epsilon must be positive, got {p.epsilon!r}'
      )
    if p.decay is not None and not 0 <= p.decay < 1:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: decay must be None, or at least 0 and below 1, '
        f'got {p.decay!r}'
      )
    self.sums_over_replicas = bool(p.over_replicas)
    one, zero = weight_params.WeightInit.Constant(1.0), weight_params.WeightInit.Constant(0.0)
    if p.scale:
      self.CreateVariable('gamma', weight_params.WeightParams([p.dim], one))
    if p.center:
      self.CreateVariable('beta', weight_params.WeightParams([p.dim], zero))
    self.CreateVariable('moving_mean', weight_params.WeightParams([p.dim], zero), trainable=False)
    self.CreateVariable(
      'moving_variance', weight_params.WeightParams([p.dim], one), trainable=False
    )
    if p.decay is None:
      count = weight_params.WeightParams([], zero, tf.int64)
      self.CreateVariable('num_updates', count, trainable=False)

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """The weights in their own dtype: a bfloat16 moving average would lose what it averaged."""
    return nested_map.NestedMap(variables)

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *others: Any) -> Any:
    """Normalises; in training reports the micro-batch's sums.

    Args:
      theta: gamma, beta, moving_mean and moving_variance, [dim].
      inputs: [batch, ..., dim].
      *others: further outputs of the layer before, handed on as they are. The first of them, if
        there are any, is the paddings: None, or 1.0 where padded, of the shape of `inputs` without
        its last axes, as [batch, time]. What is padded counts for nothing.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype; with `others` a tuple of it and them.
    """
    p = self.params
    shapes.CheckLastDim(self.path, inputs, p.dim)
    dtype = p.fprop_dtype
    compute = tf.float32 if dtype.size < 4 else dtype
    x = tf.cast(inputs, compute)
    keep = self._Keep(inputs, others[0]) if others and others[0] is not None else None
    mean, variance = tf.cast(theta.moving_mean, compute), tf.cast(theta.moving_variance, compute)
    if not self.do_eval:
      context = fprop_context.Current()
      # Over replicas each of them reports what all have: that changes no mean.
      count, *moments = _Moments(x, keep, functools.partial(context.SumOverReplicas, self))
      context.AddSums(self, _Sums(count, *moments))
      if not p.use_moving_avg_in_training:
        mean, variance = moments
    y = (x - mean) * tf.math.rsqrt(variance + tf.constant(p.epsilon, compute))
    if p.scale:
      y *= tf.cast(theta.gamma, compute)
    if p.center:
      y += tf.cast(theta.beta, compute)
    if keep is not None and p.set_padded_output_to_zero:
      y = tf.where(keep, y, tf.zeros([], compute))
    y = tf.cast(y, dtype)
    return (y, *others) if others else y

  def _Keep(self, inputs: tf.Tensor, paddings: tf.Tensor) -> tf.Tensor:
    """A bool mask that broadcasts over `inputs`, False where padded."""
    rank = paddings.shape.rank
    if not 0 < rank < inputs.shape.rank:
      raise ValueError(
        f'{self.path}: paddings must have the leading dimensions of inputs {inputs.shape}, got '
        f'shape {paddings.shape}'
      )
    shapes.CheckShape(self.path, paddings, inputs.shape.as_list()[:rank], 'paddings')
    wide = [*shapes.GetShape(paddings), *[1] * (inputs.shape.rank - rank)]
    return tf.reshape(paddings, wide) < 0.5

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]:
    """The moving averages after a mini-batch; as they were where all of it was padding."""
    mean = tf.math.divide_no_nan(sums.sum, sums.count)
    # Of all, less that of the mean: in float64 from sums of float32, so nothing is cancelled out.
    variance = tf.math.divide_no_nan(sums.sum_squares, sums.count) - tf.square(mean)
    new: dict[str, tf.Tensor] = {}
    if self.params.decay is None:
      new['num_updates'] = state.num_updates + 1
      rate = 1.0 / tf.cast(new['num_updates'], tf.float64)
    else:
      rate = tf.constant(1.0 - self.params.decay, tf.float64)
    for name, value in (('moving_mean', mean), ('moving_variance', tf.maximum(variance, 0.0))):
      old = tf.cast(state[name], tf.float64)
      new[name] = tf.cast(old + (value - old) * rate, state[name].dtype)
    return {name: tf.where(sums.count > 0, value, state[name]) for name, value in new.items()}


def _Moments(
  x: tf.Tensor, keep: tf.Tensor | None, total: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """(count of values a channel, their mean [dim], their variance [dim]), in the dtype of x.

  Args:
    x: [..., dim].
    keep: as `BatchNormLayer._Keep` returns it; None: all.
    total: makes of a sum over x, [] or [dim], one over all that counts.
  """
  axes = list(range(x.shape.rank - 1))

  def Kept(values: tf.Tensor) -> tf.Tensor:
    return values if keep is None else tf.where(keep, values, tf.zeros([], x.dtype))

  if keep is None:
    count = tf.size(x) // x.shape[-1]
  else:
    # Each kept position stands for the product of the axes that the paddings do not have.
    wide = tf.size(x) // (tf.size(keep) * x.shape[-1])
    count = tf.math.count_nonzero(keep, dtype=tf.int32) * wide
  count = total(tf.cast(count, x.dtype))
  mean = tf.math.divide_no_nan(total(tf.reduce_sum(Kept(x), axes)), count)
  squares = tf.reduce_sum(tf.square(Kept(x - mean)), axes)
  return count, mean, tf.math.divide_no_nan(total(squares), count)


def _Sums(count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> dict[str, tf.Tensor]:
  """Count, sum and sum of squares, in float64 from accurate moments.

  So the pooled variance keeps its digits where the mean is large: the squares of float32 values,
  summed up in float32, would lose them.
  """
  count, mean, variance = (tf.cast(value, tf.float64) for value in (count, mean, variance))
  return {
    'count': count,
    'sum': count * mean,
    'sum_squares': count * (variance + tf.square(mean)),
  }
