# SPDX-License-Identifier: Apache-2.0
"""`BaseTask`: layers, a loss, and the Params of training and evaluation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import sequential
from lingvo_gpipe.learning import early_stopping, learner
from lingvo_gpipe.pipeline import pipelining_layer, replicas

Metrics = dict[str, tuple[tf.Tensor, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Signature:
  """A function that an exported model serves.

  Attributes:
    inputs: {name: tf.TensorSpec}; a dimension of None accepts any size.
    function: computes {name: tensor} from the weights theta and a NestedMap of the inputs.
  """

  inputs: Mapping[str, tf.TensorSpec]
  function: Callable[[nested_map.NestedMap, nested_map.NestedMap], Mapping[str, tf.Tensor]]


def TrainParams() -> hyperparams.Params:
  """Defines the Params of training a task: `task.train`."""
  p = hyperparams.Params()
  p.Define('max_steps', 4_000_000, 'Number of steps after which training ends.', domain.STEPS)
  p.Define(
    'max_seconds',
    0.0,
    'Seconds, summed over restarts, after which training ends; 0: no limit.',
    domain.NOT_NEGATIVE,
  )
  p.Define(
    'save_interval_steps',
    1000,
    'Number of steps between checkpoints; 0: by time only.',
    domain.STEPS,
  )
  p.Define(
    'save_interval_seconds',
    600.0,
    'Seconds between checkpoints; 0: by steps only.',
    domain.NOT_NEGATIVE,
  )
  p.Define('save_async', True, 'Write checkpoints during training, from a copy in host memory.')
  p.Define('save_max_to_keep', 5, 'Number of recent checkpoints to keep.', domain.SIZE)
  p.Define(
    'save_keep_checkpoint_every_n_hours',
    0.0,
    'Interval in hours at which one checkpoint is kept permanently; 0: none is.',
    domain.NOT_NEGATIVE,
  )
  p.Define(
    'summary_interval_steps',
    100,
    'Number of steps between summaries and printed lines.',
    domain.Int(1),
  )
  p.Define(
    'histogram_interval_steps',
    0,
    "Number of steps between histograms of each weight's gradient; 0: no histograms.",
    domain.STEPS,
  )
  p.Define(
    'eval_datasets',
    [],
    'Data sets to evaluate when training ends, for example Test.',
    domain.STRINGS,
  )
  p.Define(
    'eval_interval_steps',
    1000,
    'Number of steps between evaluations by --job=train_and_eval; 0: by time only.',
    domain.STEPS,
  )
  p.Define(
    'eval_interval_seconds',
    0.0,
    'Number of seconds between evaluations by --job=train_and_eval; 0: by steps only.',
    domain.NOT_NEGATIVE,
  )
  p.Define('decode_datasets', [], 'Data sets that --job=train_and_eval decodes.', domain.STRINGS)
  p.Define(
    'decode_interval_steps',
    0,
    'Number of steps between decodings by --job=train_and_eval; 0: by time only.',
    domain.STEPS,
  )
  p.Define(
    'decode_interval_seconds',
    0.0,
    'Number of seconds between decodings by --job=train_and_eval; 0: by steps only.',
    domain.NOT_NEGATIVE,
  )
  p.Define(
    'callbacks',
    [],
    'Params of callbacks that run between steps (`callback.Callback`).',
    domain.ListOf(domain.PARAMS),
  )
  p.Define('early_stop', early_stopping.EarlyStopping.Params(), 'Params of early stopping.')
  p.Define(
    'init_from_checkpoint_rules',
    {},
    'Checkpoints that initialise the weights of a new run: '
    '{logdir: ([(regex of weight names, name in the checkpoint)], [regex of names to ignore])}.',
    domain.DictOf(
      domain.STR,
      domain.PairOf(
        domain.ListOf(domain.PairOf(domain.REGEX, domain.STR)), domain.ListOf(domain.REGEX)
      ),
    ),
  )
  p.Define(
    'learner',
    learner.Learner.Params(),
    'Params of the learner, or a list of Params if groups of weights have separate learners.',
    domain.ParamsOf(learner.Learner)
    | domain.ListOf(domain.ParamsOf(learner.Learner), not_empty=True),
  )
  p.Define(
    'max_nonfinite_steps',
    10,
    'Number of consecutive non-finite steps after which training fails; 0: it never does.',
    domain.COUNT,
  )
  p.Define(
    'ema_decay',
    0.0,
    'Decay of the moving averages of the weights, which are evaluated in their place, for example '
    '0.999; 0: no averages.',
    domain.PROBABILITY,
  )
  p.Define(
    'shard_optimizer_slots',
    False,
    'Whether, with several replicas, each weight is updated by only one of them, which alone holds '
    'its optimizer slots (stage 1 of ZeRO).',
  )
  p.Define(
    'all_reduce',
    'auto',
    "Method to sum gradients over replicas: 'collective' (NCCL between GPUs), 'send' or 'auto'.",
    domain.OneOf(*replicas.ALL_REDUCE_OPTIONS),
  )
  p.Define('ema_decay_moving_vars', False, "Whether to average the layers' moving statistics, too.")
  return p


def EvalParams() -> hyperparams.Params:
  """Defines the Params of evaluating a task: `task.eval`."""
  p = hyperparams.Params()
  p.Define(
    'samples_per_summary', 0, 'Number of examples to evaluate; 0: the whole data set.', domain.COUNT
  )
  p.Define(
    'decoder_samples_per_summary', 0, 'Number of examples to decode; 0: all of them.', domain.COUNT
  )
  p.Define(
    'max_seconds_without_trainer',
    1800.0,
    'Number of seconds without a trainer after which an evaluator of the run ends; 0: never.',
    domain.NOT_NEGATIVE,
  )
  return p


def FindReadFields(
  function: Callable[[nested_map.NestedMap], Any], batch_spec: nested_map.NestedMap
) -> list[str]:
  """Returns the paths of the batch entries that a function reads or returns."""
  paths = [path for path, spec in shapes.Leaves(batch_spec) if spec is not None]
  traced = tf.function(function, autograph=False).get_concrete_function(batch_spec)
  # Captured variables come after the arguments.
  placeholders = traced.inputs[: len(paths)]
  return [path for path, tensor in zip(paths, placeholders, strict=True) if tensor.consumers()]


class BaseTask(base_layer.BaseLayer):
  """Base class of tasks.

  A subclass creates its layers and overrides `ComputeLoss`. If it creates a `PipeliningLayer`
  child named `stack`, this child is trained as a pipeline: `PipelineInputs` feeds the first stage,
  and `ComputeLoss` runs inside the last stage on each micro-batch. Without such a child the whole
  task is a single stage on one device, and `ComputePredictions` may do anything.
  """

  # Unit of the loss weight in printed speeds, for example 'examples' or 'tokens'.
  loss_unit = 'examples'

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a task."""
    p = super().Params()
    p.Define('train', TrainParams(), 'Params of training.')
    p.Define('eval', EvalParams(), 'Params of evaluation.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    train = self.params.train
    if train.ema_decay_moving_vars and not train.ema_decay:
      raise ValueError(f'{self.path}.train.ema_decay_moving_vars needs a positive ema_decay')

  @property
  def pipeline(self) -> pipelining_layer.PipeliningLayer | None:
    """The child `stack` if it is a `PipeliningLayer`, otherwise None."""
    stack = self.children.get('stack')
    return stack if isinstance(stack, pipelining_layer.PipeliningLayer) else None

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns the arguments of the first layer, nests of tensors [batch, ...].

    The default is the whole batch as the only argument.
    """
    return (input_batch,)

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns the part of the batch that `ComputeLoss` needs, which is sent to the last stage.

    The default is the whole batch.
    """
    return input_batch

  def CheckBatch(self, input_batch: nested_map.NestedMap) -> None:
    """Raises ValueError for a batch that the layers cannot process; runs on the host before a step.

    Override it to check conditions that XLA ignores at run time, such as ids outside a table.
    """

  def ComputePredictions(self, theta: nested_map.NestedMap, input_batch: Any) -> Any:
    """Returns the outputs of the layers for a batch, by default the outputs of the pipeline."""
    if self.pipeline is None:
      raise NotImplementedError(f'{type(self).__name__} has neither a pipeline nor predictions')
    return self.pipeline.FProp(theta.stack, *self.PipelineInputs(input_batch))

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: Any, input_batch: nested_map.NestedMap
  ) -> tuple[Metrics, dict[str, tf.Tensor]]:
    """Computes the loss and other metrics of a batch or micro-batch.

    Args:
      theta: the weights of the task; empty in a pipelined task, whose weights belong to the layers
        of the pipeline.
      predictions: the outputs of the last layer.
      input_batch: the result of `LossInputs`, or a micro-batch of it.

    Returns:
      A pair (metrics, per_example). `metrics` is {name: (value, weight)} with the key 'loss'; each
      value is a scalar mean, and its weight is the scalar number of items averaged over, for
      example examples or tokens. Means of several batches are combined by their weights.
      `per_example` is {name: tensor [batch, ...]}. A mean over nothing, as for a micro-batch of
      padding, may be NaN: with weight 0 it is ignored, and the predictions get no gradient.
    """
    raise NotImplementedError(f'{type(self).__name__} has no ComputeLoss')

  def LossWeight(self, input_batch: nested_map.NestedMap) -> tf.Tensor:
    """Returns the weight of 'loss' that `ComputeLoss` will return, a float32 scalar.

    The pipeline needs the weight before the first forward pass. The trainer checks that
    `ComputeLoss` returns the same weight. The default is the sum of `example_weights` if the batch
    has that entry, otherwise the batch size.

    Args:
      input_batch: the result of `LossInputs`, or a micro-batch of it.
    """
    weights = input_batch.get('example_weights')
    if weights is not None:
      return tf.reduce_sum(weights)
    return tf.cast(tf.shape(tf.nest.flatten(input_batch)[0])[0], tf.float32)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Calls `ComputePredictions`, so that a task without a pipeline can be the layer of a stage."""
    return self.ComputePredictions(theta, *args)

  def Report(self, metrics: dict[str, float], input_generator: Any) -> str:
    """Returns a human-readable report of an evaluation to print with its metrics, or ''."""
    del metrics, input_generator
    return ''

  def Decode(self, input_batch: nested_map.NestedMap, input_generator: Any) -> dict[str, Any]:
    """Decodes a batch: returns the model's output for each example, usually with its reference.

    The decoder job writes a line for each example. After training, the trainer prints the decoding
    of the first example.

    Args:
      input_batch: a batch of eager tensors, or a single row of one, with `example_index`, int64
        [batch]: the index of each row in the data set. Random choices should depend on this index
        and not on the position in the batch.
      input_generator: the input generator of the batch, which may have the vocabulary or the
        original text.

    Returns:
      {name: a list or array with one entry for each row}, or {} if the task does not decode. An
      entry is a string, a number, or a list or array of these. The names for a translation are
      source, hypothesis, reference, source_language, target_language and score.
    """
    del input_batch, input_generator
    return {}

  def DecodeFinalize(self, decoded: dict[str, list[Any]]) -> dict[str, float | str]:
    """Computes metrics over all decoded examples of a data set.

    Args:
      decoded: {name: the entries that `Decode` returned}, for at least one example, in the order of
        the data set and without padding rows.

    Returns:
      {name: a number, or a string for the score file}.
    """
    del decoded
    return {}

  # ---- inference -------------------------------------------------------------------------------

  def InferenceSignatures(self, batch_spec: nested_map.NestedMap) -> dict[str, Signature]:
    """Returns the signatures of an exported model by name.

    The default is a single signature `serving_default`. Its inputs are the entries of the batch
    that `PipelineInputs` reads, with an entry `a.b` of a nested batch named `a_b`; its outputs are
    `InferenceOutputs` of the predictions.

    Args:
      batch_spec: the spec of a batch; dimension 0 has size None, or a fixed size if the layers
        need it.
    """
    leaves = [(name, spec) for name, spec in shapes.Leaves(batch_spec) if spec is not None]
    reads = self._PlainPredictions if self.pipeline is None else self.PipelineInputs
    names = {
      path: re.sub(r'\W+', '_', path).strip('_') for path in FindReadFields(reads, batch_spec)
    }

    def Run(theta: nested_map.NestedMap, inputs: nested_map.NestedMap) -> dict[str, tf.Tensor]:
      tensors = [inputs.get(names.get(path)) for path, _ in shapes.Leaves(batch_spec)]
      batch = tf.nest.pack_sequence_as(batch_spec, tensors)
      return self.InferenceOutputs(self.PredictInOrder(theta, batch))

    specs = {names[path]: spec for path, spec in leaves if path in names}
    return {'serving_default': Signature(specs, Run)}

  def InferenceOutputs(self, predictions: Any) -> dict[str, tf.Tensor]:
    """Returns the outputs of an exported model for predictions: {name: tensor}.

    The default names are `outputs` for a single tensor, and `outputs_0`, `outputs_1` and so on for
    several.
    """
    tensors = [tensor for tensor in tf.nest.flatten(predictions) if tensor is not None]
    if len(tensors) == 1:
      return {'outputs': tensors[0]}
    return {f'outputs_{i}': tensor for i, tensor in enumerate(tensors)}

  def PredictInOrder(self, theta: nested_map.NestedMap, input_batch: Any) -> Any:
    """Computes the predictions for a batch by running the layers in order, without the pipeline.

    In evaluation mode the result equals the pipeline's `Predict` up to rounding. The operations are
    not assigned to devices.
    """
    if self.pipeline is None:
      return self.ComputePredictions(theta, input_batch)
    inputs = self.PipelineInputs(input_batch)
    return sequential.FPropLayers(self.pipeline.layers, theta.stack.layers, *inputs)

  def _PlainPredictions(self, input_batch: nested_map.NestedMap) -> Any:
    return self.PredictInOrder(self.theta, input_batch)
