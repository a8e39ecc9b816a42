# SPDX-License-Identifier: Apache-2.0
"""The trainer as a process: full runs, resumed runs, kills, signals, other numbers of stages."""

import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gpipe.experiment import registry
from tests import naming, processes, worker_processes

project = worker_processes.project  # An experiment of two stages, quicker to trace than MODEL.

# Steps of the undisturbed run, and steps between its checkpoints.
END = 120
PART = 15
# The compared runs also keep averages of their weights.
AVERAGES = 'task.train.ema_decay:0.9'


@pytest.fixture(scope='module')
def undisturbed(forks, tmp_path_factory):
  """Returns (log directory, printed output) of a run of END steps.

  It evaluates and decodes in between; the runs compared with it do not.
  """
  logdir = tmp_path_factory.mktemp('undisturbed') / 'run'
  more = f'{AVERAGES};task.train.save_interval_steps:{PART};task.train.save_max_to_keep:100'
  more += f';task.train.eval_interval_steps:{END // 2};task.train.decode_interval_steps:{END // 2}'
  more += ";task.train.decode_datasets:['Dev'];task.eval.decoder_samples_per_summary:4"
  args = processes.TrainArgs(logdir, END, more=more, evaluate=['Test'])
  done = forks.Run('trainer', *args, '--job=train_and_eval')
  return logdir, processes.Succeeded(done)


def _ToyArgs(logdir, max_steps, more=''):
  """Returns arguments for the experiment of `project`; each step writes summaries."""
  quick = 'task.stack.xla:False;task.train.summary_interval_steps:1'
  return processes.ToyArgs(logdir, max_steps, f'{quick};{more}')


def _TrainedScalars(logdir):
  return processes.Scalars(logdir / 'train')


def _AssertScalarsEqual(actual, expected, steps, rtol=0.0):
  """Checks loss and gradient norm at these steps, each of which occurs exactly once."""
  for tag in ('loss', 'bits_per_byte', 'grad_norm', 'learning_rate'):
    assert [step for step, _ in actual[tag]] == list(steps)
    expected_values = dict(expected[tag])
    np.testing.assert_allclose(
      [value for _, value in actual[tag]],
      [expected_values[step] for step in steps],
      rtol=rtol,
      err_msg=tag,
    )


def testPrintsPlanProgressAndEvaluation(undisturbed):
  _, done = undisturbed
  lines = done.stdout.splitlines()
  assert lines[0].startswith(f'{processes.MODEL}@params/lm/stdlib.py:')
  assert naming.Names(lines[0], '2 logical CPU devices')
  header, *stages = [re.split(r' {2,}', line.strip()) for line in lines[1:4]]
  assert header == [
    'stage', 'layers', 'from', 'to', 'params', 'MFLOPs', 'share', 'idle', 'weights', 'activations',
    'device',
  ]  # fmt: skip
  assert [row[0] for row in stages] == ['0', '1']
  assert sum(int(row[1]) for row in stages) == 5
  assert abs(sum(float(row[6].rstrip('%')) for row in stages) - 100.0) < 0.2
  assert [row[-1] for row in stages] == ['device:CPU:0', 'device:CPU:1']
  num_params = sum(int(row[4].replace(',', '')) for row in stages)
  assert naming.Names(lines[4], 'K=2', 'M=2', 'gpipe', 'remat_policy stage', 'balance')
  assert naming.Names(lines[4], f'{num_params:,} parameters')
  assert naming.Names(lines[5], 'predicted', '33.3%', 'equal')
  assert re.search(r'\bbubble \d+\.\d%', lines[5])
  # Through a pipe: plain lines, with the first and the last step.
  progress = [line for line in lines if line.startswith('step ')]
  assert re.match(
    rf'step 1/{END}  loss [\d.]+  accuracy [\d.]+  bits_per_byte [\d.]+$', progress[0]
  )
  assert re.match(
    rf'step {END}/{END}  loss .*  bits_per_byte [\d.]+  [\d,]+ tokens/s  lr [\d.e-]+  bubble \d+%  '
    '0:00 left$',
    progress[-1],
  )
  assert '\x1b' not in done.stdout and '\r' not in done.stdout
  match = re.search(
    rf'^Test at step {END}: ([\d.]+) bits per byte; order-0 .*: ([\d.]+)$',
    done.stdout,
    re.MULTILINE,
  )
  assert match and 3.0 < float(match[2]) < float(match[1]) < 8.0
  names = ['prompt', 'continuation', 'reference']
  places = [done.stdout.index(f'--- {name}\n') for name in names]
  assert places == sorted(places)
  # Eight bytes, up to four for a character, and the end of the line.
  text = done.stdout[places[1] : places[2]].removeprefix('--- continuation\n')
  assert len(text) >= 3
  assert processes.Messages(done.stderr) == []


