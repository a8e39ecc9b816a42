# SPDX-License-Identifier: Apache-2.0
"""Writes <logdir>/report.html: the report of a run, with its curves, stages and profiles."""

from __future__ import annotations

import html
import os
import re
import resource
from collections.abc import Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.profiling import schedule_svg
from lingvo_gpipe.reporting import line_chart, metrics_log, report_page, run_report

# The front of the names of this process's devices.
_LOCAL = '/job:localhost/replica:0/task:0/'
# Larger pictures and profiles are left out.
_MOST_ACTIONS, _MOST_PROFILE_BYTES = 2000, 2 << 20


def Write(
  report: run_report.RunReport,
  cuts: Mapping[str, cut_lib.Cut],
  devices: cluster.Cluster,
  samples: Mapping[str, str],
  command: str,
) -> None:
  """Writes the page.

  Args:
    report: the report of the call that ends.
    cuts: {task: its cut}.
    devices: the devices of all replicas.
    samples: {name of an evaluation or decoding: text of decoded examples}.
    command: the command line that continues the run.

  Raises:
    OSError: a file cannot be read or written.
  """
  try:
    events, profiles = (
      [os.path.basename(path) for path in tf.io.gfile.glob(os.path.join(report.logdir, *pattern))]
      for pattern in (('train', 'events.out.tfevents.*'), ('timeline_*.html',))
    )
  except tf.errors.OpError as e:
    raise OSError(f'Cannot list {report.logdir!r}: {files.OneLine(e)}') from e
  # Each call of the trainer has a file of events, with the time of its start in the name.
  matches = (re.match(r'events\.out\.tfevents\.(\d{1,11})\.', name) for name in events)
  starts = sorted({float(match[1]) for match in matches if match})
  sections = {f'Stages {task}'.strip(): _Stages(cut, devices.devices) for task, cut in cuts.items()}
  sections['Memory'] = _Memory(cuts, devices)
  sections['Profile'] = ''.join(
    _Profile(report.logdir, name) for name in sorted(profiles, key=lambda name: (len(name), name))
  ) or (
    '<p>The bubble and the times of actions are predictions. <code>--profile_steps=5,7</code> '
    'measures them.</p>'
  )
  sections['Samples'] = (
    ''.join(
      f'<h3>{report_page.Escape(name)}</h3>{report_page.Preformatted(text)}'
      for name, text in samples.items()
    )
    or '<p>This call decoded nothing.</p>'
  )
  records = list(metrics_log.Read(os.path.join(report.logdir, metrics_log.NAME)))
  page = report_page.MakePage(report, records, starts, command, sections)
  files.WriteWhole(os.path.join(report.logdir, run_report.PAGE), page)


def _Stages(cut: cut_lib.Cut, devices: Sequence[str]) -> str:
  """Returns the stage table, and the picture of the predicted step."""
  text = report_page.Preformatted(cut.Table(devices))
  if sum(map(len, cut.schedule.actions)) > _MOST_ACTIONS:
    return text
  picture = schedule_svg.Draw(cut.simulated)
  return (
    f'{text}<p>A step as predicted, without transfers, and the number of activations that a device '
    f'holds:</p><div class="scroll" tabindex="0">{picture}</div>'
  )


def _Memory(cuts: Mapping[str, cut_lib.Cut], devices: cluster.Cluster) -> str:
  """Returns a table of the predicted memory of each device, and its measured peak if it has one."""
  width = len(devices.devices) // devices.num_replicas
  state, activations = [0] * width, [0] * width
  for cut in cuts.values():  # One task at a time.
    needed = [0] * width
    for device, stage in zip(cut.schedule.stage_to_device, cut.memory, strict=True):
      state[device] += stage.state
      needed[device] += stage.activations
    activations = list(map(max, activations, needed))
  rows = ''.join(
    f'<tr><td>{report_page.Escape(name.removeprefix(_LOCAL))}</td>'
    f'<td>{_MiB(state[i % width] + activations[i % width])}</td><td>{_MeasuredPeak(name)}</td></tr>'
    for i, name in enumerate(devices.devices)
  )
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return (
    '<div class="scroll"><table><tr><th>Device</th><th>Predicted peak</th>'
    '<th>Measured peak</th></tr>'
    f'{rows}<tr><td>this process, with TensorFlow</td><td></td><td>{_MiB(peak)}</td></tr>'
    '</table></div>'
    '<p>Predicted: weights, gradients, slots and activations. Measured: the memory that '
    'TensorFlow allocated on an accelerator, and the resident memory of this process.</p>'
  )


def _MeasuredPeak(device: str) -> str:
  try:
    peak = tf.config.experimental.get_memory_info(device)['peak']
  except (ValueError, tf.errors.OpError):  # A device of a worker.
    peak = 0
  return _MiB(peak) if peak else 'not reported'  # CPUs report 0.


def _MiB(size: float) -> str:
  return f'{line_chart.Number(size / (1 << 20))} MiB'


def _Profile(logdir: str, name: str) -> str:
  """Returns a page of `StepProfiler`: its text, and the page itself in a frame without scripts."""
  path = os.path.join(logdir, name)
  link = report_page.Escape(name)
  title = f'<h3><a href="{link}">{link}</a></h3>'
  try:
    with tf.io.gfile.GFile(path) as f:
      page = f.read(_MOST_PROFILE_BYTES + 1)
  except (tf.errors.OpError, UnicodeDecodeError) as e:
    raise OSError(f'Cannot read {path!r}: {files.OneLine(e)}') from e
  text = re.search('<p>(.*?)</p>', page, re.DOTALL)
  summary = f'<p>{report_page.Escape(html.unescape(text[1]))}</p>' if text else ''
  if len(page) > _MOST_PROFILE_BYTES:
    return title + summary
  frame = f'<iframe sandbox="" title="{link}" srcdoc="{report_page.Escape(page)}"></iframe>'
  return title + summary + frame
