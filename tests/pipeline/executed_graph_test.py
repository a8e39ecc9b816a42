# SPDX-License-Identifier: Apache-2.0
"""The graphs that TensorFlow executes have the schedule's order and every forward.

The graphs are those after all optimisations, cut by device, as tf.summary.trace_on collects them.
"""

import collections
import contextlib
import re
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import dropout, linear
from lingvo_gpipe.pipeline import emission, host_copies, pipelining_layer
from lingvo_gpipe.pipeline.schedule import actions, schedules
from lingvo_gpipe.pipeline.stages import micro_batch, stage_functions
from tests import graph_reader
from tests.toys import stacks

pytestmark = pytest.mark.optimized_graphs

_DIM = 4
_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
_STAGE_FUNCTION = re.compile(
  r'__(inference|forward|backward)__(Theta)?(Forward|Backward)(Keep|Kept)?_\d'
)


class _Graph:
  """The nodes of all partitions of a function, joined at the transfers between devices."""

  def __init__(self, partitions):
    self.nodes = {}
    self._data = collections.defaultdict(set)
    self._all = collections.defaultdict(set)
    senders, receivers = {}, []
    for i, partition in enumerate(partitions):
      for node in partition.node:
        key = (i, node.name)
        self.nodes[key] = node
        for name in node.input:
          source = (i, name.lstrip('^').split(':')[0])
          self._all[key].add(source)
          if not name.startswith('^'):
            self._data[key].add(source)
        if node.op in ('_Send', '_HostSend', '_Recv', '_HostRecv'):
          channel = tuple(node.attr[a].s for a in ('tensor_name', 'send_device', 'recv_device'))
          if node.op.endswith('Send'):
            senders[channel] = key
          else:
            receivers.append((channel, key))
    for channel, key in receivers:
      self._data[key].add(senders[channel])
      self._all[key].add(senders[channel])

  def Inputs(self, key):
    """The nodes whose values enter `key`."""
    return self._data[key]

  def Ancestors(self, key, *, data_only=False):
    """Returns all nodes that run before `key`, or only the nodes whose values enter it."""
    edges = self._data if data_only else self._all
    seen, pending = set(), [key]
    while pending:
      for source in edges[pending.pop()]:
        if source not in seen:
          seen.add(source)
          pending.append(source)
    return seen


def _StageCalls(graph):
  """Returns {(device, kind, micro-batch): [keys of the calls]}; inputs tell the micro-batch."""
  calls = collections.defaultdict(list)
  for key, node in graph.nodes.items():
    match = node.op in _CALLS and _STAGE_FUNCTION.match(node.attr['f'].func.name)
    if match:
      inputs = graph.Ancestors(key, data_only=True)
      micro_batches = {n[1] for n in inputs if re.fullmatch(r'micro_\d+', n[1])}
      (micro_batch,) = micro_batches
      device = int(node.device.rsplit(':', 1)[1])
      kind = schedules.Kind(match[3][0])
      calls[device, kind, int(micro_batch.removeprefix('micro_'))].append(key)
  return calls


def _Faults(functions, schedule):
  """How the executed functions differ from the schedule; [] if they don't."""
  graphs = [_Graph(partitions) for partitions in functions]
  graphs = [g for g in graphs if any(n.name.startswith('micro_') for n in g.nodes.values())]
  assert graphs, 'no executed function takes micro-batches'
  # One is expected. Two were seen in a long run of many files, before graph_reader left out what
  # earlier runs had left behind; whatever comes, each has to be right.
  return [fault for graph in graphs for fault in _FaultsOf(graph, schedule)]


def _FaultsOf(graph, schedule):
  calls = _StageCalls(graph)
  faults = []
  for device, row in enumerate(schedule.actions):
    ordered = []
    for action in row:
      keys = calls.pop((device, action.kind, action.micro_batch), [])
      if len(keys) != 1:
        faults.append(f'{action} is there {len(keys)} times')
      ordered += [(action, key) for key in keys]
    for (first, first_key), (second, second_key) in zip(ordered, ordered[1:], strict=False):
      if first_key not in graph.Ancestors(second_key):
        faults.append(f'{second} does not wait for {first}')
  return faults + [f'unexpected {key}' for key in calls]


