# SPDX-License-Identifier: Apache-2.0
"""The evaluator as a process: one checkpoint, or each new checkpoint until training ends."""

import json
import os
import re
import signal
import statistics
import sys

import pytest

from lingvo_gpipe.experiment import registry
from tests import naming, processes

END = 20


def _Args(logdir, *more):
  override = f'--model_params_override={processes.TINY}'
  return [f'--model={processes.MODEL}', f'--logdir={logdir}', override, *more]


# A trainer whose standard output accepts ASCII only.
_ASCII = """
import sys
from lingvo_gpipe import trainer
sys.stdout.reconfigure(encoding='ascii')
trainer.Run()
"""


@pytest.fixture(scope='module')
def followed(forks, tmp_path_factory):
  """An evaluator that follows a trainer: (log directory, its output, the trainer's output).

  The trainer's standard output accepts ASCII only, but its sample has other characters.
  """
  logdir = tmp_path_factory.mktemp('followed')
  program = tmp_path_factory.mktemp('program') / 'ascii.py'
  program.write_text(_ASCII)
  more = 'task.train.save_interval_steps:10'
  # The evaluator starts first, and waits for a checkpoint.
  with processes.Started('evaluator', *_Args(logdir, f'--max_steps={END}')) as evaluator:
    args = processes.TrainArgs(logdir, END, more=more, evaluate=['Test'])
    trained = processes.Succeeded(
      forks.Run(str(program), *args, more_environment=processes.OPTIMIZED)
    )
    output = evaluator.communicate(timeout=processes.TIMEOUT)[0]
    assert evaluator.returncode == 0
  return logdir, output, trained.stdout


def testEvaluatesNewCheckpointsUntilTrainingEnds(followed):
  logdir, output, trained = followed
  steps = [int(step) for step in re.findall(r'^Test at step (\d+): loss', output, re.MULTILINE)]
  # It may skip checkpoints, but never goes back, and always evaluates the last one.
  assert '?' in trained.partition('--- continuation')[2]
  assert steps[-1] == END and steps == sorted(set(steps)) and set(steps) <= {10, END}
  # The trainer's own evaluation has equal results.
  line = re.search(rf'^Test at step {END}: [\d.]+ bits per byte;.*$', trained, re.MULTILINE)[0]
  assert line in output.splitlines()
  assert [step for step, _ in processes.Scalars(logdir / 'eval_test')['loss']].count(END) == 2
  # Its decoded example is equal too.
  samples = processes.Tensorboard(logdir / 'eval_test')['sample/continuation']
  assert [step for step, _ in samples].count(END) == 2
  assert len({str(text) for step, text in samples if step == END}) == 1


def testOnceEvaluatesTheLastCheckpointOnASplit(followed, forks):
  """It uses one device, the checkpoint is of two; the case of the split does not matter."""
  logdir, _, _ = followed
  before = processes.Tensors(logdir, END)
  args = _Args(logdir, '--once', '--split=dev', '--num_devices=1')
  args[0] = '--model=lm.stdlib.ByteTransformerGPipe1'
  done = processes.Succeeded(forks.Run('evaluator', *args))
  match = re.search(
    rf'^[dD]ev at step {END}: loss [\d.]+  .*bits_per_byte ([\d.]+)$', done.stdout, re.MULTILINE
  )
  assert match
  assert naming.AnyLineNames(done.stdout.lower(), 'dev', f'step {END}', 'order-0')
  assert processes.Messages(done.stderr) == []
  score = (logdir / 'eval_dev' / f'score-{END:08d}.txt').read_text()
  scores = dict(line.split(': ') for line in score.splitlines())
  assert abs(float(scores['bits_per_byte']) - float(match[1])) < 1e-3
  ((step, loss),) = processes.Scalars(logdir / 'eval_dev')['loss']
  assert step == END and abs(loss - float(scores['loss'])) < 1e-5
  assert '\n--- continuation\n' in done.stdout
  # The evaluator does not write to the directory of the trainer.
  processes.AssertSameTensors(processes.Tensors(logdir, END), before)


def testDecodeWritesHypothesesAndReferences(followed, forks):
  logdir, _, _ = followed
  more = '--model_params_override=task.eval.decoder_samples_per_summary:6'
  args = _Args(logdir, '--job=decode', f'--checkpoint={END}', '--split=Dev', more)
  done = processes.Succeeded(forks.Run('evaluator', *args))
  path = logdir / 'decode_dev' / f'decode-{END:08d}.jsonl'
  names = (f'step {END}', '6 examples', path, 'matched_prefix_length')
  assert naming.AnyLineNames(done.stdout, 'Dev', *names)
  lines = [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]
  assert [sorted(line) for line in lines] == [['continuation', 'prompt', 'reference']] * 6
  # Windows of 16 bytes in text order, half of each a prompt; the first byte is context.
  params = registry.GetParams(processes.MODEL, 'Dev').input.Set(max_bytes=5000)
  text = params.Instantiate().Text()[: 6 * 16].tobytes().decode('ascii')
  assert ''.join(line['prompt'][1:] + line['reference'] for line in lines) == text
  assert all(line['continuation'] for line in lines)
  score = (logdir / 'decode_dev' / f'score-{END:08d}.txt').read_text()
  scores = {name: float(value) for name, value in (s.split(': ') for s in score.splitlines())}
  assert scores['num_examples'] == 6
  pairs = [(line['continuation'], line['reference']) for line in lines]
  mean = statistics.fmean(len(os.path.commonprefix(pair)) for pair in pairs)
  assert scores['matched_prefix_length'] == pytest.approx(mean)
  ((step, value),) = processes.Scalars(logdir / 'decode_dev')['matched_prefix_length']
  assert step == END and value == pytest.approx(mean)


def testADecoderRunsUntilTrainingEnds(followed, forks):
  """Without --once it runs until it finds the end marker of the trainer, which exists already."""
  logdir, _, _ = followed
  more = '--model_params_override=task.eval.decoder_samples_per_summary:2'
  output = processes.Succeeded(forks.Run('evaluator', *_Args(logdir, '--job=decode', more))).stdout
  path = logdir / 'decode_test' / f'decode-{END:08d}.jsonl'
  assert naming.AnyLineNames(output, 'Test', f'step {END}', '2 examples', path)
  assert len(path.read_text(encoding='utf-8').splitlines()) == 2


def testASignalEndsTheWait(followed, forks):
  logdir, _, _ = followed
  (logdir / 'report.json').unlink()  # Without the marker, training may still be running.
  pid = forks.Start('evaluator', *_Args(logdir, '--max_steps=1000'))
  forks.Await('order-0')
  os.kill(pid, signal.SIGTERM)
  done = forks.Wait()
  assert done.returncode == 128 + signal.SIGTERM, done.stderr


def testACheckpointOfAnotherModelIsAOneLineError(followed, forks):
  logdir, _, _ = followed
  args = _Args(logdir, '--once', '--model_params_override=task.model_dim:32')
  done = forks.Run('evaluator', *args)
  assert done.returncode == 2 and not done.stdout
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, 'Params', '~ task.model_dim : 16 -> 32')
  done = forks.Run('evaluator', *args, '--allow_params_change')
  assert done.returncode == 2
  warning, line = processes.Messages(done.stderr)
  assert '~ task.model_dim : 16 -> 32' in warning
  assert naming.Names(line, 'shape') and 'lm.stack.layers[' in line


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
