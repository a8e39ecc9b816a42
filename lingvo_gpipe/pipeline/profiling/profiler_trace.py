# SPDX-License-Identifier: Apache-2.0
"""Traces of TensorFlow's profiler: reads when each action ran, and adds rows that name the actions.

This module is the only one that knows the format of a trace (`*.xplane.pb`), the names of the
profiler's events, and the messages of its service.

`emission` calls each action in a name scope of the action's name, so the name of the call's
operation begins with it. TensorFlow's executor records an event when a call starts and another when
its result is ready, however many threads work for the call in between:

    ProcessAsync::Start                        ProcessAsync::Done
    name=action_1F0/PartitionedCall            name=action_1F0/PartitionedCall
    |<------------------------- action 1F0 ------------------------->|
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

# Not in TensorFlow's public interface, but TensorFlow has no public reader of its traces, and the
# packages that have one come with a web server. It is generated code without side effects.
from tensorflow.tsl.profiler.protobuf import profiler_options_pb2, xplane_pb2

from lingvo_gpipe.pipeline.schedule import actions

# Encloses a training step in a trace: tf.profiler.experimental.Trace(STEP_EVENT, step_num=n).
STEP_EVENT = 'train'

# The profiler service's messages, which TensorFlow's package does not contain: {message: (field,
# number, type)}. Only the fields used here; a nested message is the same as bytes.
_SERVICE = {
  'ProfileRequest': (('opts', 4, 'bytes'), ('session_id', 6, 'string'), ('emit_xspace', 9, 'bool')),
  'ProfileResponse': (('xspace', 8, 'bytes'),),
  'TerminateRequest': (('session_id', 1, 'string'),),
}
_PACKAGE = 'lingvo_gpipe.profiler_service'

# The plane and the statistic that hold a trace's start, in nanoseconds since 1970 by the clock of
# its host. The times of all lines are relative to it.
_ENVIRONMENT, _START_TIME = 'Task Environment', 'profile_start_time'

_START, _DONE = 'ExecutorState::ProcessAsync::Start', 'ExecutorState::ProcessAsync::Done'
# Transfers of a call's results to other devices have longer names that begin with the call's.
# Copies to the host and back, O and L, take no time of a device.
_CALL = re.compile(r'(?:replica_0/)?action_(\d+(?![OL])[A-Z]\d+)/(Stateful)?PartitionedCall(_\d+)?')


@dataclasses.dataclass(frozen=True)
class StepTrace:
  """The trace of one mini-batch of a training step.

  Attributes:
    step: the step's number.
    start: when the host began the mini-batch, in seconds; all times of a trace share an origin.
    end: when the host had the result.
    times: {action: (start, end)}.
  """

  step: int
  start: float
  end: float
  times: dict[actions.Action, tuple[float, float]]


class Trace:
  """The content of an `*.xplane.pb` file, with the workers' traces.

  Attributes:
    steps: the mini-batches that have actions, in order of time.
  """

  def __init__(self, content: bytes, worker_contents: Sequence[bytes] = ()) -> None:
    """Parses the traces.

    Args:
      content: the trace of the training process, which has the steps.
      worker_contents: the workers' traces, which have more actions. Assumes that the clocks of all
        hosts agree.

    Raises:
      ValueError: a content is not a trace, or has no start time.
    """
    self._space = _Parse(xplane_pb2.XSpace, content)
    self.steps: list[StepTrace] = []
    starts: list[tuple[float, tuple[Any, ...], str]] = []
    ends: dict[tuple[Any, ...], list[float]] = {}
    host_planes = [p for p in self._space.planes if STEP_EVENT in _Names(p.event_metadata).values()]
    self._origin_ns = min((line.timestamp_ns for p in host_planes for line in p.lines), default=0)
    planes = [(plane, self._origin_ns) for plane in host_planes]
    for worker_content in worker_contents:
      space = _Parse(xplane_pb2.XSpace, worker_content)
      origin_ns = self._origin_ns + _StartNs(self._space) - _StartNs(space)
      planes += [(plane, origin_ns) for plane in space.planes]
    for plane, origin_ns in planes:
      names, stat_names = _Names(plane.event_metadata), _Names(plane.stat_metadata)
      known = {i for i, name in names.items() if name in (_START, _DONE, STEP_EVENT)}
      for line in plane.lines:
        for event in (e for e in line.events if e.metadata_id in known):
          name = names[event.metadata_id]
          stats = {stat_names.get(s.metadata_id): _Value(s, stat_names) for s in event.stats}
          start = (line.timestamp_ns - origin_ns) * 1e-9 + event.offset_ps * 1e-12
          if name == STEP_EVENT:
            end = start + event.duration_ps * 1e-12
            self.steps.append(StepTrace(int(stats.get('step_num', 0)), start, end, {}))
          elif match := _CALL.fullmatch(str(stats.get('name', ''))):
            key = (stats['name'], stats.get('step_id'))
            if name == _START:
              starts.append((start, key, match[1]))
            else:
              ends.setdefault(key, []).append(start)
    self._FillSteps(starts, ends)

  def _FillSteps(
    self, starts: list[tuple[float, tuple[Any, ...], str]], ends: dict[tuple[Any, ...], list[float]]
  ) -> None:
    """Gives each step the actions that started within it.

    Args:
      starts: (time, call, text of the action) of each start.
      ends: {call: times}.
    """
    self.steps.sort(key=lambda step: step.start)
    step_starts = [step.start for step in self.steps]
    for start, key, text in starts:
      i = bisect.bisect_right(step_starts, start) - 1
      end = min((t for t in ends.get(key, ()) if t >= start), default=None)
      if i >= 0 and start < self.steps[i].end and end is not None:
        self.steps[i].times[actions.Action.FromText(text)] = (start, end)
    self.steps = [step for step in self.steps if step.times]

  def WithRows(self, rows: Sequence[Sequence[str]]) -> bytes:
    """Returns the training process's trace with additional rows that name the actions.

    TensorFlow's own events have an action's name in their arguments only, and do not last as long
    as the action.

    Args:
      rows: for each of `steps`, the name of the row of each stage.
    """
    space = xplane_pb2.XSpace()
    space.CopyFrom(self._space)
    plane = next(p for p in space.planes if STEP_EVENT in _Names(p.event_metadata).values())
    number = max(plane.event_metadata)
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
          plane.event_metadata[number].MergeFrom(
            xplane_pb2.XEventMetadata(id=number, name=str(action))
          )
        lines[names[action.stage]].events.add(
          metadata_id=numbers[action],
          offset_ps=round(start * 1e12),
          duration_ps=round((end - start) * 1e12),
        )
    return bytes(space.SerializeToString())


def Request(session: str, seconds: int) -> bytes:
  """Returns the profiler service's request for a trace that starts now.

  Args:
    session: a new name for the trace.
    seconds: the trace ends after this time at the latest.
  """
  options = profiler_options_pb2.ProfileOptions(duration_ms=1000 * seconds)
  request = _Message('ProfileRequest')(
    opts=options.SerializeToString(), session_id=session, emit_xspace=True
  )
  return bytes(request.SerializeToString())


def EndRequest(session: str) -> bytes:
  """Returns the profiler service's request to end a trace now."""
  return bytes(_Message('TerminateRequest')(session_id=session).SerializeToString())