def _Loss(theta, outputs, side):
  del theta, side
  return {'loss': (tf.reduce_sum(outputs[0] ** 2), tf.constant(1.0))}


def _Stack(
  num_stages, num_micro_batches, *, xla=False, layers_per_stage=1, keep_prob=0.5, **options
):
  """Stages of some projections and a dropout each."""
  square = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, activation='TANH', has_bias=True
  )
  drop = dropout.DropoutLayer.Params().Set(keep_prob=keep_prob)
  per_stage = [square] * layers_per_stage + [drop]
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    xla=xla,
    sub=per_stage * num_stages,
    splits=[len(per_stage) * (k + 1) for k in range(num_stages)],
    **options,
  )
  stack = p.Instantiate()
  stack.Place(stacks.Devices(), tf.TensorSpec([2 * num_micro_batches, _DIM]), loss_fn=_Loss)
  return stack


def _Signature(num_micro_batches):
  return [tf.TensorSpec([2, _DIM], name=f'micro_{m}') for m in range(num_micro_batches)]


def _TrainGraphs(stack, logdir):
  num = stack.params.num_micro_batches
  step = tf.Variable(3, dtype=tf.int64)
  stack.engine.MakeAccumulators()

  @tf.function(autograph=False, input_signature=_Signature(num))
  def Step(*micro_batches):
    ones = [tf.constant(1.0)] * num
    return stacks.RunStep(stack.engine, [(x,) for x in micro_batches], [None] * num, ones, step)

  return graph_reader.ExecutedGraphs(lambda: Step(*[tf.ones([2, _DIM])] * num), logdir)


@pytest.mark.parametrize(
  'num_stages, num_micro_batches, xla',
  [(1, 3, False), (2, 1, False), (3, 4, False), (2, 3, True)],
)
def testTrainingKeepsTheSchedule(num_stages, num_micro_batches, xla, tmp_path):
  stack = _Stack(num_stages, num_micro_batches, xla=xla)
  schedule = schedules.Get('gpipe', num_stages, num_micro_batches)
  assert _Faults(_TrainGraphs(stack, tmp_path), schedule) == []


def testWithoutRandomnessTheOrderIsKeptToo(tmp_path):
  """If no layer uses the seeds, an optimiser might drop them and the nodes that depend on them."""
  stack = _Stack(2, 3, keep_prob=1.0)
  assert _Faults(_TrainGraphs(stack, tmp_path), schedules.Get('gpipe', 2, 3)) == []


def testEvaluationKeepsTheSchedule(tmp_path):
  stack = _Stack(3, 4)

  @tf.function(autograph=False, input_signature=_Signature(4))
  def Step(*micro_batches):
    return stack.engine.Evaluate([micro_batch.MicroBatch((x,)) for x in micro_batches])

  functions = graph_reader.ExecutedGraphs(lambda: Step(*[tf.ones([2, _DIM])] * 4), tmp_path)
  assert _Faults(functions, schedules.Get('forward_only', 3, 4)) == []


# ---- what is held ------------------------------------------------------------------------


def _PeakHeld(graph, schedule):
  """For each device the most micro-batches of which a tensor made for F is used later.

  That is the input of F or what it returns, from F to the last action there that takes any of it.
  """
  calls = _StageCalls(graph)
  peaks = []
  for device, row in enumerate(schedule.actions):
    keys = [calls[device, a.kind, a.micro_batch][0] for a in row]
    spans = []
    for position, (action, key) in enumerate(zip(row, keys, strict=True)):
      if action.kind is schedules.Kind.FORWARD:
        name = f'micro_{action.micro_batch}'
        held = {key}
        for source in graph.Inputs(key):
          if name in {n[1] for n in (source, *graph.Ancestors(source, data_only=True))}:
            held.add(source)
        users = [i for i, user in enumerate(keys) if user == key or held & graph.Inputs(user)]
        spans.append((position, max(users)))
    peaks.append(max(sum(a <= i <= b for a, b in spans) for i in range(len(row))))
  return peaks


