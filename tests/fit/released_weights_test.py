# SPDX-License-Identifier: Apache-2.0
"""A pipeline that nobody holds leaves no weights in memory, so that a process can try many."""

import gc
import sys
import weakref

import keras
import pytest

from tests.toys import keras_fits


def _Alive(references):
  gc.collect()
  return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'schedule': 'zb_h1', 'remat_policy': 'layer'},
    {'loss_chunk_size': 3, 'remat_policy': 'none'},
    {'vocabulary': 'shared', 'schedule': '1f1b'},
    {'num_replicas': 2},
  ],
  ids=str,
)
def testWeightsAreReleasedWithThePipeline(options, caplog):
  """So are their slots, and the same holds after evaluation and prediction."""

  def Train():
    model = keras_fits.Mlp(outputs=9)
    pipe = keras_fits.Pipe(model, 2, 2, **options)
    pipe.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = keras_fits.Floats(8, 5), keras_fits.Integers(9, 8)
    pipe.fit(x, y, batch_size=8, verbose=0)
    pipe.evaluate(x, y, batch_size=8, verbose=0)
    if 'vocabulary' not in options:
      pipe.predict(x, batch_size=8, verbose=0)
    variables = [*model.variables, *pipe.optimizer.variables]
    return {f'{i} {v.path}': weakref.ref(v.value) for i, v in enumerate(variables)}

  assert not _Alive(Train())
  assert 'retracing' not in caplog.text  # TensorFlow counts each model alone.


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
