# SPDX-License-Identifier: Apache-2.0
"""Matrix products that backward repeats under each policy, in the graphs that TensorFlow runs.

With n layers of one product each, a forward has n, the weights' gradients n, and the inputs'
gradients n but for the first stage, which needs none for its own input. A frozen layer has no
weight's gradient.
"""

import collections
import itertools
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.layers import dropout, linear, transformer
from lingvo_gpipe.pipeline import emission
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import graph_reader, naming
from tests.toys import faulty_layers, layers, stacks

pytestmark = pytest.mark.optimized_graphs

_DIM, _N, _M = 4, 2, 3
_STAGES = 3


def _Stack(schedule, policy, *, num_stages=_STAGES, num_micro_batches=_M, block=None, **options):
  """Stages of n layers, with a dropout each."""
  square = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, activation='TANH', has_bias=True
  )
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  per_stage = [block] if block else [square] * (_N - 1) + [drop, square]
  return stacks.MakeStack(
    per_stage * num_stages,
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    splits=[len(per_stage) * (k + 1) for k in range(num_stages)],
    schedule=schedule,
    remat_policy=policy,
    **options,
  )


def _Products(stack, tmp_path, monkeypatch, shape=(2 * _M, _DIM), is_trained=None):
  """{action: number of matrix products}, of all actions of a step; the step is run eagerly."""
  numbers = itertools.count()
  known, products = {}, collections.Counter()
  original_for, original_emit = emission.Emission._FunctionsFor, emission.Emission._EmitAction
  xla = stack.params.xla
  current = []

  def Emit(self, s, action):
    current[:] = [str(action)]
    original_emit(self, s, action)

  def Counting(function):
    def Call(*args):
      shapes = tf.nest.map_structure(lambda t: None if t is None else (t.dtype, *t.shape), args)
      key = (id(function), repr(shapes))
      if xla:
        result = function(*args)
        if key not in known:
          hlo = function.experimental_get_compiler_ir(*args)(stage='optimized_hlo')
          known[key] = graph_reader.NumProductsOfXla(hlo)
      elif key in known:
        result = function(*args)
      else:
        results = []
        logdir = tmp_path / str(next(numbers))
        graphs = graph_reader.ExecutedGraphs(lambda: results.append(function(*args)), logdir)
        assert graphs
        known[key], result = graph_reader.NumProducts(graphs), results[0]
      products[current[0]] += known[key]
      return result

    return Call

  def CountingFor(self, s, m):
    functions = original_for(self, s, m)
    for name, value in vars(functions).items():
      if hasattr(value, 'get_concrete_function'):
        setattr(functions, name, Counting(value))
    return functions

  monkeypatch.setattr(emission.Emission, '_FunctionsFor', CountingFor)
  monkeypatch.setattr(emission.Emission, '_EmitAction', Emit)
  x = tf.ones(shape, tf.float64)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs([x]),
    loss_fn=_Loss,
    weights=layer_costs.Weights(is_trained),
  )
  inputs = [(piece,) for piece in stack.SplitBatch(x)]
  ones = [tf.ones([], tf.float64)] * _M
  stacks.RunStep(stack.engine, inputs, [None] * _M, ones, tf.constant(1, tf.int64))
  return products


def _Loss(theta, outputs, side):
  del theta, side
  value = tf.reduce_sum(outputs[0] ** 2)
  return {'loss': (value, tf.ones([], value.dtype))}


def _Expected(schedule, again, num_trained=_N):
  """Returns {action: products}, if backward repeats `again(k, m)` products."""
  expected = collections.Counter()
  for action in itertools.chain.from_iterable(schedule.actions):
    k, kind, m = action.stage, action.kind.value, action.micro_batch
    inputs = _N if k else _N - 1
    extra = again(k, m)
    # The first stage's I has nothing to compute; all is left to its W.
    expected[str(action)] = {
      'F': _N,
      'B': extra + inputs + num_trained,
      'V': _N + inputs + num_trained,
      'I': extra + inputs if k else 0,
      'W': num_trained if k else extra + inputs + num_trained,
    }[kind]
  return expected


