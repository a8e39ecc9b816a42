# SPDX-License-Identifier: Apache-2.0
"""Experiments that save after each step, on data by index, on a stream and on failing data."""

from lingvo_gpipe import registry, synthetic
from tasks import regression


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return synthetic.SyntheticRegressionInput.Params().Set(batch_size=3, num_examples=50)

  def Task(self):
    p = regression.Regression.Params().Set(name='toy')
    p.train.Set(save_interval_steps=1, save_max_to_keep=2, summary_interval_steps=10**6)
    p.train.ema_decay = 0.9
    return p


@registry.RegisterSingleTaskModel
class Stream(Toy):
  def Train(self):
    return regression.Draws.Params().Set(batch_size=3, shuffle_buffer_size=20)


@registry.RegisterSingleTaskModel
class Failing(Toy):
  def Train(self):
    return regression.FailingInput.Params().Set(
      batch_size=3, num_examples=50, bad_example=13, shuffle=False
    )
