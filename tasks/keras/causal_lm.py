# SPDX-License-Identifier: Apache-2.0
"""Causal language models of KerasHub as tasks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import domain, hyperparams, keras_cut, keras_preset, nested_map
from tasks.lm import model


class KerasCausalLm(model.LanguageModel):
  """A `CausalLM` of KerasHub, cut into stages; its weights are the variables of the Keras model."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params: a class and its arguments, or a preset."""
    p = super().Params()
    p.Define('keras_class', '', 'Class of keras_hub.models, for example GPT2CausalLM.')
    p.Define(
      'backbone',
      {},
      "Arguments of the backbone's class; empty: as in the preset.",
      domain.DictOf(domain.STR, domain.ANY),
    )
    p.Define('preset', '', 'Name or directory of a preset with the weights to begin at.')
    p.Define(
      'lora_rank',
      0,
      'Rank of LoRA; then only its weights and the biases beside them are trained. 0: no LoRA.',
      domain.INDEX,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    import keras_hub  # An extra, and slow to import.

    keras_class = getattr(keras_hub.models, p.keras_class, None)
    if not (isinstance(keras_class, type) and issubclass(keras_class, keras_hub.models.CausalLM)):
      raise ValueError(
        f'{self.path}.keras_class: keras_hub.models has no CausalLM {p.keras_class!r}'
      )
    with keras_cut.InitialValues(p.random_seed):
      if p.preset and not p.backbone:
        self.keras_model = keras_preset.Model(keras_class, p.preset, preprocessor=None)
      else:
        backbone = {'vocabulary_size': p.vocab_size, **p.backbone}
        domain.NUM_LAYERS.Check(f'{self.path}.backbone.num_layers', backbone.get('num_layers', 1))
        try:
          self.keras_model = keras_preset.New(keras_class, backbone, preprocessor=None)
        except (ArithmeticError, TypeError, ValueError) as e:
          raise ValueError(f'{self.path}.backbone: {e}') from e
      if p.lora_rank:
        keras_preset.EnableLora(self.keras_model, p.lora_rank)
    self._needs_weights = bool(p.preset)
    self.CreateChild('stack', p.stack.Copy().Set(**keras_cut.Cut(self.keras_model)))

  def InstantiateVariables(self, device: str | None = None) -> None:
    """Makes the variables, and fills them from the preset."""
    super().InstantiateVariables(device)
    keras_preset.GiveValues(self.keras_model)
    if self._needs_weights:
      self._needs_weights = False
      keras_preset.LoadWeights(self.keras_model, self.params.preset)

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns ids and padding mask [batch, time], in the order of the model's inputs."""
    ids = input_batch.ids
    inputs = {'token_ids': ids, 'padding_mask': tf.ones_like(ids)}
    return tuple(inputs[t.name] for t in self.keras_model.inputs)
