# SPDX-License-Identifier: Apache-2.0
"""The flags of the programs by subject, with an example of each, for --help."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import NamedTuple

from absl import flags

_RUN = '--model=lm.stdlib.ByteTransformerGPipe2 --logdir=runs/stdlib'
_WORKER = '--cluster=hosts.json --task_index=0 --trusted_network'


class Subject(NamedTuple):
  """Flags that belong together.

  Attributes:
    title: the heading.
    names: the flags, in order; a program has some of them.
    examples: arguments; the first example of which a program has all flags is shown.
  """

  title: str
  names: tuple[str, ...]
  examples: tuple[str, ...]


SUBJECTS = (
  Subject(
    'What to run',
    ('model', 'logdir', 'mode', 'job', 'max_steps', 'model_task_name', 'params_package'),
    (
      f'{_RUN} --job=decode --split=Test --once',
      f'{_RUN} --job=train_and_eval --max_steps=100',
    ),
  ),
  Subject(
    'Params',
    ('model_params_override', 'model_params_file_override', 'allow_params_change'),
    (f"{_RUN} --model_params_override='task.train.max_steps:100;input.batch_size:8'",),
  ),
  Subject('Evaluation', ('split', 'once'), (f'{_RUN} --split=Dev --once',)),
  Subject(
    'Checkpoints',
    ('checkpoint', 'export_dir'),
    (f'{_RUN} --mode=export --checkpoint=best', f'{_RUN} --checkpoint=best'),
  ),
  Subject(
    'Devices',
    (
      'platform', 'devices', 'num_devices', 'num_replicas', 'logical_devices_per_gpu', 'gpu_memory',
      'threads_per_device', 'xla_cache', 'deterministic',
    ),
    (f'{_RUN} --platform=gpu --devices=0,2', f'{_WORKER} --platform=cpu --num_devices=2'),
  ),
  Subject(
    'Hosts and workers',
    (
      'local_workers', 'cluster', 'task_index', 'local_only', 'trusted_network', 'min_workers',
      'worker_timeout', 'step_timeout', 'local', 'starter',
    ),
    (f'{_RUN} --cluster=hosts.json --step_timeout=60', _WORKER),
  ),
  Subject(
    'Profiles and errors',
    ('profile_steps', 'check_numerics', 'stack_trace'),
    (
      f'{_RUN} --max_steps=10 --profile_steps=5,7',
      f'{_RUN} --stack_trace',
      f'{_WORKER} --stack_trace',
    ),
  ),
  Subject('The shell', ('completion',), ('--completion=bash >> ~/.bashrc',)),
)  # fmt: skip


def Help(
  program: str, values: flags.FlagValues, names: Collection[str], subjects: Sequence[Subject]
) -> str:
  """Returns the text of these flags: first those without a subject, then each subject.

  Args:
    program: the command, for the examples.
    values: the flags, by name.
    names: the names of the flags to describe.
    subjects: the headings, in order.
  """
  named = {name for subject in subjects for name in subject.names}
  blocks = ['\n'.join(_Line(values[name]) for name in sorted(set(names) - named))]
  for subject in subjects:
    lines = [_Line(values[name]) for name in subject.names if name in names]
    if lines:
      examples = [text for text in subject.examples if _Flags(text) <= set(names)]
      lines += [f'  For example: {program} {text}' for text in examples[:1]]
      blocks.append('\n'.join([f'{subject.title}:', *lines]))
  return '\n\n'.join(filter(None, blocks))


def _Line(flag: flags.Flag) -> str:
  text, _, is_repeated = flag.help.partition(';\n    repeat')  # The words of absl.
  text = f'--{flag.name}: {text}{" May be given several times." if is_repeated else ""}'
  if flag.default or flag.default == 0 and not flag.boolean:
    text += f' (default: {flag.default_as_str})'
  return textwrap.fill(
    text, 100, initial_indent='  ', subsequent_indent='      ',
    break_long_words=False, break_on_hyphens=False,
  )  # fmt: skip


def _Flags(text: str) -> set[str]:
  """Returns the names of the flags in an example."""
  words = [word for word in text.split() if word.startswith('--')]
  return {word[2:].partition('=')[0] for word in words}
