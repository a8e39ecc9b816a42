# SPDX-License-Identifier: Apache-2.0
"""Traces of TensorFlow's profiler: reads when each action ran, and adds rows with their names.

TensorFlow has no public reader of the traces that it writes (`*.xplane.pb`), and the packages that
have one come with a web server. So the few fields that are needed are declared here, for protobuf's
own public reader: a field's number never changes its meaning, and fields that are not declared stay
in a file that is written again. This file is the only one that knows them, the names of the events,
and what TensorFlow's profiler service is asked and answers.

The name of a function call's operation begins with the scope in which `emission` made it. When a
call begins and when its result is there, is told by two events of TensorFlow's executor, however
many threads work for it in between.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lingvo_gpipe.pipeline.schedule import actions

# What encloses a training step in a trace: tf.profiler.experimental.Trace(STEP_EVENT, step_num=n).
STEP_EVENT = 'train'

_PACKAGE = 'lingvo_gpipe.profiler_trace'

# {message: (field, number, type)}; a type that is a message repeats. Names of events and of their
# statistics are listed once a plane, by number; what the entries of these lists and the names hold
# is of one form, so that they share a message each.
_FORMAT = {
  'XSpace': (('planes', 1, 'XPlane'),),
  'XPlane': (
    ('name', 2, 'string'),
    ('lines', 3, 'XLine'),
    ('event_names', 4, 'Entry'),
    ('stat_names', 5, 'Entry'),
    ('stats', 6, 'XStat'),
  ),
  'XLine': (
    ('id', 1, 'int64'),
    ('name', 2, 'string'),
    ('timestamp_ns', 3, 'int64'),
    ('events', 4, 'XEvent'),
  ),
  'XEvent': (
    ('metadata_id', 1, 'int64'),
    ('offset_ps', 2, 'int64'),
    ('duration_ps', 3, 'int64'),
    ('stats', 4, 'XStat'),
  ),
  'XStat': (
    ('metadata_id', 1, 'int64'),
    ('uint64_value', 3, 'uint64'),
    ('int64_value', 4, 'int64'),
    ('str_value', 5, 'string'),
    ('ref_value', 7, 'uint64'),
  ),
  'Entry': (('key', 1, 'int64'), ('value', 2, 'Name')),
  'Name': (('id', 1, 'int64'), ('name', 2, 'string')),
  'ProfileRequest': (
    ('opts', 4, 'ProfileOptions'),
    ('session_id', 6, 'string'),
    ('emit_xspace', 9, 'bool'),
  ),
  'ProfileOptions': (('duration_ms', 9, 'uint64'),),
  'ProfileResponse': (('xspace', 8, 'XSpace'),),
  'TerminateRequest': (('session_id', 1, 'string'),),
}

# Where a trace says when it began, in nanoseconds since 1970 by its host's clock. Times of lines
# count from there.
_ENVIRONMENT, _BEGAN = 'Task Environment', 'profile_start_time'

_START, _DONE = 'ExecutorState::ProcessAsync::Start', 'ExecutorState::ProcessAsync::Done'
# Transfers of a call's results to other devices are named after the call, with more behind it.
_CALL = re.compile(r'(?:replica_0/)?action_(\d+[A-Z]\d+)/(Stateful)?PartitionedCall(_\d+)?')


@dataclasses.dataclass(frozen=True)
class StepTrace:
  """What a trace tells of one mini-batch of a training step.

  Attributes:
    step: the step's number.
    start: when the host began it, in seconds; all times of one trace have the same origin.
    end: when it had the result.
    times: {action: (start, end)}.
  """

  step: int
  start: float
  end: float
  times: dict[actions.Action, tuple[float, float]]


class Trace:
  """The content of an `*.xplane.pb`, and of those of workers.

  Attributes:
    steps: the mini-batches in it, in order of time; those without any action are left out.
  """

  def __init__(self, content: bytes, of_workers: Sequence[bytes] = ()) -> None:
    """Reads it.

    Args:
      content: the trace of the process that trains: it has the steps.
      of_workers: traces of others, with more actions. The clocks of all hosts are taken for equal.

    Raises:
      ValueError: one is something else.
    """
    self._space = _Parsed('XSpace', content)
    self.steps: list[StepTrace] = []
    begun: list[tuple[float, tuple[Any, ...], str]] = []
    done: dict[tuple[Any, ...], list[float]] = {}
    planes = [p for p in self._space.planes if STEP_EVENT in _Names(p.event_names).values()]
    self._origin_ns = min((line.timestamp_ns for p in planes for line in p.lines), default=0)
    found = [(plane, self._origin_ns) for plane in planes]
    for other in of_workers:
      space = _Parsed('XSpace', other)
      origin_ns = self._origin_ns + _BeganNs(self._space) - _BeganNs(space)
      found += [(plane, origin_ns) for plane in space.planes]
    for plane, origin_ns in found:
      names, stat_names = _Names(plane.event_names), _Names(plane.stat_names)
      wanted = {i for i, name in names.items() if name in (_START, _DONE, STEP_EVENT)}
      for line in plane.lines:
        for event in (e for e in line.events if e.metadata_id in wanted):
          name = names[event.metadata_id]
          stats = {stat_names.get(s.metadata_id): _Value(s, stat_names) for s in event.stats}
          start = (line.timestamp_ns - origin_ns) * 1e-9 + event.offset_ps * 1e-12
          if name == STEP_EVENT:
            end = start + event.duration_ps * 1e-12
            self.steps.append(StepTrace(int(stats.get('step_num', 0)), start, end, {}))
          elif match := _CALL.fullmatch(str(stats.get('name', ''))):
            key = (stats['name'], stats.get('step_id'))
            if name == _START:
              begun.append((start, key, match[1]))
            else:
              done.setdefault(key, []).append(start)
    self._FillSteps(begun, done)

  def _FillSteps(
    self, begun: list[tuple[float, tuple[Any, ...], str]], done: dict[tuple[Any, ...], list[float]]
  ) -> None:
    """Gives each step its actions: what began within a step belongs to it."""
    self.steps.sort(key=lambda step: step.start)
    starts = [step.start for step in self.steps]
    for start, key, text in begun:
      i = bisect.bisect_right(starts, start) - 1
      end = min((t for t in done.get(key, ()) if t >= start), default=None)
      if i >= 0 and start < self.steps[i].end and end is not None:
        self.steps[i].times[actions.Action.FromText(text)] = (start, end)
    self.steps = [step for step in self.steps if step.times]

  def WithRows(self, rows: Sequence[Sequence[str]]) -> bytes:
    """The trace of the process that trains with more rows, with the actions by their names.

    TensorFlow's own events have them among their arguments only, and not over an action's time.

    Args:
      rows: for each of the steps: for each of its stages the name of its row.
    """
    space = _Message('XSpace')()
    space.CopyFrom(self._space)
    plane = next(p for p in space.planes if STEP_EVENT in _Names(p.event_names).values())
    number = max(entry.key for entry in plane.event_names)
    ids = {line.id for line in plane.lines}
    free = itertools.filterfalse(ids.__contains__, itertools.count(1))
    lines = {
      name: plane.lines.add(id=next(free), name=name, timestamp_ns=self._origin_ns)
      for name in dict.fromkeys(itertools.chain(*rows))
    }
    numbers: dict[actions.Action, int] = {}
    for step, names in zip(self.steps, rows, strict=True):
      for action, (start, end) in sorted(step.times.items(), key=lambda item: item[1]):
        if action not in numbers:
          number = numbers[action] = number + 1
          entry = plane.event_names.add(key=number)
          entry.value.add(id=number, name=str(action))
        lines[names[action.stage]].events.add(
          metadata_id=numbers[action],
          offset_ps=round(start * 1e12),
          duration_ps=round((end - start) * 1e12),
        )
    return bytes(space.SerializeToString())


def Request(session: str, seconds: int) -> bytes:
  """What TensorFlow's profiler service is asked for a trace that begins now.

  Args:
    session: a new name for it.
    seconds: the trace ends then, if not before.
  """
  request = _Message('ProfileRequest')(session_id=session, emit_xspace=True)
  request.opts.add(duration_ms=1000 * seconds)
  return bytes(request.SerializeToString())


def EndRequest(session: str) -> bytes:
  """What the service is told for a trace to end now."""
  return bytes(_Message('TerminateRequest')(session_id=session).SerializeToString())


def Answer(response: bytes) -> bytes:
  """The trace that it answers a `Request` with.

  Raises:
    ValueError: it is something else.
  """
  return b''.join(s.SerializeToString() for s in _Parsed('ProfileResponse', response).xspace)


def _Names(entries: Any) -> dict[int, str]:
  """The names in a plane's list, by number."""
  return {entry.key: entry.value[0].name for entry in entries if entry.value}


