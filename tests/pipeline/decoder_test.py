# SPDX-License-Identifier: Apache-2.0
"""Decoding through the pipeline: the layers' own outputs, each position computed once."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.graph import graph_cost
from lingvo_gpipe.layers import embedding, linear, norm, skip, transformer
from lingvo_gpipe.pipeline.stages import micro_batch
from tests import naming
from tests.toys import decoding_layers, stacks

_VOCAB, _DIM, _BATCH, _PROMPT, _TIME, _MAX = 11, 8, 7, 3, 6, 9


def _Layers(num_layers=2):
  """Embedding, positions, blocks, norm, softmax."""
  block = transformer.TransformerLayer.Params().Set(
    input_dim=_DIM, hidden_dim=12, num_heads=2, is_causal=True, residual_dropout_prob=0.5
  )
  return [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    embedding.PositionalEmbeddingLayer.Params().Set(embedding_dim=_DIM),
    *[block.Copy() for _ in range(num_layers)],
    norm.LayerNorm.Params().Set(input_dim=_DIM),
    embedding.SimpleFullSoftmax.Params().Set(input_dim=_DIM, num_classes=_VOCAB),
  ]


# By the number of stages; in four, the two in the middle are equal.
_SPLITS = {1: [6], 2: [3, 6], 4: [2, 3, 4, 6]}


def _Ids(batch=_BATCH, time=_TIME, seed=0):
  rng = np.random.default_rng(seed)
  return tf.constant(rng.integers(0, _VOCAB, [batch, time]), tf.int32)


def _Stack(num_stages, num_micro_batches, sub=None, specs=None, **options):
  options = {'splits': _SPLITS[num_stages], **options} if sub is None else options
  stack = stacks.MakeStack(
    sub or _Layers(), num_stages=num_stages, num_micro_batches=num_micro_batches, **options
  )
  stack.Place(stacks.Devices(), specs or tf.TensorSpec([_BATCH, _TIME], tf.int32))
  return stack


@functools.cache
def _Plain():
  return stacks.PlainLayers(_Layers())


def _Logits(ids):
  """Returns logits of all positions at once, by the layers on one device."""
  layer, theta = _Plain()
  return layer.FProp(theta(), ids).numpy()


def _Decode(stack, ids, prompt=_PROMPT, max_length=_MAX, **options):
  """The outputs at all positions, and the last states."""
  outputs, states = stack.Prefill(ids[:, :prompt], max_length=max_length, **options)
  pieces = [outputs]
  for t in range(prompt, ids.shape[1]):
    outputs, states = stack.ExtendStep(states, ids[:, t : t + 1], time_step=t)
    pieces.append(outputs)
  return tf.concat(pieces, axis=1).numpy(), states


def _CheckDevices(stack, states):
  """Every tensor of the states lies on the device of its stage."""
  for s, of_micro_batches in zip(stack.engine.stages, states.stages, strict=True):
    for leaf in tf.nest.flatten(of_micro_batches):
      assert leaf.backing_device.endswith(s.device)


@pytest.mark.parametrize(('num_stages', 'num_micro_batches'), [(1, 1), (2, 2), (4, 3)])
def testEqualsTheLayersOnTheWholeSequence(num_stages, num_micro_batches):
  """7 examples into 3 micro-batches are 3, 2 and 2; each structure is traced once for each size."""
  stack = _Stack(num_stages, num_micro_batches)
  logits, states = _Decode(stack, _Ids())
  np.testing.assert_allclose(logits, _Logits(_Ids()), rtol=0, atol=1e-12)
  _CheckDevices(stack, states)
  num_sizes = len(set(micro_batch.Sizes(_BATCH, num_micro_batches)))
  num_structures = len({s.structure for s in stack.engine.stages})
  assert num_structures == min(num_stages, 3)
  assert stack.decoder.num_traces == 2 * num_sizes * num_structures
  # More positions, another sequence: nothing is traced any more.
  again, _ = _Decode(stack, _Ids(seed=1))
  np.testing.assert_allclose(again, _Logits(_Ids(seed=1)), rtol=0, atol=1e-12)
  assert stack.decoder.num_traces == 2 * num_sizes * num_structures


@functools.cache
def _Shared():
  """A stack for the tests that only use it."""
  return _Stack(2, 3)


def testABatchMayBeSmallerThanTheNumberOfMicroBatches():
  logits, states = _Decode(_Shared(), _Ids(2))
  np.testing.assert_allclose(logits, _Logits(_Ids(2)), rtol=0, atol=1e-12)
  assert [len(of_micro_batches) for of_micro_batches in states.stages] == [2, 2]


def testStatesStayAsTheyAre():
  """A step from old states repeats its outputs: nothing is written in place."""
  stack, ids = _Shared(), _Ids()
  _, states = stack.Prefill(ids[:, :_PROMPT], max_length=_MAX)
  first, _ = stack.ExtendStep(states, ids[:, 3:4], time_step=3)
  other, _ = stack.ExtendStep(states, ids[:, 4:5], time_step=3)
  again, _ = stack.ExtendStep(states, ids[:, 3:4], time_step=3)
  np.testing.assert_array_equal(first, again)
  assert not np.allclose(first, other)


def testLogitsOfTheLastPositionAreComputedAlone():
  """Its logits are the same, and the softmax computes no others."""
  stack, ids = _Shared(), _Ids()
  whole, _ = _Decode(stack, ids)
  last, states = _Decode(stack, ids, last_only=True)
  np.testing.assert_allclose(last, whole[:, _PROMPT - 1 :], rtol=0, atol=1e-12)
  _CheckDevices(stack, states)

  def Flops(last_only):
    prefill = stack.decoder._prefill
    graph = prefill.get_concrete_function((ids[:, :_PROMPT],), _MAX, last_only)
    return graph_cost.CountFlops(graph).flops

  saved = Flops(False) - Flops(True)
  assert saved >= 2 * _DIM * _VOCAB * _BATCH * (_PROMPT - 1)
  # Where the last layer mixes positions, the outputs are cut, None among them.
  stack, ids = _Stack(1, 1, _Layers(1)[:3]), _Ids(2)
  (x, paddings), _ = stack.Prefill(ids, max_length=_MAX)
  (last, none), _ = stack.Prefill(ids, max_length=_MAX, last_only=True)
  assert paddings is None and none is None
  np.testing.assert_allclose(last, x[:, -1:], rtol=0, atol=1e-12)


def testReorderedStatesContinueAsTheirRows():
  """Rows move between micro-batches, on their stage's device, and may be more or fewer."""
  stack, prompts = _Shared(), _Ids(3, _PROMPT)
  for rows in ([2, 0, 0, 1, 2, 2, 1], [1], [2, 1, 0]):
    ids = tf.concat([tf.gather(prompts, rows), _Ids(len(rows), 2, seed=2)], axis=1)
    _, states = stack.Prefill(prompts, max_length=_MAX)
    states = stack.ReorderStates(states, rows)
    assert states.batch_size == len(rows)
    _CheckDevices(stack, states)
    expected = _Logits(ids)
    for t in range(_PROMPT, ids.shape[1]):
      logits, states = stack.ExtendStep(states, ids[:, t : t + 1], time_step=t)
      np.testing.assert_allclose(logits[:, 0], expected[:, t], rtol=0, atol=1e-12)
    _CheckDevices(stack, states)


