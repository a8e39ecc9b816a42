# SPDX-License-Identifier: Apache-2.0
"""Params, and values that Params may hold, for the tests of Params."""

import dataclasses

import pytest

from lingvo_gpipe.core import hyperparams, literals


@dataclasses.dataclass
class Options:
  alpha: float = 0.5
  names: list = dataclasses.field(default_factory=list)


class Layer:
  def __init__(self, params, **kwargs):
    self.params = params
    self.kwargs = kwargs


def Activation(x):
  return x


literals.AllowPackageOf(Layer)


def Leaf(**kwargs):
  p = hyperparams.Params()
  for name, value in kwargs.items():
    p.Define(name, value, f'The {name}.')
  return p


def Model():
  """Returns a tree of Params like the Params of a model."""
  return Leaf(
    task=Leaf(
      name='lm',
      train=Leaf(learning_rate=0.1, max_steps=100, warmup=None, shuffle=True),
      layers=[Leaf(dim=i, sizes=[i]) for i in range(3)],
      groups={'a': Leaf(x=1), 'b.c': Leaf(x=2), 7: Leaf(x=3)},
      stages=(Leaf(x=4), [5, Leaf(x=6)]),
      sub=[('first', Leaf(x=7)), ('second', Leaf(x=8))],
    ),
    cluster=Leaf(devices=2),
  )


def Message(error, fn, *args, **kwargs):
  """Returns the message of the error that the call raises, and checks that it is one line."""
  with pytest.raises(error) as info:
    fn(*args, **kwargs)
  assert type(info.value) is error
  assert '\n' not in str(info.value)
  return str(info.value)
