# SPDX-License-Identifier: Apache-2.0
"""Whether a run may go on with other Params than those it has in its log directory.

Three kinds of differences:

* Harmless: how long, how often, where. They change no step, but for rounding and random masks.
* What changes the training itself, such as the learning rate, the batch size, the data, dropout:
  refused, unless the caller allows it.
* What changes the names or shapes of weights: the checkpoint refuses it in any case.
"""

from __future__ import annotations

import os
import re

import tensorflow as tf
from absl import logging

from lingvo_gpipe import hyperparams, params_diff, params_text, params_tree

# Where a run keeps its Params.
FILE_NAME = 'params.txt'

_HARMLESS = re.compile(
  '|'.join(
    (
      r'name|model',  # The experiment's place in its file, and what it is called.
      # How long to train, what to keep, and what to report.
      r'task\.train\.(max|save|summary|histogram|eval|decode|init_from)_\w+',
      r'task\.train\.early_stop\..+',
      # Evaluation and decoding.
      r'task\.(eval|sampling|beam_search)\..+',
      # The cut of the pipeline, its order and its compilation.
      r'task\.stack\.(num_stages|stages_per_device|splits|partition_by|memory_limit)',
      r'task\.stack\.(num_micro_batches|schedule|remat_policy|xla)',
      # How batches are prepared, and where prepared data lie.
      r'input\.(name|num_prefetch|num_parallel_calls|cache_dir|data_dir)',
    )
  )
)
_MAX_SHOWN = 8


def IsHarmless(
  change: params_diff.Change, old: str, params: hyperparams.InstantiableParams
) -> bool:
  """Whether a run may go on with a change of its Params without being asked.

  A param that is new and has its default is harmless: the program that began the run did not know
  it.

  Args:
    change: from `params_diff.Changes(old, params)`.
    old: the text of the Params that the run has.
    params: those it is to go on with.
  """
  if _HARMLESS.fullmatch(change.path):
    return True
  if change.old is not None:
    return False
  prefix = ''
  for step in params_text.ParsePath(change.path):
    prefix += step.text
    if not re.search(rf'^{re.escape(prefix)}(?![\w])', old, re.MULTILINE):
      # The first step into what the run does not have.
      return step.kind == 'param' and params_tree.Equal(
        params.Get(prefix), params.GetDefault(prefix)
      )
  return False


def Check(logdir: str, params: hyperparams.InstantiableParams, allow: bool) -> None:
  """Checks that the run in a log directory may go on with these Params; logs what differs.

  Args:
    logdir: the log directory. Where it has no params.txt, anything may.
    params: the model's Params.
    allow: let through what is not harmless.

  Raises:
    ValueError: the differences, on one line; or params.txt cannot be read.
  """
  path = os.path.join(logdir, FILE_NAME)
  try:
    with tf.io.gfile.GFile(path) as f:
      old = f.read()
    changes = params_diff.Changes(old, params)
  except tf.errors.NotFoundError:
    return
  except (tf.errors.OpError, ValueError) as e:
    raise ValueError(
      f'{path!r} cannot be read, so this run cannot be compared with these Params: {e}. To go on '
      'without it, remove it.'
    ) from e
  grave = [change for change in changes if not IsHarmless(change, old, params)]
  if grave and not allow:
    more = f', and {len(grave) - _MAX_SHOWN} more' if len(grave) > _MAX_SHOWN else ''
    raise ValueError(
      f'the run in {logdir!r} was trained with other Params (- its own, + these, ~ both): '
      f'{"; ".join(map(str, grave[:_MAX_SHOWN]))}{more}. Give another --logdir to begin a run; to '
      'go on with this one from its last checkpoint all the same, give --allow_params_change'
    )
  for change in changes:
    report = logging.warning if change in grave else logging.info
    report('this run goes on with other Params: %s', change)
