# SPDX-License-Identifier: Apache-2.0
"""Reads the graphs that TensorFlow executes: optimised, and partitioned by device."""

import collections
import functools
import math
import pathlib
import re
import struct

import tensorflow as tf
from tensorboard.compat.proto import config_pb2, event_pb2

from tests import fast_tracing

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
# Longer names first.
_KINDS = {
  'ForwardBackward': 'V',
  'Forward': 'F',
  'Backward': 'B',
  'InputGradient': 'I',
  'WeightGradient': 'W',
}
_STAGE_FUNCTION = re.compile(rf'__inference__({"|".join(_KINDS)})_\d')
_ACTION = re.compile(r'action_(\d+[FBVIW]\d+)/(?:Stateful)?PartitionedCall')
_ACTION_OF_REPLICA = re.compile(rf'(?:replica_(\d+)/)?{_ACTION.pattern}')
_PRODUCTS = frozenset(
  ('MatMul', '_FusedMatMul', '_MklMatMul', 'BatchMatMul', 'BatchMatMulV2', 'Einsum', 'Conv2D')
)


def ExecutedGraphs(run, logdir):
  """Returns the partitions of each function that `run` executes for the first time."""
  options = tf.config.optimizer.get_experimental_options()
  assert not options.get('disable_meta_optimizer'), 'mark the test: optimized_graphs'
  # TensorFlow also returns graphs collected earlier: they go to a separate file.
  _Collect(lambda: None, pathlib.Path(logdir, 'before'))
  after = pathlib.Path(logdir, 'after')
  _Collect(run, after)
  (events,) = after.iterdir()
  functions = []
  for record in _Records(events.read_bytes()):
    for value in event_pb2.Event.FromString(record).summary.value:
      data = config_pb2.RunMetadata.FromString(value.tensor.string_val[0])
      functions += [f.partition_graphs for f in data.function_graphs]
  return functions


def _Records(data):
  """Yields the records of a TFRecord file; a data set takes longer than some graphs."""
  while data:
    (length,) = struct.unpack_from('<Q', data)
    yield data[12 : 12 + length]  # Checksums are behind the length and behind the record.
    data = data[16 + length :]


def _Collect(run, logdir):
  tf.summary.trace_on(graph=True)
  try:
    run()
  finally:
    with tf.summary.create_file_writer(str(logdir)).as_default():
      tf.summary.trace_export('graphs', step=0)
    fast_tracing.StopCollectingGraphs()


def NumProducts(functions):
  """Returns the number of matrix products in all graphs."""
  return sum(n.op in _PRODUCTS for graphs in functions for g in graphs for n in g.node)


def NumProductsOfXla(hlo):
  """Returns the number of matrix products in optimised HLO."""
  return len(re.findall(r' dot\(', hlo))


def NumProductsBefore(functions):
  """Returns, for each product and each draw of random bits, how many products must run before."""
  before_products, before_draws = [], []
  for partitions in functions:
    _, nodes, inputs = _Read(partitions)
    products = {key for key, node in nodes.items() if node.op in _PRODUCTS}
    for key, node in nodes.items():
      if key in products or node.op.startswith('StatelessRandomUniform'):
        counts = before_products if key in products else before_draws
        counts.append(len(products & _Ancestors(key, inputs)))
  return before_products, before_draws


_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)')
_NUM_BYTES = {'f64': 8, 's64': 8, 'u64': 8, 'f32': 4, 's32': 4, 'u32': 4, 'pred': 1}


def PeakBytesOfXla(hlo):
  """Returns the peak bytes of temporaries between the inputs and outputs of a function.

  Args:
    hlo: optimised HLO, in the order in which it runs.
  """
  assert 'is_scheduled=true' in hlo
  rows = [
    m.groups() for m in map(_INSTRUCTION.match, hlo[hlo.index('\nENTRY') :].splitlines()) if m
  ]
  sources, sizes, last_use = {}, {}, {}
  for i, (name, shape, op, operands) in enumerate(rows):
    used = set().union(*(sources[o] for o in re.findall(r'%([\w.-]+)', operands)))
    is_view = op in ('bitcast', 'tuple', 'get-tuple-element')
    sources[name] = used if is_view else {name}
    parts = re.findall(r'(\w+)\[([\d,]*)\]', shape)
    sizes[name] = sum(
      _NUM_BYTES[dtype] * math.prod(int(d) for d in dims.split(',') if d) for dtype, dims in parts
    )
    if is_view or op in ('parameter', 'constant'):
      sizes[name] = 0
    last_use.update(dict.fromkeys(used, i))
  outputs = sources[rows[-1][0]]
  live = peak = 0
  for i, (name, *_) in enumerate(rows):
    if name not in outputs:
      live += sizes[name]
    peak = max(peak, live)
    live -= sum(sizes[n] for n, last in last_use.items() if last == i and n not in outputs)
  return peak


def StageCalls(functions):
  """Returns, for each device, the letters of its stage calls in execution order.

  Raises:
    ValueError: two calls of a device are unordered.
  """
  result = {}
  for partitions in functions:
    calls, nodes, inputs = _Read(partitions)
    for device, keys in calls.items():
      before = {key: len(keys & _Ancestors(key, inputs)) for key in keys}
      ordered = sorted(keys, key=before.get)
      if [before[key] for key in ordered] != list(range(len(keys))):
        names = [nodes[key].attr['f'].func.name for key in ordered]
        raise ValueError(f'calls of {device} are unordered: {names}, {sorted(before.values())}')
      letters = [_Letter(nodes[key]) for key in ordered]
      if len(letters) > len(result.get(device, ())):
        result[device] = letters
  return {int(device.rsplit(':', 1)[1]): letters for device, letters in result.items()}