def testAStepCostsOnePositionOfFProp():
  """A step per position takes as many products as the whole sequence: none is repeated."""
  stack, batch = _Shared(), 2
  ids = _Ids(batch, _MAX)

  def Flops(function, *args, **kwargs):
    return graph_cost.CountFlops(function.get_concrete_function(*args, **kwargs)).flops

  _, states = stack.Prefill(ids[:, :1], max_length=_MAX)
  step = Flops(stack.decoder._extend_step, states.stages, (ids[:, :1],), tf.constant(1))
  whole = Flops(stack.decoder._prefill, (ids,), max_length=_MAX, last_only=False)
  # Beside the products there is the writing into the caches.
  written = 2 * 2 * _MAX * _DIM * batch
  assert 0.9 * whole <= _MAX * step <= 1.1 * whole + 2 * _MAX * written
  # One function serves all positions; only attention grows with the room.
  _, longer = stack.Prefill(ids[:, :1], max_length=2 * _MAX)
  twice = Flops(stack.decoder._extend_step, longer.stages, (ids[:, :1],), tf.constant(1))
  assert step < twice < 1.5 * step


def testWeightsAreReadAtEachCallAndTiesKept():
  sub = _Layers()
  sub[-1] = embedding.SharedSoftmaxLayer.Params().Set(input_dim=_DIM, num_classes=_VOCAB)
  stack, ids = _Stack(2, 2, sub, ties=[['layers[5].emb', 'layers[0].emb']]), _Ids(4)
  before, _ = _Decode(stack, ids)
  for v in stack.trainable_variables:
    v.assign_add(tf.random.stateless_normal(v.shape, [1, 2], dtype=v.dtype))
  after, _ = _Decode(stack, ids)
  assert not np.allclose(before, after)
  np.testing.assert_allclose(after, stack.Predict(ids), rtol=0, atol=1e-11)


