# SPDX-License-Identifier: Apache-2.0
"""The model of `tests/toys/training.py`, with a data set for evaluations."""

from lingvo_gpipe import registry
from tasks import training


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return training.Input('Train')

  def Dev(self):
    return training.Input('Dev')

  def Task(self):
    return training.Params().task
