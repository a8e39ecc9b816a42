# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # Two hosts on one machine
#
# Stages may be on other hosts. Each host runs a `worker`, and the trainer connects to all of them.
# This tutorial starts two workers on one machine, as one would on two. It kills a worker, starts it
# again, and compares the result with a run that was not disturbed.
#
# The experiment is a small regression. It needs to be on the trainer's host only: workers know
# devices, but no experiments.

# %%
import atexit
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

project = tempfile.TemporaryDirectory()
root = pathlib.Path(project.name)
(root / 'params').mkdir()
(root / 'params' / '__init__.py').touch()
_ = (root / 'params' / 'toy.py').write_text("""
import tensorflow as tf
from lingvo_gpipe import linear, pipelining_layer, registry, synthetic, task


class Regression(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'The layers and their cut.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', self.params.stack)

  def PipelineInputs(self, batch):
    return (batch.inputs,)

  def ComputeLoss(self, theta, predictions, batch):
    weight = tf.reduce_sum(batch.example_weights)
    errors = batch.example_weights * tf.reduce_sum((predictions - batch.targets) ** 2, axis=1)
    return {'loss': (tf.math.divide_no_nan(tf.reduce_sum(errors), weight), weight)}, {}


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return synthetic.SyntheticRegressionInput.Params().Set(batch_size=64)

  def Test(self):
    return self.Train().Set(first_example=1024, num_examples=256)

  def Task(self):
    hidden = linear.ProjectionLayer.Params().Set(input_dim=32, output_dim=32, has_bias=True)
    head = linear.LinearLayer.Params().Set(input_dim=32, output_dim=1)
    p = Regression.Params().Set(name='toy')
    p.stack.Set(sub=[hidden] * 3 + [head], num_stages=2, num_micro_batches=4, xla=False)
    p.train.Set(max_steps=300, save_interval_steps=50, eval_datasets=['Test'])
    return p
""")

# %% [markdown]
# ## The addresses
#
# One file names the workers. On two hosts it would have names such as `alpha:2222` and `beta:2222`.
# Here both are this machine, at two free ports.

# %%
sockets = [socket.create_server(('localhost', 0)) for _ in range(2)]
addresses = [f'localhost:{s.getsockname()[1]}' for s in sockets]
for s in sockets:
  s.close()
_ = (root / 'hosts.json').write_text(json.dumps({'worker': addresses}))


def Start(program, *flags):
  """Starts a program of the library in the project's directory."""
  command = [sys.executable, '-m', f'lingvo_gpipe.{program}', '--platform=cpu', *flags]
  log = (root / f'{program}.log').open('a')
  process = subprocess.Popen(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=log)
  atexit.register(process.kill)  # In case a cell fails.
  return process


# %% [markdown]
# ## The workers
#
# The first host would run `worker --cluster=hosts.json --task_index=0`, the second one the same
# with index 1. TensorFlow's workers ask for no password. So you have to choose: `--local_only`
# keeps other machines away, and `--trusted_network` says that only trusted hosts can reach the
# port.


# %%
def StartWorker(index):
  worker = Start('worker', '--cluster=hosts.json', f'--task_index={index}', '--local_only')
  line = worker.stdout.readline()  # Comes as soon as it serves.
  assert line, (root / 'worker.log').read_text()
  print(line.partition(' at port')[0])
  return worker


workers = [StartWorker(0), StartWorker(1)]

# %% [markdown]
# ## Train
#
# The trainer gets the file of addresses, too. The rest is as on one host. The last column of the
# table shows on which worker each stage is.


# %%
def Train(logdir, *flags):
  return Start('trainer', '--model=toy.Toy', f'--logdir={logdir}', *flags)


def Finish(trainer):
  """Waits for the end of a trainer; returns the lines that it printed."""
  output, _ = trainer.communicate()
  assert trainer.returncode == 0, (root / 'trainer.log').read_text()
  return output.splitlines()


lines = Finish(Train('straight', '--cluster=hosts.json'))
print(*lines[:4], sep='\n')
print(*(line for line in lines if line.startswith('Test')))

# %% [markdown]
# ## Kill a worker
#
# The same in another directory. After the first checkpoint we kill worker 1, as if its host had
# crashed. We have its process, so we end this process and no other.

# %%
trainer = Train('killed', '--cluster=hosts.json')
while not list((root / 'killed' / 'train').glob('ckpt-*.json')):
  assert trainer.poll() is None
  time.sleep(0.02)
workers[1].kill()
assert workers[1].wait() == -signal.SIGKILL

# %% [markdown]
# The trainer is still there. It waits until worker 1 answers again, for up to half an hour. On a
# real host, a service manager would start the worker again. Here we do that:

# %%
workers[1] = StartWorker(1)
lines = Finish(trainer)
print(*(line for line in lines if line.startswith(('resuming', 'failures', 'Test'))), sep='\n')

# %% [markdown]
# Steps after the last checkpoint ran again, with the same data. So the result is equal to the last
# digit:


# %%
def Loss(logdir):
  report = json.loads((root / logdir / 'report.json').read_text())
  return report['passes']['eval_test']['values']['loss']


print('test loss:', Loss('straight'), Loss('killed'))
assert Loss('straight') == Loss('killed')

# %% [markdown]
# ## Replicas
#
# The two workers may also hold two copies of the whole pipeline. Each takes half of every batch. To
# keep the micro-batches as they are, each has two instead of four. Both stages of a replica need a
# device, so here the trainer starts workers of its own, with two devices each. They end with it.

# %%
for worker in workers:
  worker.terminate()
  worker.wait()
replicas = Train(
  'replicas', '--local_workers=2', '--num_replicas=2',
  '--model_params_override=task.stack.num_micro_batches:2',
)  # fmt: skip
lines = Finish(replicas)
print(lines[0], *(line for line in lines if line.startswith('Test')), sep='\n')
print('test loss:', Loss('replicas'))
assert abs(Loss('replicas') - Loss('straight')) <= 1e-2 * Loss('straight')
project.cleanup()

# %% [markdown]
# The loss is equal up to rounding, because sums over the replicas are added in another order.
#
# [Several hosts](../distributed.md) has the checkpoints and GPUs, and
# [Protect the ports](../network.md) the tunnels. [Data on workers](../worker_data.md) has the data,
# and [When a worker fails](../worker_failures.md) training with fewer workers. A Keras model uses
# workers by [`cluster.Cluster.Connect`](../keras.md#on-other-hosts).