def testDecodingUnderXlaEqualsTheLayers():
  ids = _Ids(4)
  logits, states = _Decode(_Stack(2, 2, _Layers(1), xla=True, dtype=tf.float32), ids)
  layer, theta = stacks.PlainLayers(_Layers(1), dtype=tf.float32)
  np.testing.assert_allclose(logits, layer.FProp(theta(), ids), atol=1e-5)
  assert {x.dtype for x in tf.nest.flatten(states.stages)} == {tf.float32}


def testAnyLayerAndAnyNest():
  """A layer with states of its own; None, integers and bools between stages and in states."""
  rng = np.random.default_rng(3)
  x = tf.constant(rng.normal(size=[5, _TIME, _DIM]))
  nest = {'ids': _Ids(5), 'flag': _Ids(5) > 4, 'none': None}
  sub = [decoding_layers.RunningSumLayer.Params() for _ in range(3)]
  stack = stacks.MakeStack(sub, num_stages=3, num_micro_batches=2)
  stack.Place(stacks.Devices(), *stacks.Specs((x, nest)))
  expected, _ = stack.Predict(x, nest)

  def At(a, b):
    return x[:, a:b], {k: None if v is None else v[:, a:b] for k, v in nest.items()}

  (y, _), states = stack.Prefill(*At(0, 2), max_length=_TIME)
  np.testing.assert_allclose(y, expected[:, :2], rtol=0, atol=1e-12)
  for t in range(2, _TIME):
    (y, passed), states = stack.ExtendStep(states, *At(t, t + 1), time_step=t)
    np.testing.assert_allclose(y, expected[:, t : t + 1], rtol=0, atol=1e-12)
    assert passed['none'] is None
    np.testing.assert_array_equal(passed['ids'], nest['ids'][:, t : t + 1])
  flags = tf.concat([of.flag for (of,) in states.stages[2]], axis=0)
  np.testing.assert_array_equal(flags, nest['flag'][:, -1:])
  assert flags.dtype == tf.bool


def testAOneElementTupleStaysATuple():
  x = tf.ones([2, _TIME, _DIM], tf.float64)
  single = decoding_layers.PositionWiseLayer.Params().Set(fn=lambda x: (x,))
  stack = _Stack(2, 1, [single] * 2, tf.TensorSpec(x.shape, x.dtype))
  (prompt,), states = stack.Prefill(x[:, 1:], max_length=_TIME)
  (last,), _ = stack.ExtendStep(states, x[:, :1], time_step=_TIME - 1)
  assert (prompt.shape, last.shape) == ((2, _TIME - 1, _DIM), (2, 1, _DIM))


