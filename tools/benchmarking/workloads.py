# SPDX-License-Identifier: Apache-2.0
"""The workloads: (a) residual layers, (b) a Transformer, (c) GPT-2 of KerasHub, (d) AmoebaNet-D."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, weight_params
from lingvo_gpipe.experiment import task
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline import pipelining_layer
from tasks.image import amoebanet
from tasks.lm import model


class ResidualLayer(base_layer.BaseLayer):
  """A layer that computes x + relu(x w)."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a ResidualLayer."""
    p = super().Params()
    p.Define('dim', 0, 'Size of the last axis.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    dim = self.params.dim
    init = weight_params.WeightInit.Gaussian(dim**-0.5)
    self.CreateVariable('w', weight_params.WeightParams([dim, dim], init))

  def FProp(self, theta: nested_map.NestedMap, x: tf.Tensor) -> tf.Tensor:
    """Maps x [batch, dim] to the same shape."""
    return x + tf.nn.relu(tf.matmul(x, theta.w))


class ResidualTask(task.BaseTask):
  """Workload (a): residual layers with the mean square of their outputs as the loss."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the sizes and the pipeline `stack`."""
    p = super().Params()
    p.Define('num_layers', 16, 'Residual layers.')
    p.Define('dim', 1024, 'Their width.')
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    layers = [ResidualLayer.Params().Set(dim=p.dim) for _ in range(p.num_layers)]
    self.CreateChild('stack', p.stack.Copy().Set(sub=layers))

  def PipelineInputs(self, input_batch: nested_map.NestedMap) -> tuple[Any, ...]:
    """Returns the inputs [batch, dim]."""
    return (input_batch.x,)

  def LossInputs(self, input_batch: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns one column [batch, 1]: the loss needs the outputs and the number of rows only."""
    return nested_map.NestedMap(x=input_batch.x[:, :1])

  def ComputeLoss(
    self, theta: nested_map.NestedMap, predictions: tf.Tensor, input_batch: nested_map.NestedMap
  ) -> tuple[task.Metrics, dict[str, tf.Tensor]]:
    """Returns the mean square of the outputs."""
    del theta
    weight = tf.constant(float(predictions.shape[0]))
    return {'loss': (tf.reduce_mean(tf.square(predictions)), weight)}, {}


def Make(
  workload: str, sizes: Mapping[str, int], stack: Mapping[str, Any]
) -> tuple[task.BaseTask, nested_map.NestedMap]:
  """Returns the task of (a), (b) or (d) with a pipeline as in `stack`, and a batch."""
  if workload == 'a':
    p = ResidualTask.Params().Set(num_layers=sizes['layers'], dim=sizes['dim'])
    batch = nested_map.NestedMap(x=_Normal([sizes['batch'], sizes['dim']]))
  elif workload == 'd':
    p = amoebanet.AmoebaNet.Params().Set(
      num_cells=sizes['cells'],
      reduction_size=sizes['filters'],
      image_size=sizes['image'],
      num_classes=10,
    )
    shape = [sizes['batch'], sizes['image'], sizes['image'], 3]
    labels = tf.zeros(shape[:1], tf.int32)
    batch = nested_map.NestedMap(
      images=_Normal(shape), labels=labels, example_weights=tf.ones(shape[:1])
    )
  else:
    p = model.TransformerLm.Params().Set(
      vocab_size=sizes['vocab'],
      model_dim=sizes['dim'],
      hidden_dim=4 * sizes['dim'],
      num_heads=sizes['heads'],
      num_layers=sizes['layers'],
    )
    p.softmax_tpl.Set(chunk_size=sizes.get('chunk', 0), num_shards=sizes.get('shards', 1))
    shape = [sizes['batch'], sizes['time']]
    ids = tf.random.stateless_uniform(shape, [1, 2], 0, sizes['vocab'], tf.int32)
    labels = tf.random.stateless_uniform(shape, [3, 4], 0, sizes['vocab'], tf.int32)
    batch = nested_map.NestedMap(ids=ids, labels=labels, weights=tf.ones(shape))
  p.Set(name='task', random_seed=1)
  p.stack.Set(vocabulary='shared' if sizes.get('shared') else 'one', **stack)
  p.train.learner.Set(learning_rate=1e-3, optimizer=optimizer.SGD.Params())
  return p.Instantiate(), batch


def KerasModel(sizes: Mapping[str, int]) -> Any:
  """Returns the model of workload (c), not compiled."""
  import keras_hub  # An extra.

  keras.utils.set_random_seed(1)
  backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=sizes['vocab'],
    num_layers=sizes['layers'],
    num_heads=sizes['heads'],
    hidden_dim=sizes['dim'],
    intermediate_dim=4 * sizes['dim'],
    max_sequence_length=sizes['time'],
    dropout=0.0,
  )
  return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def KerasData(sizes: Mapping[str, int], num_steps: int) -> tf.data.Dataset:
  """Returns the batches of workload (c), enough for some steps.

  tf.data's tuner is off. With it, the end of an epoch waits until the tuner wakes up, after 2.5, 5
  or 10 seconds, which hides any difference between models: arrays given to `fit` have a tuner, too.
  """
  shape = [num_steps * sizes['batch'], sizes['time'] + 1]
  ids = np.random.RandomState(0).randint(0, sizes['vocab'], shape)
  x = ids[:, :-1]
  inputs = {'token_ids': x, 'padding_mask': np.ones_like(x)}
  options = tf.data.Options()
  options.autotune.enabled = False
  dataset = tf.data.Dataset.from_tensor_slices((inputs, ids[:, 1:]))
  return dataset.batch(sizes['batch'], drop_remainder=True).with_options(options)


def _Normal(shape: list[int]) -> tf.Tensor:
  return tf.random.stateless_normal(shape, [5, 6])
