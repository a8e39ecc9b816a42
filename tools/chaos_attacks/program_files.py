# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that users hand to the programs, and that runs and studies leave behind."""

from __future__ import annotations

import json
import pathlib
import random

from lingvo_gpipe.pipeline.schedule import schedules
from tools import multilingual_study, program
from tools.chaos_attacks import children, file_attacks, mutation

_MODEL = 'lm.stdlib.ByteTransformerGPipe2'
_PARAMS = (
  'task.num_layers:1;task.model_dim:16;task.hidden_dim:32;task.num_heads:2;task.stack.xla:False;'
  'task.stack.num_micro_batches:2;input.max_bytes:5000;input.batch_size:4;input.seq_len:16;'
  'task.train.save_interval_steps:1'
)
_STEPS = 3
_SECONDS = 120.0
_WARM_START = "task.train.init_from_checkpoint_rules:{{'{}': ([(r'(.*)', r'\\1')], [])}}"

# Parts of paths that no reader may have expected.
_NAMES = ['\udcff', 'x' * 5000, 'a\0b', '\udce9/x', '/x' * 2500]
_DEVICES = ['/dev/zero', '/dev/null', '/dev/stdin', '/proc/version', '/']
_NUMBERS = [
  '-1', '0', '1', '3', '4097', '99999999999', str(2**63), '1e30', 'x', '', '0,1', '\u0663',
]  # fmt: skip


def _MakeFlags(folder: pathlib.Path) -> None:
  lines = [
    '# A run.', f'--model={_MODEL}', '--mode=inspect_params', '',
    '--num_devices=2', '--model_params_override=task.num_layers:1', '--nostack_trace',
    '--platform', 'cpu', '--params_package=params',
  ]  # fmt: skip
  (folder / 'flags').write_text('\n'.join(lines) + '\n')
  (folder / 'more').write_text('--num_replicas=1\n// A comment.\n--nostack_trace\n')


