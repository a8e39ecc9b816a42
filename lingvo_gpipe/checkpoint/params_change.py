# SPDX-License-Identifier: Apache-2.0
"""Checks that a run may resume, or be evaluated, with Params that differ from its checkpoint's.

There are three kinds of differences:

* Harmless: duration, intervals and placement. They change no step except for rounding and random
  masks. For an evaluation, settings that affect only training are harmless, too, and its data set
  differs anyway.
* Differences that change training, such as the learning rate, the batch size, the data or dropout,
  or the model of an evaluation. They are an error unless the caller allows them.
* Differences in the names or shapes of weights, which the checkpoint itself rejects. Switching
  moving averages of weights on or off is such a difference and is rejected here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from absl import logging

from lingvo_gpipe.checkpoint import checkpoint_info
from lingvo_gpipe.core import hyperparams, literals, params_diff, params_text, params_tree

# Key of a checkpoint's metadata that holds the text of its Params. A separate file would not match
# the newest checkpoint for a moment, and after a kill for longer.
KEY = 'params'

# A single task, or one of several.
_TASK = r'(task|task_params\.\w+)'

_HARMLESS = re.compile(
  '|'.join(
    (
      r'name|model',  # The experiment's name and location.
      # Duration of training, checkpoints to keep, and reports.
      r'(task\.)?train\.(max|save|summary|histogram|eval|decode|init_from)_\w+',
      r'(task\.)?train\.(early_stop\..+|callbacks\b.*)',
      # Placement of optimizer slots, and the order in which replicas' gradients are added.
      r'(task\.)?train\.(shard_optimizer_slots|all_reduce)',
      # Evaluation and decoding.
      rf'{_TASK}\.(eval|sampling|beam_search)\..+',
      # The cut of the pipeline, its schedule and its compilation.
      rf'{_TASK}\.stack\.(num_stages|stages_per_device|splits|partition_by|memory_limit)',
      rf'{_TASK}\.stack\.(num_micro_batches|schedule|remat_policy|offload|vocabulary|xla)',
      # The end of the data, damaged records, and statistics of batches that only metrics use. Each
      # of several tasks has its own input.
      r'input\.(\w+\.)?(num_epochs|damaged_records|count_words)',
      # Preparation of batches, and the location of prepared data.
      r'input\.(\w+\.)?(name|num_prefetch|num_parallel_calls|cache_dir|data_dir)',
      r'input\.(\w+\.)?read_on_workers',
    )
  )
)
_HARMLESS_TO_EVALUATION = re.compile(
  '|'.join(
    (
      # How weights are trained. Averages are read if the checkpoint has them.
      rf'({_TASK}\.)?train\..+',
      rf'{_TASK}\.(.+\.)?(\w+_)?(dropout_prob|keep_prob|random_seed|params_init)',
      # The choice of a step's task, and of the task whose metric is followed.
      r'task_(name|probs|schedule)\b.*|random_seed',
    )
  )
)
# Params that change no training, but results of evaluation or decoding.
_OF_RESULTS = re.compile(
  rf'{_TASK}\.(eval\.(decoder_)?samples_per_summary|(sampling|beam_search)\..+)'
)
# Params that decide which averages a checkpoint holds, and the texts of values that mean none.
_AVERAGES = re.compile(rf'{_TASK}\.train\.ema_decay(_moving_vars)?')
_OFF = (None, '0', '0.0', 'False')
_MAX_LISTED = 8


def IsHarmless(
  change: params_diff.Change, old: str, params: hyperparams.InstantiableParams
) -> bool:
  """Whether a run may resume with a change of its Params without explicit permission.

  A new param with its default value is harmless: an older version of the program, which did not
  have it, started the run.

  Args:
    change: a change from `params_diff.FindChanges(old, params)`.
    old: the text of the run's Params.
    params: the Params to resume with.
  """
  if _HARMLESS.fullmatch(change.path):
    return True
  if change.old is not None:
    return False
  prefix = ''
  for step in params_text.ParseSteps(change.path):
    prefix += step.text
    if not re.search(rf'^{re.escape(prefix)}(?![\w])', old, re.MULTILINE):
      # The first part of the path that the run's Params do not have.
      return step.kind == 'param' and params_tree.Equal(
        params.Get(prefix), params.GetDefault(prefix)
      )
  return False


def Check(
  info: checkpoint_info.CheckpointInfo, params: hyperparams.InstantiableParams, allow: bool
) -> None:
  """Checks that a run may resume from a checkpoint with these Params, and logs the differences.

  Args:
    info: the checkpoint. If it does not record its Params, all Params are accepted.
    params: the model's Params.
    allow: whether to accept differences that are not harmless.

  Raises:
    ValueError: the Params differ (the message lists the differences on one line), or the
      checkpoint's Params cannot be read.
  """
  changes = _Changes(info, params, allow)
  for path, was, now in changes:
    if _AVERAGES.fullmatch(path) and (was in _OFF) != (now in _OFF):
      averages = 'no averages' if was in _OFF else 'averages'
      raise ValueError(
        f'{path} cannot be switched on or off within a run: it was {was or "unset"} and is now '
        f'{now or "unset"}, but the checkpoint {info.path!r} holds {averages} for it. Restore the '
        'old value, or use another --logdir and start a new run with the weights of this one by '
        'train.init_from_checkpoint_rules'
      )
  grave = [c for c in changes if not IsHarmless(c, info.metadata[KEY], params)]
  if grave and not allow:
    hint = (
      'Use another --logdir to start a new run. To resume this run from its last checkpoint '
      'anyway, pass --allow_params_change'
    )
    raise _OtherParamsError(info, grave, hint)
  _Log('resuming with other Params', changes, grave)
  _WarnOfUnwritten(params, changes, _HARMLESS)


def CheckEvaluated(
  info: checkpoint_info.CheckpointInfo,
  params: hyperparams.InstantiableParams,
  allow: bool,
  checked: str | None = None,
) -> str | None:
  """Checks that these Params describe the model of a checkpoint, and logs the differences.

  Args:
    info: the checkpoint. If it does not record its Params, all Params are accepted.
    params: the model's Params, with the input of any data set.
    allow: whether to accept differences that are not harmless.
    checked: result of the last call. If the checkpoint has the same Params, nothing is compared.

  Returns:
    The text of the checkpoint's Params, or None if it does not record them.

  Raises:
    ValueError: the Params differ (the message lists the differences on one line), or the
      checkpoint's Params cannot be read.
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
      'Use the --model and the overrides that it was trained with. To use its weights with these '
      'Params anyway, pass --allow_params_change'
    )
    raise _OtherParamsError(info, grave, hint)
  _Log('the run was trained with other Params', changes, grave)
  _WarnOfUnwritten(params, changes, re.compile(r'input\b.*'), _HARMLESS, _HARMLESS_TO_EVALUATION)
  return str(old)