def testArgumentsThatDoNotFitAreNamed():
  stack, ids = _Shared(), _Ids()
  _, states = stack.Prefill(ids[:, :_PROMPT], max_length=4)
  step_ids = ids[:, :1]
  for t in (4, 5, -1):
    with pytest.raises(ValueError, match=naming.Naming('stack', f'time_step {t}', '4 positions')):
      stack.ExtendStep(states, step_ids, time_step=tf.constant(t))
  with pytest.raises(ValueError, match=naming.Naming('stack', 'step of 2', 7)):
    stack.ExtendStep(states, step_ids[:2], time_step=3)
  with pytest.raises(ValueError, match=naming.Naming('6 positions', 'max_length 4')) as e:
    stack.Prefill(ids, max_length=4)
  assert any(naming.Names(note, 'stage 0', '0F0') for note in e.value.__notes__)
  for rows in ([0, 7], [-1], [[0]], [0.5], []):
    with pytest.raises(ValueError, match=naming.Naming('stack', '0 to 6')):
      stack.ReorderStates(states, rows)


def testTheErrorNamesTheFailingStageAmongEqualStages():
  """The stages share their functions; the third gets an input that its layer cannot take."""
  x = tf.ones([2, _TIME, _DIM])
  double = decoding_layers.DoublingLayer.Params().Set(most=2 * _DIM)
  stack = _Stack(3, 1, [double] * 3, tf.TensorSpec(x.shape))
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', '[2, 6, 32]')) as e:
    stack.Prefill(x, max_length=_MAX)
  notes = '\n'.join(e.value.__notes__)
  assert 'stack.layers[2] (DoublingLayer), given (float32[2, 6, 32])' in notes
  assert naming.AnyLineNames(notes, 'stage 2 (stack.layers[2])')


@pytest.mark.parametrize(
  ('sub', 'error', 'names'),
  [
    (
      [
        linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=_DIM),
        skip.StashLayer.Params().Set(key='x'),
        skip.PopLayer.Params().Set(key='x'),
      ],
      NotImplementedError,
      ['stack.layers[1]', 'StashLayer', "skip 'x'"],
    ),
    (
      [
        transformer.TransformerLayer.Params().Set(input_dim=_DIM, hidden_dim=4, num_heads=1),
        norm.LayerNorm.Params().Set(input_dim=_DIM),
      ],
      NotImplementedError,
      ['stack.layers[0].self_atten.atten', 'not causal'],
    ),
  ],
)
def testLayersThatCannotDecodeAreNamed(sub, error, names):
  stack = _Stack(2, 1, sub, tf.TensorSpec([_BATCH, _TIME, _DIM], tf.float64))
  with pytest.raises(error, match=naming.Naming(*names)):
    stack.Prefill(tf.zeros([_BATCH, _TIME, _DIM], tf.float64), max_length=_MAX)


def testOtherBatchDimensionsAndUnplacedLayersAreRefused():
  sub = [linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)]
  x = tf.zeros([_TIME, _BATCH, _DIM], tf.float64)
  stack = stacks.MakeStack(sub, batch_dim=1)
  stack.Place(stacks.Devices(), stacks.Specs(x))
  with pytest.raises(ValueError, match=naming.Naming('stack', 'batch_dim 0', 'got 1')):
    stack.Prefill(x, max_length=_MAX)
  with pytest.raises(ValueError, match=naming.Naming('stack', 'no devices', 'Place')):
    stacks.MakeStack(sub).Prefill(x, max_length=_MAX)


def testAFailureAtRunTimeNamesStageLayerAndMicroBatch():
  stack, ids = _Shared(), _Ids().numpy()
  _, states = stack.Prefill(tf.constant(ids[:, :_PROMPT]), max_length=_MAX)
  wrong = ids[:, :1].copy()
  wrong[4] = _VOCAB
  with pytest.raises(tf.errors.InvalidArgumentError) as e:
    stack.ExtendStep(states, tf.constant(wrong), time_step=_PROMPT)
  notes = '\n'.join(e.value.__notes__)
  assert naming.AnyLineNames(notes, 'layer', 'stack.layers[0] (EmbeddingLayer)')
  assert naming.AnyLineNames(notes, 'stage 0', 'micro-batch 1', '0F1')
  # And decoding can continue.
  stack.ExtendStep(states, tf.constant(ids[:, :1]), time_step=_PROMPT)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
