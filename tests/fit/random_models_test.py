# SPDX-License-Identifier: Apache-2.0
"""Random Keras models fit as plain Keras does, under several schedules and each policy.

    RANDOM_MODELS=1000:1100 make test ARGS=tests/fit/random_models_test.py

tries the models of these seeds, too.
"""

import os
import random
import sys

import keras
import pytest

from lingvo_gpipe.pipeline.schedule import rematerialisation
from tests.toys import keras_fits, random_models

_POLICIES = (*rematerialisation.POLICIES, 'auto')
_SEEDS = range(len(_POLICIES))
_MORE_SEEDS = range(*map(int, os.environ.get('RANDOM_MODELS', '0:0').split(':')))


def _Compiled():
  return {'loss': 'huber'}


def _Optimizer():
  return keras.optimizers.SGD(0.05, clipnorm=1.0)  # No random model diverges.


@pytest.mark.parametrize('seed', [*_SEEDS, *_MORE_SEEDS])
def testAModelFitsAsInKeras(seed):
  choose = random.Random(f'options {seed}')  # Independent of the model's choices.

  def Make():
    return random_models.Make(seed)

  plain = keras_fits.Seeded(Make)
  x, y = random_models.Batch(plain, 8, seed)
  options = {'optimizer': _Optimizer, 'batch_size': choose.choice([4, 5])}
  expected = keras_fits.Fit(plain, x, y, _Compiled, **options)
  pipe = keras_fits.Pipe(
    keras_fits.Seeded(Make),
    num_stages=choose.choice([2, 3]),
    num_micro_batches=choose.choice([1, 2, 3]),
    schedule=choose.choice(['gpipe', '1f1b', '1f1b_fused', 'zb_h1']),
    remat_policy=_POLICIES[seed % len(_POLICIES)],
  )
  keras_fits.CheckEqual(keras_fits.Fit(pipe, x, y, _Compiled, **options), expected)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
