# SPDX-License-Identifier: Apache-2.0
"""Describes a weight by shape, dtype and initial distribution, and draws its initial value.

This module allocates no variables. The initial value is a pure function of a seed and of the
variable's path, so a model starts from the same weights for every cut into stages and every order
of creating its layers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain


def AccumulatorDtype(dtype: Any) -> tf.DType:
  """Returns the dtype in which the gradients of micro-batches add up, for weights of a dtype.

  Many small numbers would be lost in a sum of bfloat16.
  """
  dtype = tf.as_dtype(dtype)
  return tf.float32 if dtype.size < 4 else dtype


def NewAccumulator(weight: tf.Variable) -> tf.Variable:
  """Returns a variable of zeros to which the gradients of a weight are added."""
  zeros = tf.zeros(weight.shape, AccumulatorDtype(weight.dtype))
  return tf.Variable(zeros, trainable=False, name='accumulator')


@dataclasses.dataclass(frozen=True)
class WeightInit:
  """The initialisation of a weight: a method and its scale.

  The factories have Lingvo's names, for example `WeightInit.Xavier(1.0)`. `fan_in` is
  `shape[-2] * receptive field` and `fan_out` is `shape[-1] * receptive field`; the receptive field
  is the product of the leading dimensions. For a weight of rank one, both are its size. `custom` is
  the function or the values of the two custom methods.
  """

  method: str
  scale: float = 1.0
  custom: Any = None

  def __post_init__(self) -> None:
    if self.method not in _METHODS:
      raise ValueError(
        f'unknown initialisation method {self.method!r}; known: {", ".join(sorted(_METHODS))}'
      )
    if self.method == 'custom' and not callable(self.custom):
      raise ValueError(f'custom of WeightInit must be a function, got {self.custom!r}')
    scales = {'constant': domain.ANY, 'category': domain.Int(1)}  # InitialValue checks a constant.
    scales.get(self.method, domain.NOT_NEGATIVE).Check(f'the scale of {self.method}', self.scale)

  @classmethod
  def Gaussian(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale)."""
    return cls('gaussian', scale)

  @classmethod
  def Uniform(cls, scale: float = 1.0) -> WeightInit:
    """U[-scale, scale]."""
    return cls('uniform', scale)

  @classmethod
  def UniformPositive(cls, scale: float = 1.0) -> WeightInit:
    """U[0, scale]."""
    return cls('uniform_positive', scale)

  @classmethod
  def Category(cls, num_categories: int = 2) -> WeightInit:
    """Integers 0 ... num_categories - 1, equally likely: floor of U[0, num_categories)."""
    return cls('category', num_categories)

  @classmethod
  def CustomVarInit(cls, fn: Callable[[Sequence[int], tf.DType, tf.Tensor], Any]) -> WeightInit:
    """The result of `fn(shape, dtype, seed)`; `seed` is an int64 [2] for stateless random ops."""
    return cls('custom', 1.0, fn)

  @classmethod
  def CustomConstantVarInit(cls, values: Any) -> WeightInit:
    """The given values: nested lists or an array of the weight's shape."""
    return cls('custom_constant', 1.0, values)

  @classmethod
  def ScaledDeltaOrthogonal(cls, scale: float = 1.0) -> WeightInit:
    """A convolution kernel [..., in, out], zero except for an orthogonal matrix in the centre.

    The matrix is scale * the orthonormal rows or columns of a Gaussian matrix (Xiao et al. 2018).
    """
    return cls('delta_orthogonal', scale)

  @classmethod
  def Constant(cls, scale: float = 1.0) -> WeightInit:
    """Every entry equals `scale`."""
    return cls('constant', scale)

  @classmethod
  def TruncatedGaussian(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale), redrawn beyond two standard deviations."""
    return cls('truncated_gaussian', scale)

  @classmethod
  def Xavier(cls, scale: float = 1.0) -> WeightInit:
    """scale * U[-l, l] with l = sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010)."""
    return cls('xavier', scale)

  @classmethod
  def GeoMeanXavier(cls, scale: float = 1.0) -> WeightInit:
    """scale * U[-l, l] with l = sqrt(3 / sqrt(fan_in * fan_out))."""
    return cls('geo_mean_xavier', scale)

  @classmethod
  def XavierWithFixupParams(
    cls, scale: float = 1.0, depth: float = 1.0, layers_per_residual_block: float = 1.0
  ) -> WeightInit:
    """Xavier, scaled by depth^(-1 / (2 * layers_per_residual_block)) (GPipe, section 5; Fixup)."""
    if depth <= 0 or layers_per_residual_block <= 0:
      raise ValueError(
        'depth and layers_per_residual_block must be positive, '
        f'got {depth} and {layers_per_residual_block}'
      )
    return cls('xavier', scale * depth ** (-1.0 / (2.0 * layers_per_residual_block)))

  @classmethod
  def GaussianSqrtDim(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale / sqrt(dim 0))."""
    return cls('gaussian_sqrt_dim', scale)

  @classmethod
  def UniformSqrtDim(cls, scale: float = 1.0) -> WeightInit:
    """U[-l, l] with l = scale / sqrt(dim 0)."""
    return cls('uniform_sqrt_dim', scale)

  @classmethod
  def TruncatedGaussianSqrtDim(cls, scale: float = 1.0) -> WeightInit:
    """Truncated N(0, scale / sqrt(dim 0))."""
    return cls('truncated_gaussian_sqrt_dim', scale)

  @classmethod
  def GaussianSqrtFanIn(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale / sqrt(fan_in))."""
    return cls('gaussian_sqrt_fan_in', scale)

  @classmethod
  def TruncatedGaussianSqrtFanIn(cls, scale: float = 1.0) -> WeightInit:
    """Truncated N(0, scale / sqrt(fan_in))."""
    return cls('truncated_gaussian_sqrt_fan_in', scale)

  @classmethod
  def GaussianSqrtFanOut(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale / sqrt(fan_out))."""
    return cls('gaussian_sqrt_fan_out', scale)

  @classmethod
  def TruncatedGaussianSqrtFanOut(cls, scale: float = 1.0) -> WeightInit:
    """Truncated N(0, scale / sqrt(fan_out))."""
    return cls('truncated_gaussian_sqrt_fan_out', scale)

  @classmethod
  def GaussianSqrtFanAvg(cls, scale: float = 1.0) -> WeightInit:
    """N(0, scale * sqrt(2 / (fan_in + fan_out)))."""
    return cls('gaussian_sqrt_fan_avg', scale)

  @classmethod
  def UniformUnitScaling(cls, scale: float = 1.0) -> WeightInit:
    """U[-l, l] with l = scale * sqrt(3 / dim 0)."""
    return cls('uniform_unit_scaling', scale)

  @classmethod
  def UniformUnitScalingFanAvg(cls, scale: float = 1.0) -> WeightInit:
    """U[-l, l] with l = scale * sqrt(6 / (fan_in + fan_out))."""
    return cls('uniform_unit_scaling_fan_avg', scale)

  @classmethod
  def KaimingUniformFanInRelu(cls, scale: float = 1.0) -> WeightInit:
    """U[-l, l] with l = scale * sqrt(6 / fan_in) (He et al. 2015)."""
    return cls('kaiming_uniform_fan_in_relu', scale)

  @classmethod
  def KaimingUniformFanInLeakyRelu(cls, scale: float = math.sqrt(5.0)) -> WeightInit:
    """U[-l, l] with l = sqrt(6 / ((1 + scale^2) fan_in)): `scale` is the negative slope."""
    return cls('kaiming_uniform_fan_in_leaky_relu', scale)


