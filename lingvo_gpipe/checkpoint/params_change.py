# SPDX-License-Identifier: Apache-2.0
"""Whether a run may go on, or be evaluated, with other Params than those of its checkpoint.

Three kinds of differences:

* Harmless: how long, how often, where. They change no step, but for rounding and random masks. To
  an evaluation all that only training feels is harmless, too, and its data set is another anyway.
* What changes the training itself, such as the learning rate, the batch size, the data, dropout,
  or, of an evaluation, the model: refused, unless the caller allows it.
* What changes the names or shapes of weights: the checkpoint refuses it in any case. Whether
  weights are averaged is such a change, and refused here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from absl import logging

from lingvo_gpipe.checkpoint import checkpoint_info
from lingvo_gpipe.core import hyperparams, params_diff, params_text, params_tree

# Under what a checkpoint's metadata have the text of the Params with which it was trained. A file
# beside the checkpoints would belong to another one for a moment, and after a kill for longer.
KEY = 'params'

# A task, alone or one of several.
_TASK = r'(task|task_params\.\w+)'

_HARMLESS = re.compile(
  '|'.join(
    (
      r'name|model',  # The experiment's place in its file, and what it is called.
      # How long to train, what to keep, and what to report.
      r'(task\.)?train\.(max|save|summary|histogram|eval|decode|init_from)_\w+',
      r'(task\.)?train\.(early_stop\..+|callbacks\b.*)',
      # Where slots lie, and in which order replicas' gradients are added.
      r'(task\.)?train\.(shard_optimizer_slots|all_reduce)',
      # Evaluation and decoding.
      rf'{_TASK}\.(eval|sampling|beam_search)\..+',
      # The cut of the pipeline, its order and its compilation.
      rf'{_TASK}\.stack\.(num_stages|stages_per_device|splits|partition_by|memory_limit)',
      rf'{_TASK}\.stack\.(num_micro_batches|schedule|remat_policy|xla)',
      # When the data end, what to do with damaged ones, and what batches tell for metrics alone; of
      # several tasks, each has its input.
      r'input\.(\w+\.)?(num_epochs|damaged_records|count_words)',
      # How batches are prepared, and where prepared data lie.
      r'input\.(\w+\.)?(name|num_prefetch|num_parallel_calls|cache_dir|data_dir)',
      r'input\.(\w+\.)?read_on_workers',
    )
  )
)
_HARMLESS_TO_EVALUATION = re.compile(
  '|'.join(
    (
      # How the weights came about. Averages are read where a checkpoint has them.
      rf'({_TASK}\.)?train\..+',
      rf'{_TASK}\.(.+\.)?(\w+_)?(dropout_prob|keep_prob|random_seed|params_init)',
      # Which of several tasks a step trains, and which of them is looked at.
      r'task_(name|probs|schedule)\b.*|random_seed',
    )
  )
)
# Whether checkpoints have averages, and of what; and the texts of values that say no.
_AVERAGES = re.compile(rf'{_TASK}\.train\.ema_decay(_moving_vars)?')
_NO = (None, '0', '0.0', 'False')
_MAX_SHOWN = 8


def IsHarmless(
  change: params_diff.Change, old: str, params: hyperparams.InstantiableParams
) -> bool:
  """Whether a run may go on with a change of its Params without being asked.

  A param that is new and has its default is harmless: the program that began the run did not know
  it.

  Args:
    change: from `params_diff.FindChanges(old, params)`.
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


def Check(
  info: checkpoint_info.CheckpointInfo, params: hyperparams.InstantiableParams, allow: bool
) -> None:
  """Checks that a run may go on from a checkpoint with these Params; logs what differs.

  Args:
    info: the checkpoint. Where it does not tell its Params, anything may.
    params: the model's Params.
    allow: let through what is not harmless.

  Raises:
    ValueError: the differences, on one line; or the checkpoint's Params cannot be read.
  """
  changes = _Changes(info, params, allow)
  for path, was, now in changes:
    if _AVERAGES.fullmatch(path) and (was in _NO) != (now in _NO):
      raise ValueError(
        f'the run of {info.path!r} can neither begin nor end to average: {path} was '
        f'{was or "not set"} and is {now or "not set"}, and its checkpoints are to have the '
        'averages that they had. Set it as it was; or give another --logdir, to begin a run that '
        'takes over the weights of this one by train.init_from_checkpoint_rules'
      )
  grave = [c for c in changes if not IsHarmless(c, info.metadata[KEY], params)]
  if grave and not allow:
    hint = (
      'Give another --logdir to begin a run; to go on with this one from its last checkpoint all '
      'the same, give --allow_params_change'
    )
    raise _Refused(info, grave, hint)
  _Log('this run goes on with other Params', changes, grave)


def CheckEvaluated(
  info: checkpoint_info.CheckpointInfo,
  params: hyperparams.InstantiableParams,
  allow: bool,
  checked: str | None = None,
) -> str | None:
  """Checks that these Params mean the model of a checkpoint; logs what differs.

  Args:
    info: the checkpoint. Where it does not tell its Params, anything may.
    params: the model's Params, with the input of any data set.
    allow: let through what is not harmless.
    checked: what the last call returned; nothing is done where the Params are those yet.

  Returns:
    The text of the checkpoint's Params; None where there is none.

  Raises:
    ValueError: as `Check`.
  """
  old = info.metadata.get(KEY)
  if old is None or old == checked:
    return old
  changes = [c for c in _Changes(info, params, allow) if not re.match(r'input\b', c.path)]
  grave = [
    change
    for change in changes
    if not (_HARMLESS_TO_EVALUATION.fullmatch(change.path) or IsHarmless(change, old, params))
  ]
  if grave and not allow:
    hint = (
      'Give the --model and the overrides with which it was trained; to take its weights with '
      'these all the same, give --allow_params_change'
    )
    raise _Refused(info, grave, hint)
  _Log('the run was trained with other Params', changes, grave)
  return str(old)


def _Changes(
  info: checkpoint_info.CheckpointInfo, params: hyperparams.InstantiableParams, allow: bool
) -> list[params_diff.Change]:
  """What differs; [] where the checkpoint does not tell its Params."""
  old = info.metadata.get(KEY)
  if not isinstance(old, str):
    return []
  try:
    return params_diff.FindChanges(old, params)
  except ValueError as e:
    if not allow:
      raise ValueError(
        f'the Params of {info.path!r} cannot be read, nor compared with these: {e}. To go on all '
        'the same, give --allow_params_change'
      ) from e
    logging.warning('the Params of %s cannot be read: %s', info.path, e)
    return []


def _Refused(
  info: checkpoint_info.CheckpointInfo, changes: Sequence[params_diff.Change], hint: str
) -> ValueError:
  more = f', and {len(changes) - _MAX_SHOWN} more' if len(changes) > _MAX_SHOWN else ''
  return ValueError(
    f'{info.path!r} was trained with other Params (- its own, + these, ~ both): '
    f'{"; ".join(map(str, changes[:_MAX_SHOWN]))}{more}. {hint}'
  )


def _Log(
  what: str, changes: Sequence[params_diff.Change], grave: Collection[params_diff.Change]
) -> None:
  for change in changes:
    report = logging.warning if change in grave else logging.info
    report('%s: %s', what, change)
