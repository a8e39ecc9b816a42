# SPDX-License-Identifier: Apache-2.0
"""Transformer-L of the GPipe paper (arXiv:1811.06965v5) on the One Billion Word benchmark.

`trainer --model=lm.one_billion_wds.Transformer3 --logdir=runs/lm1b` trains. Without data and on any
machine, `--mode=inspect_model` counts the parameters, and `--mode=inspect_partition` shows the cut
and the memory of the stages. None of these experiments has been trained yet.

Training needs lm1b of TFDS (1.8 GB to download, over 4 GB prepared; docs/datasets.md describes how
to prepare it) and a vocabulary of 32,000 pieces, made by

    python -m tools.train_sentencepiece --model=lm.one_billion_wds.Transformer3

Without the data, `--model_params_override='input.num_fake_examples:1024'` trains on random tokens,
to measure time and memory, and `lm.stdlib.ByteTransformerGPipe2` runs anywhere.

Evaluation reports the log-perplexity per token and per word. The literature on this data set uses
the latter: the sum of all log-probabilities divided by the number of words, including ends of
sentences. Test has all 50 held-out files; published figures use the first of them.

Known from the paper (Table 1): width 2048, feed-forward 8192, 32 heads, a vocabulary of 32,000,
1024 tokens per row and 32 rows per batch; only the number of layers L differs. The parameter counts
fit self-attention layers with biases, an embedding and a softmax that are not tied, and no
LayerNorm before the softmax: 50,358,272 L + 131,104,000 parameters. The paper counts 12 bytes per
parameter: weight, gradient and one slot of RMSProp.

Not in the paper: the data and their packing into rows (Lingvo's choice or ours), the number of
micro-batches for Table 1, the sizes of Transformer-48 and -24 (we use the sizes of Table 1), and
the training. Training follows Lingvo's OneBWdsGPipeTransformer: Adam with two slots (16 bytes per
parameter), a learning rate of 0.5 under the Transformer schedule with 40,000 steps of warm-up, no
clipping, dropout 0.1 of attention weights and sub-layer outputs, and 32 micro-batches of one row.
Lingvo's model has 16 heads and a LayerNorm before the softmax. The number of steps is our choice.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry, tfds_text
from tasks.lm import model


class Transformer(registry.SingleTaskModelParams):
  """Transformer-NUM_LAYERS in NUM_STAGES stages."""

  NUM_LAYERS = 3
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 32
  MODEL_DIM = 2048
  HIDDEN_DIM = 8192
  NUM_HEADS = 32
  VOCAB_SIZE = 32_000
  SEQ_LEN = 1024
  BATCH_SIZE = 32
  MAX_STEPS = 200_000

  def _Input(self, split: str) -> hyperparams.InstantiableParams:
    return tfds_text.TfdsTextInput.Params().Set(
      name='lm1b',
      dataset='lm1b',
      split=split,
      vocab_filepath='runs/vocab/lm1b_32k.model',
      vocab_size=self.VOCAB_SIZE,
      seq_len=self.SEQ_LEN,
      batch_size=self.BATCH_SIZE,
      count_words=True,
      cache_dir='~/.cache/lingvo_gpipe',
    )

  def Train(self) -> hyperparams.InstantiableParams:
    """30 million sentences; a row holds whole sentences."""
    return self._Input('train')

  def Test(self) -> hyperparams.InstantiableParams:
    """The 306,688 sentences of all held-out files."""
    return self._Input('test')

  def Task(self) -> hyperparams.InstantiableParams:
    """The model and its training."""
    p = model.TransformerLm.Params().Set(
      name='lm',
      vocab_size=self.VOCAB_SIZE,
      model_dim=self.MODEL_DIM,
      hidden_dim=self.HIDDEN_DIM,
      num_heads=self.NUM_HEADS,
      num_layers=self.NUM_LAYERS,
      residual_dropout_prob=0.1,
      atten_dropout_prob=0.1,
      # A LayerNorm would add 4,096 parameters to the paper's count.
      final_layer_norm=False,
    )
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=self.NUM_MICRO_BATCHES)
    p.train.Set(max_steps=self.MAX_STEPS, save_interval_steps=2000, eval_datasets=['Test'])
    p.train.learner.Set(
      learning_rate=0.5,
      optimizer=optimizer.Adam.Params().Set(beta_2=0.997, epsilon=1e-9),
      lr_schedule=lr_schedules.TransformerSchedule.Params().Set(
        warmup_steps=40_000, model_dim=self.MODEL_DIM
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """One narrow layer on short rows of random tokens, in one stage."""
    return {
      'input.num_fake_examples': 16,
      'input.vocab_size': 64,
      'input.seq_len': 16,
      'input.batch_size': 4,
      'task.vocab_size': 64,
      'task.model_dim': 16,
      'task.hidden_dim': 32,
      'task.num_heads': 2,
      'task.num_layers': 1,
      'task.stack.num_stages': 1,
      'task.stack.num_micro_batches': 2,
      'task.stack.xla': False,
    }


@registry.RegisterSingleTaskModel
class Transformer3(Transformer):
  """Table 1, Naive-1: the largest model for one accelerator of 16 GB without GPipe.

  282,178,816 parameters. The paper reports 282.2M, 3.15 GiB of parameter memory (12 bytes per
  parameter) and 11.7 GiB of activations; the table has the two memory figures swapped.
  """

  NUM_MICRO_BATCHES = 1

  def Task(self) -> hyperparams.InstantiableParams:
    """The model and its training, without re-materialisation."""
    p = super().Task()
    p.stack.remat_policy = 'none'
    return p


@registry.RegisterSingleTaskModel
class Transformer13(Transformer):
  """Table 1, Pipeline-1: one accelerator, micro-batches and re-materialisation.

  785,761,536 parameters. The paper reports 785.8M, 8.8 GiB of parameter memory and 6.4 GiB of
  activations.
  """

  NUM_LAYERS = 13


@registry.RegisterSingleTaskModel
class Transformer103(Transformer):
  """Table 1, Pipeline-8: eight accelerators.

  5,318,006,016 parameters. The paper reports 5.3B, 59.5 GiB of parameter memory and 50.9 GiB of
  activations on all accelerators together.
  """

  NUM_LAYERS = 103
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class Transformer415(Transformer):
  """Table 1, Pipeline-32: 32 accelerators.

  21,029,786,880 parameters. The paper reports 21.0B, 235.1 GiB of parameter memory and 199.9 GiB of
  activations on all accelerators together.
  """

  NUM_LAYERS = 415
  NUM_STAGES = 32


@registry.RegisterSingleTaskModel
class Transformer1663(Transformer):
  """Table 1, Pipeline-128: 128 accelerators.

  83,876,910,336 parameters. The paper reports 83.9B, 937.9 GiB of parameter memory and 796.1 GiB of
  activations on all accelerators together.
  """

  NUM_LAYERS = 1663
  NUM_STAGES = 128


@registry.RegisterSingleTaskModel
class Transformer48(Transformer):
  """Table 2: throughput on TPUs; `task.stack.num_stages` 2, 4 and 8, `num_micro_batches` 1, 4, 32.

  2,548,301,056 parameters, if the layers are as in Table 1, which the paper does not say. It
  reports, relative to K=2, M=1 and with batches "adjusted to fit memory": 1.7, 3.2, 4.8 at M=4
  (more than the bound for equal batches) and 1.8, 3.4, 6.3 at M=32 for K=2, 4, 8.
  """

  NUM_LAYERS = 48
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class Transformer24(Transformer):
  """Table 3: throughput on P100 GPUs without fast links; `task.stack.num_stages` 2, 4 and 8.

  1,339,702,528 parameters, if the layers are as in Table 1, which the paper does not say. It
  reports 1, 1.8 and 3.3 for K=2, 4, 8 at M=32.
  """

  NUM_LAYERS = 24
  NUM_STAGES = 8
