# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # Your first experiment
#
# An experiment is a class that assembles Params: a task, its layers, their pipeline and the data.
# The programs `trainer` and `evaluator` run it by its name. This tutorial writes one, trains it in
# two stages, kills the training, resumes it, and compares the result with a run that was not
# disturbed.
#
# The task is code, and so it has a file of its own. `ComputeLoss` runs in the last stage, for each
# micro-batch.

# %%
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

project = tempfile.TemporaryDirectory()
root = pathlib.Path(project.name)
for folder in ('tasks', 'params'):
  (root / folder).mkdir()
  (root / folder / '__init__.py').touch()

_ = (root / 'tasks' / 'toy.py').write_text("""
import tensorflow as tf
from lingvo_gpipe import pipelining_layer, task


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
    errors = batch.example_weights * tf.reduce_sum((predictions - batch.targets) ** 2, axis=1)
    weight = tf.reduce_sum(batch.example_weights)
    return {'loss': (tf.math.divide_no_nan(tf.reduce_sum(errors), weight), weight)}, {}
""")

# %% [markdown]
# The experiment names the data for training and testing, and the Params of the task: four layers,
# cut into two stages, with four micro-batches. Each param can be changed from the command line.

# %%
_ = (root / 'params' / 'toy.py').write_text("""
from lingvo_gpipe import linear, registry, synthetic
from tasks import toy


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return synthetic.SyntheticRegressionInput.Params().Set(batch_size=64)

  def Test(self):
    return self.Train().Set(first_example=1024, num_examples=256)

  def Task(self):
    hidden = linear.ProjectionLayer.Params().Set(input_dim=32, output_dim=32, has_bias=True)
    head = linear.LinearLayer.Params().Set(input_dim=32, output_dim=1)
    p = toy.Regression.Params().Set(name='toy')
    p.stack.Set(sub=[hidden] * 3 + [head], num_stages=2, num_micro_batches=4)
    p.train.Set(max_steps=600, save_interval_steps=100, eval_datasets=['Test'])
    return p
""")


def Start(program, *flags):
  """Starts a program of the library in the project's directory."""
  command = [sys.executable, '-m', f'lingvo_gpipe.{program}', '--model=toy.Toy', '--platform=cpu']
  return subprocess.Popen(
    [*command, *flags], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
  )


def Run(program, *flags):
  """Runs a program to its end, and returns the lines that it prints."""
  process = Start(program, *flags)
  output, _ = process.communicate()
  assert process.returncode == 0, output
  return output.splitlines()


# %% [markdown]
# ## Look before you train
#
# `--mode=inspect_partition` shows the cut, the predicted memory and the schedule, without training.

# %%
print(*Run('trainer', '--mode=inspect_partition'), sep='\n')

# %% [markdown]
# ## Train
#
# Everything that a run writes goes into its log directory: checkpoints, metrics, and at the end
# `report.txt` and `report.html`.

# %%
lines = Run('trainer', '--logdir=straight')
print(*lines[lines.index('--- run report') :], sep='\n')

# %% [markdown]
# ## Kill it
#
# The same again, in another directory. As soon as there is a checkpoint, the process is killed, as
# by a crash of the machine.

# %%
process = Start('trainer', '--logdir=killed')
while not list((root / 'killed' / 'train').glob('ckpt-*.json')):
  assert process.poll() is None
  time.sleep(0.02)
process.kill()
assert process.wait() == -signal.SIGKILL
print('checkpoints:', *sorted(path.name for path in (root / 'killed' / 'train').glob('*.json')))

# %% [markdown]
# ## Resume
#
# The same command resumes from the last checkpoint, with the next example of the data.

# %%
lines = Run('trainer', '--logdir=killed')
print(*(line for line in lines if line.startswith(('resuming', 'Test'))), sep='\n')

# %% [markdown]
# The result equals the result of the run that nobody killed, to the last digit:

# %%
reports = [json.loads((root / name / 'report.json').read_text()) for name in ('straight', 'killed')]
losses = [report['passes']['eval_test']['values']['loss'] for report in reports]
print('test loss:', *losses)
assert losses[0] == losses[1]

# %% [markdown]
# ## Other stages, the same result
#
# The number of stages changes the speed and memory of a run, but not its result, up to rounding. So
# a run may resume in another number of stages, too.

# %%
Run(
  'trainer', '--logdir=four', '--model_params_override=task.stack.num_stages:4',
  '--model_params_override=task.stack.schedule:1f1b',
)  # fmt: skip
report = json.loads((root / 'four' / 'report.json').read_text())
loss = report['passes']['eval_test']['values']['loss']
print('test loss in four stages:', loss)
assert abs(loss - losses[0]) <= 1e-2 * losses[0]  # Many steps magnify rounding.
print('files:', *sorted(os.listdir(root / 'four')))
project.cleanup()

# %% [markdown]
# [Train and evaluate](../training.md) has the jobs and evaluations,
# [Choose the optimizer](../learner.md) the learners, and [Train on several
# hosts](../distributed.md) the changes if the devices are on other machines.
