# SPDX-License-Identifier: Apache-2.0
"""Writes random GPT-2 models as directories of Hugging Face."""

import json
import pathlib

import numpy as np
import tensorflow as tf

NUM_LAYERS, LENGTH = 2, 6
_DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': tf.bfloat16.as_numpy_dtype}


def Write(directory, *, vocabulary=20, dim=16, num_files=1, dtype='F32'):
  """Writes a model with two layers, in one file of safetensors or in shards."""
  shapes = {'wte': [vocabulary, dim], 'wpe': [LENGTH, dim]}
  shapes = {f'{name}.weight': shape for name, shape in shapes.items()} | _Norm('ln_f', dim)
  for i in range(NUM_LAYERS):
    shapes |= _Norm(f'h.{i}.ln_1', dim) | _Norm(f'h.{i}.ln_2', dim)
    shapes |= _Dense(f'h.{i}.attn.c_attn', dim, 3 * dim) | _Dense(f'h.{i}.attn.c_proj', dim, dim)
    shapes |= _Dense(f'h.{i}.mlp.c_fc', dim, 4 * dim) | _Dense(f'h.{i}.mlp.c_proj', 4 * dim, dim)
  config = {
    'model_type': 'gpt2',
    'architectures': ['GPT2LMHeadModel'],
    'vocab_size': vocabulary,
    'n_layer': NUM_LAYERS,
    'n_head': 2,
    'n_embd': dim,
    'n_positions': LENGTH,
    'resid_pdrop': 0.0,
  }
  directory = pathlib.Path(directory)
  directory.mkdir(exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config))
  names = list(shapes)
  if num_files == 1:
    _WriteFile(directory / 'model.safetensors', shapes, dtype)
    return
  files = {f'model-{k}.safetensors': names[k::num_files] for k in range(num_files)}
  for file, of_file in files.items():
    _WriteFile(directory / file, {name: shapes[name] for name in of_file}, dtype)
  index = {f'transformer.{name}': file for file, of_file in files.items() for name in of_file}
  text = json.dumps({'metadata': {}, 'weight_map': index})
  (directory / 'model.safetensors.index.json').write_text(text)


def _Norm(name, dim):
  return {f'{name}.weight': [dim], f'{name}.bias': [dim]}


def _Dense(name, num_in, num_out):
  return {f'{name}.weight': [num_in, num_out], f'{name}.bias': [num_out]}


def _WriteFile(path, shapes, dtype):
  """Writes random tensors: the length of a header, the header in JSON, and the data."""
  header, size = {}, 0
  item_size = np.dtype(_DTYPES[dtype]).itemsize
  for name, shape in shapes.items():
    end = size + item_size * int(np.prod(shape))
    offsets = [size, end]
    header[f'transformer.{name}'] = {'dtype': dtype, 'shape': shape, 'data_offsets': offsets}
    size = end
  text = json.dumps(header).encode()
  rng = np.random.default_rng(size)
  with path.open('wb') as f:
    f.write(len(text).to_bytes(8, 'little') + text)
    for shape in shapes.values():
      f.write(rng.standard_normal(shape, 'float32').astype(_DTYPES[dtype]).tobytes())