def _ReadFlags(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  names = draw.choice([['flags'], ['more', 'flags'], ['more']])
  args = [f'--flagfile={folder / name}' for name in names]
  return file_attacks.Command('trainer', [*args, f'--model={_MODEL}', '--mode=inspect_params'])


def _DamageFlags(draw: random.Random, folder: pathlib.Path) -> str:
  if draw.random() < 0.3:  # Even a file that refers to itself.
    with (folder / 'flags').open('a') as f:
      f.write(f'--flagfile={folder / draw.choice(["more", "flags", "missing", ""])}\n')
    if draw.random() < 0.3:
      return 'reference to a file'
  return file_attacks.DamageAny(draw, folder)


def _MakeDevices(folder: pathlib.Path) -> None:
  path = program.ROOT / 'tools' / 'devices' / 'h100.json'
  (folder / path.name).write_bytes(path.read_bytes())


def _ReadDevices(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  return file_attacks.Command('tools.plan', [
    f'--model={_MODEL}', '--platform=cpu', f'--model_params_override={_PARAMS}',
    f'--device_file={folder / "h100.json"}', '--schedules=gpipe,1f1b', '--remat_policies=stage',
    '--vocabularies=one', '--num_stages=2', f'--num_devices={draw.choice([2, 4])}', '--num_rows=2',
  ])  # fmt: skip


def _MakePictures(folder: pathlib.Path) -> None:
  for name in ('1f1b', 'zb_h1'):
    (folder / name).write_text(schedules.Get(name, 3, 4).ToText())
  (folder / 'timeline.html').write_text(
    '<html><body><h2>step 7 &amp; 8</h2>\n<svg width="9" viewBox="0 0 500 200"><style>a{}</style>'
    '<rect class="measured"/></svg></body></html>'
  )


def _ReadPictures(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  name = draw.choice(['schedule=1f1b', 'schedule=zb_h1', 'timeline=timeline.html'])
  flag, _, file = name.partition('=')
  args = [f'--{flag}={folder / file}', f'--output={folder / "x.svg"}']
  return file_attacks.Command('tools.draw_schedule', args)


def _MakeTable(folder: pathlib.Path) -> None:
  configuration = {
    'system': 'lingvo_gpipe', 'workload': 'a', 'sizes': {'layers': 2}, 'num_stages': 2,
    'num_micro_batches': 4, 'schedule': 'gpipe', 'remat_policy': 'stage', 'xla': True,
    'num_cores': 2, 'repeats': 3, 'seconds': 0.0,
  }  # fmt: skip
  result = {
    'steps': [0.5, 0.6], 'cores': 2, 'memory_mib': 9.0, 'trace_seconds': 1.0,
    'compile_seconds': 1.0, 'simulated_best': 0.4,
  }  # fmt: skip
  line = json.dumps({'configuration': configuration, 'result': result, 'time': 1.0})
  (folder / 'results.jsonl').write_text(f'{line}\n')


def _MakeRun(folder: pathlib.Path) -> None:
  runner = children.Runner(folder.parent / 'training', _SECONDS)
  args = [f'--max_steps={_STEPS}', 'task.train.eval_datasets:[]']
  children.CheckEnd(runner.Run('trainer', [*_Args(folder / 'run', args[1]), args[0]]))


def _Args(logdir: pathlib.Path, more: str = '') -> list[str]:
  return [
    f'--model={_MODEL}', '--platform=cpu', f'--logdir={logdir}',
    f'--model_params_override={_PARAMS};{more}',
  ]  # fmt: skip


def _ReadRun(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  """Evaluates, follows, resumes, exports or inspects a run, or trains further from its weights."""
  logdir = folder / 'run'
  rules = _WARM_START.format(logdir)
  checkpoint = draw.choice([_STEPS - 1, _STEPS])
  export = ['--mode=export', f'--export_dir={folder / "export"}', f'--checkpoint={checkpoint}']
  warm = _Args(folder / 'warm', f'task.train.eval_datasets:[];{rules}')
  evaluation = [*_Args(logdir), '--once', f'--checkpoint={checkpoint}']
  # A run whose report is damaged may continue: the evaluator waits for it, and ends with status 1.
  following = _Args(logdir, 'task.eval.max_seconds_without_trainer:0.1')
  resumed = [*_Args(logdir, 'task.train.eval_datasets:[]'), f'--max_steps={_STEPS + 1}']
  return draw.choice([
    file_attacks.Command('evaluator', evaluation, is_checked=True),
    file_attacks.Command('evaluator', following, (0, 1)),
    file_attacks.Command('trainer', resumed),
    file_attacks.Command('trainer', [*_Args(logdir), *export]),
    file_attacks.Command('trainer', ['--mode=diff_params', str(logdir), _MODEL], (0, 1)),
    file_attacks.Command('trainer', ['--mode=inspect_checkpoint', f'--logdir={logdir}'], (0, 1)),
    file_attacks.Command('trainer', [*warm, '--max_steps=1']),
  ])  # fmt: skip


def _DamageRun(draw: random.Random, folder: pathlib.Path) -> str:
  """Damages any files, or one beside the checkpoints: the report, the Params, the metrics."""
  if draw.random() < 0.5:
    return file_attacks.DamageAny(draw, folder)
  return mutation.File(draw, draw.choice(sorted((folder / 'run').glob('*.*'))))


def _ReadTable(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  del draw
  return file_attacks.Command('tools.benchmark', [f'--table_of={folder / "results.jsonl"}'])


def _MakeStudy(folder: pathlib.Path) -> None:
  metrics = {'bleu': 10.0, 'chrf': 20.0, 'exact': 0.1}
  result = {
    'overrides': [''], 'num_params': 1000, 'steps': 10, 'seconds': 1.0, 'total_seconds': 2.0,
    'is_done': False, 'dev_loss': 1.5, 'metrics': metrics,
  }  # fmt: skip
  results = [{'name': name, **result} for name in ('bilingual-de', 'multilingual', 'deep')]
  lines = ''.join(f'{json.dumps(result)}\n' for result in results)
  (folder / 'results.jsonl').write_text(lines)


def _ReadStudy(folder: pathlib.Path) -> str:
  return multilingual_study.Report(multilingual_study.ReadResults(folder / 'results.jsonl'))


def _DamageStudy(draw: random.Random, folder: pathlib.Path) -> str:
  """Damages the file, or a value of a line that stays valid JSON."""
  if draw.random() < 0.3:
    return file_attacks.DamageAny(draw, folder)
  path = folder / 'results.jsonl'
  lines = path.read_text().splitlines()
  lines[0] = mutation.Json(draw, lines[0])
  path.write_text('\n'.join(lines) + '\n')
  return 'a value of the first line'


def _MakeNothing(folder: pathlib.Path) -> None:
  (folder / 'unused').touch()


def _UsePath(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  """Uses a path that no reader expects: not in UTF-8, with NUL, too long, or of a device."""
  path = draw.choice([f'{folder}/{draw.choice(_NAMES)}', draw.choice(_DEVICES)])
  args = _Args(folder / 'run', 'task.train.eval_datasets:[]') + ['--max_steps=1']
  inspect = [f'--model={_MODEL}', '--mode=inspect_params']
  tokens = ['--model=lm.stdlib.PackedTransformerGPipe2', '--mode=inspect_model', '--platform=cpu']
  reader, reader_args = draw.choice([
    ('trainer', [*args, f'--logdir={path}']),
    ('trainer', [f'--logdir={path}', '--mode=inspect_checkpoint']),
    ('trainer', [*args, '--mode=export', f'--export_dir={path}']),
    ('trainer', ['--mode=diff_params', _MODEL, path]),
    ('trainer', [*inspect, f'--model_params_file_override={path}']),
    ('trainer', [*inspect, f'--flagfile={path}']),
    ('trainer', [*inspect, f'--params_package={path}']),
    ('trainer', [*args, f'--cluster={path}']),
    ('trainer', [*args, f'--model_params_override={_WARM_START.format(path)}']),
    ('trainer', [*tokens, f'--model_params_override=input.vocab_filepath:{path}']),
    ('trainer', [*tokens, f'--model_params_override=input.cache_dir:{path}']),
    ('evaluator', [*args, '--once', f'--logdir={path}']),
    ('tools.train_sentencepiece', [f'--files={path}', '--vocab_size=300', f'--prefix={path}']),
    ('tools.draw_schedule', [f'--schedule={path}']),
    ('tools.draw_schedule', [f'--output={path}']),
    ('tools.plan', [f'--model={_MODEL}', '--platform=cpu', f'--device_file={path}']),
    ('tools.benchmark', [f'--table_of={path}']),
  ])  # fmt: skip
  # A file may differ from the model.
  statuses = (0, 1) if '--mode=diff_params' in reader_args else (0,)
  return file_attacks.Command(reader, reader_args, statuses)


def _UseNumber(draw: random.Random, folder: pathlib.Path) -> file_attacks.Command:
  """Gives any number to a flag."""
  del folder
  flag = draw.choice(['num_replicas', 'num_devices', 'devices', 'logical_devices_per_gpu'])
  mode = draw.choice(['inspect_partition', 'inspect_model', 'inspect_params'])
  number = draw.choice(_NUMBERS)
  args = [f'--model={_MODEL}', '--platform=cpu', f'--mode={mode}', f'--{flag}={number}']
  return file_attacks.Command('trainer', args)


KINDS = {
  'flag_file': file_attacks.Kind(_MakeFlags, command=_ReadFlags, damage=_DamageFlags),
  'device_file': file_attacks.Kind(_MakeDevices, command=_ReadDevices),
  'pictures': file_attacks.Kind(_MakePictures, command=_ReadPictures),
  'benchmarks': file_attacks.Kind(_MakeTable, command=_ReadTable),
  'run': file_attacks.Kind(_MakeRun, command=_ReadRun, damage=_DamageRun),
  'study': file_attacks.Kind(_MakeStudy, _ReadStudy, damage=_DamageStudy),
  'paths': file_attacks.Kind(_MakeNothing, command=_UsePath),
  'numbers': file_attacks.Kind(_MakeNothing, command=_UseNumber),
}
