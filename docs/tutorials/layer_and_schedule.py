# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # A layer and a schedule of your own
#
# A layer has Params, weights, and a pure function `FProp` of both and its inputs. A schedule is a
# list of actions for each device. Neither knows the other, so any layer runs under any schedule.
#
# ## A layer
#
# This one lets one projection gate another one. `CreateVariable` only declares a weight; `FProp`
# gets its value in `theta`. It must not use anything that differs between equal layers, such as a
# name or a counter, because equal layers share one trace.

# %%
import tensorflow as tf

from lingvo_gpipe import (
  base_layer,
  cluster,
  domain,
  pipelining_layer,
  schedules,
  simulator,
  verify,
  weight_params,
)

K, M, BATCH, DIM = 2, 6, 36, 16
devices = cluster.Cluster.Create(K, platform='cpu').devices


class GatedLayer(base_layer.BaseLayer):
  """x + (x w_in) * sigmoid(x w_gate)."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', 0, 'Size of the last axis of inputs and outputs.', domain.Int(1))
    return p

  def __init__(self, params):
    super().__init__(params)
    dim = self.params.dim
    self.CreateVariable('w_in', weight_params.WeightParams([dim, dim]))
    self.CreateVariable('w_gate', weight_params.WeightParams([dim, dim]))

  def FProp(self, theta, inputs):
    return inputs + (inputs @ theta.w_in) * tf.sigmoid(inputs @ theta.w_gate)


layer = GatedLayer.Params().Set(name='gated', dim=DIM)
print(GatedLayer.FPropMeta(layer, tf.TensorSpec([BATCH, DIM])).flops, 'operations, counted')

# %% [markdown]
# `domain.Int(1)` says which values the param may have, so a wrong one is found when the layer is
# made:

# %%
try:
  layer.Copy().Set(dim=0).Instantiate()
except ValueError as e:
  print(e)

# %% [markdown]
# ## In a pipeline
#
# Six of them in two stages. `Verify` runs a training step, and compares losses and gradients with
# the same layers on one device.

# %%
inputs = tf.random.stateless_normal([BATCH, DIM], [1, 0])
targets = tf.random.stateless_normal([BATCH, DIM], [1, 1])


def Weight(targets):
  return tf.cast(tf.shape(targets)[0], tf.float32)


def Loss(theta, outputs, targets):
  return {'loss': (tf.reduce_mean(tf.square(outputs[0] - targets)), Weight(targets))}


def Check(schedule):
  """Trains a step under a schedule; prints whether the result is that of one device."""
  p = pipelining_layer.PipeliningLayer.Params().Set(name='net', sub=[layer] * 6)
  p.Set(num_stages=K, num_micro_batches=M, schedule=schedule)
  net = p.Instantiate()
  net.Place(devices, tf.TensorSpec(inputs.shape), loss_fn=Loss)
  report = verify.Verify(net, (inputs,), targets, loss_fn=Loss, loss_weight=Weight)
  assert not report.Failures()
  print(f'{schedule:12}', report.Text().splitlines()[-1])


Check('1f1b')

# %% [markdown]
# ## A schedule
#
# Slow links make `1f1b` wait: each backward of stage 0 needs a result that has just been sent. With
# more forwards ahead, there is work in the meantime. A registered function returns the actions of
# each device, for any number of stages and micro-batches.

# %%
Action, Kind = schedules.Action, schedules.Kind


@schedules.Register('1f1b_eager')
def Eager(num_stages, num_micro_batches, num_devices):
  """1F1B with twice as many forwards before the first backward."""
  rows = []
  for k in range(num_stages):
    ahead = min(2 * (num_stages - 1 - k) + 1, num_micro_batches)
    row = [Action(k, Kind.FORWARD, m) for m in range(ahead)]
    for m in range(num_micro_batches):
      row.append(Action(k, Kind.BACKWARD, m))
      if m + ahead < num_micro_batches:
        row.append(Action(k, Kind.FORWARD, m + ahead))
    rows.append(row)
  return schedules.Schedule('1f1b_eager', num_stages, num_micro_batches, rows, range(num_stages))


print(schedules.Get('1f1b_eager', K, M).Picture())

# %% [markdown]
# `Get` has checked that each stage runs each micro-batch once, in an order that is possible. The
# simulator shows the time of the order, and its cost in memory:

# %%
for name in ('gpipe', '1f1b', '1f1b_eager'):
  schedule = schedules.Get(name, 4, 8)
  for latency in (0, 1):
    result = simulator.Simulate(schedule, simulator.Costs(forward=1, latency=latency))
    print(f'{name:10}  latency {latency}  step {result.makespan:g}  held {result.peak_activations}')

# %% [markdown]
# And the gradients are equal here, too:

# %%
Check('1f1b_eager')

# %% [markdown]
# [Schedules](../schedules.md) has the notation and the other ways to write one;
# [Contributing](../../CONTRIBUTING.md) lists the parts of a new layer or schedule.
