# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # A Keras model on two devices
#
# A model that does not fit one device is cut into stages on several. `PipelinedModel` does that
# with a Keras model as it is, and trains it by `fit`. Here two logical CPU devices stand for two
# accelerators, and the model is small, so that this runs anywhere in seconds.

# %%
import tempfile

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import PipelinedModel, cluster

cluster.Cluster.Create(2, platform='cpu')  # Two devices, before anything else uses TensorFlow.


def Model():
  keras.utils.set_random_seed(1)
  x = inputs = keras.Input([32])
  for _ in range(6):
    y = keras.layers.Dense(64, activation='gelu')(keras.layers.LayerNormalization()(x))
    x = x + keras.layers.Dense(32)(y)
  return keras.Model(inputs, keras.layers.Dense(10)(x))


draws = np.random.default_rng(0)
x = draws.normal(size=[1024, 32]).astype('float32')
y = (x @ draws.normal(size=[32, 10])).argmax(axis=1)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# %% [markdown]
# ## Plain Keras
#
# For comparison, the plain model, whose weights are all on one device.

# %%
plain = Model()
plain.compile(optimizer='adam', loss=loss, metrics=['accuracy'])
history = plain.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history
for name, values in history.items():
  print(f'{name:8}', *(f'{value:.4f}' for value in values))

# %% [markdown]
# ## The pipeline
#
# The same in two stages: the one new line says how many stages and micro-batches. Each batch of 64
# streams through the stages as four micro-batches of 16.

# %%
pipe = PipelinedModel(Model(), num_stages=2, num_micro_batches=4, schedule='1f1b')
pipe.compile(optimizer='adam', loss=loss, metrics=['accuracy'])
history_of_pipe = pipe.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history
for name, values in history_of_pipe.items():
  print(f'{name:8}', *(f'{value:.4f}' for value in values))
np.testing.assert_allclose(history_of_pipe['loss'], history['loss'], rtol=1e-3)

# %% [markdown]
# The losses equal the losses of plain Keras, up to rounding. The end of the summary shows the cut,
# with the memory that each device needs for weights, gradients, slots and activations:

# %%
lines = []
pipe.summary(print_fn=lines.append)
print(*'\n'.join(lines).splitlines()[-8:], sep='\n')

# %% [markdown]
# Each variable of the model is on the device of its stage, and so are its gradient and slots:

# %%
for variable in pipe.trainable_variables[:1] + pipe.trainable_variables[-1:]:
  print(variable.path, variable.value.device)

# %% [markdown]
# ## Out again
#
# `save` writes the plain Keras model. Whoever loads it needs no pipeline.

# %%
with tempfile.TemporaryDirectory() as directory:
  pipe.save(f'{directory}/classifier.keras')
  loaded = keras.models.load_model(f'{directory}/classifier.keras')
tf.debugging.assert_near(loaded.predict(x[:4], verbose=0), pipe.predict(x[:4], verbose=0))
print(type(loaded).__name__, 'of', loaded.count_params(), 'weights')

# %% [markdown]
# [A Keras model as a pipeline](../keras.md) has the arguments and what is equal, and
# [Choose a schedule](choosing_a_schedule.md) what to say for `schedule`.
