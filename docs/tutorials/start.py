# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # Five-minute tour
#
# You know Keras, and you have a model that is too large or too slow for one device. This page takes
# you from nothing to `fit` over two devices. You need no accelerator: two CPU devices of your
# computer stand for two GPUs.
#
# ## Install
#
# You need Linux, Python 3.11 to 3.13, and a checkout of the repository. The package is not on PyPI.
#
# ```bash
# python3 -m venv pipeline
# . pipeline/bin/activate
# pip install ./lingvo_gpipe    # The path of the checkout. Installs TensorFlow and Keras, too.
# ```
#
# Put the code of this page into one file, and run it with `python`. Or open the notebook: on the
# site its link is at the end of the page.
#
# ## Your model
#
# Most Keras models will do. This one finds the quarter of a noisy image that has a bright square.
# You may put your own `model`, `x`, `y` and `loss` in its place: the rest of the page stays as it
# is.

# %%
import tempfile

import keras
import numpy as np

from lingvo_gpipe import PipelinedModel, cluster, schedule_svg

cluster.Cluster.Create(2, platform='cpu')  # Two devices, before TensorFlow starts.
keras.utils.set_random_seed(1)

draws = np.random.default_rng(1)
y = draws.integers(0, 4, 1280)
x = draws.normal(size=[1280, 16, 16, 1]).astype('float32')
for image, quarter in zip(x, y, strict=True):
  row, column = 8 * (quarter // 2), 8 * (quarter % 2)
  image[row + 2 : row + 6, column + 2 : column + 6] += 1

layers = keras.layers
model = keras.Sequential(
  [
    keras.Input([16, 16, 1]),
    layers.Conv2D(16, 3, padding='same', activation='relu'),
    layers.Conv2D(16, 3, padding='same', activation='relu'),
    layers.MaxPooling2D(),
    layers.Conv2D(32, 3, padding='same', activation='relu'),
    layers.Conv2D(32, 3, padding='same', activation='relu'),
    layers.MaxPooling2D(),
    layers.Flatten(),
    layers.Dense(64, activation='relu'),
    layers.Dense(4),
  ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# %% [markdown]
# ## Two devices
#
# `PipelinedModel` is the new line. It cuts the model into two stages, one for each device. The rest
# is Keras: the same `compile`, `fit`, `evaluate` and `predict`.

# %%
pipe = PipelinedModel(model, num_stages=2, num_micro_batches=4)
pipe.compile(optimizer='adam', loss=loss, metrics=['accuracy'])
history = pipe.fit(x, y, batch_size=64, epochs=3, validation_split=0.2, verbose=2)

# %% [markdown]
# The numbers equal plain Keras's, up to rounding. [The next tutorial](keras_fit.md) compares
# them.
#
# ## The stages at work
#
# The stages were made at the first batch. Each batch of 64 goes through them as four micro-batches
# of 16, so that both devices can work at the same time. In this picture blue is a forward, green a
# backward, and purple both in one. The pale part of a backward computes the stage again. The gaps
# are waiting, and the grey area is the number of micro-batches that a device holds:

# %%
schedule_svg.Draw(pipe.cut.simulated)

# %% [markdown]
# A notebook shows the picture. It is a string, so a program can write it to a file, for example
# `pipeline.svg`.
#
# The table has a row for each stage: its layers, its share of the work, and the memory that its
# device needs. `pipe.summary()` prints it, too.

# %%
print(pipe.cut.Table(['CPU:0', 'CPU:1']))

# %% [markdown]
# ## Settings
#
# Three arguments of `PipelinedModel` matter most:
#
# | Argument | Advice |
# | --- | --- |
# | `num_stages` | as few as fit into memory |
# | `num_micro_batches` | four for each stage, or more, up to the batch size: the gaps shrink |
# | `remat_policy` | `'stage'` saves memory by computing a stage again; `'none'` is faster |
#
# Some layers differ from plain Keras: dropout draws other numbers, and BatchNormalization sees a
# micro-batch instead of a batch. [What is equal](../keras.md#what-is-equal) has the list. A model
# that cannot be a pipeline is refused with the reason.
#
# ## Save
#
# `save` writes the plain Keras model. Nobody who loads it needs a pipeline.

# %%
with tempfile.TemporaryDirectory() as folder:
  pipe.save(f'{folder}/model.keras')
  loaded = keras.models.load_model(f'{folder}/model.keras')
same = np.allclose(loaded.predict(x[:8], verbose=0), pipe.predict(x[:8], verbose=0), atol=1e-5)
print(type(loaded).__name__, 'with equal predictions' if same else 'with other predictions')

# %% [markdown]
# ## On accelerators
#
# Leave out the line with `cluster`: the first two GPUs are the devices then.
# [Accelerators](../accelerators.md) reports the tests there, and has a command that checks yours.
#
# ## Read on
#
# - [A Keras model on two devices](keras_fit.md): the comparison with plain Keras.
# - [Fine-tune a KerasHub model with LoRA](keras_hub_lora.md), with generation of text.
# - [GPipe from scratch](gpipe_from_scratch.md): how it works, in forty lines.
# - [Choose a schedule](choosing_a_schedule.md): less waiting, less memory.
# - [Your first experiment](first_experiment.md): the trainer, with exact resume after a kill.
# - [A Keras model as a pipeline](../keras.md): all arguments, and models on other hosts.