@dataclasses.dataclass(frozen=True)
class WeightParams:
  """A declared weight: shape, initialisation (None: the layer's), dtype (None: the layer's)."""

  shape: tuple[int, ...]
  init: WeightInit | None = None
  dtype: Any = None

  def __init__(
    self, shape: Sequence[int], init: WeightInit | None = None, dtype: Any = None
  ) -> None:
    shape = tuple(int(d) for d in shape)
    if any(d <= 0 for d in shape):
      raise ValueError(f'every dimension of a weight must be positive, got shape {list(shape)}')
    object.__setattr__(self, 'shape', shape)
    object.__setattr__(self, 'init', init)
    object.__setattr__(self, 'dtype', None if dtype is None else tf.as_dtype(dtype))

  @property
  def num_elements(self) -> int:
    """Number of elements of the weight."""
    return math.prod(self.shape)

  @property
  def accumulator_bytes(self) -> int:
    """Bytes of the accumulator of the weight's gradient, see `NewAccumulator`."""
    return self.num_elements * AccumulatorDtype(self.dtype).size


def Hash64(*parts: int | str) -> int:
  """Returns a signed 64-bit hash of names and numbers, equal on every machine and run."""
  digest = hashlib.sha256('\x00'.join(str(p) for p in parts).encode()).digest()
  return int.from_bytes(digest[:8], 'little', signed=True)


