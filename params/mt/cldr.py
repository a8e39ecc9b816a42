# SPDX-License-Identifier: Apache-2.0
"""Translates names from 129 languages into English: a small version of GPipe's translation study.

The data are about 1,000 names of territories, languages, currencies and scripts for each language,
from Babel's CLDR data (`pip install 'lingvo_gpipe[mt]'`; needs no download). `trainer
--model=mt.cldr.Multilingual --logdir=runs/multilingual` trains one model for all languages.

The study compares it with bilingual models for a dozen languages (`cldr_names.STUDIED`). Training
uses only some of the names of these languages, so that their resources differ by two orders of
magnitude, and all names of all other languages. `python -m tools.multilingual_study` trains the
models one after another and draws the paper's figure 3; docs/translation.md has the measured
results.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, lr_schedules, optimizer, registry
from tasks.mt import cldr_input, cldr_names, model


class Names(registry.SingleTaskModelParams):
  """T(NUM_LAYERS, HIDDEN_DIM, NUM_HEADS) with model dimension MODEL_DIM, on names of LANGUAGES."""

  LANGUAGES: list[str] = []
  DIRECTION = 'given'
  NUM_LAYERS = 2
  HIDDEN_DIM = 256
  NUM_HEADS = 1
  MODEL_DIM = 64
  VOCAB_SIZE = 2000
  BATCH_LIMIT = [256, 64]
  DROPOUT = 0.0
  LEARNING_RATE = 1.0
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 2
  MAX_STEPS = 3000

  def _Input(self, split: str) -> hyperparams.InstantiableParams:
    return cldr_input.CldrInput.Params().Set(
      name=split,
      split=split,
      languages=list(self.LANGUAGES),
      direction=self.DIRECTION,
      target_language_token='' if self.DIRECTION == 'given' else 'source',
      vocab_filepath='vocab/cldr_2k.model',
      vocab_size=self.VOCAB_SIZE,
      bucket_upper_bound=[16, 48],
      bucket_batch_limit=list(self.BATCH_LIMIT),
      sampling_temperature=5.0,
    )

  def _StudiedInput(self, split: str) -> hyperparams.InstantiableParams:
    return self._Input(split).Set(languages=list(self.LANGUAGES or cldr_names.STUDIED))

  def Train(self) -> hyperparams.InstantiableParams:
    """80 % of the names of each language; fewer of the studied languages."""
    return self._Input('train').Set(max_names=dict(cldr_names.STUDIED))

  def Dev(self) -> hyperparams.InstantiableParams:
    """5 % of the names of the studied languages."""
    return self._StudiedInput('dev')

  def Test(self) -> hyperparams.InstantiableParams:
    """15 % of the names of the studied languages."""
    return self._StudiedInput('test')

  def Task(self) -> hyperparams.InstantiableParams:
    """The model and its training."""
    p = model.TransformerMt.Params().Set(
      name='mt',
      vocab_size=self.VOCAB_SIZE,
      model_dim=self.MODEL_DIM,
      hidden_dim=self.HIDDEN_DIM,
      num_heads=self.NUM_HEADS,
      num_layers=self.NUM_LAYERS,
      label_smoothing=0.1,
      input_dropout_prob=self.DROPOUT,
      residual_dropout_prob=self.DROPOUT,
    )
    p.beam_search.target_seq_len = 24
    p.stack.Set(
      num_stages=self.NUM_STAGES,
      num_micro_batches=self.NUM_MICRO_BATCHES,
      remat_policy='none',  # The activations are small, and recomputing them takes time.
      xla=False,
    )
    p.train.Set(
      max_steps=self.MAX_STEPS,
      save_interval_steps=500,
      summary_interval_steps=50,
      eval_datasets=['Dev', 'Test'],
    )
    p.train.learner.Set(
      learning_rate=self.LEARNING_RATE,
      optimizer=optimizer.Adam.Params().Set(beta_2=0.98),
      clip_gradient_norm_to_value=1.0,
      lr_schedule=lr_schedules.TransformerSchedule.Params().Set(
        warmup_steps=150, model_dim=self.MODEL_DIM
      ),
    )
    return p

  def Smoke(self) -> dict[str, object]:
    """Two narrow layers on a few short names of noise."""
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
    }


@registry.RegisterSingleTaskModel
class Multilingual(Names):
  """T(2, 256, 1) on all languages: half a million parameters, as many as Bilingual."""


@registry.RegisterSingleTaskModel
class MultilingualDeep(Names):
  """T(8, 256, 1) on all languages, with as many weights in its layers as MultilingualWide."""

  NUM_LAYERS = 8
  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class MultilingualWide(Names):
  """T(4, 512, 2) on all languages."""

  NUM_LAYERS = 4
  HIDDEN_DIM = 512
  NUM_HEADS = 2
  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class ManyToMany(Names):
  """T(4, 512, 2) from all languages into English and back; a token selects the target language.

  Not measured yet.
  """

  DIRECTION = 'both'
  NUM_LAYERS = 4
  HIDDEN_DIM = 512
  NUM_HEADS = 2
  NUM_STAGES = 2


@registry.RegisterSingleTaskModel
class Bilingual(Names):
  """T(2, 256, 1) on German, a baseline of the study; for Russian set `input.languages:['ru']`."""

  LANGUAGES = ['de']
  BATCH_LIMIT = [64, 16]
  DROPOUT = 0.2
  LEARNING_RATE = 0.5
