# SPDX-License-Identifier: Apache-2.0
"""Lingvo's command lines: taken where they mean the same, else refused with what to use."""

import sys

import pytest

from lingvo_gpipe.cli import lingvo_flags

_DEFINED = {'model', 'logdir', 'mode', 'platform', 'max_steps'}


def testANewcomersCommandIsTaken():
  """The one of Lingvo's own introduction."""
  args = ['--model=lm.X', '--mode=sync', '--run_locally=cpu', '--logdir=/tmp/x']
  expected = ['--model=lm.X', '--mode=train', '--platform=cpu', '--logdir=/tmp/x']
  assert lingvo_flags.Translate(args, _DEFINED) == expected
  apart = ['--model=lm.X', '--mode', 'sync', '-run_locally', 'gpu']
  expected = ['--model=lm.X', '--mode=train', '--platform=gpu']
  assert lingvo_flags.Translate(apart, _DEFINED) == expected
  # A program without --mode is not told of one.
  assert lingvo_flags.Translate(args, _DEFINED - {'mode'}) == [args[0], '--platform=cpu', args[-1]]


@pytest.mark.parametrize(
  'args',
  [
    [],
    ['--mode=inspect_params', '--model', 'lm.X', '--max_steps=3', '--nostack_trace'],
    ['--mode=diff_params', 'a', 'b'],
    ['--mode'],
    ['--', '--worker_gpus=3', '--mode=sync'],
    ['--unknown=1', '-', '', '--=', '--x y'],
    # Where a program has such a flag, its values are its own.
    ['--job=train', '--job=train_and_eval', '--job=eval', '--job=decode'],
  ],
)
def testOthersStayAsTheyAre(args):
  assert lingvo_flags.Translate(args, _DEFINED) == args


def testAFlagThatAProgramDefinesIsItsOwn():
  for arg in ('--task=3', '--add_summary', '--run_locally=x'):
    name = arg.strip('-').partition('=')[0]
    assert lingvo_flags.Translate([arg], _DEFINED | {name}) == [arg]
    with pytest.raises(ValueError, match="Lingvo's"):
      lingvo_flags.Translate([arg], _DEFINED)


@pytest.mark.parametrize(
  'arg, hint',
  [
    ('--mode=async', '--mode=train'),
    ('--mode=write_inference_graph', '--mode=export'),
    ('--mode=inspect_decoder', 'evaluator --split'),
    ('--mode=shell', 'registry.GetParams'),
    ('--run_locally=all', '--platform'),
    ('--job=controller,trainer_client', 'one process'),
    ('--job=executor_tpu', 'one process'),
    ('--job=evaler_test', 'evaluator --split=Test'),
    ('--job=evaler_once_test@205', '--once'),
    ('--job=decoder_test', 'evaluator --job=decode'),
    ('--job=controller,trainer_client,evaler_test,decoder_test', 'evaluator --job=decode'),
    ('--job=evaler_test,evaler_dev', 'evaluator --split=Test'),
    ('--worker_gpus=8', 'num_stages'),
    ('--worker_split_size=4', 'num_stages'),
    ('--ps_replicas=1', 'num_stages'),
    ('--ps_job=/job:ps', 'num_stages'),
    ('--controller_gpus=0', 'num_stages'),
    ('--cluster_spec=job=h1:1', '--cluster=hosts.json names workers'),
    ('--tf_master=grpc://x', '--cluster=hosts.json names workers'),
    ('--executor_datasets_to_eval=x', 'one process'),
    ('--saver_max_to_keep=3', r'task\.train\.save_max_to_keep'),
    ('--enable_check_numerics', '--check_numerics'),
    ('--noenable_check_numerics', '--check_numerics'),
    ('--inspect_model_topn=3', 'inspect_model'),
    ('--tpu', '--platform=tpu'),
    ('--use_eager', 'TensorFlow 2'),
  ],
)
def testWhatHasNoLikeIsRefusedWithAHint(arg, hint):
  with pytest.raises(ValueError, match=hint) as e:
    lingvo_flags.Translate(['--model=lm.X', arg], _DEFINED)
  assert '\n' not in str(e.value) and str(e.value).startswith(arg.partition('=')[0])


def testHintsNameFlagsThatExist():
  """Of the programs; what they define is in their --help, which other tests read."""
  for *_, hint in (*lingvo_flags._VALUE_HINTS, *lingvo_flags._NAME_HINTS):
    with_own = [word.strip(':;,').partition('=')[0] for word in hint.split() if word[:2] == '--']
    assert set(with_own) <= {
      '--mode', '--model', '--platform', '--split', '--once', '--job', '--check_numerics',
      '--model_params_override', '--stack_trace', '--checkpoint', '--cluster',
    }  # fmt: skip


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
