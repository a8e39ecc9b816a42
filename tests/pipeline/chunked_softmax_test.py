# SPDX-License-Identifier: Apache-2.0
"""A softmax whose logits are computed in chunks, as the last layer of a pipeline."""

import functools
import sys

import numpy as np
import pytest

from lingvo_gpipe.layers import embedding, linear
from tests.toys import stacks, tokens

_BATCH, _TIME, _DIM, _VOCAB = 6, 5, 4, 7


def _Sub(chunk_size=0, head=embedding.SimpleFullSoftmax):
  return [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH'),
    head.Params().Set(input_dim=_DIM, num_classes=_VOCAB, chunk_size=chunk_size),
  ]


def _Batch():
  """The second of three micro-batches counts nothing: its mean is NaN."""
  return tokens.Batch(_VOCAB, _BATCH, _TIME, empty=slice(2, 4))


def _Run(stack, inputs, side):
  stack.Place(stacks.Devices(), *stacks.Specs(inputs), loss_fn=tokens.SmoothedXent)
  return stacks.TakeStep(stack, inputs, side)


@functools.cache
def _Expected(head):
  """Returns (sums, gradients) with whole logits, in one stage."""
  stack = stacks.MakeStack(_Sub(0, head), num_stages=1, num_micro_batches=3)
  return _Run(stack, *_Batch())


@pytest.mark.parametrize(
  'head, chunk_size, options',
  [
    (embedding.SimpleFullSoftmax, 99, {'remat_policy': 'layer'}),
    (embedding.SimpleFullSoftmax, 1, {'schedule': '1f1b_fused', 'xla': True}),
    (embedding.SharedSoftmaxLayer, 4, {'remat_policy': 'none', 'schedule': '1f1b'}),
    (embedding.SharedSoftmaxLayer, 10, {'schedule': 'zb_h1'}),
  ],
)
def testLossAndGradientsEqualWholeLogits(head, chunk_size, options):
  stack = stacks.MakeStack(_Sub(chunk_size, head), num_stages=2, num_micro_batches=3, **options)
  sums, gradients = _Run(stack, *_Batch())
  expected_sums, expected = _Expected(head)
  for name, value in expected_sums.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-12, err_msg=name)
  assert gradients.keys() == expected.keys()
  for path, value in expected.items():
    assert np.any(value), path
    np.testing.assert_allclose(gradients[path], value, rtol=1e-10, atol=1e-12, err_msg=path)


def testTheTableOfAnEmbeddingMayBeTheSoftmax():
  """The gradients of both uses add up."""
  ties = [['layers[2].emb', 'layers[0].emb']]
  results = []
  for chunk_size in (0, 4):
    sub = _Sub(chunk_size, embedding.SharedSoftmaxLayer)
    stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=3, ties=ties)
    results.append(_Run(stack, *_Batch())[1])
  for path, value in results[0].items():
    np.testing.assert_allclose(results[1][path], value, rtol=1e-10, atol=1e-12, err_msg=path)


def testThePipelineReturnsLogitsIfThereIsNoLoss():
  stack = stacks.MakeStack(_Sub(4), num_stages=2, num_micro_batches=3)
  (ids,), _ = _Batch()
  stack.Place(stacks.Devices(), *stacks.Specs((ids,)))
  logits = stack.FProp(stack.theta, ids)
  assert logits.shape == [_BATCH, _TIME, _VOCAB]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
