# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # Fine-tune a KerasHub model with LoRA
#
# LoRA freezes a pretrained model and trains small matrices beside its large ones. Then gradients
# and optimizer slots are small, and the frozen weights fill the memory. `PipelinedModel` puts each
# of them on the device of its stage. Here two logical CPU devices stand for two accelerators. You
# need the extra `lingvo_gpipe[keras-hub]`.

# %%
import contextlib
import importlib
import inspect
import io
import os
import tempfile

import keras
import keras_hub
import numpy as np

from lingvo_gpipe import PipelinedModel, cluster

cluster.Cluster.Create(2, platform='cpu')  # Two devices, before anything else uses TensorFlow.
LENGTH = 64


def Rows(text, stride, count):
  """Returns inputs and targets; the tokens are bytes, so that we need no tokenizer."""
  ids = np.frombuffer(text.encode(), 'uint8').astype('int32')
  rows = np.stack([ids[i : i + LENGTH + 1] for i in range(0, count * stride, stride)])
  return {'token_ids': rows[:, :-1], 'padding_mask': np.ones_like(rows[:, :-1])}, rows[:, 1:]


def Compile(model, learning_rate):
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  optimizer = keras.optimizers.Adam(learning_rate)
  # On CPUs a pipeline runs without XLA, so the plain model should, too.
  model.compile(optimizer=optimizer, loss=loss, sampler='greedy', jit_compile=False)
  return model


# %% [markdown]
# ## A pretrained model
#
# This page must run without a download, so we make a small GPT-2 from its config, train it on
# Python code for some seconds, and save it as a preset.

# %%
keras.utils.set_random_seed(1)
backbone = keras_hub.models.GPT2Backbone(
  vocabulary_size=256, num_layers=2, num_heads=4, hidden_dim=64, intermediate_dim=256,
  max_sequence_length=LENGTH, dropout=0.0,
)  # fmt: skip
base = Compile(keras_hub.models.GPT2CausalLM(backbone, preprocessor=None), 5e-3)
x, y = Rows(inspect.getsource(inspect), stride=LENGTH, count=640)
losses = base.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0).history['loss']
print('loss on Python code:', *(f'{loss:.3f}' for loss in losses))

folder = tempfile.TemporaryDirectory()
preset = f'{folder.name}/base'
base.save_to_preset(preset)

# %% [markdown]
# ## Load it, with LoRA
#
# For a real model change one line: `preset = 'gpt2_base_en'`, or another one of
# [KerasHub's presets](https://keras.io/keras_hub/presets/). Without `preprocessor=None` the model
# then takes strings: `pipe.fit(texts)`, `pipe.generate('Beautiful is')`.
#
# A rank of 8 trains 8 columns and 8 rows for each matrix of queries and values. KerasHub also
# trains the biases of these layers.


# %%
def Load():
  model = keras_hub.models.CausalLM.from_preset(preset, preprocessor=None)
  keras.utils.set_random_seed(2)  # The matrices of LoRA are drawn at random.
  model.backbone.enable_lora(rank=8)
  return model


def Count(weights):
  return sum(w.shape.num_elements() for w in weights)


model = Load()
print(f'{Count(model.weights):,} weights, {Count(model.trainable_weights):,} of them trained')

# %% [markdown]
# ## Plain Keras
#
# The new text is the Zen of Python, in overlapping rows. For comparison, the plain model, all of
# whose weights are on one device:

# %%
with contextlib.redirect_stdout(io.StringIO()) as zen:
  importlib.import_module('this')  # Prints it.

x, y = Rows(zen.getvalue(), stride=6, count=128)
options = {'batch_size': 32, 'epochs': 6, 'shuffle': False, 'verbose': 0}
plain = Compile(Load(), 5e-3)
losses = plain.fit(x, y, **options).history['loss']
print('plain Keras:', *(f'{loss:.4f}' for loss in losses))

# %% [markdown]
# ## Two devices
#
# The same in two stages. A stage runs no backward if neither it nor an earlier stage has anything
# to train.

# %%
before = {w.path: w.numpy() for w in model.weights}
pipe = Compile(PipelinedModel(model, num_stages=2, num_micro_batches=4, schedule='1f1b'), 5e-3)
losses_of_pipe = pipe.fit(x, y, **options).history['loss']
print('two stages: ', *(f'{loss:.4f}' for loss in losses_of_pipe))
np.testing.assert_allclose(losses_of_pipe, losses, rtol=1e-4)

# %% [markdown]
# The losses are equal, up to rounding. The weights of the preset did not change, but for the biases
# named above:

# %%
changed = {w.path for w in model.weights if not np.array_equal(w.numpy(), before[w.path])}
assert changed == {w.path for w in model.trainable_weights}
print(sorted({path.split('/')[-1] for path in changed}), f'changed, in {len(changed)} weights')
for w in (model.weights[0], model.weights[-1]):
  print(f'{w.path} is on {w.value.device}')

# %% [markdown]
# The memory for weights includes gradients and slots. With LoRA it is little more than the weights
# themselves:

# %%
print(pipe.cut.Table(['CPU:0', 'CPU:1']))

# %% [markdown]
# ## Generate
#
# `generate` samples through the stages. A model this small, trained this briefly, writes no
# English. But both models write the same.


# %%
def Continue(model, prompt):
  ids = np.zeros([1, LENGTH], 'int32')
  ids[0, : len(prompt)] = list(prompt.encode())
  inputs = {'token_ids': ids, 'padding_mask': (np.arange(LENGTH) < len(prompt))[None]}
  output = model.generate(inputs, stop_token_ids=None)['token_ids']
  return bytes(np.asarray(output[0], 'uint8')).decode(errors='replace')


text = Continue(pipe, 'Beautiful is')
print(repr(text))
assert text == Continue(plain, 'Beautiful is')

# %% [markdown]
# ## Save
#
# `save_to_preset` adds the products of LoRA's matrices to the weights, so that the file is an
# ordinary preset. `save_lora_weights` of the backbone writes LoRA's matrices alone, to be used with
# the preset from which they were trained.

# %%
pipe.save_to_preset(f'{folder.name}/tuned')
tuned = keras_hub.models.CausalLM.from_preset(f'{folder.name}/tuned', preprocessor=None)
assert Count(tuned.weights) == Count(base.weights)
few = {name: values[:4] for name, values in x.items()}
np.testing.assert_allclose(tuned.predict_on_batch(few), pipe.predict_on_batch(few), atol=1e-4)

model.backbone.save_lora_weights(f'{folder.name}/zen.lora.h5')
for name in ('tuned/model.weights.h5', 'zen.lora.h5'):
  print(f'{name}: {os.path.getsize(f"{folder.name}/{name}") / 1024:.0f} KiB')
folder.cleanup()

# %% [markdown]
# If the whole model does not fit into the memory of the host, load it weight by weight into the
# stages: `PipelinedModel.from_preset(preset, num_stages=2, example=x, lora_rank=8)`. See [a Keras
# model as a pipeline](../keras.md), for devices on other hosts, too.