def FanInFanOut(shape: Sequence[int]) -> tuple[int, int]:
  """Returns (fan_in, fan_out) of a weight of this shape; (1, 1) for a scalar."""
  if not shape:
    return 1, 1
  if len(shape) == 1:
    return shape[0], shape[0]
  receptive = math.prod(shape[:-2])
  return shape[-2] * receptive, shape[-1] * receptive


def ForPart(init: WeightInit, part: Sequence[int], whole: Sequence[int]) -> WeightInit:
  """Returns the initialisation that draws a part of a weight as `init` would draw the whole.

  Args:
    init: the initialisation of the whole weight.
    part: the shape of the part.
    whole: the shape of the whole weight.
  """
  _, limit = _METHODS[init.method]
  ratio = limit(whole, 1.0) / limit(part, 1.0)
  return init if ratio == 1 else dataclasses.replace(init, scale=init.scale * ratio)


def _Constant(value: Any, dtype: tf.DType, path: str) -> tf.Tensor:
  """Returns a number as a scalar of a dtype; ValueError if the dtype cannot hold it."""
  try:
    with np.errstate(all='ignore'):
      scalar = np.asarray(value).astype(dtype.as_numpy_dtype)
    is_out_of_range = bool(np.isfinite(value)) and not np.isfinite(scalar)
  except (TypeError, ValueError, OverflowError):
    is_out_of_range = True
  if is_out_of_range:
    raise ValueError(f'{path}: the constant {value!r} does not fit {dtype.name}')
  return tf.constant(scalar, dtype)


def InitialValue(weight: WeightParams, random_seed: int, path: str) -> tf.Tensor:
  """Returns the initial value of the weight at `path`, a tensor of its shape and dtype.

  A stateless generator draws it in float32 (float64 for a float64 weight), seeded with
  `random_seed` and the path, so the value depends on nothing else.
  """
  if weight.init is None or weight.dtype is None:
    raise ValueError(f'{path}: the weight needs an init and a dtype to get a value')
  if not weight.dtype.is_floating and weight.init.method not in _ANY_DTYPE:
    raise ValueError(
      f'{path}: a weight of dtype {weight.dtype.name} needs WeightInit.Constant, Category or a '
      f'custom one, got {weight.init.method}'
    )
  draw_dtype = tf.float64 if weight.dtype == tf.float64 else tf.float32
  if weight.init.method == 'constant':
    return tf.fill(weight.shape, _Constant(weight.init.scale, weight.dtype, path))
  kind, limit = _METHODS[weight.init.method]
  size = limit(weight.shape, weight.init.scale)
  seed = [Hash64(path), int(random_seed)]
  alg = 'philox'  # Draws equal numbers on every kind of device.
  if kind == 'uniform':
    value = tf.random.stateless_uniform(weight.shape, seed, -size, size, draw_dtype, alg=alg)
  elif kind == 'uniform_positive':
    value = tf.random.stateless_uniform(weight.shape, seed, 0.0, size, draw_dtype, alg=alg)
  elif kind == 'category':
    value = tf.floor(tf.random.stateless_uniform(weight.shape, seed, 0.0, size, alg=alg))
  elif kind == 'delta_orthogonal':
    value = _DeltaOrthogonal(weight.shape, seed, size, draw_dtype, path)
  elif kind == 'custom':
    value = weight.init.custom(weight.shape, weight.dtype, tf.constant(seed, tf.int64))
  elif kind == 'custom_constant':
    value = tf.convert_to_tensor(weight.init.custom)
  elif kind == 'gaussian':
    value = tf.random.stateless_normal(weight.shape, seed, 0.0, size, draw_dtype, alg=alg)
  else:
    value = tf.random.stateless_truncated_normal(weight.shape, seed, 0.0, size, draw_dtype, alg=alg)
  if tuple(value.shape) != weight.shape:
    raise ValueError(f'{path}: expected an initial value of {weight.shape}, got {value.shape}')
  return tf.cast(value, weight.dtype)


