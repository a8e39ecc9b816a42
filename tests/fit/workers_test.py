# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel` on workers: a model that is too large for one process is loaded, fitted, saved.

With LoRA all processes have the same limit of memory (RLIMIT_DATA), the client too.
"""

import json
import shutil
import sys

import numpy as np
import pytest

from tests import processes

pytest.importorskip('keras_hub')

LAYERS, WIDTH = 4, 1280
LAYER = 12 * WIDTH**2 * 4 / 2**20  # MiB of a block; the embeddings are small.
WEIGHTS = LAYERS * LAYER
# MiB beyond the weights: TensorFlow's code that is loaded, its graphs and buffers.
ALLOWANCE = 64
# MiB of each process, for LoRA.
LIMIT, RANK = 880, 4

PROGRAM = """
import json, re, sys

import keras, keras_hub, numpy as np

from lingvo_gpipe import PipelinedModel, cluster
from lingvo_gpipe.distributed import local_workers

kind, directory = sys.argv[1:3]
ids = np.random.default_rng(0).integers(0, 64, [4, 8]).astype('int32')
batch = {'token_ids': ids, 'padding_mask': np.ones_like(ids)}
GPT = keras_hub.models.GPT2CausalLM
processes, result = ['self'], {'peaks': {}}


def Status(name, process):
  with open(f'/proc/{process}/status') as f:
    return int(re.search(name + r':\\s+(\\d+)', f.read())[1]) / 1024


def Peaks(name, run):
  for process in processes:
    with open(f'/proc/{process}/clear_refs', 'w') as f:
      f.write('5')  # The peak is the present size.
  before = [Status('VmRSS', p) for p in processes]
  returned = run()
  result['peaks'][name] = [Status('VmHWM', p) - b for p, b in zip(processes, before)]
  return returned


def Compile(model):
  model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=[],
    jit_compile=False,
  )
  return model


def Train(model):
  history = model.fit(batch, (ids + 1) % 64, batch_size=4, epochs=2, shuffle=False, verbose=0)
  return history.history['loss']


def Plain(rank):
  model = GPT.from_preset(directory, preprocessor=None)
  if rank:
    model.backbone.enable_lora(rank)
  return Train(Compile(model))


if kind == 'write':
  keras.utils.set_random_seed(1)
  backbone = keras_hub.models.GPT2Backbone(**json.loads(sys.argv[3]))
  GPT(backbone, preprocessor=None).save_to_preset(directory)
  result['losses'] = {rank: Plain(rank) for rank in map(int, sys.argv[4:])}
elif kind == 'plain':
  Plain(int(sys.argv[3]))
else:
  workers = local_workers.LocalWorkers(2, ['--platform=cpu', '--threads_per_device=1'])
  processes += [p.pid for p in workers.processes]
  devices = cluster.Cluster.Connect(workers.spec, 2).devices
  pipe = Peaks(
    'load',
    lambda: PipelinedModel.from_preset(
      directory,
      2,
      example=batch,
      keras_class=GPT,
      lora_rank=int(sys.argv[3]),
      preset_arguments={'preprocessor': None},
      num_micro_batches=2,
      devices=devices,
      xla=False,
    ),
  )
  Compile(pipe)
  result['losses'] = Peaks('fit', lambda: Train(pipe))
  path = f'{directory}_{sys.argv[3]}'
  Peaks('weights', lambda: pipe.save_weights(path + '.weights.json', max_shard_size=0.1))
  Peaks('preset', lambda: pipe.model.save_to_preset(path))
  Peaks('archive', lambda: pipe.save(path + '.keras'))
print(json.dumps(result))
"""

CONFIG = {
  'vocabulary_size': 64,
  'num_layers': LAYERS,
  'num_heads': 4,
  'hidden_dim': WIDTH,
  'intermediate_dim': 4 * WIDTH,
  'max_sequence_length': 8,
  'dropout': 0.0,
}


def _Run(directory, *args, limit='unlimited'):
  """Runs the program under a limit in MiB, which its workers inherit."""
  program = directory / 'program.py'
  program.write_text(PROGRAM)
  data = limit if isinstance(limit, str) else limit * 1024
  # Each of TensorFlow's many threads reserves its stack.
  shell = f'ulimit -s 1024; ulimit -d {data}; exec "$@"'
  environment = {
    'TF_ENABLE_ONEDNN_OPTS': '0',  # No pool of memory, so that its size is its use.
    'MALLOC_MMAP_THRESHOLD_': str(2**20),
  }
  return processes.Run(
    '', str(program), *args, command=['bash', '-c', shell, 'bash', sys.executable],
    more_environment=environment, timeout=170,
  )  # fmt: skip


@pytest.fixture(scope='module')
def preset(tmp_path_factory):
  """Returns the directory of a preset, and the losses of plain Keras by rank of LoRA."""
  path = tmp_path_factory.mktemp('large') / 'preset'
  done = processes.Succeeded(
    _Run(path.parent, 'write', str(path), json.dumps(CONFIG), '0', str(RANK))
  )
  losses = json.loads(done.stdout.splitlines()[-1])['losses']
  yield path, {int(rank): values for rank, values in losses.items()}
  shutil.rmtree(path.parent)


def testPlainKerasDiesUnderTheLimit(preset):
  path, _ = preset
  assert _Run(path.parent, 'plain', str(path), str(RANK), limit=LIMIT).returncode


@pytest.mark.parametrize(('rank', 'limit'), [(RANK, LIMIT), (0, 'unlimited')])
def testTwoWorkersTrain(preset, rank, limit):
  """While it loads and saves, a process holds the weights of its stages, and at most a layer."""
  path, losses = preset
  done = processes.Succeeded(_Run(path.parent, 'workers', str(path), str(rank), limit=limit))
  result = json.loads(done.stdout.splitlines()[-1])
  np.testing.assert_allclose(result['losses'], losses[rank], rtol=1e-4)
  peaks = result['peaks']
  for name in ('load', 'weights', 'preset', 'archive'):
    assert peaks[name][0] < LAYER + ALLOWANCE, peaks
  for of_worker in peaks['load'][1:]:
    assert of_worker < WEIGHTS / 2 + LAYER + ALLOWANCE, peaks
  assert peaks['fit'][0] < WEIGHTS, peaks  # The updates are computed by the workers.


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
