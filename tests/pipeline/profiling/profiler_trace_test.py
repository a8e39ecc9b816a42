# SPDX-License-Identifier: Apache-2.0
"""Traces of the profiler: actions are identified by name and follow the schedule's order."""

import itertools
import sys

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from lingvo_gpipe.layers import dropout, linear
from lingvo_gpipe.pipeline.profiling import profiler_trace
from lingvo_gpipe.pipeline.schedule import actions, schedules, step_work
from tests import naming
from tests.toys import stacks

_DIM, _BATCH, _STEPS = 4, 6, (3, 4)


def _Stack(schedule, policy, xla):
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  sub = [layer, dropout.DropoutLayer.Params().Set(keep_prob=0.7), layer.Copy(), layer.Copy()]
  return stacks.MakeStack(
    sub, num_stages=2, num_micro_batches=3, schedule=schedule, remat_policy=policy, xla=xla
  )


def _Profile(stack, directory):
  """Profiles two steps, with an evaluation between them; returns the trace's content."""
  inputs = (tf.random.stateless_normal([_BATCH, _DIM], [1, 2], dtype=tf.float64),)
  side = stacks.ExampleWeights(_BATCH)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs(inputs),
    loss_fn=stacks.SquareLoss,
  )
  step = stacks.StepFunction(stack)
  evaluate = tf.function(lambda: stacks.Evaluate(stack, inputs, side), autograph=False)
  for run in (lambda: step(inputs, side, tf.constant(0, tf.int64)), evaluate):
    run()
  tf.profiler.experimental.start(str(directory))
  for n in _STEPS:
    with tf.profiler.experimental.Trace(profiler_trace.STEP_EVENT, step_num=n, _r=1):
      step(inputs, side, tf.constant(n, tf.int64))
    evaluate()
  tf.profiler.experimental.stop()
  (path,) = directory.glob('plugins/profile/*/*.xplane.pb')
  return path.read_bytes()


@pytest.mark.parametrize(
  'schedule, policy, xla',
  [
    ('gpipe', 'stage', False),
    ('1f1b_fused', 'layer', True),
    ('zb_h1', 'none', True),
  ],
)
def testEachActionOccursOnceAndInOrder(tmp_path, schedule, policy, xla):
  stack = _Stack(schedule, policy, xla)
  ran = schedules.Get(schedule, 2, 3, 2)
  work = step_work.StepWork(ran, policy, [True, True])
  expected = [[a for a in row if work.Exists(a)] for row in ran.actions]
  # On a busy machine an event may be missing: try up to three times.
  for trial in range(3):
    steps = profiler_trace.Trace(_Profile(stack, tmp_path / str(trial))).steps
    assert tuple(step.step for step in steps) == _STEPS
    if all(len(step.times) == sum(map(len, expected)) for step in steps):
      break
  for step in steps:
    assert step.times.keys() == set(itertools.chain(*expected))
    for row in expected:
      for before, after in itertools.pairwise(row):
        assert step.times[before][1] <= step.times[after][0], f'{before} {after}'
    for action, (start, end) in step.times.items():
      assert start < end
      for needed in work.Dependencies(action):
        assert step.times[needed][1] <= start, f'{needed} {action}'
    times = [t for pair in step.times.values() for t in pair]
    assert step.start < min(times) and max(times) < step.end
  assert steps[0].end < steps[1].start


def testRowsNameTheActions(tmp_path):
  """The new rows come last, and everything else in the trace is unchanged."""
  content = _Profile(_Stack('gpipe', 'stage', False), tmp_path)
  before = profiler_trace.Trace(content)
  after = profiler_trace.Trace(before.WithRows([['first', 'second']] * len(before.steps)))
  assert after.steps == before.steps
  # Parsing and serialising keeps unknown fields.
  assert len(before._space.SerializeToString()) == len(content)
  assert len(after._space.planes) == len(before._space.planes)
  for old, new in zip(before._space.planes, after._space.planes, strict=True):
    if old.lines:
      host_planes = old, new
    else:
      pair = [plane.SerializeToString(deterministic=True) for plane in (new, old)]
      assert pair[0] == pair[1]
  old, new = host_planes
  old_lines = [line.SerializeToString() for line in new.lines[:-2]]
  assert old_lines == [line.SerializeToString() for line in old.lines]
  names = {number: entry.name for number, entry in new.event_metadata.items()}
  assert all(number == entry.id for number, entry in new.event_metadata.items())
  assert len(names) == len(old.event_metadata) + 12
  assert len({line.id for line in new.lines}) == len(new.lines)
  origin = min(line.timestamp_ns for line in old.lines)
  for device, line in enumerate(new.lines[-2:]):
    assert line.name == ('first', 'second')[device]
    assert line.timestamp_ns == origin
    expected = [
      (str(action), round(start * 1e12), round((end - start) * 1e12))
      for step in before.steps
      for action, (start, end) in sorted(step.times.items(), key=lambda item: item[1])
      if action.stage == device
    ]
    events = [(names[e.metadata_id], e.offset_ps, e.duration_ps) for e in line.events]
    assert events == expected


