# SPDX-License-Identifier: Apache-2.0
"""AmoebaNet: parameter counts, and equal training with any cut."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import skip
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.schedule import schedules
from tasks.image import amoebanet, amoebanet_cell, heads
from tests import naming
from tests.toys import stacks

NUM_CLASSES = 7
IMAGE_SIZE = 12
BATCH_SIZE = 6


def _Params(**values):
  p = amoebanet.AmoebaNet.Params().Set(name='net', image_size=224, num_classes=1001)
  return p.Set(**values)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'variant, num_cells, reduction_size, expected',
  [
    ('D', 3, 16, 354_190),
    ('D', 6, 64, 3_668_881),
    ('B', 18, 512, 557_299_209),
  ],
)
def testParameterCountsOfThePaper(variant, num_cells, reduction_size, expected):
  """Counts the paper's models; tests/params/image/imagenet_test.py has the experiments."""

  def Refuse(next_creator, **kwargs):
    raise AssertionError('a variable was made')

  p = _Params(variant=variant, num_cells=num_cells, reduction_size=reduction_size)
  with tf.variable_creator_scope(Refuse):
    assert p.Instantiate().NumParams() == expected


def testSizesOfTheLayers():
  """Table 2's network at 224x224: shapes between cells, and 14.19 G multiply-adds per image."""
  net = _Params(num_cells=18, reduction_size=256, aux_loss_weight=0.4).Instantiate()
  layers = net.stack.layers
  # Stem, two stem cells, 18 normal and two reduction cells, the ends of the skip, the head.
  assert len(layers) == 1 + 2 + 18 + 2 + 2 + 1
  cut = cut_lib.MakeCut(
    layers, [tf.TensorSpec([1, 224, 224, 3])], schedule=schedules.Get('gpipe', 1, 1)
  )
  shapes = [cost.out_specs[0].shape.as_list()[1:] for cost in cut.layers]
  assert shapes[:3] == [[111, 111, 32], [56, 56, 3 * 64], [28, 28, 3 * 128]]
  assert shapes[3:9] == [[28, 28, 4 * 256]] * 6
  assert shapes[9:16] == [[14, 14, 3 * 512]] + [[14, 14, 4 * 512]] * 6
  assert shapes[16] == shapes[15]
  assert isinstance(layers[16], skip.StashLayer)  # After the last cell of the second stack.
  assert shapes[17:24] == [[7, 7, 3 * 1024]] + [[7, 7, 4 * 1024]] * 6
  assert [spec.shape.as_list() for spec in cut.layers[-1].out_specs] == [[1, 1001]] * 2
  flops = sum(stage.flops for stage in cut.stages)
  np.testing.assert_allclose(flops / 2, 14.19e9, rtol=0.03)


def testAuxiliaryHeadHasThePapersParameters():
  p = _Params(num_cells=18, reduction_size=208, aux_loss_weight=0.4)
  # Without it there are 81.14 million, see tests/params/image/imagenet_test.py.
  assert round(p.Instantiate().NumParams() / 1e6, 2) == 81.79


def testParamsReachTheLayers():
  p = _Params(
    num_cells=3,
    reduction_size=16,
    aux_loss_weight=0.4,
    dropout_prob=0.3,
    drop_path_keep_prob=0.6,
    drop_path_total_steps=50,
  )
  p.batch_norm_tpl.Set(decay=0.25, epsilon=0.125)
  layers = p.Instantiate().stack.layers
  assert layers[0].params.activation == 'NONE'
  assert layers[-1].params.dropout_prob == 0.3
  assert layers[-2].params.input_dim == 4 * 32  # The normal cell after the reduction cell.
  norms, drops = (
    [x.params for layer in layers for x in layer.Descendants() if type(x).__name__ == name]
    for name in ('BatchNormLayer', 'DropPathLayer')
  )
  assert len(norms) > 50 and {(x.decay, x.epsilon) for x in norms} == {(0.25, 0.125)}
  assert len(drops) > 30 and {(x.keep_prob, x.total_steps) for x in drops} == {(0.6, 50)}


