# SPDX-License-Identifier: Apache-2.0
"""Experiments of a user, some with mistakes."""

from lingvo_gpipe import registry
from tasks import doubling


@registry.RegisterSingleTaskModel
class Doubling2(registry.SingleTaskModelParams):
  def Train(self):
    return doubling.Points.Params().Set(batch_size=8)

  def Test(self):
    return self.Train()

  def Task(self):
    p = doubling.Doubling.Params().Set(name='mine')
    p.stack.Set(num_stages=2, num_micro_batches=2, xla=False)
    p.train.Set(max_steps=40, eval_datasets=['Test'])
    p.train.learner.learning_rate = 0.1
    return p


@registry.RegisterSingleTaskModel
class Slow(Doubling2):
  def Train(self):
    return super().Train().Set(seconds=90.0)


class _First(Doubling2):
  FIRST = ()

  def Train(self):
    return super().Train().Set(shuffle=False)

  def Task(self):
    p = super().Task()
    p.first = [getattr(doubling, name).Params().Set(dim=3) for name in self.FIRST]
    return p


@registry.RegisterSingleTaskModel
class Ill(_First):
  FIRST = ('Widens', 'Strict')


@registry.RegisterSingleTaskModel
class Unequal(_First):
  FIRST = ('Widens',)


@registry.RegisterSingleTaskModel
class Failing(_First):
  FIRST = ('Scale', 'Bounded')


@registry.RegisterSingleTaskModel
class Diverging(_First):
  FIRST = ('Scale', 'Logarithm')


@registry.RegisterSingleTaskModel
class Misspelt(Doubling2):
  def Task(self):
    return super().Task().Set(nmae='theirs')


@registry.RegisterSingleTaskModel
class Broken(Doubling2):
  def Task(self):
    raise ValueError('out of my own file')