def _MakeTrace(plane, start_ns, line_ns, events):
  """Returns the content of a trace.

  Args:
    plane: the name of the plane with the events.
    start_ns: when the trace started; None: the trace has no start time.
    line_ns: when its line starts, relative to the trace.
    events: (name, offset in ns, duration in ns, {name of a statistic: value}) of each event.
  """
  space = xplane_pb2.XSpace()
  host, environment = space.planes.add(name=plane), space.planes.add(name='Task Environment')
  if start_ns is not None:
    environment.stat_metadata[1].MergeFrom(
      xplane_pb2.XStatMetadata(id=1, name='profile_start_time')
    )
    environment.stats.add(metadata_id=1, uint64_value=start_ns)
  line = host.lines.add(id=1, timestamp_ns=line_ns)
  numbers = {}

  def Number(metadata, name):
    if name not in numbers:
      numbers[name] = len(numbers) + 1
      metadata[numbers[name]].id = numbers[name]
      metadata[numbers[name]].name = name
    return numbers[name]

  for name, offset, duration, stats in events:
    event = line.events.add(
      metadata_id=Number(host.event_metadata, name),
      offset_ps=offset * 1000,
      duration_ps=duration * 1000,
    )
    for key, value in stats.items():
      kind = 'str_value' if isinstance(value, str) else 'int64_value'
      event.stats.add(metadata_id=Number(host.stat_metadata, key), **{kind: value})
  return space.SerializeToString()


def testActionsOfWorkersAreAlignedByTheClocksOfTheirHosts():
  """Times in a trace are relative to its start, and times in a line to the line's start."""

  def Worker(start_ns, stage):
    def Event(which, offset):
      name = f'ExecutorState::ProcessAsync::{which}'
      return name, offset, 1, {'name': f'action_{stage}F0/PartitionedCall', 'step_id': 7}

    events = [Event('Start', 0), Event('Done', 2000), Event('Start', 10_000), Event('Done', 13_000)]
    return _MakeTrace('/host:CPU', start_ns, 500, events)

  steps = [('train', n * 10_000, 9000, {'step_num': n + 3}) for n in range(2)]
  now = 1_700_000_000_000_000_000
  trainer = _MakeTrace('/host:CPU', now, 100, steps)
  # The actions start 1 and 5 microseconds after the first step.
  trace = profiler_trace.Trace(trainer, [Worker(now + 600, 0), Worker(now - 400 + 5000, 1)])
  first, second = actions.Action.FromText('0F0'), actions.Action.FromText('1F0')
  assert [step.step for step in trace.steps] == [3, 4]
  expected = {first: (1e-6, 3e-6), second: (5e-6, 7e-6)}
  assert {a: pytest.approx(t) for a, t in trace.steps[0].times.items()} == expected
  expected = {first: (11e-6, 14e-6), second: (15e-6, 18e-6)}
  assert {a: pytest.approx(t) for a, t in trace.steps[1].times.items()} == expected
  after = profiler_trace.Trace(trace.WithRows([['first', 'second']] * 2))
  rows = [[(e.offset_ps, e.duration_ps) for e in x.events] for x in after._space.planes[0].lines]
  assert rows[1:] == [
    [(10**6, 2 * 10**6), (11 * 10**6, 3 * 10**6)],
    [(5 * 10**6, 2 * 10**6), (15 * 10**6, 3 * 10**6)],
  ]
  with pytest.raises(ValueError, match=naming.Naming('profile_start_time')):
    profiler_trace.Trace(trainer, [Worker(None, 1)])


def testOtherContentIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('profiler', 'XSpace')):
    profiler_trace.Trace(b'\x0a\xff')
  assert profiler_trace.Trace(b'').steps == []


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
