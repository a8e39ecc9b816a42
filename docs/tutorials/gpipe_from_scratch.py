# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # GPipe from scratch
#
# GPipe trains a network that is too large for one device. It cuts the network into stages, sends
# the mini-batch through them in micro-batches, and recomputes activations in the backward pass.
# Here we write that by hand in a few lines, without devices, and see that the gradients do not
# change. Then the library does the same.

# %%
import tensorflow as tf

from lingvo_gpipe import (
  cluster,
  linear,
  pipelining_layer,
  schedule_svg,
  schedules,
  simulator,
  verify,
)

K, M, BATCH, DIM = 2, 4, 32, 16
devices = cluster.Cluster.Create(K, platform='cpu').devices
weights = [tf.random.stateless_normal([DIM, DIM], [1, i]) / DIM**0.5 for i in range(8)]
inputs = tf.random.stateless_normal([BATCH, DIM], [2, 0])
targets = tf.random.stateless_normal([BATCH, DIM], [2, 1])


def Layers(x, layers):
  for w in layers:
    x = tf.tanh(x @ w)
  return x


def Loss(x, y):
  return tf.reduce_mean(tf.square(x - y))


with tf.GradientTape() as tape:
  tape.watch(weights)
  loss = Loss(Layers(inputs, weights), targets)
expected = tape.gradient(loss, weights)
print(f'loss {loss:.6f}, {len(weights)} layers')

# %% [markdown]
# ## Cut and split
#
# Two stages of four layers, and four micro-batches of eight examples. On two devices stage 1 would
# run micro-batch 0 while stage 0 runs micro-batch 1. A stage keeps only its input of each
# micro-batch: the outputs of its layers are dropped.

# %%
stages = [weights[:4], weights[4:]]
kept = []  # For each micro-batch the input of each stage.
for x in tf.split(inputs, M):
  stage_inputs = []
  for stage in stages:
    stage_inputs.append(x)
    x = Layers(x, stage)
  kept.append(stage_inputs)
print(f'kept: {M * K} tensors of {kept[0][0].shape}, in place of {M * len(weights)}')

# %% [markdown]
# ## Backward with recomputation
#
# Backward goes from the last micro-batch to the first, and from the last stage to the first. A
# stage runs its forward again from the input that it kept. It turns the gradient of its output into
# gradients of its input and its weights. The gradients of the weights are added up over the
# micro-batches.

# %%
sums = [[tf.zeros_like(w) for w in stage] for stage in stages]
for m in reversed(range(M)):
  gradient = None
  for k in reversed(range(K)):
    with tf.GradientTape() as tape:
      tape.watch([kept[m][k], stages[k]])
      y = Layers(kept[m][k], stages[k])  # Computed again.
      if k == K - 1:
        y = Loss(y, tf.split(targets, M)[m]) / M  # The mean over all micro-batches.
    gradient, of_weights = tape.gradient(y, (kept[m][k], stages[k]), output_gradients=gradient)
    sums[k] = [a + b for a, b in zip(sums[k], of_weights, strict=True)]
for gradient, reference in zip(sums[0] + sums[1], expected, strict=True):
  tf.debugging.assert_near(gradient, reference, rtol=1e-5, atol=1e-6)
print('The gradients equal those without a pipeline, up to rounding.')

# %% [markdown]
# That is GPipe. What remains is to run the stages on their devices at the same time. In this
# picture a blue box is a forward of a micro-batch, and a green one a backward. The pale part of a
# backward is the recomputation:

# %%
schedule = schedules.Get('gpipe', K, M)
schedule_svg.Draw(simulator.Simulate(schedule, simulator.Costs(forward=1)))

# %% [markdown]
# The gaps are the bubble, (K-1)/(M+K-1) = 20 % of the step. [Choose a
# schedule](choosing_a_schedule.md) shows how to make it smaller. The grey area is the number of
# inputs that a device holds.
#
# ## The library
#
# `PipeliningLayer` cuts layers by their cost, puts each stage on its device and runs the schedule.
# `Verify` compares a training step with the same layers on one device.

# %%
layer = linear.ProjectionLayer.Params().Set(input_dim=DIM, output_dim=DIM, activation='TANH')
p = pipelining_layer.PipeliningLayer.Params()
p.Set(name='net', sub=[layer] * 8, num_stages=K, num_micro_batches=M)
net = p.Instantiate()


def LossOfOutputs(theta, outputs, side):
  return {'loss': (Loss(outputs[0], side), tf.cast(tf.shape(side)[0], tf.float32))}


def Weight(side):
  return tf.cast(tf.shape(side)[0], tf.float32)


net.Place(devices, tf.TensorSpec([BATCH, DIM]), loss_fn=LossOfOutputs)
report = verify.Verify(net, (inputs,), targets, loss_fn=LossOfOutputs, loss_weight=Weight)
print(report.Text())
assert not report.Failures()

# %% [markdown]
# From here: [a Keras model](../keras.md) in two stages by one line, or a [loop of your
# own](../own_loop.md) around a `PipeliningLayer`.
