# SPDX-License-Identifier: Apache-2.0
"""Transformers over bytes or tokens of the source files of Python's standard library.

Needs no download: `trainer --model=lm.stdlib.ByteTransformerGPipe2 --logdir=runs/stdlib`.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry
from tasks.lm import model, stdlib_input


class ByteTransformer(registry.SingleTaskModelParams):
  """Sizes and data shared by the experiments in this file."""

  BATCH_SIZE = 32
  SEQ_LEN = 128
  MODEL_DIM = 128
  NUM_LAYERS = 6
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 4
  MAX_STEPS = 800

  def _Input(self, split: str) -> hyperparams.InstantiableParams:
    return stdlib_input.StdlibInput.Params().Set(
      name=split, split=split, batch_size=self.BATCH_SIZE, seq_len=self.SEQ_LEN
    )

  def Train(self) -> hyperparams.InstantiableParams:
    """About 90 % of the files."""
    return self._Input('train')

  def Dev(self) -> hyperparams.InstantiableParams:
    """About 5 % of the files, none of them in Train or Test."""
    return self._Input('dev')

  def Test(self) -> hyperparams.InstantiableParams:
    """Up to 256 KiB of the remaining files."""
    return self._Input('test').Set(max_bytes=1 << 18)

  def Task(self) -> hyperparams.InstantiableParams:
    """A decoder-only Transformer over bytes."""
    p = model.ByteTransformerLm.Params().Set(
      name='lm',
      vocab_size=256,
      model_dim=self.MODEL_DIM,
      hidden_dim=4 * self.MODEL_DIM,
      num_heads=self.MODEL_DIM // 32,
      num_layers=self.NUM_LAYERS,
      residual_dropout_prob=0.05,
    )
    # Measured on two CPU cores, training without XLA is 1.5 times as fast as with XLA.
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES, xla=False)
    p.train.Set(
      max_steps=self.MAX_STEPS,
      save_interval_steps=100,
      summary_interval_steps=10,
      eval_datasets=['Test'],
    )
    p.eval.decoder_samples_per_summary = 64
    p.train.learner.Set(
      learning_rate=2e-3,
      optimizer=optimizer.Adam.Params().Set(beta_2=0.98),
      clip_gradient_norm_to_value=1.0,
      lr_schedule=lr_schedules.LinearRampupCosineSchedule.Params().Set(
        warmup_steps=50, total_steps=self.MAX_STEPS
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """One narrow layer and short sequences."""
    return {
      'task.model_dim': 16,
      'task.hidden_dim': 32,
      'task.num_heads': 2,
      'task.num_layers': 1,
      'input.batch_size': 4,
      'input.seq_len': 16,
      'input.max_bytes': 4096,
    }


@registry.RegisterSingleTaskModel
class ByteTransformerGPipe1(ByteTransformer):
  """ByteTransformerGPipe2 on one device, with the same losses, for comparison. Not measured."""


@registry.RegisterSingleTaskModel
class ByteTransformerGPipe2(ByteTransformer):
  """The model of `make train`: K=2 stages, M=4 micro-batches and re-materialisation.

  Measured on two CPU cores: 4 min 41 s, 13,423 bytes per second, 2.329 bits per byte of Test.
  """

  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class ByteTransformerGPipe4(ByteTransformer):
  """The same model in four stages. Not measured."""

  NUM_STAGES = 4


@registry.RegisterSingleTaskModel
class ByteTransformerTiny(ByteTransformer):
  """A model for tests: two narrow layers in K=2 stages, trained on 64 KiB.

  `trainer --model=lm.stdlib.ByteTransformerTiny --logdir=runs/tiny`

  Measured on two CPU cores: 8 s including the start of the program, 4.44 bits per byte of Test.
  """

  BATCH_SIZE = 8
  SEQ_LEN = 32
  MODEL_DIM = 32
  NUM_LAYERS = 2
  NUM_STAGES = 2
  NUM_MICRO_BATCHES = 2
  MAX_STEPS = 100

  def Train(self) -> hyperparams.InstantiableParams:
    """The first 64 KiB of the training files."""
    return super().Train().Set(max_bytes=1 << 16)

  def Test(self) -> hyperparams.InstantiableParams:
    """4 KiB of the test files."""
    return super().Test().Set(max_bytes=1 << 12)


@registry.RegisterSingleTaskModel
class ByteTransformerHalfHour(ByteTransformer):
  """About half an hour on two CPU cores: eight layers of 256, K=2 stages, M=8 micro-batches.

  `trainer --model=lm.stdlib.ByteTransformerHalfHour --logdir=runs/half_hour`

  Measured on two CPU cores with max_steps 900: 13 min 12 s, 5,000 bytes per second, 2.035 bits per
  byte of Test. The full 2,000 steps have not been measured.
  """

  BATCH_SIZE = 16
  SEQ_LEN = 256
  MODEL_DIM = 256
  NUM_LAYERS = 8
  NUM_STAGES = 2
  NUM_MICRO_BATCHES = 8
  MAX_STEPS = 2000


@registry.RegisterSingleTaskModel
class PackedTransformerGPipe2(ByteTransformer):
  """SentencePiece tokens instead of bytes, in packed rows; attention stays within a file.

  Train the vocabulary first, on the same files:

      python -m tools.train_sentencepiece --model=lm.stdlib.PackedTransformerGPipe2 --lossless
      trainer --model=lm.stdlib.PackedTransformerGPipe2 --logdir=runs/packed

  Measured on two CPU cores: 86 s for the vocabulary, then 4 min 31 s at 15,500 tokens per second;
  4.14 bits per token of Test, perplexity 17.7.
  """

  VOCAB_SIZE = 2000
  NUM_STAGES = 2

  def _Input(self, split: str) -> hyperparams.InstantiableParams:
    return stdlib_input.StdlibTokensInput.Params().Set(
      name=split,
      split=split,
      batch_size=self.BATCH_SIZE,
      seq_len=self.SEQ_LEN,
      vocab_filepath='runs/vocab/stdlib_2k.model',
      vocab_size=self.VOCAB_SIZE,
    )

  def Test(self) -> hyperparams.InstantiableParams:
    """The first 20 of the remaining files."""
    return self._Input('test').Set(max_documents=20)

  def Task(self) -> hyperparams.InstantiableParams:
    """The same Transformer over tokens."""
    return super().Task().Set(cls=model.TransformerLm, vocab_size=self.VOCAB_SIZE)

  def Smoke(self) -> dict[str, object]:
    """A narrow model and small batches of random tokens."""
    smoke = {name: value for name, value in super().Smoke().items() if name != 'input.max_bytes'}
    return {**smoke, 'input.num_fake_examples': 16}
