# SPDX-License-Identifier: Apache-2.0
"""`WorkerProfiles`: runs TensorFlow's profiler in the workers until it is asked to end.

A worker's server offers the profiler as a service at its port. `tf.profiler.experimental.client`
requests a trace of a fixed duration, which the worker writes to a directory of its own host. The
requests here set no directory, and the worker sends the trace when it is asked to end.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping

import grpc

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import worker_connection
from lingvo_gpipe.pipeline.profiling import profiler_trace

_SERVICE = '/tensorflow.ProfilerService'

# A worker does not report when its profiler has started, so there is a pause. The profiler ends
# after the longest time, or when the connection ends.
_BEGIN_SECONDS, _LONGEST_SECONDS = 1.0, 3600
# Timeouts of the request to end, and of the traces after it.
_REQUEST_SECONDS, _END_SECONDS = 5.0, 60.0


class WorkerProfiles:
  """Profiles workers from its construction to `End`; does nothing without workers."""

  def __init__(self, addresses: Mapping[int, str]) -> None:
    """Starts the profilers and waits until they should be running.

    Args:
      addresses: {task index: 'host:port'} of the workers.
    """
    self._session = secrets.token_hex(8)
    self._channels = {
      index: grpc.insecure_channel(address, [('grpc.max_receive_message_length', -1)])
      for index, address in addresses.items()
    }
    request = profiler_trace.Request(self._session, _LONGEST_SECONDS)
    self._traces = {
      index: channel.unary_unary(f'{_SERVICE}/Profile').future(request)
      for index, channel in self._channels.items()
    }
    if addresses:
      time.sleep(_BEGIN_SECONDS)

  def End(self) -> tuple[dict[int, bytes], dict[int, str]]:
    """Returns the traces by task index, and the reasons why other workers have none."""
    heartbeat.SuspendTimeout()
    for channel in self._channels.values():
      with contextlib.suppress(grpc.RpcError):  # Then the request for the trace fails as well.
        terminate = channel.unary_unary(f'{_SERVICE}/Terminate')
        terminate(profiler_trace.EndRequest(self._session), timeout=_REQUEST_SECONDS)
    traces: dict[int, bytes] = {}
    reasons: dict[int, str] = {}
    deadline = time.monotonic() + _END_SECONDS
    for index, trace in self._traces.items():
      try:
        answer = trace.result(max(0.0, deadline - time.monotonic()))
        traces[index] = profiler_trace.Answer(answer)
      except grpc.FutureTimeoutError:
        reasons[index] = f'it did not come within {_END_SECONDS:g} s'
      except grpc.RpcError as e:
        reasons[index] = worker_connection.DescribeRpcError(e)
      except ValueError as e:
        reasons[index] = str(e)
    for channel in self._channels.values():
      channel.close()
    return traces, reasons
