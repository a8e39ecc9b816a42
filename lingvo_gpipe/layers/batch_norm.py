# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation as in GPipe: by micro-batch, with moving averages over mini-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  domain,
  fprop_context,
  hyperparams,
  nested_map,
  shapes,
  weight_params,
)


class BatchNormLayer(base_layer.BaseLayer):
  """Normalises every channel: (x - mean) / sqrt(variance + epsilon) * gamma + beta.

  In training, mean and variance are computed over all axes of the micro-batch but the last (Huang
  et al. 2019, section 2.2; Ioffe & Szegedy 2015); with `over_replicas`, over one micro-batch of
  each replica of the pipeline. Results therefore depend on the number of micro-batches, but not on
  the cut, the schedule or the recomputation.

  After each mini-batch the moving averages are updated with the mean and the (biased) variance of
  the whole mini-batch, for micro-batches of any sizes. Evaluation normalises by the moving
  averages. They are updated whenever the layer runs in training mode, even if gamma and beta are
  not trained.

  Statistics are computed in float32, or in float64 for float64 activations, and the variance from
  deviations from the mean; sums over micro-batches are float64. `gamma` starts at 1 and multiplies
  the output directly (Lingvo multiplies by 1 + gamma).
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a BatchNormLayer, with Lingvo's names."""
    p = super().Params()
    p.Define('dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define(
      'decay',
      0.999,
      'Share of a moving average that an update keeps. None: the plain mean over all mini-batches '
      'so far.',
      domain.Number(0, below=1) | domain.NONE,
    )
    p.Define('epsilon', 1e-3, 'Added to the variance.', domain.POSITIVE)
    p.Define('center', True, 'Whether to add a trained beta.')
    p.Define('scale', True, 'Whether to multiply by a trained gamma.')
    p.Define(
      'use_moving_avg_in_training', False, 'Whether to use the moving averages in training too.'
    )
    p.Define('set_padded_output_to_zero', True, 'Whether to set outputs at padded positions to 0.')
    p.Define(
      'over_replicas',
      False,
      'Whether to normalise over the micro-batches of all replicas. Needs stages without XLA.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self.sums_over_replicas = bool(p.over_replicas)
    ones, zeros = weight_params.WeightInit.Constant(1.0), weight_params.WeightInit.Constant(0.0)
    if p.scale:
      self.CreateVariable('gamma', weight_params.WeightParams([p.dim], ones))
    if p.center:
      self.CreateVariable('beta', weight_params.WeightParams([p.dim], zeros))
    self.CreateVariable('moving_mean', weight_params.WeightParams([p.dim], zeros), trainable=False)
    self.CreateVariable(
      'moving_variance', weight_params.WeightParams([p.dim], ones), trainable=False
    )
    if p.decay is None:
      count = weight_params.WeightParams([], zeros, tf.int64)
      self.CreateVariable('num_updates', count, trainable=False)

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns the weights in their own dtype: moving averages would lose precision in bfloat16."""
    return nested_map.NestedMap(variables)

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> Any:
    """Normalises the inputs, and in training reports the sums of the micro-batch.

    Args:
      theta: gamma, beta, moving_mean and moving_variance, [dim].
      inputs: [batch, ..., dim].
      *extras: further outputs of the previous layer, returned unchanged. The first is the paddings:
        None, or a tensor with the leading axes of `inputs`, such as [batch, time], that is 1.0 at
        padded positions. Padded positions are left out of the statistics.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype; if there are `extras`, the tuple (tensor,
      *extras).
    """
    p = self.params
    shapes.CheckLastDim(self.path, inputs, p.dim)
    dtype = p.fprop_dtype
    compute = tf.float32 if dtype.size < 4 else dtype
    x = tf.cast(inputs, compute)
    keep = self._NonPaddingMask(inputs, extras[0]) if extras and extras[0] is not None else None
    mean, variance = tf.cast(theta.moving_mean, compute), tf.cast(theta.moving_variance, compute)
    if not self.do_eval:
      context = fprop_context.Current()
      # With over_replicas each replica reports the sums of all, which does not change a mean.
      count, *moments = _Moments(x, keep, functools.partial(context.SumOverReplicas, self))
      context.AddSums(self, _Sums(count, *moments))
      if not p.use_moving_avg_in_training:
        mean, variance = moments
    scale = tf.math.rsqrt(variance + tf.constant(p.epsilon, compute))
    if p.scale:
      scale *= tf.cast(theta.gamma, compute)
    y = (x - mean) * scale
    if p.center:
      y += tf.cast(theta.beta, compute)
    if keep is not None and p.set_padded_output_to_zero:
      y = tf.where(keep, y, tf.zeros([], compute))
    y = tf.cast(y, dtype)
    return (y, *extras) if extras else y

  def _NonPaddingMask(self, inputs: tf.Tensor, paddings: tf.Tensor) -> tf.Tensor:
    """Returns a bool mask that broadcasts over `inputs`, False at padded positions."""
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
    """Returns the moving averages after a mini-batch; unchanged if all of it was padding."""
    mean = tf.math.divide_no_nan(sums.sum, sums.count)
    # E[x^2] - E[x]^2 in float64, from float32 moments, so that cancellation does no harm.
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
  """Returns (number of values per channel, mean [dim], variance [dim]) in the dtype of x.

  Args:
    x: [..., dim].
    keep: a bool mask that broadcasts over x, False at padded positions; None: there is no padding.
    total: maps a sum over x, [] or [dim], to the sum over all replicas.
  """
  axes = list(range(x.shape.rank - 1))

  def MaskPadding(values: tf.Tensor) -> tf.Tensor:
    return values if keep is None else tf.where(keep, values, tf.zeros([], x.dtype))

  if keep is None:
    count = tf.size(x) // x.shape[-1]
  else:
    # Each position has as many values as the axes that the paddings lack.
    wide = tf.size(x) // (tf.size(keep) * x.shape[-1])
    count = tf.math.count_nonzero(keep, dtype=tf.int32) * wide
  count = total(tf.cast(count, x.dtype))
  mean = tf.math.divide_no_nan(total(tf.reduce_sum(MaskPadding(x), axes)), count)
  squares = tf.reduce_sum(tf.square(MaskPadding(x - mean)), axes)
  return count, mean, tf.math.divide_no_nan(total(squares), count)


def _Sums(count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> dict[str, tf.Tensor]:
  """Returns count, sum and sum of squares in float64, from accurate moments.

  This keeps the pooled variance accurate if the mean is large: sums of squares in float32 would
  lose its digits.
  """
  count, mean, variance = (tf.cast(value, tf.float64) for value in (count, mean, variance))
  return {
    'count': count,
    'sum': count * mean,
    'sum_squares': count * (variance + tf.square(mean)),
  }