def Answer(response: bytes) -> bytes:
  """Returns the trace in the profiler service's response to a `Request`.

  Raises:
    ValueError: the response does not hold a trace.
  """
  content = bytes(_Parse(_Message('ProfileResponse'), response).xspace)
  _Parse(xplane_pb2.XSpace, content)
  return content


def _Names(metadata: Any) -> dict[int, str]:
  """Returns the names of a plane's events or statistics, by number."""
  return {number: entry.name for number, entry in metadata.items()}


def _Value(stat: Any, names: dict[int, str]) -> str | int:
  """Returns an event's statistic; most texts are numbers that refer to the list of names."""
  return stat.str_value or names.get(stat.ref_value) or stat.int64_value or stat.uint64_value


def _StartNs(space: Any) -> int:
  """Returns the start time of a trace, in nanoseconds; raises ValueError if it has none."""
  for plane in space.planes:
    if plane.name == _ENVIRONMENT:
      names = _Names(plane.stat_metadata)
      for stat in plane.stats:
        if names.get(stat.metadata_id) == _START_TIME:
          return int(_Value(stat, {}))
  raise ValueError(f'a trace of the profiler has no start time ({_ENVIRONMENT}: {_START_TIME})')


def _Parse(message: Any, content: bytes) -> Any:
  try:
    return message.FromString(content)
  except Exception as e:  # protobuf's class of errors depends on its implementation.
    raise ValueError(f'not a trace of the profiler: {e}') from e


@functools.cache
def _Message(name: str) -> Any:
  """Returns the class of a message of the profiler service."""
  file = descriptor_pb2.FileDescriptorProto(name=f'{_PACKAGE}.{name}.proto', package=_PACKAGE)
  declared = file.message_type.add(name=name)
  types = descriptor_pb2.FieldDescriptorProto
  for field, number, kind in _SERVICE[name]:
    declared.field.add(
      name=field,
      number=number,
      label=types.LABEL_OPTIONAL,
      type=getattr(types, f'TYPE_{kind.upper()}'),
    )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f'{_PACKAGE}.{name}'))
