# SPDX-License-Identifier: Apache-2.0
"""Presets of KerasHub and of Hugging Face: weights, configurations and tokenizers."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.fit import pipelined_model
from tools.chaos_attacks import file_attacks

_VOCABULARY = {'!': 0, 'a': 1, 'b': 2, 'ab': 3, '\u0120': 4, '<|endoftext|>': 5, 'c': 6, 'd': 7}
_MERGES = '#version: 0.2\na b\n'
_DIM, _LENGTH = 8, 6
_BACKBONE = {
  'vocabulary_size': len(_VOCABULARY), 'num_layers': 1, 'num_heads': 2, 'hidden_dim': _DIM,
  'intermediate_dim': 4 * _DIM, 'max_sequence_length': _LENGTH, 'dropout': 0.0,
}  # fmt: skip


def _MakeKerasHub(folder: pathlib.Path) -> None:
  import keras
  import keras_hub

  keras.utils.set_random_seed(1)
  tokenizer = keras_hub.models.GPT2Tokenizer(_VOCABULARY, _MERGES.splitlines()[1:])
  preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=_LENGTH)
  backbone = keras_hub.models.GPT2Backbone(**_BACKBONE)
  model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
  model.save_to_preset(str(folder / 'preset'))


def _MakeHuggingFace(folder: pathlib.Path) -> None:
  from safetensors import numpy as safetensors_numpy

  def Norm(name: str) -> dict[str, list[int]]:
    return {f'{name}.weight': [_DIM], f'{name}.bias': [_DIM]}

  def Dense(name: str, num_in: int, num_out: int) -> dict[str, list[int]]:
    return {f'{name}.weight': [num_in, num_out], f'{name}.bias': [num_out]}

  shapes = {'wte.weight': [len(_VOCABULARY), _DIM], 'wpe.weight': [_LENGTH, _DIM]}
  shapes |= Norm('ln_f') | Norm('h.0.ln_1') | Norm('h.0.ln_2')
  shapes |= Dense('h.0.attn.c_attn', _DIM, 3 * _DIM) | Dense('h.0.attn.c_proj', _DIM, _DIM)
  shapes |= Dense('h.0.mlp.c_fc', _DIM, 4 * _DIM) | Dense('h.0.mlp.c_proj', 4 * _DIM, _DIM)
  values = np.random.default_rng(1)
  tensors = {f'transformer.{k}': values.standard_normal(v, np.float32) for k, v in shapes.items()}
  preset = folder / 'preset'
  preset.mkdir()
  config = {
    'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel'], 'vocab_size': len(_VOCABULARY),
    'n_layer': 1, 'n_head': 2, 'n_embd': _DIM, 'n_positions': _LENGTH, 'resid_pdrop': 0.0,
  }  # fmt: skip
  (preset / 'config.json').write_text(json.dumps(config))
  (preset / 'tokenizer.json').write_text(
    json.dumps({'model': {'vocab': _VOCABULARY, 'merges': ['a b']}, 'added_tokens': []})
  )
  (preset / 'vocab.json').write_text(json.dumps(_VOCABULARY))
  (preset / 'merges.txt').write_text(_MERGES)
  names = sorted(tensors)
  shards = {f'model-{k}.safetensors': names[k::2] for k in range(2)}
  for file, of_file in shards.items():
    safetensors_numpy.save_file({name: tensors[name] for name in of_file}, str(preset / file))
  index = {name: file for file, of_file in shards.items() for name in of_file}
  text = json.dumps({'metadata': {}, 'weight_map': index})
  (preset / 'model.safetensors.index.json').write_text(text)


def _Read(folder: pathlib.Path) -> Any:
  """Loads the model into two stages; returns the shapes of its weights."""
  import keras_hub

  cpus = tf.config.list_physical_devices('CPU')
  tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
  pipe = pipelined_model.PipelinedModel.from_preset(
    str(folder / 'preset'),
    2,
    example=['ab'],
    keras_class=keras_hub.models.GPT2CausalLM,
    devices=['/CPU:0', '/CPU:1'],
    xla=False,
    num_micro_batches=1,
  )
  return [np.shape(v) for v in pipe.model.variables]


KINDS = {}
if importlib.util.find_spec('keras_hub'):
  KINDS['keras_hub'] = file_attacks.Kind(_MakeKerasHub, _Read)
  if importlib.util.find_spec('safetensors'):
    KINDS['hugging_face'] = file_attacks.Kind(_MakeHuggingFace, _Read)