# Each policy once; under gpipe, which holds all, the two that keep more than a stage's input.
@pytest.mark.parametrize(
  'name, policy',
  [('gpipe', 'except_last'), ('gpipe', 'none'), ('1f1b', 'stage'), ('1f1b', 'layer')],
)
def testHoldsAsManyMicroBatchesAsTheScheduleSays(name, policy, tmp_path):
  """Stage k holds all M micro-batches, and under 1f1b at most min(M, K-k)."""
  k, m = 3, 4
  stack = _Stack(k, m, schedule=name, remat_policy=policy)
  schedule = schedules.Get(name, k, m)
  graphs = [_Graph(partitions) for partitions in _TrainGraphs(stack, tmp_path)]
  graphs = [g for g in graphs if any(n.name.startswith('micro_') for n in g.nodes.values())]
  assert graphs
  expected = [m] * k if name == 'gpipe' else [min(m, k - stage) for stage in range(k)]
  assert expected == list(schedule.PeakActivations())
  assert [_PeakHeld(graph, schedule) for graph in graphs] == [expected] * len(graphs)


def _Copies(graph):
  """Returns {(stage, micro-batch): keys of the calls of O on the device and the host, and of L}."""
  keys = {node.name: key for key, node in graph.nodes.items() if node.op in _CALLS}
  copies = {}
  for name, key in keys.items():
    if match := re.fullmatch(r'action_(\d+)O(\d+)/PartitionedCall', name):
      load = keys[f'action_{match[1]}L{match[2]}/PartitionedCall']
      copies[int(match[1]), int(match[2])] = key, keys[f'{name}_1'], load
  return copies


def _PeakHeldWithCopies(graph, schedule):
  """Like `_PeakHeld`, with the time in which the host has the tensors.

  On the device nothing but F and O may take a tensor that goes to the host, or send it elsewhere
  as F's result. Then the device has it until the first action that waits for O on the host, and
  again from the last action that L on the host waits for.
  """
  calls, copies = _StageCalls(graph), _Copies(graph)
  assert copies.keys() == schedule.offloaded
  peaks = []
  for device, row in enumerate(schedule.actions):
    row = [a for a in row if a.kind not in actions.COPIES]
    keys = [calls[device, a.kind, a.micro_batch][0] for a in row]
    ancestors = [graph.Ancestors(key) for key in keys]
    spans = []
    for position, (action, key) in enumerate(zip(row, keys, strict=True)):
      if action.kind is not schedules.Kind.FORWARD:
        continue
      last = max(
        i for i, a in enumerate(row) if a.kind in _LAST and a.micro_batch == action.micro_batch
      )
      if (device, action.micro_batch) not in copies:
        spans.append((position, last))
        continue
      offload, on_host, load = copies[device, action.micro_batch]
      assert key in graph.Ancestors(offload)
      inputs = {name for name in graph.nodes[offload].input if not name.startswith('^')}
      for taker, node in graph.nodes.items():
        if taker[0] == offload[0] and inputs.intersection(node.input) and taker != offload:
          assert taker == key or node.op == '_Send', f'{node.name} takes what {action} keeps'
      freed = next(i for i, before in enumerate(ancestors) if on_host in before)
      loaded = max(i for i, key in enumerate(keys) if key in graph.Ancestors(load))
      spans += [(position, freed - 1), (loaded + 1, last)]
    peaks.append(max(sum(a <= i <= b for a, b in spans) for i in range(len(row))))
  return peaks


_LAST = (schedules.Kind.BACKWARD, schedules.Kind.WEIGHT_GRADIENT)
_OFFLOADED = [('gpipe', 'none', 2, 4), ('gpipe', 'stage', 2, 4), ('1f1b', 'layer', 4, 5)]


def _OffloadedStep(name, policy, k, m, logdir):
  """Returns the executed graph of a step with offload, and its schedule."""
  stack = _Stack(k, m, schedule=name, remat_policy=policy, offload=1.0)
  stack.engine.host_copies.host_device = stacks.Devices()[-1]
  graphs = [_Graph(partitions) for partitions in _TrainGraphs(stack, logdir)]
  (graph,) = [g for g in graphs if any(n.name.startswith('micro_') for n in g.nodes.values())]
  return graph, stack.engine.TrainingSchedule(m)


