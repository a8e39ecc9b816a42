# SPDX-License-Identifier: Apache-2.0
"""Translation into English: the multilingual models T(L, H, A) of the GPipe paper.

See arXiv:1811.06965v5, section 5. `trainer --model=mt.multilingual.T6x8192x16 --logdir=runs/t6`
trains. Without data and on any machine, `--mode=inspect_model` counts the parameters, and
`--mode=inspect_partition` shows the cut and the memory of the stages. None of these experiments has
been trained yet.

The paper's corpus, 25 billion sentence pairs of 102 languages with English, is not public. These
experiments use 14 languages of WMT from TFDS instead, as later work of the same authors (Kudugunta
et al. 2021). docs/datasets.md describes how to prepare the data sets named below (about 40 GB; some
files for Czech, Hindi and Russian must be downloaded by hand). `python -m
tools.train_sentencepiece --model=mt.multilingual.T6x8192x16` makes the vocabulary. Without data and
vocabulary, `--model_params_override='input.num_fake_examples:4096'` trains on random tokens, to
measure time and memory, and `mt.cldr.Multilingual` runs anywhere.

From the paper: the sizes; 64k pieces; one model for all languages, which are sampled by
temperature; the numbers of stages; a smaller initialisation of the feed-forward layers and clipped
logits for deep models. The sizes in Figure 1b fit two tables of 64,000 x 1024: one for the tokens
of both sides, and one for the softmax, which is not tied.

Not in the paper, but in the same group's later work (GShard, Kudugunta et al.): temperature 5,
Adafactor with a learning rate of 3.0 under the Transformer schedule with 40,000 steps of warm-up,
and dropout 0.1. Our choice: label smoothing 0.1, the exponent of the initialisation (Fixup by
Lingvo's rule, depth^-1/2), the bound of the logits, batches and buckets, and the numbers of
micro-batches and steps.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry, tfds_pairs, weight_params
from tasks.mt import model

_WMT = [
  'wmt14_translate/cs-en',
  'wmt14_translate/de-en',
  'wmt14_translate/fr-en',
  'wmt14_translate/hi-en',
  'wmt14_translate/ru-en',
  'wmt15_translate/fi-en',
  'wmt16_translate/ro-en',
  'wmt16_translate/tr-en',
  'wmt17_translate/lv-en',
  'wmt17_translate/zh-en',
  'wmt18_translate/et-en',
  'wmt19_translate/gu-en',
  'wmt19_translate/kk-en',
  'wmt19_translate/lt-en',
]
# The data sets of wmt19 have no test split.
_WMT_WITH_TEST = [name for name in _WMT if 'wmt19' not in name]


class Translation(registry.SingleTaskModelParams):
  """T(NUM_LAYERS, HIDDEN_DIM, NUM_HEADS) in NUM_STAGES stages, on WMT data from TFDS."""

  PAIRS = _WMT
  PAIRS_WITH_TEST = _WMT_WITH_TEST
  VOCABULARY = 'vocab/multilingual_64k.model'
  VOCAB_SIZE = 64_000
  NUM_LAYERS = 6
  HIDDEN_DIM = 8192
  NUM_HEADS = 16
  NUM_STAGES = 1
  MAX_STEPS = 300_000

  def _Input(self, split: str, datasets: list[str]) -> hyperparams.InstantiableParams:
    return tfds_pairs.TfdsPairs.Params().Set(
      name=split,
      datasets=list(datasets),
      split=split,
      vocab_filepath=self.VOCABULARY,
      vocab_size=self.VOCAB_SIZE,
      # 32,768 tokens of each side in every batch.
      bucket_upper_bound=[32, 64, 128],
      bucket_batch_limit=[1024, 512, 256],
      sampling_temperature=5.0,
      cache_dir='~/.cache/lingvo_gpipe',
    )

  def Train(self) -> hyperparams.InstantiableParams:
    """The training pairs, into English."""
    return self._Input('train', self.PAIRS)

  def Dev(self) -> hyperparams.InstantiableParams:
    """The validation pairs."""
    return self._Input('validation', self.PAIRS)

  def Test(self) -> hyperparams.InstantiableParams:
    """The test pairs."""
    return self._Input('test', self.PAIRS_WITH_TEST)

  def Task(self) -> hyperparams.InstantiableParams:
    """The model and its training."""
    p = model.TransformerMt.Params().Set(
      name='mt',
      vocab_size=self.VOCAB_SIZE,
      hidden_dim=self.HIDDEN_DIM,
      num_heads=self.NUM_HEADS,
      num_layers=self.NUM_LAYERS,
      label_smoothing=0.1,
      input_dropout_prob=0.1,
      residual_dropout_prob=0.1,
      atten_dropout_prob=0.1,
      relu_dropout_prob=0.1,
    )
    p.softmax_tpl.logits_abs_max = 30.0
    small = weight_params.WeightInit.XavierWithFixupParams(depth=self.NUM_LAYERS)
    p.encoder_tpl.tr_fflayer_tpl.fflayer_tpl.params_init = small
    p.decoder_tpl.tr_fflayer_tpl.fflayer_tpl.params_init = small
    p.stack.Set(num_stages=self.NUM_STAGES, num_micro_batches=max(16, 4 * self.NUM_STAGES))
    p.train.Set(max_steps=self.MAX_STEPS, save_interval_steps=5000, eval_datasets=['Dev', 'Test'])
    p.train.learner.Set(
      learning_rate=3.0,
      optimizer=optimizer.Adafactor.Params().Set(relative_step=False),
      lr_schedule=lr_schedules.TransformerSchedule.Params().Set(
        warmup_steps=40_000, model_dim=1024
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """Two narrow layers on a few short sentences of noise."""
    return {
      'input.num_fake_examples': 8,
      'input.vocab_size': 32,
      'input.bucket_upper_bound': [6],
      'input.bucket_batch_limit': [4],
      'task.vocab_size': 32,
      'task.model_dim': 8,
      'task.hidden_dim': 12,
      'task.num_heads': 2,
      'task.dim_per_head': 4,
      'task.num_layers': 1,
      'task.stack.num_stages': 1,
      'task.stack.num_micro_batches': 2,
      'task.stack.xla': False,
    }


@registry.RegisterSingleTaskModel
class T6x8192x16(Translation):
  """T(6, 8192, 16) on one accelerator, as large as the paper's bilingual Transformer Big.

  Matrices of the layers: 276,824,064; with two tables of 64,000 x 1024: 407,896,064; biases and
  norms: 313,856. The paper reports 400M parameters and, as read from Figure 1b, a mean of 30.35
  BLEU over 102 languages.
  """


@registry.RegisterSingleTaskModel
class T24x8192x16(Translation):
  """T(24, 8192, 16), deep, on four accelerators.

  Matrices of the layers: 1,107,296,256; with two tables: 1,238,368,256. The paper reports 1.3B
  parameters and about 34.55 BLEU, far better than the wide model on low-resource languages.
  """

  NUM_LAYERS = 24
  NUM_STAGES = 4


@registry.RegisterSingleTaskModel
class T12x16384x32(Translation):
  """T(12, 16384, 32), wide, on two accelerators.

  Matrices of the layers: 1,107,296,256, as many as the deep model's; with two tables:
  1,238,368,256. The paper reports 1.3B parameters and about 32.8 BLEU.
  """

  NUM_LAYERS = 12
  HIDDEN_DIM = 16384
  NUM_HEADS = 32
  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class T32x16384x32(Translation):
  """T(32, 16384, 32) on eight accelerators.

  Matrices of the layers: 2,952,790,016; with two tables: 3,083,862,016. The paper reports 3B
  parameters and about 35.45 BLEU.
  """

  NUM_LAYERS = 32
  HIDDEN_DIM = 16384
  NUM_HEADS = 32
  NUM_STAGES = 8


@registry.RegisterSingleTaskModel
class T64x16384x32(Translation):
  """T(64, 16384, 32), the paper's largest model: 128 layers on sixteen accelerators.

  Matrices of the layers: 5,905,580,032; with two tables: 6,036,652,032. The paper reports 6B
  parameters and about 36.2 BLEU.
  """

  NUM_LAYERS = 64
  HIDDEN_DIM = 16384
  NUM_HEADS = 32
  NUM_STAGES = 16