def _Value(stat: Any, names: dict[int, str]) -> str | int:
  """A statistic of an event: texts are numbers in the list of names, for the most part."""
  return stat.str_value or names.get(stat.ref_value) or stat.int64_value or stat.uint64_value


def _BeganNs(space: Any) -> int:
  """When a trace began."""
  for plane in space.planes:
    if plane.name == _ENVIRONMENT:
      names = _Names(plane.stat_names)
      for stat in plane.stats:
        if names.get(stat.metadata_id) == _BEGAN:
          return int(_Value(stat, {}))
  raise ValueError('a trace of the profiler does not say when it began')


def _Parsed(message: str, content: bytes) -> Any:
  try:
    return _Message(message).FromString(content)
  except Exception as e:  # protobuf's own class of errors depends on how it was built.
    raise ValueError(f'no trace of the profiler: {e}') from e


def _Message(name: str) -> Any:
  """The class of a message; an XSpace is a whole trace."""
  return message_factory.GetMessageClass(_Pool().FindMessageTypeByName(f'{_PACKAGE}.{name}'))


@functools.cache
def _Pool() -> descriptor_pool.DescriptorPool:
  file = descriptor_pb2.FileDescriptorProto(name=f'{_PACKAGE}.proto', package=_PACKAGE)
  field_type = descriptor_pb2.FieldDescriptorProto
  for message, fields in _FORMAT.items():
    declared = file.message_type.add(name=message)
    for name, number, kind in fields:
      field = declared.field.add(name=name, number=number)
      if kind in _FORMAT:
        field.label, field.type = field_type.LABEL_REPEATED, field_type.TYPE_MESSAGE
        field.type_name = f'.{_PACKAGE}.{kind}'
      else:
        field.label = field_type.LABEL_OPTIONAL
        field.type = getattr(field_type, f'TYPE_{kind.upper()}')
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return pool