def NumOrderedCollectives(graph):
  """Returns the number of collectives in a traced graph and in the functions that it calls.

  Raises:
    ValueError: two of a device are unordered.
  """
  definition = graph.as_graph_def()
  functions = {f.signature.name: f for f in definition.library.function}

  @functools.cache
  def Count(name):
    return CountIn(functions[name].node_def)

  def CountIn(nodes):
    counts, inlined = {}, set()
    by_device, inputs = collections.defaultdict(set), collections.defaultdict(set)
    for node in nodes:
      inputs[node.name] = {name.lstrip('^').split(':')[0] for name in node.input}
      counts[node.name] = int(node.op == 'CollectiveReduce')
      if node.op in _CALLS:
        name = node.attr['f'].func.name
        counts[node.name] = Count(name)
        if not functions[name].attr['_noinline'].b:
          inlined.add(node.name)
      if counts[node.name]:
        by_device[node.device].add(node.name)
    for device, names in by_device.items():
      before = sorted((len(names & _Ancestors(name, inputs)), name) for name in names)
      # An inlined function does not run as a whole.
      is_ordered = [count for count, _ in before] == list(range(len(names)))
      if not is_ordered or (names & inlined and len(names) > 1):
        raise ValueError(f'collectives of {device or "a function"} are unordered: {before}')
    return sum(counts.values())

  return CountIn(definition.node)


def Sends(functions):
  """Returns a sorted list of (action, from, to) of stage outputs that go to other devices."""
  result = []
  for partitions in functions:
    for node in (node for partition in partitions for node in partition.node):
      action = _ACTION.match(node.input[0]) if node.op == '_Send' else None
      if action:
        ends = (node.attr[a].s.decode() for a in ('send_device', 'recv_device'))
        source, target = (int(name.rsplit(':', 1)[1]) for name in ends)
        result += [(action[1], source, target)] if source != target else []
  return sorted(result)


def Takers(functions):
  """Returns {(action, from, to): names of the nodes that read it} of the tensors sent.

  TensorFlow frees a tensor when the last of these nodes has run.
  """
  result = collections.defaultdict(list)
  for partitions in functions:
    nodes = [node for partition in partitions for node in partition.node]
    channels = {}
    for node in nodes:
      action = _ACTION.match(node.input[0]) if node.op == '_Send' else None
      if action:
        channels[node.attr['tensor_name'].s] = action[1]
    for partition in partitions:
      readers = collections.defaultdict(list)
      for node in partition.node:
        for name in {n.split(':')[0] for n in node.input if not n.startswith('^')}:
          readers[name].append(node.name)
      for node in partition.node:
        if node.op == '_Recv' and node.attr['tensor_name'].s in channels:
          ends = (node.attr[a].s.decode() for a in ('send_device', 'recv_device'))
          source, target = (int(name.rsplit(':', 1)[1]) for name in ends)
          if source != target:
            key = (channels[node.attr['tensor_name'].s], source, target)
            result[key].append(
              sorted(m[1] if (m := _ACTION.match(r)) else r for r in readers[node.name])
            )
  return dict(result)


def ActionsBefore(functions, name):
  """Returns the actions that must run before some nodes.

  Args:
    functions: as `ExecutedGraphs` returned them.
    name: a regular expression with one group that matches the start of the node names.

  Returns:
    {text of the group: {(replica, action)} of all nodes with this text}.
  """
  result = collections.defaultdict(set)
  for partitions in functions:
    _, nodes, inputs = _Read(partitions)
    calls = {
      key: (int(match[1] or 0), match[2])
      for key, node in nodes.items()
      if node.op in _CALLS and (match := _ACTION_OF_REPLICA.match(node.name))
    }
    for key, node in nodes.items():
      if match := re.match(name, node.name):
        result[match[1]] |= {calls[k] for k in _Ancestors(key, inputs) & calls.keys()}
  return dict(result)


def _Letter(node):
  match = node.op in _CALLS and _STAGE_FUNCTION.match(node.attr['f'].func.name)
  return _KINDS[match[1]] if match else None


def _Read(partitions):
  """Returns ({device: keys of stage calls}, {key: node}, {key: keys of inputs}) of partitions."""
  calls, nodes, inputs = collections.defaultdict(set), {}, collections.defaultdict(set)
  senders, receivers = {}, []
  for i, partition in enumerate(partitions):
    for node in partition.node:
      key = (i, node.name)
      nodes[key] = node
      inputs[key].update((i, name.lstrip('^').split(':')[0]) for name in node.input)
      if node.op in ('_Send', '_HostSend', '_Recv', '_HostRecv'):
        channel = tuple(node.attr[a].s for a in ('tensor_name', 'send_device', 'recv_device'))
        if node.op.endswith('Send'):
          senders[channel] = key
        else:
          receivers.append((channel, key))
      if _Letter(node):
        calls[node.device].add(key)
  for channel, key in receivers:
    inputs[key].add(senders[channel])
  return calls, nodes, inputs


def _Ancestors(key, inputs):
  seen, pending = set(), [key]
  while pending:
    for source in inputs[pending.pop()]:
      if source not in seen:
        seen.add(source)
        pending.append(source)
  return seen
