# SPDX-License-Identifier: Apache-2.0
"""Writes a preset, or trains it by plain Keras or on workers; prints losses and peaks of memory."""

import json
import os
import pathlib
import re
import resource
import sys

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from lingvo_gpipe import PipelinedModel, cluster
from lingvo_gpipe.distributed import cluster_spec

kind, directory = sys.argv[1:3]
num_layers, width, rows, length, num_micro_batches, rank, budget = map(int, sys.argv[3:10])
ids = np.random.default_rng(0).integers(0, 64, [rows, length]).astype('int32')
batch = {'token_ids': ids, 'padding_mask': np.ones_like(ids)}
GPT = keras_hub.models.GPT2CausalLM
processes, result = [os.getpid()], {'peaks': {}}


def Status(name, process):
  with open(f'/proc/{process}/status') as f:
    return int(re.search(name + r':\s+(\d+)', f.read())[1]) / 1024


def Limit():
  # The memory of TensorFlow itself depends on the machine: each thread has a stack.
  for process in processes:
    limit = int((Status('VmData', process) + budget) * 2**20)
    resource.prlimit(process, resource.RLIMIT_DATA, (limit, limit))


def Peaks(name, run):
  for process in processes:
    with open(f'/proc/{process}/clear_refs', 'w') as f:
      f.write('5')  # The peak is the present size.
  before = [Status('VmRSS', p) for p in processes]
  returned = run()
  result['peaks'][name] = [Status('VmHWM', p) - b for p, b in zip(processes, before, strict=True)]
  return returned


def Compile(model):
  drawn = [v for v in model.trainable_variables if v.name == 'lora_kernel_a']
  for i, v in enumerate(drawn):
    v.assign(np.random.default_rng(i).standard_normal(v.shape).astype('float32'))
  model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=[],
    jit_compile=False,
  )
  return model


def Train(model):
  history = model.fit(batch, (ids + 1) % 64, batch_size=rows, epochs=2, shuffle=False, verbose=0)
  return history.history['loss']


def TrainPlain(model):
  if rank:
    model.backbone.enable_lora(rank)
  return Train(Compile(model))


if kind == 'write':
  keras.utils.set_random_seed(1)
  backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=64,
    num_layers=num_layers,
    num_heads=4,
    hidden_dim=width,
    intermediate_dim=4 * width,
    max_sequence_length=length,
    dropout=0.0,
  )
  GPT(backbone, preprocessor=None).save_to_preset(directory)
elif kind == 'plain':
  tf.matmul(tf.ones([2, 2]), tf.ones([2, 2]))  # Starts TensorFlow's threads.
  result['losses'] = Peaks(
    'plain', lambda: TrainPlain(GPT.from_preset(directory, preprocessor=None))
  )
else:
  processes += map(int, sys.argv[11:])
  spec = cluster_spec.FromText(pathlib.Path(sys.argv[10]).read_text(), '')
  devices = cluster.Cluster.Connect(spec, 2).devices
  for device in devices:
    with tf.device(device):
      tf.matmul(tf.ones([2, 2]), tf.ones([2, 2])).numpy()
  Limit()
  pipe = Peaks(
    'load',
    lambda: PipelinedModel.from_preset(
      directory,
      2,
      example=batch,
      keras_class=GPT,
      lora_rank=rank,
      preset_arguments={'preprocessor': None},
      num_micro_batches=num_micro_batches,
      devices=devices,
      xla=False,
    ),
  )
  Compile(pipe)
  result['losses'] = Peaks('fit', lambda: Train(pipe))
  path = f'{directory}_trained'
  if rank:  # The other model's weights are so small that a save cannot take much memory.
    Peaks('weights', lambda: pipe.save_weights(path + '.weights.json', max_shard_size=0.1))
    Peaks('preset', lambda: pipe.save_to_preset(path))
    Peaks('archive', lambda: pipe.save(path + '.keras'))
print(json.dumps(result))
