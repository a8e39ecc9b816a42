# SPDX-License-Identifier: Apache-2.0
"""Language models of KerasHub over bytes of Python's standard library; needs no download.

    trainer --model=lm.keras_hub.ByteGPT2 --logdir=runs/gpt2
    python -m tools.write_preset --model=lm.keras_hub.ByteGPT2 --logdir=runs/gpt2 \\
        --preset=runs/preset
    trainer --model=lm.keras_hub.ByteGPT2Lora --logdir=runs/lora

The second command writes the trained weights as a preset of KerasHub, with which the third begins.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, registry
from params.lm import stdlib
from tasks.keras import causal_lm


@registry.RegisterSingleTaskModel
class ByteGPT2(stdlib.ByteTransformer):
  """GPT-2 of KerasHub with a vocabulary of bytes, in K=2 stages. Not measured."""

  NUM_STAGES = 2
  NUM_LAYERS = 4
  MAX_STEPS = 300

  def Task(self) -> hyperparams.InstantiableParams:
    """GPT-2 of KerasHub."""
    p = causal_lm.KerasCausalLm.Params().Set(
      name='lm',
      keras_class='GPT2CausalLM',
      backbone={
        'num_layers': self.NUM_LAYERS,
        'num_heads': self.MODEL_DIM // 32,
        'hidden_dim': self.MODEL_DIM,
        'intermediate_dim': 4 * self.MODEL_DIM,
        'max_sequence_length': self.SEQ_LEN,
        'dropout': 0.05,
      },
    )
    plain = super().Task()
    p.Set(train=plain.train, eval=plain.eval)
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES, xla=False)
    return p

  def Smoke(self) -> dict[str, object]:
    """One narrow layer and short sequences."""
    return {
      'task.backbone': {
        'num_layers': 1,
        'num_heads': 2,
        'hidden_dim': 16,
        'intermediate_dim': 32,
        'max_sequence_length': 16,
      },
      'input.batch_size': 4,
      'task.stack.num_micro_batches': 2,
      'input.seq_len': 16,
      'input.max_bytes': 4096,
    }


@registry.RegisterSingleTaskModel
class ByteGPT2Lora(ByteGPT2):
  """Trains LoRA's weights of rank 4, from the preset `runs/preset`. Not measured."""

  MAX_STEPS = 100

  def Task(self) -> hyperparams.InstantiableParams:
    """The preset that ByteGPT2 has written."""
    return super().Task().Set(preset='runs/preset', lora_rank=4)

  def Smoke(self) -> dict[str, object]:
    """A model of its own in place of the preset."""
    return {**super().Smoke(), 'task.preset': ''}