@pytest.mark.parametrize('name, policy, k, m', _OFFLOADED)
def testOffloadHoldsAsManyMicroBatchesAsTheScheduleSays(name, policy, k, m, tmp_path):
  graph, schedule = _OffloadedStep(name, policy, k, m, tmp_path)
  assert max(schedule.PeakActivations()) < max(schedules.Get(name, k, m).PeakActivations())
  assert _PeakHeldWithCopies(graph, schedule) == list(schedule.PeakActivations())
  order = [a for row in schedule.actions for a in row if a.kind not in actions.COPIES]
  assert len(order) == sum(map(len, _StageCalls(graph).values()))


@pytest.mark.parametrize('fault', ['copies are inlined', 'nothing waits', 'F and B share x'])
def testOffloadThatFreesNothingIsCaught(fault, tmp_path, monkeypatch):
  if fault == 'copies are inlined':

    def Pass(self, nest):
      del self
      return tf.nest.map_structure(lambda t: None if t is None else tf.identity(t), nest)

    monkeypatch.setattr(host_copies.HostCopies, '_Pass', Pass)
  elif fault == 'nothing waits':
    monkeypatch.setattr(emission.Walk, 'RegisterOffload', lambda *_: None)
  else:
    monkeypatch.setattr(emission.Emission, '_SetWaiting', lambda *_: None)
  with pytest.raises((AssertionError, KeyError, StopIteration)):
    graph, schedule = _OffloadedStep('gpipe', 'stage', 2, 4, tmp_path)
    assert _PeakHeldWithCopies(graph, schedule) == list(schedule.PeakActivations())


# ---- the check can fail ------------------------------------------------------------------


def testInlinedStagesAreCaught(tmp_path, monkeypatch):
  original = stage_functions.StageFunctions.__init__

  def Init(self, *args, **options):
    original(self, *args, **options)
    self.Forward = tf.function(self._Forward, autograph=False)
    self.Backward = tf.function(self._Backward, autograph=False)

  monkeypatch.setattr(stage_functions.StageFunctions, '__init__', Init)
  faults = _Faults(_TrainGraphs(_Stack(2, 4), tmp_path), schedules.Get('gpipe', 2, 4))
  assert '0F0 is there 0 times' in faults
  assert len(faults) == 16


def testUnchainedActionsAreCaught(tmp_path, monkeypatch):
  monkeypatch.setattr(tf, 'control_dependencies', lambda control_inputs: contextlib.nullcontext())
  faults = _Faults(_TrainGraphs(_Stack(2, 4), tmp_path), schedules.Get('gpipe', 2, 4))
  assert '0F1 does not wait for 0F0' in faults
  assert '1F3 does not wait for 1F2' in faults
  # The accumulators order the backward actions too, but not as the schedule does.
  assert not any('is there' in fault for fault in faults)


def testAnotherOrderIsCaught(tmp_path):
  functions = _TrainGraphs(_Stack(2, 3), tmp_path)
  faults = _Faults(functions, schedules.Get('1f1b', 2, 3))
  assert '1F1 does not wait for 1B0' in faults


def testAFailedRunLeavesNothingToTheNext(tmp_path):
  """TensorFlow keeps the graphs of a failed run, and returns them with the graphs of the next."""

  def Function(name):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([2], name=name)])
    def Run(x):
      tf.debugging.assert_positive(x)
      return 2 * x

    return Run

  tf.summary.trace_on(graph=True)
  with pytest.raises(tf.errors.InvalidArgumentError):
    Function('first')(-tf.ones([2]))
  tf.summary.trace_off()
  functions = graph_reader.ExecutedGraphs(lambda: Function('next')(tf.ones([2])), tmp_path)
  names = [n.name for partitions in functions for g in partitions for n in g.node]
  assert 'next' in names and 'first' not in names


# ---- under somebody else's tape ----------------------------------------------------------


def _Gradients(stack, x):
  with tf.GradientTape() as tape, fprop_context.Scope(step=tf.constant(3, tf.int64)):
    loss = tf.reduce_sum(stack(x) ** 2)
  return tape.gradient(loss, stack.trainable_variables)


def _CallsByDevice(functions, pattern):
  """For each device the stage calls whose function fits `pattern`, each with its graph."""
  rows = collections.defaultdict(list)
  for graph in map(_Graph, functions):
    for key, node in graph.nodes.items():
      if node.op in _CALLS and re.match(pattern, node.attr['f'].func.name):
        rows[node.device].append((graph, key))
  return rows


