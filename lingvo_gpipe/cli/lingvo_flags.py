# SPDX-License-Identifier: Apache-2.0
"""Lingvo's flags on the command line: what means the same is taken, for the rest there are hints.

The table stands beside the flags of the programs: a flag that a program defines itself is its own.
Imports no TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

# {flag: {its value: the arguments in its place}}; values that are not named are refused below.
_SAME: dict[str, dict[str, list[str]]] = {
  'run_locally': {
    '': [],
    'cpu': ['--platform=cpu'],
    'gpu': ['--platform=gpu'],
    'tpu': ['--platform=tpu'],
  },
  'mode': {'sync': ['--mode=train']},
}

_ONE_PROCESS = 'one process on one host uses all devices; leave it out'
_STAGES = (
  "the devices are those of the stages: set num_stages of each task's PipeliningLayer, such as "
  'task.stack.num_stages'
)
_TF2 = 'everything is TensorFlow 2 code; leave it out'

# What to say of values: (flag, pattern of the value, hint).
_VALUE_HINTS = (
  ('run_locally', '.*', 'expected cpu, gpu or tpu; see --platform'),
  ('mode', 'async', 'updates are synchronous here: --mode=train'),
  (
    'mode',
    'shell',
    'import the experiment in Python: lingvo_gpipe.experiment.registry.GetParams(key, "Train")',
  ),
  ('mode', 'inspect_(evaler|decoder)', 'any data set can be evaluated: evaluator --split=Test'),
  ('mode', 'write_inference_graph', 'it is --mode=export, and writes a SavedModel'),
  ('job', r'decoder(_\w+)?(@\d+)?', 'it is evaluator --job=decode --split=Test'),
  (
    'job',
    r'(evaler|eval_\w+|evaler_\w+)(@\d+)?',
    'it is evaluator --split=Test, with --once for the last checkpoint, --checkpoint for another',
  ),
  (
    'job',
    '(controller|trainer|trainer_client|executor_tpu|host_driven_executor_tpu|worker|ps|input'
    '|train_summaries|,)+',
    'one process trains, saves and writes summaries: trainer, without this value',
  ),
  (
    'job',
    '.*,.*',
    'each is a process of its own: trainer, evaluator --split=Test, evaluator --job=decode '
    '--split=Test',
  ),
)

# What to say of flags: (pattern of the name, hint).
_NAME_HINTS = (
  ('worker_split_size', _STAGES),
  ('(worker|controller|evaler|decoder|ps|input)_(gpus|tpus|replicas|job|num_tpu_hosts)', _STAGES),
  ('(ps|worker|input|controller|evaler|decoder|executor)_.*|ps|task', _ONE_PROCESS),
  ('cluster_spec|tf_master', '--cluster=hosts.json names workers on other hosts'),
  ('tf_data_service_address|vizier_reporting_job', _ONE_PROCESS),
  (
    'saver_max_to_keep',
    '--model_params_override=task.train.save_max_to_keep:N, of several tasks '
    'train.save_max_to_keep:N, says how many checkpoints stay',
  ),
  (
    'saver_keep_checkpoint_every_n_hours',
    '--model_params_override=task.train.save_keep_checkpoint_every_n_hours:N, of several tasks '
    'train.save_keep_checkpoint_every_n_hours:N, says it',
  ),
  ('enable_check_numerics', '--check_numerics stops at the first step that is not finite'),
  ('enable_asserts', 'batches are always checked before a step; leave it out'),
  ('inspect_model_.*', '--mode=inspect_model prints all weights; pipe it through grep'),
  ('inspect_params_dataset_name', '--mode=inspect_params prints the Params for Train'),
  (
    'tpu|xla_device',
    "--platform=tpu; xla of each task's PipeliningLayer, such as task.stack.xla, says whether "
    'stages are compiled by XLA',
  ),
  ('use_eager.*|disable_tf2|run_functions_eagerly|stateless_vars_init|interactive', _TF2),
  ('checkpoint_in_trainer_.*|add_summary', 'the trainer does it always; leave it out'),
  ('pdb_on_exception', '--stack_trace shows where an error came from'),
)


def Translate(args: Sequence[str], defined: Container[str]) -> list[str]:
  """The arguments with Lingvo's flags in this project's spelling.

  Args:
    args: the command line without the program.
    defined: names of the flags that the program defines.

  Raises:
    ValueError: a flag, or a value, of Lingvo's that has no like here; one line says what to use.
  """
  found: list[str] = []
  rest = list(args)
  while rest:
    arg = rest.pop(0)
    match = re.fullmatch(r'--?([A-Za-z]\w*)(=(.*))?', arg, re.DOTALL)
    if arg == '--':
      return [*found, arg, *rest]
    if match is None:
      found.append(arg)
      continue
    name, value = match[1], match[3]
    hints = [(pattern, hint) for flag, pattern, hint in _VALUE_HINTS if flag == name]
    if hints and value is None and rest:
      value = rest.pop(0)
      arg = f'--{name}={value}'
    if value in _SAME.get(name, {}):
      # A program without the flag that says it here does it without being told.
      found += [x for x in _SAME[name][value] if x[2:].partition('=')[0] in defined]
      continue
    for pattern, hint in hints:
      # What a program defines, it knows values of.
      if re.fullmatch(pattern, value or '') and not (pattern == '.*' and name in defined):
        raise ValueError(f"{arg} is Lingvo's: {hint}")
    for pattern, hint in _NAME_HINTS:
      if name not in defined and re.fullmatch(f'(no)?({pattern})', name):
        raise ValueError(f"--{name} is Lingvo's: {hint}")
    found.append(arg)
  return found
