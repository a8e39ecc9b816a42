# SPDX-License-Identifier: Apache-2.0
"""A user's project outside the checkout, run with the installed programs."""

import os
import re
import signal
import sys
import textwrap
import time

import pytest

from tests import processes

_TASK = """
import tensorflow as tf

from lingvo_gpipe import base_input_generator, base_layer, nested_map, pipelining_layer, task
from lingvo_gpipe import weight_params


class Scale(base_layer.BaseLayer):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', 0, 'Size.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([self.params.dim]))

  def FProp(self, theta, x):
    return x * theta.w


class Strict(Scale):
  def FProp(self, theta, x):
    if x.shape[-1] != 3:
      raise ValueError('only 3 columns')
    return x * theta.w


class Widens(Scale):
  def FProp(self, theta, x):
    return tf.concat([x, x], -1)


class Bounded(Scale):
  def FProp(self, theta, x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 3.2, message='out of bounds')]):
      return x * theta.w

  @classmethod
  def FPropMeta(cls, params, x):
    return nested_map.NestedMap(flops=1, out_specs=(x,))


class Logarithm(Scale):
  def FProp(self, theta, x):
    return tf.math.log(3.2 - tf.stop_gradient(x)) * theta.w


class Points(base_input_generator.BaseInputGenerator):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('seconds', 0.0, 'How long the first batch takes.')
    return p

  def NumExamples(self):
    return 64

  def _Examples(self, indices):
    x = tf.cast(indices, tf.float32)[:, tf.newaxis] / 64.0 + tf.constant([[1.0, 2.0, 3.0]])
    if self.params.seconds:
      x = tf.ensure_shape(tf.py_function(self._Wait, [x], tf.float32), x.shape)
    return nested_map.NestedMap(x=x, y=2.0 * x)

  def _Wait(self, x):
    import time
    print('waiting', flush=True)
    time.sleep(self.params.seconds)
    return x

  def _FingerprintParts(self):
    return ['points']


class Doubling(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'Pipeline.')
    p.Define('first', [], 'Layers before the last three.')
    return p

  def __init__(self, params):
    super().__init__(params)
    layers = [*self.params.first, *(Scale.Params().Set(dim=3) for _ in range(3))]
    self.CreateChild('stack', self.params.stack.Copy().Set(sub=layers))

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def LossInputs(self, input_batch):
    return nested_map.NestedMap(y=input_batch.y)

  def ComputeLoss(self, theta, predictions, input_batch):
    size = tf.cast(tf.shape(predictions)[0], tf.float32)
    return {'loss': (tf.reduce_mean(tf.square(predictions - input_batch.y)), size)}, {}
"""

_EXPERIMENT = """
from lingvo_gpipe import registry
from tasks import doubling


@registry.RegisterSingleTaskModel
class Doubling2(registry.SingleTaskModelParams):
  def Train(self):
    return doubling.Points.Params().Set(batch_size=8)

  def Test(self):
    return self.Train()

  def Task(self):
    p = doubling.Doubling.Params().Set(name='mine')
    p.stack.Set(num_stages=2, num_micro_batches=2, xla=False)
    p.train.Set(max_steps=40, eval_datasets=['Test'])
    p.train.learner.learning_rate = 0.1
    return p


@registry.RegisterSingleTaskModel
class Slow(Doubling2):
  def Train(self):
    return super().Train().Set(seconds=90.0)


class _First(Doubling2):
  FIRST = ()

  def Train(self):
    return super().Train().Set(shuffle=False)

  def Task(self):
    p = super().Task()
    p.first = [getattr(doubling, name).Params().Set(dim=3) for name in self.FIRST]
    return p


@registry.RegisterSingleTaskModel
class Ill(_First):
  FIRST = ('Widens', 'Strict')


@registry.RegisterSingleTaskModel
class Unequal(_First):
  FIRST = ('Widens',)


@registry.RegisterSingleTaskModel
class Failing(_First):
  FIRST = ('Scale', 'Bounded')


@registry.RegisterSingleTaskModel
class Diverging(_First):
  FIRST = ('Scale', 'Logarithm')


@registry.RegisterSingleTaskModel
class Misspelt(Doubling2):
  def Task(self):
    return super().Task().Set(nmae='theirs')


@registry.RegisterSingleTaskModel
class Broken(Doubling2):
  def Task(self):
    raise ValueError('out of my own file')
"""


def _Write(root, with_init):
  for folder, name, text in (('params', 'mine', _EXPERIMENT), ('tasks', 'doubling', _TASK)):
    (root / folder).mkdir()
    (root / folder / f'{name}.py').write_text(textwrap.dedent(text))
    if with_init:
      (root / folder / '__init__.py').write_text('')
  return root


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return _Write(tmp_path_factory.mktemp('project'), with_init=True)


@pytest.mark.parametrize('with_init', [True, False])
def testAProjectTrainsInItsDirectory(tmp_path, forks, with_init):
  project = _Write(tmp_path, with_init)
  done = forks.Run('trainer', '--model=mine.Doubling2', '--logdir=run', cwd=project)
  lines = processes.Succeeded(done).stdout.splitlines()
  assert lines[0].startswith('mine.Doubling2@params/mine.py:')
  (evaluated,) = [line for line in lines if line.startswith('Test at step 40: loss ')]
  (first,) = [line for line in lines if line.startswith('step 1/40  loss ')]
  assert float(evaluated.split()[-1]) < 0.5 * float(first.split()[-1])
  assert any(re.search(r' examples/s  lr \S+  bubble \d+%  0:00 left$', line) for line in lines)
  assert processes.Steps(project / 'run') == [40]
  assert 'mine.stack.layers[0].w' in processes.Tensors(project / 'run', 40)