def testLeavesDescriptionsCheckpointsAndSummaries(undisturbed, monkeypatch):
  logdir, done = undisturbed
  monkeypatch.syspath_prepend(str(processes.ROOT))
  text = (logdir / 'params.txt').read_text()
  params = registry.GetParams(processes.MODEL, 'Train')
  assert params.ToText() != text
  params.FromText(text)
  assert params.ToText() == text
  assert params.task.model_dim == 16 and params.task.train.max_steps == END
  analysis = (logdir / 'model_analysis.txt').read_text()
  assert 'lm.stack.layers[0].emb' in analysis and '10,704 parameters' in analysis
  assert 'K=2 stages' in analysis
  assert processes.Steps(logdir) == list(range(PART, END + 1, PART))
  scalars = _TrainedScalars(logdir)
  for tag in ('loss', 'bits_per_byte', 'accuracy', 'grad_norm', 'learning_rate', 'is_finite'):
    assert [step for step, _ in scalars[tag]] == list(range(1, END + 1)), tag
  losses = [value for _, value in scalars['loss']]
  assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 1.0
  assert scalars['tokens_per_second'][-1][1] > 0
  evaluated = processes.Scalars(logdir / 'eval_test')
  (half, _), (step, bits) = evaluated['bits_per_byte']
  decoded = sorted(path.name for path in (logdir / 'decode_dev').glob('*.jsonl'))
  assert decoded == [f'decode-{step:08d}.jsonl' for step in (END // 2, END)]
  assert half == END // 2 and step == END
  assert naming.AnyLineNames(done.stdout, f'step {END}', f'{bits:.3f} bits per byte')
  score = (logdir / 'eval_test' / f'score-{END:08d}.txt').read_text()
  assert re.search(r'^bits_per_byte: [\d.]+$', score, re.MULTILINE)


@pytest.mark.parametrize('num_stages', [1, 2, 4])
def testACheckpointResumesWithAnyNumberOfStages(undisturbed, forks, tmp_path, num_stages):
  """With two stages, as in the first run, all values are bit-equal.

  In stream_training_test and docs_test, calls resume from the end of others.
  """
  logdir, _ = undisturbed
  os.makedirs(tmp_path / 'train')
  for path in (logdir / 'train').glob(f'ckpt-{PART:08d}*'):
    copy = shutil.copytree if path.is_dir() else shutil.copy
    copy(path, tmp_path / 'train' / path.name)
  model = f'lm.stdlib.ByteTransformerGPipe{num_stages}'
  done = forks.Run('trainer', *processes.TrainArgs(tmp_path, 2 * PART, model=model, more=AVERAGES))
  processes.Succeeded(done)
  names = ('resuming', f'step {PART}', f'{4 * PART} examples')
  assert naming.AnyLineNames(done.stdout, *names)
  assert f'step {PART + 1}/{2 * PART}  loss' in done.stdout
  assert re.search(r'traced .*\d+\.\d s; .*first step .*\d+\.\d s', done.stdout)
  assert f'K={num_stages} stages' in done.stdout
  # Only the changed params are logged.
  changed = {line.split('] ')[1].split()[0] for line in processes.Messages(done.stderr)}
  is_equal = model == processes.MODEL
  expected = set() if is_equal else {'model', 'cut'}
  assert expected <= changed <= {*expected, 'intra_op_threads'}
  _AssertScalarsEqual(
    _TrainedScalars(tmp_path), _TrainedScalars(logdir), range(PART + 1, 2 * PART + 1),
    rtol=0.0 if is_equal else 1e-4,
  )  # fmt: skip
  tensors = processes.Tensors(logdir, 2 * PART)
  assert 'lm.stack.layers[0].emb/ema' in tensors
  if is_equal:
    processes.AssertSameTensors(processes.Tensors(tmp_path, 2 * PART), tensors)


def _AwaitStep(logdir, step):
  """Waits for a checkpoint of at least this step."""
  deadline = time.monotonic() + processes.TIMEOUT
  while time.monotonic() < deadline:
    names = os.listdir(logdir / 'train') if (logdir / 'train').exists() else []
    steps = [int(m[1]) for name in names if (m := re.fullmatch(r'ckpt-(\d+)\.json', name))]
    if max(steps, default=0) >= step:
      return
    time.sleep(0.002)


def testARunKilledAtRandomMomentsEqualsAnUndisturbedRun(project, forks, tmp_path):
  """The run has two stages; restarts_test kills more often."""
  rng = random.Random(7)
  killed, undisturbed = tmp_path / 'killed', tmp_path / 'undisturbed'
  more = f'{AVERAGES};task.train.save_interval_steps:4'
  # Once during start-up, then at a random moment of training and saving.
  for step in [0, rng.randrange(2, 100)]:
    pid = forks.Start('trainer', *_ToyArgs(killed, 10**6, more), cwd=project)
    if step:
      _AwaitStep(killed, step)
      time.sleep(rng.uniform(0.0, 0.05))
    else:
      time.sleep(rng.uniform(0.0, 0.3))
    os.kill(pid, signal.SIGKILL)
    done = forks.Wait()
    assert done.returncode == -signal.SIGKILL, done.stderr
  last = processes.Steps(killed)[-1]
  end = max(last, *(step for step, _ in _TrainedScalars(killed)['loss'])) + 20
  done = processes.Succeeded(forks.Run('trainer', *_ToyArgs(killed, end, more), cwd=project))
  assert naming.AnyLineNames(done.stdout, 'resuming', f'step {last}')
  processes.Succeeded(forks.Run('trainer', *_ToyArgs(undisturbed, end, AVERAGES), cwd=project))
  tensors = processes.Tensors(killed, end)
  assert 'toy.stack.layers[0].w/ema' in tensors
  processes.AssertSameTensors(tensors, processes.Tensors(undisturbed, end))
  # Repeated steps have equal losses.
  expected = dict(_TrainedScalars(undisturbed)['loss'])
  losses = _TrainedScalars(killed)['loss']
  assert {step for step, _ in losses} >= set(range(last + 1, end + 1))
  assert all(expected[step] == value for step, value in losses)
  # metrics.jsonl has each step once, with equal values.
  lines = [json.loads(line) for line in (killed / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines] == list(range(1, end + 1))
  assert all(np.float32(line['values']['loss']) == expected[line['step']] for line in lines)


def testSignalsSaveAndLeave(project, forks, tmp_path):
  step = 0
  args = _ToyArgs(tmp_path, 10**6, "task.train.eval_datasets:['Train']")
  for number in (signal.SIGTERM, signal.SIGINT):
    pid = forks.Start('trainer', *args, cwd=project)
    forks.Await('\nstep ')
    os.kill(pid, number)
    done = forks.Wait()
    assert done.returncode == 128 + number, done.stderr
    start = ['resuming', f'step {step}'] if step else ['starting', 'new run']
    assert naming.AnyLineNames(done.stdout, *start), done.stdout
    match = re.search(
      rf'^stopped\b.*\b{number.name}\b.*\bstep (\d+)\b.*\bcheckpoint\b.*\bsaved$',
      done.stdout,
      re.MULTILINE,
    )
    assert match, done.stdout
    assert int(match[1]) > step
    step = int(match[1])
    assert processes.Steps(tmp_path)[-1] == step
  assert [step for step, _ in _TrainedScalars(tmp_path)['loss']] == list(range(1, step + 1))


def testModesThatInspectARun(undisturbed, forks, tmp_path):
  logdir, _ = undisturbed
  args = processes.TrainArgs(logdir, END)
  exported = forks.Run(
    'trainer', *args, '--mode=export', '--platform=cpu', '--model_task_name=',
    f'--export_dir={tmp_path}/model',
  )  # fmt: skip
  inspected = forks.Run('trainer', '--mode=inspect_checkpoint', f'--logdir={logdir}')
  params = str(logdir / 'params.txt')
  same = forks.Run('trainer', '--mode=diff_params', str(logdir), params)
  other = forks.Run('trainer', '--mode=diff_params', params, processes.MODEL)
  copy = tmp_path / 'copy'
  copy.mkdir()
  text = (logdir / 'params.txt').read_text()
  (copy / 'params.txt').write_text(text.replace('task.model_dim : 16', 'task.model_dim : 32'))
  compared = forks.Run('trainer', '--mode=diff_params', str(logdir), str(copy))
  processes.Succeeded(exported)
  assert naming.AnyLineNames(exported.stdout, 'weights', f'step {END}', tmp_path / 'model')
  assert (tmp_path / 'model' / 'saved_model.pb').exists()
  assert (same.returncode, same.stdout) == (0, ''), same.stderr
  assert other.returncode == 1
  assert '~ task.model_dim : 16 -> 128' in other.stdout.splitlines()
  assert (compared.returncode, compared.stdout) == (1, '~ task.model_dim : 16 -> 32\n')
  lines = processes.Succeeded(inspected).stdout.splitlines()
  steps = [int(line.split()[1]) for line in lines[1 : lines.index('')]]
  assert steps == processes.Steps(logdir)
  weight = '    lm.stack.layers[0].emb  [256, 16]  float32  4,096'
  assert weight.split() in [line.split() for line in lines]
  assert processes.Messages(exported.stderr + inspected.stderr + other.stderr) == []


def testOnTerminalOneLineIsUpdated(project, tmp_path):
  """The installed program, and one device too many: --num_devices=3 for two stages."""
  ours, theirs = pty.openpty()
  args = [*_ToyArgs(tmp_path, PART), '--num_devices=3']
  output = b''
  with processes.Started(
    'trainer', *args, stdout=theirs, stderr=subprocess.PIPE, cwd=project
  ) as process:
    os.close(theirs)
    deadline = time.monotonic() + processes.TIMEOUT
    while time.monotonic() < deadline:
      if not select.select([ours], [], [], 1.0)[0]:
        continue
      try:
        read = os.read(ours, 1 << 16)
      except OSError:  # On Linux this means that the other side was closed.
        break
      if not read:
        break
      output += read
    _, stderr = process.communicate(timeout=processes.TIMEOUT)
  assert process.returncode == 0, stderr
  assert processes.Messages(stderr) == []
  os.close(ours)
  text = output.decode()
  assert '3 logical CPU devices' in text and 'device:CPU:1' in text and 'device:CPU:2' not in text
  # Each step rewrites the line: return to its start, erase. No step has a separate line.
  steps = [int(match) for match in re.findall(rf'\x1b\[2Kstep (\d+)/{PART} ', text)]
  assert steps and steps[-1] == PART and len(set(steps)) >= PART - 1
  assert len(re.findall(r'step \d+/\d+ [^\x1b]*\n', text)) <= 2
  # The cursor is visible at the end.
  assert text.rfind('\x1b[?25h') > text.rfind('\x1b[?25l')
  assert text.index('\x1b[?25h') < text.index('step 1/')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
