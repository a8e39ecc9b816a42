# SPDX-License-Identifier: Apache-2.0
"""A process of `tools.largest_model`: trains a Transformer for one step within a memory limit.

All stages share the process. Its limit is therefore the limit of one device times the number of
stages, plus the memory of a pipeline with equally many almost empty stages.

python -m tools.benchmarking.memory_trial '<Trial as JSON>'
"""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import sys


@dataclasses.dataclass(frozen=True)
class Trial:
  """A model and its memory limit.

  Attributes:
    num_layers: Transformer layers.
    num_stages: K.
    remat_policy: the re-materialisation policy.
    limit_mib: limit in MiB per stage.
    num_micro_batches: M.
    dim: width of the layers; the feed-forward width is 4 * dim, and attention heads have size 64.
    batch: number of sequences per mini-batch.
    time: number of tokens per sequence.
    vocab: number of tokens.
  """

  num_layers: int
  num_stages: int
  remat_policy: str
  limit_mib: int
  num_micro_batches: int = 8
  dim: int = 256
  batch: int = 8
  time: int = 128
  vocab: int = 512

  def ToJson(self) -> str:
    """Returns the trial as one line of JSON, for a separate process."""
    return json.dumps(dataclasses.asdict(self))


def Run(trial: Trial) -> int:
  """Trains one step and returns the number of parameters; fails if the model does not fit."""
  import tensorflow as tf

  from lingvo_gpipe.core import nested_map
  from lingvo_gpipe.distributed import cluster
  from lingvo_gpipe.learning import optimizer
  from lingvo_gpipe.runners import train_runner
  from tasks.lm import model

  devices = cluster.Cluster.Create(trial.num_stages, platform='cpu', threads_per_device=1)

  def Train(num_layers: int, dim: int) -> int:
    p = model.TransformerLm.Params().Set(
      name='lm',
      vocab_size=trial.vocab,
      model_dim=dim,
      hidden_dim=4 * dim,
      num_heads=max(1, dim // 64),
      num_layers=num_layers,
    )
    p.stack.Set(
      num_stages=trial.num_stages,
      num_micro_batches=trial.num_micro_batches,
      remat_policy=trial.remat_policy,
      xla=False,
    )
    # One slot per weight: 12 bytes per parameter, as in Table 1 of the paper.
    p.train.learner.Set(learning_rate=1e-3, optimizer=optimizer.RMSprop.Params())
    task = p.Instantiate()
    ids = tf.zeros([trial.batch, trial.time], tf.int32)
    batch = nested_map.NestedMap(ids=ids, labels=ids, weights=tf.ones(ids.shape))
    spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
    train_runner.TrainRunner(task, devices.devices, spec).TrainStep(batch)
    return int(task.NumParams())

  Train(trial.num_stages, 16)
  limit = _DataBytes() + trial.num_stages * trial.limit_mib * 2**20
  resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  return Train(trial.num_layers, trial.dim)


def _DataBytes() -> int:
  """Returns the memory that counts against RLIMIT_DATA."""
  with open('/proc/self/status', encoding='ascii') as f:
    match = re.search(r'^VmData:\s*(\d+) kB', f.read(), re.MULTILINE)
  assert match is not None
  return int(match[1]) * 1024


if __name__ == '__main__':
  print(json.dumps(Run(Trial(**json.loads(sys.argv[1])))))