_AGAIN = {
  'stage': lambda k, m: _N,
  'layer': lambda k, m: _N,
  'except_last': lambda k, m: _N if m < _M - 1 else 0,
  'none': lambda k, m: 0,
}


@pytest.mark.parametrize(
  'name, policy',
  [
    *(('gpipe', policy) for policy in rematerialisation.POLICIES),
    # With stage and none under these, a layer is frozen below: it takes one product away.
    *(('zb_h1', policy) for policy in ('layer', 'except_last')),
    # Stages before the last do what they do under gpipe.
    ('1f1b_fused', 'except_last'),
  ],
)
def testProductsOfEveryAction(name, policy, tmp_path, monkeypatch):
  products = _Products(_Stack(name, policy), tmp_path, monkeypatch)
  schedule = schedules.Get(name, _STAGES, _M)
  assert products == _Expected(schedule, _AGAIN[policy])


@pytest.mark.parametrize(
  'name, policy',
  # With all but the last micro-batch, except_last equals stage.
  [('1f1b', 'except_last'), ('gpipe', 'layer'), ('zb_h1', 'none')],
)
def testProductsOfEveryActionCompiledByXla(name, policy, tmp_path, monkeypatch):
  products = _Products(_Stack(name, policy, num_stages=2, xla=True), tmp_path, monkeypatch)
  schedule = schedules.Get(name, 2, _M)
  assert products == _Expected(schedule, _AGAIN[policy])


@pytest.mark.parametrize(
  'name, policy',
  [('1f1b_fused', 'stage'), ('gpipe', 'none'), ('zb_h1', 'stage'), ('zb_h1', 'none')],
)
def testAFrozenLayerWithinAStageHasNoWeightGradient(name, policy, tmp_path, monkeypatch):
  """The last of each stage's n layers; the gradient of its input is needed as before."""
  frozen = [f'layers[{(_N + 1) * k + _N}]' for k in range(_STAGES)]
  products = _Products(
    _Stack(name, policy),
    tmp_path,
    monkeypatch,
    is_trained=lambda path: not any(layer in path for layer in frozen),
  )
  schedule = schedules.Get(name, _STAGES, _M)
  assert products == _Expected(schedule, _AGAIN[policy], _N - 1)


def testHalvesOfABackwardRunNoProductTwice(tmp_path, monkeypatch):
  """Attention, LayerNorm and dropout: F + I + W with nothing recomputed has what V has."""
  block = transformer.TransformerLayer.Params().Set(
    input_dim=_DIM,
    hidden_dim=6,
    num_heads=2,
    is_causal=True,
    residual_dropout_prob=0.1,
    atten_dropout_prob=0.1,
    relu_dropout_prob=0.1,
  )
  totals = {}
  for name in ('1f1b_fused', 'zb_h1'):  # The first has B in its first stage, and V in the last.
    stack = _Stack(name, 'none', num_stages=2, block=block)
    with monkeypatch.context() as patch:
      products = _Products(stack, tmp_path / name, patch, (2 * _M, 3, _DIM))
    totals[name] = collections.Counter()
    for action, count in products.items():
      totals[name][action[0]] += count
  assert totals['zb_h1'] == totals['1f1b_fused']
  forward = sum(v for a, v in products.items() if a[:2] == '1F')
  assert totals['zb_h1']['1'] == 3 * forward > 0


