# SPDX-License-Identifier: Apache-2.0
"""German to English on WMT 2014: the bilingual baseline of the GPipe paper on public data.

The data are wmt14_translate/de-en of TFDS (2 GB; docs/datasets.md describes how to prepare them).
`python -m tools.train_sentencepiece --model=mt.wmt14.TransformerBigDeEn` makes the vocabulary, and
`trainer --model=mt.wmt14.TransformerBigDeEn --logdir=runs/wmt14` trains on one accelerator. Without
data and vocabulary, `--model_params_override='input.num_fake_examples:4096'` trains on random
tokens, to measure time and memory, and `mt.cldr.Bilingual` runs anywhere. The experiment has not
been trained yet.
"""

from __future__ import annotations

from lingvo_gpipe import hyperparams, registry
from params.mt import multilingual


@registry.RegisterSingleTaskModel
class TransformerBigDeEn(multilingual.Translation):
  """T(6, 8192, 16) with 32,000 pieces: 343 million parameters (the paper's baselines: about 350).

  The paper's Table 5 reports a Transformer Big from German to English on non-public data: batches
  of 260K, 1M and 4M tokens give a loss of 2.58, 2.51 and 2.46, and 30.92, 31.86 and 32.71 BLEU. A
  mini-batch of this experiment has 32,768 tokens; set
  `task.train.learner.num_accumulated_mini_batches` to 8, 32 or 128 for the paper's batches.
  """

  PAIRS = ['wmt14_translate/de-en']
  PAIRS_WITH_TEST = PAIRS
  VOCABULARY = 'vocab/wmt14_de_en_32k.model'
  VOCAB_SIZE = 32_000

  def Train(self) -> hyperparams.InstantiableParams:
    """4.5 million sentence pairs."""
    return super().Train().Set(sampling_temperature=1.0)