def testTheExperimentsOfTheCheckoutAreNotAvailable(project, forks):
  """Neither through the installation nor through a PYTHONPATH that the user sets."""
  done = forks.Run('trainer', '--mode=list', cwd=project)
  keys = 'Broken Diverging Doubling2 Failing Ill Misspelt Slow Unequal'
  mine = [f'mine.{key}' for key in keys.split()]
  assert processes.Succeeded(done).stdout.splitlines() == mine


@pytest.mark.parametrize(
  'key, last_line',
  [
    ('Broken', 'ValueError: out of my own file'),
    # The library reports a mistake in this file: the message needs its line.
    ('Misspelt', 'AttributeError: .*nmae.*did you mean name'),
  ],
)
def testAnExceptionInAnExperimentShowsItsStackTrace(project, forks, key, last_line):
  done = forks.Run('trainer', f'--model=mine.{key}', '--logdir=other', cwd=project)
  assert done.returncode == 1
  assert 'Traceback' in done.stderr and f'{project}/params/mine.py", line ' in done.stderr
  assert re.search(last_line, done.stderr.splitlines()[-1])
  assert not (project / 'other').exists()


@pytest.mark.parametrize(
  'key, status, words',
  [
    # A check by the project itself: one line.
    ('Ill', 2, r'only 3 columns \(while measuring layer mine\.stack\.layers\[1\] \(Strict\) for '
     r'one micro-batch, given \(float32\[4, 6\]\) by mine\.stack\.layers\[0\] \(Widens\)\)'),
    # A mistake in the code of the project: the message needs its line.
    ('Unequal', 1, r'while measuring layer mine\.stack\.layers\[1\] \(Scale\) for one micro-batch, '
     r'given \(float32\[4, 6\]\) by mine\.stack\.layers\[0\] \(Widens\)'),
    ('Failing', 1, r'in stage 0 \(mine\.stack\.layers\[0\] to mine\.stack\.layers\[2\]\), '
     r'micro-batch ([01]), while running action 0F\1'),
  ],
)  # fmt: skip
def testALayerThatFailsIsNamed(project, forks, tmp_path, key, status, words):
  args = [f'--model=mine.{key}', f'--logdir={tmp_path}']
  if key == 'Failing':
    # With what TensorFlow prints. The working directory comes before PYTHONPATH, with other params.
    (tmp_path / 'params').mkdir()
    (tmp_path / 'params' / '__init__.py').write_text('')
    path = f'{processes.Environment().get("PYTHONPATH", "")}:{tmp_path}:{project}'
    done = processes.Run('trainer', *args, cwd=project, more_environment={'PYTHONPATH': path})
  else:
    done = forks.Run('trainer', *args, cwd=project)
  assert done.returncode == status, done.stderr
  if status == 2:
    (line,) = processes.Messages(done.stderr)
    assert re.search(words, line)
    return
  # The cause comes last, its name first; everything else is in a file.
  line, code, *more, trace = processes.Messages(done.stderr)[1:]
  assert re.match(r'\w+Error ', line) and re.search(words, line)
  file = f'{project}/tasks/doubling.py'
  assert re.fullmatch(rf'File "{file}", line \d+, in FProp', code)
  assert trace == f'stack trace: {tmp_path}/error-trainer.txt'
  text = (tmp_path / 'error-trainer.txt').read_text()
  assert text.startswith('Traceback') and f'File "{file}"' in text
  if key == 'Failing':
    assert 'in layer mine.stack.layers[1] (Bounded), ' in line and 'out of bounds' in line
    match = re.fullmatch(r'training ended after step (\d+); the next call starts over', *more)
    assert match and f'step {int(match[1]) + 1}/40' not in done.stdout


def testCheckNumericsNamesTheLayer(project, forks, tmp_path):
  args = ['--model=mine.Diverging', f'--logdir={tmp_path}', '--check_numerics']
  done = forks.Run('trainer', *args, cwd=project)
  assert done.returncode == 1
  line, resume = processes.Messages(done.stderr)
  assert re.fullmatch(r'training ended after step \d+; the next call starts over', resume)
  assert re.match(
    r'step \d+ is not finite: the first value that is not finite is the output of layer '
    r'mine\.stack\.layers\[1\] \(Logarithm\) in stage 0, micro-batch [01]: \d+ NaN and \d Inf in '
    r'float32\[4, 3\], .* its inputs are finite, its weights finite',
    line,
  )
  assert 'step 1/40' in done.stdout


def testASecondSignalEndsTheTrainerAtOnceInAnyStep(project, forks):
  pid = forks.Start('trainer', '--model=mine.Slow', '--logdir=slow', cwd=project)
  forks.Await('waiting\n')
  for number in (signal.SIGTERM, signal.SIGINT):
    time.sleep(0.2)
    os.kill(pid, number)  # It has not ended before.
  done = forks.Wait()
  assert done.returncode == 128 + signal.SIGINT, done.stderr
  assert processes.Steps(project / 'slow') == []


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