def _DeltaOrthogonal(
  shape: Sequence[int], seed: list[int], scale: float, dtype: tf.DType, path: str
) -> tf.Tensor:
  if len(shape) < 3:
    raise ValueError(f'{path}: ScaledDeltaOrthogonal is for kernels [..., in, out], got {shape}')
  rows, columns = shape[-2:]
  large, small = max(rows, columns), min(rows, columns)
  q, r = tf.linalg.qr(tf.random.stateless_normal([large, small], seed, dtype=dtype, alg='philox'))
  # Without the signs of r's diagonal, q is uniform over the orthogonal matrices.
  q *= tf.sign(tf.linalg.diag_part(r))
  matrix = scale * (q if rows >= columns else tf.transpose(q))
  centre = [size // 2 for size in shape[:-2]]
  return tf.scatter_nd([centre], [matrix], shape)


def _FanIn(shape: Sequence[int]) -> int:
  return FanInFanOut(shape)[0]


def _FanOut(shape: Sequence[int]) -> int:
  return FanInFanOut(shape)[1]


def _FanSum(shape: Sequence[int]) -> int:
  return sum(FanInFanOut(shape))


def _Dim0(shape: Sequence[int]) -> int:
  return shape[0] if shape else 1


_ANY_DTYPE = frozenset({'constant', 'category', 'custom', 'custom_constant'})

# {method: (distribution, its half-width or standard deviation from shape and scale)}.
_METHODS: dict[str, tuple[str, Callable[[Sequence[int], float], float]]] = {
  'constant': ('constant', lambda shape, scale: scale),
  'category': ('category', lambda shape, scale: scale),
  'custom': ('custom', lambda shape, scale: scale),
  'custom_constant': ('custom_constant', lambda shape, scale: scale),
  'delta_orthogonal': ('delta_orthogonal', lambda shape, scale: scale),
  'gaussian': ('gaussian', lambda shape, scale: scale),
  'uniform': ('uniform', lambda shape, scale: scale),
  'uniform_positive': ('uniform_positive', lambda shape, scale: scale),
  'truncated_gaussian': ('truncated', lambda shape, scale: scale),
  'xavier': ('uniform', lambda shape, scale: scale * math.sqrt(6.0 / _FanSum(shape))),
  'geo_mean_xavier': (
    'uniform',
    lambda shape, scale: scale * math.sqrt(3.0 / math.sqrt(_FanIn(shape) * _FanOut(shape))),
  ),
  'gaussian_sqrt_dim': ('gaussian', lambda shape, scale: scale / math.sqrt(_Dim0(shape))),
  'uniform_sqrt_dim': ('uniform', lambda shape, scale: scale / math.sqrt(_Dim0(shape))),
  'truncated_gaussian_sqrt_dim': (
    'truncated',
    lambda shape, scale: scale / math.sqrt(_Dim0(shape)),
  ),
  'gaussian_sqrt_fan_in': ('gaussian', lambda shape, scale: scale / math.sqrt(_FanIn(shape))),
  'truncated_gaussian_sqrt_fan_in': (
    'truncated',
    lambda shape, scale: scale / math.sqrt(_FanIn(shape)),
  ),
  'gaussian_sqrt_fan_out': ('gaussian', lambda shape, scale: scale / math.sqrt(_FanOut(shape))),
  'truncated_gaussian_sqrt_fan_out': (
    'truncated',
    lambda shape, scale: scale / math.sqrt(_FanOut(shape)),
  ),
  'gaussian_sqrt_fan_avg': (
    'gaussian',
    lambda shape, scale: scale * math.sqrt(2.0 / _FanSum(shape)),
  ),
  'uniform_unit_scaling': ('uniform', lambda shape, scale: scale * math.sqrt(3.0 / _Dim0(shape))),
  'uniform_unit_scaling_fan_avg': (
    'uniform',
    lambda shape, scale: scale * math.sqrt(6.0 / _FanSum(shape)),
  ),
  'kaiming_uniform_fan_in_relu': (
    'uniform',
    lambda shape, scale: scale * math.sqrt(6.0 / _FanIn(shape)),
  ),
  'kaiming_uniform_fan_in_leaky_relu': (
    'uniform',
    lambda shape, scale: math.sqrt(6.0 / ((1.0 + scale * scale) * _FanIn(shape))),
  ),
}