@pytest.mark.parametrize('in_function', [False, True])
def testAUsersTapeKeepsOrderAndNoActivations(in_function, tmp_path):
  num_stages, num_micro_batches = 2, 3
  stack = _Stack(num_stages, num_micro_batches)
  run = lambda x: _Gradients(stack, x)  # noqa: E731
  if in_function:
    run = tf.function(run, autograph=False)
  x = tf.ones([2 * num_micro_batches, _DIM])
  functions = graph_reader.ExecutedGraphs(lambda: run(x), tmp_path)
  num_weights = len(stack.engine.stages[0].trained)
  # A forward returns its output alone; one that a tape had differentiated would return what its
  # gradient needs too. A backward returns the weights' gradients and the input's.
  for pattern, num_outputs in (
    (r'__\w+?__Forward_\d', 1),
    (r'__\w+?__ThetaBackward_\d', num_weights + 1),
  ):
    rows = _CallsByDevice(functions, pattern)
    assert len(rows) == num_stages
    for row in rows.values():
      assert len(row) == num_micro_batches
      for graph, key in row:
        assert len(graph.nodes[key].attr['Tout'].list.type) <= num_outputs
      # Any two are ordered: in a chain of n there are 0, 1 ... n - 1 before.
      keys = {key for _, key in row}
      before = sorted(len(keys & graph.Ancestors(key)) for graph, key in row)
      assert before == list(range(num_micro_batches))


# ---- recomputation -----------------------------------------------------------------------


_NUM_LAYERS = 3
# n products forward; n again, n for the weights and n - 1 for the inputs backward: the gradient of
# the first stage's input is not computed.
_EXPECTED_PRODUCTS = {'Forward': _NUM_LAYERS, 'Backward': 3 * _NUM_LAYERS - 1}


def _StageCallsOfTheEngine(monkeypatch, xla):
  """{'Forward' or 'Backward': (function, arguments)}, as the engine calls them for stage 0."""
  calls, instances = {}, []
  original = stage_functions.StageFunctions.__init__

  def Spec(x):
    if x is None or isinstance(x, tf.Variable):
      return x
    return tf.TensorSpec(x.shape, x.dtype)

  def Recording(name, function):
    def Record(*args):
      calls[name] = (function, tf.nest.map_structure(Spec, args))
      return function(*args)

    return Record

  def Init(self, *args, **options):
    original(self, *args, **options)
    if not instances:  # Stage 0 runs first, and the last stage has functions of its own.
      for name in _EXPECTED_PRODUCTS:
        setattr(self, name, Recording(name, getattr(self, name)))
    instances.append(self)

  monkeypatch.setattr(stage_functions.StageFunctions, '__init__', Init)
  stack = _Stack(2, 1, layers_per_stage=_NUM_LAYERS, xla=xla)
  step = tf.Variable(3, dtype=tf.int64)

  @tf.function(autograph=False, input_signature=_Signature(1))
  def Step(x):
    return stacks.RunStep(stack.engine, [(x,)], [None], [tf.constant(1.0)], step)

  Step.get_concrete_function()

  def Value(x):
    return tf.ones(x.shape, x.dtype) if isinstance(x, tf.TensorSpec) else x

  return stack, {
    name: (function, tf.nest.map_structure(Value, args)) for name, (function, args) in calls.items()
  }


def testBackwardRunsEachForwardOnceMore(tmp_path, monkeypatch):
  # The stack is kept: with it the variables would go.
  stack, calls = _StageCallsOfTheEngine(monkeypatch, xla=False)
  counts = {}
  for name, (function, args) in calls.items():
    functions = graph_reader.ExecutedGraphs(lambda f=function, a=args: f(*a), tmp_path / name)
    ops = [n.op for partitions in functions for g in partitions for n in g.node]
    counts[name] = sum('MatMul' in op for op in ops)
  assert counts == _EXPECTED_PRODUCTS
  del stack


def testBackwardRunsEachForwardOnceMoreCompiledByXla(monkeypatch):
  stack, calls = _StageCallsOfTheEngine(monkeypatch, xla=True)
  counts = {}
  for name, (function, args) in calls.items():
    hlo = function.experimental_get_compiler_ir(*args)(stage='optimized_hlo')
    counts[name] = len(re.findall(r' dot\(', hlo))
  assert counts == _EXPECTED_PRODUCTS
  del stack


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
