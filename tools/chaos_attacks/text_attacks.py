# SPDX-License-Identifier: Apache-2.0
"""Attacks on readers: mutated texts and files end in a result, or in one line that refuses them."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import random

import tensorflow as tf

from lingvo_gpipe.core import files, params_tree
from lingvo_gpipe.distributed import cluster_spec
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.text import token_store
from lingvo_gpipe.pipeline.schedule import schedules
from tools.chaos_attacks import children, data_files, mutation

_KEYS = [
  'lm.stdlib.ByteTransformerGPipe2', 'image.digits.LeNet5', 'image.digits.AmoebaNetDGPipe2',
  'mt.cldr.Bilingual', 'image.digits_tasks.DigitAndParity',
]  # fmt: skip
if importlib.util.find_spec('keras_hub'):
  _KEYS.append('lm.keras_hub.ByteGPT2')
# Classes that are near the right ones, and what is near a class.
_LAYERS = 'type/lingvo_gpipe.layers'
_VALUES = [
  'None', '-1', '0', '1.5', '1e30', '9223372036854775807', '-2147483649', '1000003', 'nan', 'inf',
  'true', 'x', "''", '[]', '()', '{}', '[1]', '[None]', "{'a': 1}", '{1: ([], [])}', 'tf.string',
  'tf.float64', 'type/os/system', '3', '[[1, 2], [3]]', f'{_LAYERS}.norm/LayerNorm',
  f'{_LAYERS}.linear/LinearLayer', f'{_LAYERS}.linear/LinearLayer.__eq__',
  f'{_LAYERS}.linear/LinearLayer.Params', f'{_LAYERS}.linear/LinearLayer.Missing',
  f'{_LAYERS}.linear/tf', f'{_LAYERS}.linear/', f'{_LAYERS}.missing/LinearLayer',
  f'{_LAYERS}.base_layer/BaseLayer', 'type/lingvo_gpipe.learning.optimizer/Adam',
  'type/tasks.image.lenet/LeNet5', 'type/tasks.lm.model/TransformerLm', 'type/builtins/int',
]  # fmt: skip

# Experiments that train a step within seconds.
_TRAINED = {
  'lm.stdlib.ByteTransformerGPipe2': 'task.num_layers:2;task.model_dim:16;task.hidden_dim:32;'
  'task.num_heads:2;input.max_bytes:20000;input.batch_size:4;input.seq_len:16',
  'image.digits.LeNet5': 'input.batch_size:4',
  'mt.cldr.Bilingual': 'task.num_layers:1;task.model_dim:16;task.num_heads:2',
}


def Overrides(draw: random.Random, runner: children.Runner) -> None:
  """Overrides of Params, on the command line or in a file."""
  key = draw.choice(_KEYS)
  params = registry.GetParams(key, 'Train')
  paths = [path for path, _ in params_tree.Leaves('', params)]
  lines = [f'{draw.choice(paths)}:{draw.choice(_VALUES)}' for _ in range(draw.choice([1, 1, 2]))]
  text = draw.choice([';', '\n']).join(lines)
  if draw.random() < 0.4:
    text = mutation.Text(draw, text)
  args = [f'--mode={draw.choice(["inspect_params", "inspect_model"])}', f'--model={key}']
  if draw.random() < 0.5 or '\0' in text:
    path = runner.folder / 'overrides'
    data = text.encode()
    path.write_bytes(mutation.Bytes(draw, data) if draw.random() < 0.3 else data)
    args.append(f'--model_params_file_override={path}')
  else:
    args.append(f'--model_params_override={text}')
  children.CheckEnd(runner.Run('trainer', args))


def Training(draw: random.Random, runner: children.Runner) -> None:
  """An override of any param of an experiment, which then trains a step or refuses it."""
  key, small = draw.choice(list(_TRAINED.items()))
  leaves = params_tree.Leaves('', registry.GetParams(key, 'Train'))
  # Neighbouring layers may compute in different dtypes, unless TensorFlow refuses to mix them. A
  # cache would be written into the checkout.
  paths = [path for path, _ in leaves if not path.endswith(('fprop_dtype', 'cache_dir'))]
  value = draw.choice([*_VALUES, '2', '7', '64', '0.1', '1e-30'])
  override = f'{draw.choice(paths)}:{value}'
  overrides = [small, 'task.stack.xla:False;task.train.eval_datasets:[]', override]
  flags = ['--platform=cpu', '--max_steps=1', f'--logdir={runner.folder}/run', f'--model={key}']
  ended = runner.Run('trainer', [*flags, f'--model_params_override={";".join(overrides)}'])
  try:
    children.CheckEnd(ended)
  except children.FindingError as e:
    raise children.FindingError(f'{override}: {e}') from None


def ParamsFile(draw: random.Random, runner: children.Runner) -> None:
  """A file of Params, as runs leave it."""
  key = draw.choice(_KEYS)
  text = registry.GetParams(key, 'Train').ToText()
  path = runner.folder / 'params.txt'
  if draw.random() < 0.5:
    path.write_text(mutation.Text(draw, text), encoding='utf-8')
  else:
    path.write_bytes(mutation.Bytes(draw, text.encode()))
  ended = runner.Run('trainer', ['--mode=diff_params', key, str(path)])
  children.CheckEnd(ended, (0, 1))
  if ended.status == 1 and ended.stderr:
    raise children.FindingError(f'status 1: {ended.stderr[-1500:]}')


def ClusterFile(draw: random.Random, runner: children.Runner) -> None:
  """A file of workers, or TF_CONFIG."""
  record = {'cluster': {'worker': ['a:1', 'b:2'], 'chief': ['c:3']}, 'task': {'index': 0}}
  path = runner.folder / 'cluster.json'
  data = json.dumps(draw.choice([record, record['cluster']])).encode()
  path.write_bytes(mutation.Bytes(draw, data))
  text = mutation.Text(draw, data.decode())

  def Read() -> None:
    with children.Refusals(ValueError):
      cluster_spec.FromText(files.ReadText(str(path), '--cluster'), str(path))
    with children.Refusals(ValueError):
      cluster_spec.FromEnvironment({'TF_CONFIG': text})

  runner.Call(Read)


def Schedule(draw: random.Random, runner: children.Runner) -> None:
  """The text of a schedule."""
  name = draw.choice(['gpipe', '1f1b', 'zb_h1'])
  text = mutation.Text(draw, schedules.Get(name, 4, 4).ToText())

  def Read() -> None:
    with children.Refusals(ValueError):
      schedule = schedules.Schedule.FromText(text)
      schedule.Validate()
      schedule.Picture()

  runner.Call(Read)


def TokenStore(draw: random.Random, runner: children.Runner) -> None:
  """The cache of tokens."""
  folder = runner.folder / 'store'
  sequences = [[draw.randrange(500) for _ in range(draw.randrange(5))] for _ in range(9)]

  def Read() -> None:
    token_store.TokenStore.Write(str(folder), sequences)
    path = draw.choice(sorted(folder.iterdir()))
    mutation.File(draw, path)
    with children.Refusals(token_store.DamagedStoreError):
      store = token_store.TokenStore.Load(str(folder))
      if [list(store[i]) for i in range(len(store))] != sequences:
        raise children.FindingError(f'other tokens after a damage to {path.name}')

  runner.Call(Read)


def Records(draw: random.Random, runner: children.Runner) -> None:
  """TFRecord files, some with lengths that are wrong and have the right checksum."""
  path = runner.folder / 'some.tfrecord'
  records = [draw.randbytes(draw.choice([0, 1, 5, 300])) for _ in range(draw.randint(1, 6))]
  _WriteRecords(draw, path, records)

  def Read() -> None:
    for policy in tf_records.POLICIES:
      with children.Refusals(ValueError):
        intact = [x for _, x in tf_records.Records(str(path), '', policy) if x is not None]
        places = tf_records.RecordLocations(str(path), '', policy)
        ranges, _ = tf_records.IntactRanges(str(path))
        parts = [
          record
          for first_byte, count in ranges
          for record in tf_records.Dataset(str(path), first_byte).take(count).as_numpy_iterator()
        ]
        if parts != intact or (policy == 'skip' and len(places) != len(intact)):
          raise children.FindingError(f'{policy}: {intact}, {places}, {parts}')
        for _, first_byte, num_bytes in places if policy == 'skip' else ():
          tf_records.ReadRecord(str(path), tf.constant(first_byte), tf.constant(num_bytes))

  runner.Call(Read)


def _WriteRecords(draw: random.Random, path: pathlib.Path, records: list[bytes]) -> None:
  data = b''
  for record in records:
    length = draw.choice(data_files.LENGTHS) if draw.random() < 0.2 else len(record)
    data += data_files.Record(record, length)
  path.write_bytes(mutation.Bytes(draw, data) if draw.random() < 0.7 else data)