def CheckEvaluatedByTrainer(
  dataset: str, params: hyperparams.Params, trained: hyperparams.Params
) -> None:
  """Checks that a trainer, which evaluates with its own task, gets the results of an evaluator.

  Args:
    dataset: the name of a data set.
    params: the model's Params for this data set.
    trained: the model's Params for training.

  Raises:
    ValueError: Params of a task differ that may change the results of evaluation or decoding.
  """
  changes = [
    change
    for change in params_diff.FindChanges(trained, params)
    if not re.match(r'input\b', change.path)
    and (
      _OF_RESULTS.fullmatch(change.path)
      or not (_HARMLESS.fullmatch(change.path) or _HARMLESS_TO_EVALUATION.fullmatch(change.path))
    )
  ]
  if changes:
    raise ValueError(
      f'a trainer evaluates {dataset} with the task that it trains, but the task for {dataset} '
      f'differs (- only trained, + only for {dataset}, ~ changed): {_ListChanges(changes)}. Remove '
      f'{dataset} from train.eval_datasets and train.decode_datasets, and run an evaluator with '
      f'--split={dataset}; or leave out Task_{dataset}()'
    )


def _Changes(
  info: checkpoint_info.CheckpointInfo, params: hyperparams.InstantiableParams, allow: bool
) -> list[params_diff.Change]:
  """Returns the differences; [] if the checkpoint does not record its Params."""
  old = info.metadata.get(KEY)
  if not isinstance(old, str):
    return []
  try:
    return params_diff.FindChanges(old, params)
  except ValueError as e:
    if not allow:
      raise ValueError(
        f'the Params of {info.path!r} cannot be read to compare them: {e}. To continue anyway, '
        'pass --allow_params_change'
      ) from e
    logging.warning('the Params of %s cannot be read: %s', info.path, e)
    return []


def _OtherParamsError(
  info: checkpoint_info.CheckpointInfo, changes: Sequence[params_diff.Change], hint: str
) -> ValueError:
  return ValueError(
    f'{info.path!r} was trained with other Params (- only its, + only these, ~ changed): '
    f'{_ListChanges(changes)}. {hint}'
  )


def _ListChanges(changes: Sequence[params_diff.Change]) -> str:
  more = f', and {len(changes) - _MAX_LISTED} more' if len(changes) > _MAX_LISTED else ''
  return f'{"; ".join(map(str, changes[:_MAX_LISTED]))}{more}'


def _Log(
  message: str, changes: Sequence[params_diff.Change], grave: Collection[params_diff.Change]
) -> None:
  for change in changes:
    log = logging.warning if change in grave else logging.info
    log('%s: %s', message, change)


def _WarnOfUnwritten(
  params: hyperparams.InstantiableParams,
  changes: Collection[params_diff.Change],
  *harmless: re.Pattern[str],
) -> None:
  """Logs the params that seem equal only because text does not tell their values apart."""
  changed = {change.path for change in changes}
  for path, value in params_tree.Leaves('', params):
    classes = literals.UnwrittenClasses(value)
    if classes and path not in changed and not any(p.fullmatch(path) for p in harmless):
      logging.warning(
        '%s cannot be compared with its value in the run, because it holds a %s: Params record '
        'only its class. Check that it is unchanged; a dataclass would be compared',
        path,
        ', a '.join(sorted(set(classes))),
      )
