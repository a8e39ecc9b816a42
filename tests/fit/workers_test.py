# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel` on workers: models that are too large for one process are loaded, fitted, saved.

Every process, the client among them, may take the same memory beyond what TensorFlow takes to start
(RLIMIT_DATA). Plain Keras takes more. The first model has large weights and is trained by LoRA. The
second has large activations and is trained in full.
"""

import json
import os
import shutil
import signal
import sys
from typing import NamedTuple

import numpy as np
import pytest

from lingvo_gpipe.distributed import worker_connection
from tests import processes, worker_processes

pytest.importorskip('keras_hub')

# MiB beyond the weights: TensorFlow's code that is loaded, its graphs and buffers. The process that
# loads the model runs more code. A worker with all blocks of LORA would exceed its limit.
ALLOWANCE_OF_LOADING, ALLOWANCE = 96, 48


class Case(NamedTuple):
  """A model and its training; a process may take `budget` MiB."""

  num_layers: int
  width: int
  rows: int
  length: int
  num_micro_batches: int
  rank: int
  budget: int

  @property
  def block(self):
    """MiB of the weights of a block; the embeddings are small."""
    return 12 * self.width**2 * 4 / 2**20


LORA = Case(num_layers=4, width=1024, rows=4, length=8, num_micro_batches=1, rank=4, budget=250)
FULL = Case(num_layers=2, width=128, rows=128, length=64, num_micro_batches=2, rank=0, budget=200)


@pytest.fixture(scope='module')
def memory_forks(tmp_path_factory):
  """Like `forks`, with settings that only the start of a process takes, for memory that is used."""
  shell = 'ulimit -s 1024; exec "$@"'  # Each of TensorFlow's many threads reserves its stack.
  runner = processes.Forks(
    tmp_path_factory.mktemp('forks'),
    modules=['keras_hub'],
    command=['bash', '-c', shell, 'bash', sys.executable],
    more_environment={
      'TF_ENABLE_ONEDNN_OPTS': '0',  # No pool of memory, so that its size is its use.
      'MALLOC_MMAP_THRESHOLD_': str(2**20),
    },
  )
  yield runner
  runner.Close()


@pytest.mark.parametrize('case', [LORA, FULL], ids=['lora', 'full'])
def testTwoWorkersTrainAModelTooLargeForPlainKeras(case, memory_forks, tmp_path):
  """While it loads and saves, a process holds the weights of its stages, and at most a block."""
  program = processes.Program('fit_on_workers')
  path, hosts = tmp_path / 'preset', tmp_path / 'hosts.json'

  def Run(kind, *args):
    return memory_forks.Run(program, kind, str(path), *map(str, case), *args)

  processes.Succeeded(Run('write'))
  done = processes.Succeeded(Run('plain'))
  plain = json.loads(done.stdout.splitlines()[-1])
  # Measured: beyond the limit a process would end, or hang until it is killed.
  assert plain['peaks']['plain'][0] > case.budget
  addresses = [f'localhost:{port}' for port in worker_processes.FreePorts(2)]
  hosts.write_text(json.dumps({'worker': addresses}))
  flags = [f'--cluster={hosts}', '--local_only', '--platform=cpu', '--threads_per_device=1']
  workers = [
    memory_forks.Start('worker', *flags, f'--task_index={index}', is_waited_for=False)
    for index in range(2)
  ]
  try:
    worker_connection.AwaitWorkers(addresses, worker_processes.SECONDS)
    done = processes.Succeeded(Run('workers', str(hosts), *map(str, workers)))
  finally:
    for pid in workers:
      os.kill(pid, signal.SIGKILL)
  shutil.rmtree(tmp_path)
  result = json.loads(done.stdout.splitlines()[-1])
  np.testing.assert_allclose(result['losses'], plain['losses'], rtol=1e-4)
  peaks = result['peaks']
  assert peaks['load'][0] < case.block + ALLOWANCE_OF_LOADING, peaks
  for name in ('weights', 'preset', 'archive') if case.rank else ():
    assert peaks[name][0] < case.block + ALLOWANCE, peaks
  for of_worker in peaks['load'][1:]:
    assert of_worker < (case.num_layers / 2 + 1) * case.block + ALLOWANCE, peaks


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