@pytest.mark.parametrize(
  'values, names',
  [
    ({'variant': 'A'}, ('variant', "'B'", "'D'", "'A'")),
    ({'num_cells': 0}, ('num_cells', 0)),
    ({'num_cells': 1, 'aux_loss_weight': 0.4}, ('aux_loss_weight', 'num_cells', 2, 1)),
    ({'reduction_size': 40}, ('reduction_size', 16, 40)),
    (
      {'image_size': 32, 'aux_loss_weight': 0.4},
      ('image_size 32', '2x2', '5x5', 'aux_loss_weight'),
    ),
  ],
)
def testWrongParamsRaise(values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Params(**{'num_cells': 3, 'reduction_size': 16, **values}).Instantiate()


def testWrongCellRaises():
  p = amoebanet_cell.AmoebaNetCell.Params().Set(name='cell', filters=4, input_dim=4)
  with pytest.raises(ValueError, match=naming.Naming('kind', "'d_normal'", "'normal'")):
    p.Copy().Set(kind='normal').Instantiate()
  with pytest.raises(ValueError, match=naming.Naming('filters', 4, 6)):
    p.Copy().Set(filters=6).Instantiate()


# ---- pipelined = unpipelined ---------------------------------------------------------------------


def _TwoCells():
  """Returns a normal and a reduction cell, with everything that depends on the micro-batch.

  All operations of cells are in these two.
  """
  net = _SmallNet('D')
  stem, normal = net.stack.params.sub[:2]
  reduction = _SmallNet('B').stack.params.sub[2]
  (aux_head,) = [p for p in net.stack.params.sub if p.cls is heads.AuxiliaryHead]
  aux_head = aux_head.Copy().Set(input_dim=reduction.input_dim, input_size=IMAGE_SIZE)
  head_dim = amoebanet_cell.AmoebaNetCell.OutputDim(reduction.kind, reduction.filters)
  head = net.stack.params.sub[-1].Copy().Set(input_dim=head_dim)
  stash = skip.StashLayer.Params().Set(key=aux_head.key)
  return net, [stem, normal, stash, reduction, aux_head, head]


def _SmallNet(variant):
  p = amoebanet.AmoebaNet.Params().Set(
    name='net',
    variant=variant,
    num_cells=3,
    reduction_size=4,
    stem_filters=8,
    stem_stride=1,
    num_stem_cells=0,
    image_size=IMAGE_SIZE,
    num_classes=NUM_CLASSES,
    label_smoothing=0.1,
    aux_loss_weight=0.4,
    aux_head_scale=0.05,
    dropout_prob=0.3,
    drop_path_keep_prob=0.6,
    drop_path_total_steps=2 * stacks.STEP,
  )
  return p.Instantiate()


def testPipelinedEqualsUnpipelined():
  """Cells of both variants; the input of the auxiliary head skips a stage."""
  net, sub = _TwoCells()

  def Loss(theta, outputs, side):
    del theta
    batch = nested_map.NestedMap(labels=side.labels, example_weights=side.weights)
    # The reference computes the loss outside its context.
    with fprop_context.Scope(step=0):
      metrics, _ = net.ComputeLoss(None, outputs, batch)
    return metrics

  rng = np.random.default_rng(0)
  images = tf.constant(rng.standard_normal([BATCH_SIZE, IMAGE_SIZE, IMAGE_SIZE, 3]))
  labels = tf.constant(rng.integers(0, NUM_CLASSES, [BATCH_SIZE]), tf.int32)
  side = nested_map.NestedMap(labels=labels, weights=stacks.ExampleWeights(BATCH_SIZE))
  stack = stacks.MakeStack(
    sub,
    num_stages=3,
    splits=[3, 4, 6],
    num_micro_batches=2,
    schedule='1f1b',
    remat_policy='layer',
  )
  actual = stacks.Train(stack, (images,), side, Loss)
  expected = stacks.Reference(sub, 2, (images,), side, Loss)
  assert 'aux_loss' in actual[0]
  stacks.CheckEqual(actual, expected)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
