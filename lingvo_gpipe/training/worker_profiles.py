# SPDX-License-Identifier: Apache-2.0
"""`WorkerProfiles`: TensorFlow's profiler in the workers, for as long as is wanted.

A worker's server has the profiler among its services, at the same port.
`tf.profiler.experimental.client.trace` would ask it for a time that is fixed before, and have it
write into a directory of its own host. Asked without that, it sends the trace when it is told to.
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

# A worker does not say when its profiler runs. It ends by itself after the longest time, or when
# the connection does; a trace that does not come in time after it was told to is given up.
_BEGIN_SECONDS, _LONGEST_SECONDS, _TELL_SECONDS, _END_SECONDS = 1.0, 3600, 5.0, 60.0


class WorkerProfiles:
  """Profiles workers from its construction to `End`; without any it does nothing."""

  def __init__(self, addresses: Mapping[int, str]) -> None:
    """Returns when the profilers should run.

    Args:
      addresses: 'host:port' of the workers, by task index.
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
    """Returns the traces by task index, and why others have none."""
    heartbeat.SuspendTimeout()
    for channel in self._channels.values():
      with contextlib.suppress(grpc.RpcError):  # Then there is no trace, which tells why.
        tell = channel.unary_unary(f'{_SERVICE}/Terminate')
        tell(profiler_trace.EndRequest(self._session), timeout=_TELL_SECONDS)
    found: dict[int, bytes] = {}
    reasons: dict[int, str] = {}
    deadline = time.monotonic() + _END_SECONDS
    for index, trace in self._traces.items():
      try:
        answer = trace.result(max(0.0, deadline - time.monotonic()))
        found[index] = profiler_trace.Answer(answer)
      except grpc.FutureTimeoutError:
        reasons[index] = f'it did not come within {_END_SECONDS:g} s'
      except grpc.RpcError as e:
        reasons[index] = worker_connection.WhyNot(e)
      except ValueError as e:
        reasons[index] = str(e)
    for channel in self._channels.values():
      channel.close()
    return found, reasons
