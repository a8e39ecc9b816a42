# SPDX-License-Identifier: Apache-2.0
"""Models of KerasHub with tiny random configurations; needs the extra `keras_hub`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras_hub

from tools.keras_zoo.case import Case

_BFLOAT16: dict[str, Any] = {'tolerance': 100.0, 'note': 'bounds for bfloat16'}
_EXPERTS = 'M=1: balancing loss of a micro-batch'

# Arguments that most decoders have.
_HEADS = {'num_query_heads': 4, 'num_key_value_heads': 2}
_DECODER = {'vocabulary_size': 20, 'num_layers': 3, 'hidden_dim': 16, 'intermediate_dim': 32}
_LLAMA = {**_DECODER, **_HEADS}
_GPT = {**_DECODER, 'num_heads': 2}
_GPT2 = {**_GPT, 'max_sequence_length': 8}
_GEMMA = {**_LLAMA, 'head_dim': 4}
_GEMMA2 = {
  **_GEMMA,
  'use_post_ffw_norm': True,
  'use_post_attention_norm': True,
  'attention_logit_soft_cap': 50.0,
  'final_logit_soft_cap': 30.0,
  'use_sliding_window_attention': True,
  'sliding_window_size': 4,
}
_SMOLLM = {
  **_DECODER,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'attention_bias': False,
  'attention_dropout': 0.0,
  'rope_layer_enabled_list': [True, True, False],
  'layer_types': ['full_attention'] * 3,
  'mlp_bias': False,
  'layer_norm_epsilon': 1e-6,
  'max_position_embeddings': 8,
  'rope_theta': 10000.0,
  'partial_rotary_factor': 1.0,
}

_FILE_OF_LORA = 'a file of plain Keras has LoRA added to the kernels, too'


def Backbone(name: str, config: Mapping[str, Any]) -> Any:
  """Returns the backbone of that name."""
  return getattr(keras_hub.models, f'{name}Backbone')(**config)


def Task(name: str, task: str, config: Mapping[str, Any], **arguments: Any) -> Any:
  """Returns a task with the backbone of that name, without a preprocessor."""
  keras_class = getattr(keras_hub.models, f'{name}{task}')
  return keras_class(backbone=Backbone(name, config), preprocessor=None, **arguments)


def _Lm(row: str, name: str, config: Mapping[str, Any], **fields: Any) -> Case:
  """Returns the row of a CausalLM."""
  return Case(row, functools.partial(Task, name, 'CausalLM', config), **fields)


def _Lora(quantization: str | None = None) -> Any:
  model = Task('GPT2', 'CausalLM', _GPT2)
  if quantization is not None:
    model.quantize(quantization)
  model.backbone.enable_lora(4)
  return model


def _FrozenEmbedding() -> Any:
  model = Task('GPT2', 'CausalLM', _GPT2)
  model.backbone.token_embedding.trainable = False
  return model


_LMS = [
  _Lm('GPT-2', 'GPT2', _GPT2),
  Case('GPT-2, LoRA', _Lora, note=_FILE_OF_LORA),
  Case('GPT-2, int8, LoRA', functools.partial(_Lora, 'int8'), note=_FILE_OF_LORA),
  Case('GPT-2, int4, LoRA', functools.partial(_Lora, 'int4'), note=_FILE_OF_LORA),
  Case('GPT-2, frozen embedding', _FrozenEmbedding),
  _Lm('GPT-2, mixed_bfloat16', 'GPT2', {**_GPT2, 'dtype': 'mixed_bfloat16'}, **_BFLOAT16),
  _Lm('GPT-2, bfloat16', 'GPT2', {**_GPT2, 'dtype': 'bfloat16'}, **_BFLOAT16),
  _Lm('Llama 2', 'Llama', _LLAMA),
  _Lm('Llama 2, tied', 'Llama', {**_LLAMA, 'tie_word_embeddings': True}),
  _Lm('Llama 3', 'Llama3', _LLAMA),
  _Lm('Llama 3, tied', 'Llama3', {**_LLAMA, 'tie_word_embeddings': True}),
  _Lm('Gemma 1', 'Gemma', _GEMMA),
  _Lm('Gemma 2', 'Gemma', _GEMMA2),
  _Lm('Gemma 3', 'Gemma3', {**_GEMMA2, 'image_size': 16}),
  _Lm('Mistral', 'Mistral', {**_LLAMA, 'sliding_window': 4}),
  _Lm(
    'Mixtral',
    'Mixtral',
    {**_LLAMA, 'num_experts': 4, 'sliding_window': 4},
    num_micro_batches=1,
    note=_EXPERTS,
  ),
  _Lm('Qwen 2, 2.5', 'Qwen', _LLAMA),
  _Lm('Qwen 2, 2.5, untied', 'Qwen', {**_LLAMA, 'tie_word_embeddings': False}),
  _Lm('Qwen 3', 'Qwen3', _GEMMA),
  _Lm('Qwen 3, untied', 'Qwen3', {**_GEMMA, 'tie_word_embeddings': False}),
  _Lm(
    'Qwen MoE',
    'QwenMoe',
    {
      **_LLAMA,
      'moe_intermediate_dim': 8,
      'shared_expert_intermediate_dim': 8,
      'num_experts': 4,
      'top_k': 2,
    },
    num_micro_batches=1,
    note=_EXPERTS,
  ),
  _Lm(
    'Qwen 3 MoE',
    'Qwen3Moe',
    {**_GEMMA, 'moe_intermediate_dim': 8, 'num_experts': 4, 'top_k': 2},
    num_micro_batches=1,
    note=_EXPERTS,
  ),
  _Lm('Phi-3', 'Phi3', _LLAMA),
  _Lm('OPT', 'OPT', _GPT2),
  _Lm('Bloom', 'Bloom', _GPT),
  _Lm('Falcon', 'Falcon', {**_DECODER, 'num_attention_heads': 2}),
  _Lm('GPT-NeoX', 'GPTNeoX', {**_GPT, 'max_sequence_length': 8}),
  _Lm('SmolLM 3', 'SmolLM3', _SMOLLM),
  _Lm(
    'GPT-OSS',
    'GptOss',
    {**_LLAMA, 'num_experts': 4, 'sliding_window': 4},
    num_micro_batches=1,
    note=_EXPERTS,
  ),
]

CASES = [*_LMS]
