# SPDX-License-Identifier: Apache-2.0
"""`BaseTask`: what is trained, that is layers, a loss, and how to train them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import sequential
from lingvo_gpipe.learning import early_stopping, learner
from lingvo_gpipe.pipeline import pipelining_layer

Metrics = dict[str, tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Signature:
  """A function that an export serves.

  Attributes:
    inputs: {name: tf.TensorSpec}; sizes of None are free.
    function: makes {name: tensor} of the weights theta and a NestedMap of such inputs.
  """

  inputs: Mapping[str, tf.TensorSpec]
  function: Callable[[nested_map.NestedMap, nested_map.NestedMap], Mapping[str, tf.Tensor]]


# The least value of numbers among the Params of a task.
_LEAST = {
  'train.max_steps': 0,
  'train.save_interval_steps': 0,
  'train.save_interval_seconds': 0,
  'train.save_max_to_keep': 1,
  'train.save_keep_checkpoint_every_n_hours': 0,
  'train.summary_interval_steps': 1,
  'train.max_seconds': 0,
  'train.histogram_interval_steps': 0,
  'train.eval_interval_steps': 0,
  'train.eval_interval_seconds': 0,
  'train.decode_interval_steps': 0,
  'train.decode_interval_seconds': 0,
  'train.max_nonfinite_steps': 0,
  'eval.samples_per_summary': 0,
  'eval.decoder_samples_per_summary': 0,
  'eval.max_seconds_without_trainer': 0,
}


def TrainParams() -> hyperparams.Params:
  """Params of training a task: `task.train`."""
  p = hyperparams.Params()
  p.Define('max_steps', 4_000_000, 'Training ends after this many steps.')
  p.Define(
    'max_seconds', 0.0, 'Training ends after so many seconds over all calls; 0: no limit of time.'
  )
  p.Define('save_interval_steps', 1000, 'Steps between checkpoints; 0: by time only.')
  p.Define('save_interval_seconds', 600.0, 'Seconds between checkpoints; 0: by steps only.')
  p.Define('save_async', True, 'Write checkpoints beside training, from a copy in host memory.')
  p.Define('save_max_to_keep', 5, 'How many of the last checkpoints are kept.')
  p.Define(
    'save_keep_checkpoint_every_n_hours', 0.0, 'Keep one for good each so many hours; 0: none.'
  )
  p.Define('summary_interval_steps', 100, 'Steps between summaries and printed lines.')
  p.Define(
    'histogram_interval_steps', 0, "Steps between histograms of each weight's gradient; 0: none."
  )
  p.Define('eval_datasets', [], 'Data sets to evaluate when training ends, such as Test.')
  p.Define(
    'eval_interval_steps', 1000, 'train_and_eval evaluates at multiples of this step; 0: by time.'
  )
  p.Define(
    'eval_interval_seconds', 0.0, 'train_and_eval evaluates each so many seconds; 0: by steps.'
  )
  p.Define('decode_datasets', [], 'Data sets that train_and_eval decodes.')
  p.Define(
    'decode_interval_steps', 0, 'train_and_eval decodes at multiples of this step; 0: by time.'
  )
  p.Define(
    'decode_interval_seconds', 0.0, 'train_and_eval decodes each so many seconds; 0: by steps.'
  )
  p.Define('early_stop', early_stopping.EarlyStopping.Params(), 'The metric to follow.')
  p.Define(
    'init_from_checkpoint_rules',
    {},
    'A new run takes weights from others: {logdir: ([(regex of names, name there)], [ignored])}.',
  )
  p.Define(
    'learner',
    learner.Learner.Params(),
    'Params of the learner, or a list of them, each with a name and variables of its own.',
  )
  p.Define(
    'max_nonfinite_steps',
    10,
    'Training stops with an error after so many steps in a row that are not finite; 0: never.',
  )
  p.Define('ema_decay', 0.0, 'Decay of the moving averages to evaluate, such as 0.999; 0: none.')
  p.Define(
    'shard_optimizer_slots',
    False,
    'With several replicas: each weight is updated by one of them, which alone has its slots '
    '(stage 1 of ZeRO).',
  )
  p.Define(
    'all_reduce',
    'auto',
    "How gradients are added over replicas: 'collective' (NCCL between GPUs), 'send', or 'auto'.",
  )
  p.Define('ema_decay_moving_vars', False, "Average layers' moving statistics, too.")
  return p


def EvalParams() -> hyperparams.Params:
  """Params of evaluating a task: `task.eval`."""
  p = hyperparams.Params()
  p.Define('samples_per_summary', 0, 'Examples of an evaluation; 0: the whole data set.')
  p.Define('decoder_samples_per_summary', 0, 'Examples to decode; 0: the whole data set.')
  p.Define(
    'max_seconds_without_trainer',
    1800.0,
    'An evaluator that follows a run gives up where nobody trained for so long; 0: never.',
  )
  return p


def FindReadFields(
  function: Callable[[nested_map.NestedMap], Any], batch_spec: nested_map.NestedMap
) -> list[str]:
  """The paths of the entries of a batch that a function of it reads or returns."""
  paths = [path for path, spec in shapes.Leaves(batch_spec) if spec is not None]
  traced = tf.function(function, autograph=False).get_concrete_function(batch_spec)
  # Variables that were captured come after the arguments.
  placeholders = traced.inputs[: len(paths)]
  return [path for path, tensor in zip(paths, placeholders, strict=True) if tensor.consumers()]


class BaseTask(base_layer.BaseLayer):
  """Base class of tasks.

  A subclass creates its layers and overrides `ComputeLoss`. If it creates a `PipeliningLayer`
  child called `stack`, that is trained as a pipeline: `PipelineInputs` feeds the first stage, and
  `ComputeLoss` runs inside the last one on each micro-batch. Else the whole task is one stage on
  one device, and `ComputePredictions` may do anything.
  """

  # What the weight of the loss counts, for people.
  loss_unit = 'examples'

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a task."""
    p = super().Params()
    p.Define('train', TrainParams(), 'How to train.')
    p.Define('eval', EvalParams(), 'How to evaluate.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    for name, least in _LEAST.items():
      if self.params.Get(name) < least:
        raise ValueError(
          f'{self.path}.{name} must be at least {least}, got {self.params.Get(name)}'
        )
    train = self.params.train
    if not 0 <= train.ema_decay < 1:
      raise ValueError(
        f'{self.path}.train.ema_decay must be in [0, 1), 0 for no averages, got {train.ema_decay}'
      )
    if train.ema_decay_moving_vars and not train.ema_decay:
      raise ValueError(f'{self.path}.train.ema_decay_moving_vars needs an ema_decay above 0')

  @property
  def pipeline(self) -> pipelining_layer.PipeliningLayer | None:
    """The pipelined child `stack`, or None."""
    stack = self.children.get('stack')
    return stack if isinstance(stack, pipelining_layer.PipeliningLayer) else None

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """The arguments of the first layer: nests of tensors [batch, ...]. Here: the whole batch."""
    return (input_batch,)

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """The part of the batch that `ComputeLoss` needs: it is sent to the last stage."""
    return input_batch

  def CheckBatch(self, input_batch: nested_map.NestedMap) -> None:
    """Raises ValueError for a batch that the layers cannot take; runs on the host before a step.

    What XLA does not check at run time belongs here: ids outside a table, for one.
    """

  def ComputePredictions(self, theta: nested_map.NestedMap, input_batch: Any) -> Any:
    """What the layers make of a batch; here, what the pipeline returns."""
    if self.pipeline is None:
      raise NotImplementedError(f'{type(self).__name__} has neither a pipeline nor predictions')
    return self.pipeline.FProp(theta.stack, *self.PipelineInputs(input_batch))

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: Any, input_batch: nested_map.NestedMap
  ) -> tuple[Metrics, dict[str, tf.Tensor]]:
    """Metrics of a (micro-)batch.

    Args:
      theta: the weights of a task without a pipeline. A pipelined task's weights belong to its
        layers: there it is empty.
      predictions: what the layers returned.
      input_batch: what `LossInputs` returned, or its micro-batch.

    Returns:
      {name: (value, weight)}, scalars, 'loss' among them: a mean and the weight it counts with
      against other batches (examples, tokens); and {name: tensor [batch, ...]} per example. A mean
      over nothing, as of a micro-batch of padding, may be NaN: where its weight is 0 it counts for
      nothing, and the predictions get no gradient.
    """
    raise NotImplementedError(f'{type(self).__name__} has no ComputeLoss')

  def LossWeight(self, input_batch: nested_map.NestedMap) -> tf.Tensor:
    """The weight of 'loss' that `ComputeLoss` will return, from what `LossInputs` returned.

    It is needed before the first forward, and `ComputeLoss` must return the same: the trainer
    compares the two. Here: the sum of `example_weights` if the batch has them, else its size.
    """
    weights = input_batch.get('example_weights')
    if weights is not None:
      return tf.reduce_sum(weights)
    return tf.cast(tf.shape(tf.nest.flatten(input_batch)[0])[0], tf.float32)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """`ComputePredictions` of a batch, so that a task can be a layer of one stage."""
    return self.ComputePredictions(theta, *args)

  def Report(self, metrics: dict[str, float], input_generator: Any) -> str:
    """What a person should read of an evaluation beside its metrics; '' for nothing."""
    del metrics, input_generator
    return ''

  def Decode(self, input_batch: nested_map.NestedMap, input_generator: Any) -> dict[str, Any]:
    """What the model makes of each example, beside what it was to make: texts, for the most part.

    The decoder job writes a line for each example; after training, that of the first one is shown.

    Args:
      input_batch: a batch of eager tensors, or one row of one, with `example_index`, int64 [batch]:
        the number of each row in the data set. What is drawn should depend on that, not on the row.
      input_generator: where it comes from: it may know the vocabulary, or the text as it was read.

    Returns:
      {name: a list or array with one entry for each row}; {} where a task decodes nothing. An entry
      is a text, a number, or a list or array of these. Names for a translation are source,
      hypothesis, reference, source_language, target_language and score.
    """
    del input_batch, input_generator
    return {}

  def DecodeFinalize(self, decoded: dict[str, list[Any]]) -> dict[str, float | str]:
    """Metrics of all that was decoded of a data set.

    Args:
      decoded: {name: the entries that `Decode` returned}, of every example but padded rows, in data
        order; there is at least one.

    Returns:
      {name: a number, or a text for the score file}.
    """
    del decoded
    return {}

  # ---- inference -------------------------------------------------------------------------------

  def InferenceSignatures(self, batch_spec: nested_map.NestedMap) -> dict[str, Signature]:
    """What an export of this task serves, by name.

    Here: `serving_default`, from the entries of the batch that `PipelineInputs` reads to
    `InferenceOutputs` of the predictions. Where the batch is nested, an entry `a.b` is `a_b`.

    Args:
      batch_spec: the spec of a batch, its dimension 0 free or, where layers need its size, fixed.
    """
    leaves = [(name, spec) for name, spec in shapes.Leaves(batch_spec) if spec is not None]
    reads = self._PlainPredictions if self.pipeline is None else self.PipelineInputs
    names = {
      path: re.sub(r'\W+', '_', path).strip('_') for path in FindReadFields(reads, batch_spec)
    }

    def Run(theta: nested_map.NestedMap, inputs: nested_map.NestedMap) -> dict[str, tf.Tensor]:
      found = [inputs.get(names.get(path)) for path, _ in shapes.Leaves(batch_spec)]
      batch = tf.nest.pack_sequence_as(batch_spec, found)
      return self.InferenceOutputs(self.PredictInOrder(theta, batch))

    specs = {names[path]: spec for path, spec in leaves if path in names}
    return {'serving_default': Signature(specs, Run)}

  def InferenceOutputs(self, predictions: Any) -> dict[str, tf.Tensor]:
    """What an export returns for predictions: {name: tensor}.

    Here `outputs`, or `outputs_0`, `outputs_1` ... where there are several.
    """
    found = [tensor for tensor in tf.nest.flatten(predictions) if tensor is not None]
    if len(found) == 1:
      return {'outputs': found[0]}
    return {f'outputs_{i}': tensor for i, tensor in enumerate(found)}

  def PredictInOrder(self, theta: nested_map.NestedMap, input_batch: Any) -> Any:
    """The predictions for a batch without a pipeline: layer after layer, wherever one is.

    The same as the pipeline's `Predict`, rounding aside, in evaluation mode; it names no device.
    """
    if self.pipeline is None:
      return self.ComputePredictions(theta, input_batch)
    inputs = self.PipelineInputs(input_batch)
    return sequential.FPropLayers(self.pipeline.layers, theta.stack.layers, *inputs)

  def _PlainPredictions(self, input_batch: nested_map.NestedMap) -> Any:
    return self.PredictInOrder(self.theta, input_batch)