# ---- order -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, policy, num_stages, stages_per_device, xla',
  [
    ('fused_fill_drain', 'stage', 3, 1, False),
    ('1f1b', 'none', 3, 1, False),
    ('1f1b_fused', 'layer', 2, 1, True),
    ('zb_h1', 'stage', 3, 1, False),
    ('zb_h1', 'except_last', 2, 1, True),
    ('interleaved_1f1b', 'except_last', 4, 2, False),
    ('looped_bfs', 'none', 4, 2, False),
  ],
)
def testActionsRunInTheScheduleOrder(name, policy, num_stages, stages_per_device, xla, tmp_path):
  stack = _Stack(
    name,
    policy,
    block=linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM),
    num_stages=num_stages,
    num_micro_batches=4,
    stages_per_device=stages_per_device,
    xla=xla,
  )
  x, side = (tf.ones([8, _DIM], tf.float64),), stacks.ExampleWeights(8)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs(x),
    loss_fn=stacks.SquareLoss,
  )
  step = stacks.StepFunction(stack)
  graphs = graph_reader.ExecutedGraphs(lambda: step(x, side, tf.constant(1, tf.int64)), tmp_path)
  schedule = schedules.Get(name, num_stages, 4, num_stages // stages_per_device)
  assert graph_reader.StageCalls(graphs) == {
    # The first stage has no input gradient: nothing is left of its I.
    device: [a.kind.value for a in row if (a.stage, a.kind.value) != (0, 'I')]
    for device, row in enumerate(schedule.actions)
  }


def _Identity(slope):
  """Returns Params of an identity that defines its derivative."""
  fn = tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: slope * dy))
  return layers.Without(fn)


def testGradientsThatLayersDefineHoldInEveryStage():
  x = tf.random.stateless_normal([6, _DIM], [1, 2], dtype=tf.float64)
  square = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  sub = [square, _Identity(3.0)] * 2
  side = stacks.ExampleWeights(6)
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=2, splits=[2, 4])
  expected = stacks.Reference(sub, 2, (x,), side)
  # `except_last` covers both `stage` and `none`.
  ways = [('gpipe', 'except_last'), ('gpipe', 'layer')]
  stacks.CheckWays(stack, (x,), side, ways, expected)
  sub = [square, _Identity(1.0)] * 2
  _, plain = stacks.Reference(sub, 2, (x,), side)
  ratios = [expected[1][path] / plain[path] for path in sorted(plain)]
  assert abs(ratios[0] - 9).max() < 1e-9 and abs(ratios[-1] - 3).max() < 1e-9


def _MakeSquare(cls, **options):
  sub = [cls.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')] * 2
  return stacks.MakeStack(sub, num_stages=2, num_micro_batches=2, **options)


@pytest.mark.parametrize('policy', ['stage', 'layer'])
def testCustomGradientsMayTakeVariablesFromTheirSurroundings(policy):
  x = tf.random.stateless_normal([6, _DIM], [1, 2], dtype=tf.float64)
  side = stacks.ExampleWeights(6)
  expected = stacks.Train(_MakeSquare(linear.ProjectionLayer), (x,), side)
  actual = stacks.Train(
    _MakeSquare(faulty_layers.RecomputingProjection, remat_policy=policy), (x,), side
  )
  stacks.CheckEqual(actual, expected)


@pytest.mark.parametrize(
  'options',
  [
    {'remat_policy': 'none'},
    {'schedule': 'zb_h1'},
    {'fprop_dtype': tf.float32},  # The weight that FProp gets is cast.
    {'is_under_tape': True},
  ],
  ids=lambda options: next(iter(options)),
)
def testWeightsThatACustomGradientLosesAreRefused(options):
  """They would get the gradient 0."""
  options = dict(options)
  is_under_tape = options.pop('is_under_tape', False)
  stack = _MakeSquare(faulty_layers.RecomputingProjection, **options)
  x = tf.ones([6, _DIM], stack.params.fprop_dtype or tf.float64)
  with pytest.raises(ValueError, match=naming.Naming('w', 'recompute_grad')):
    if is_under_tape:
      stack.Place(stacks.Devices(), *stacks.Specs((x,)))
      stack(x)
    else:
      stacks.Train(stack, (x,), stacks.ExampleWeights(6))


def testALossMayNotLoseAWeightEither():
  def Loss(theta, outputs, side):
    scaled = tf.recompute_grad(lambda x: x @ theta[-1].w)(outputs[0])
    return stacks.SquareLoss(theta, (scaled,), side)

  stack = _MakeSquare(linear.ProjectionLayer, remat_policy='none')
  with pytest.raises(ValueError, match=naming.Naming('the loss', 'w', 'recompute_grad')):
    stacks.Train(stack, (tf.ones([6, _DIM], tf.float64),), stacks.ExampleWeights(6), Loss)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
