# SPDX-License-Identifier: Apache-2.0
"""An override ends in a model and its input, or in one line that names the param."""

import random
import sys

import pytest

from lingvo_gpipe.core import params_tree
from lingvo_gpipe.experiment import registry

_TRANSFORMER = 'lm.stdlib.ByteTransformerGPipe2'
# Without a text of their own; all but the last few fit some param.
_VALUES = [
  'None', '-1', '0', '1.5', '1e30', '1e300', '9223372036854775807', '-2147483649', '1000003',
  '2147483648', 'nan', 'inf', '-inf', '1e-300', 'true', 'x', "''", '[]', '()', '{}', '[1]', '(-1,)',
  '[None]', "['a', 'b']", '{1: ([], [])}', "{'a': 1}", 'tf.string', 'tf.int32', 'tf.float64',
  'type/lingvo_gpipe.layers.norm/LayerNorm', '[[1, 2], [3]]', '[1e300]', "['(']", '(', '3', '[3]',
  'type/os/system', 'type/builtins/eval', 'type/dataclasses/Field(x=1)',
]  # fmt: skip


def _Try(params, path, text):
  """Sets one param, and makes the model and its input; an error must be one line about a param."""
  try:
    params.ApplyOverrides([(path, text)])
    params.Instantiate()
    if 'cls' in params.input:
      params.input.Instantiate()
  except (ValueError, LookupError) as e:
    assert '\n' not in str(e) and len(str(e)) < 600
    if type(e) is KeyError:
      assert 'schedule' in path
    return str(e)
  return ''


@pytest.mark.parametrize(
  'key',
  [_TRANSFORMER, 'image.digits.LeNet5', 'image.digits_tasks.DigitAndParity', 'mt.cldr.Bilingual'],
)
def testRandomOverrides(key):
  params = registry.GetParams(key, 'Train')
  paths = [path for path, _ in params_tree.Leaves('', params)]
  paths += sorted({path.rpartition('.')[0] for path in paths} - {'', 'input'})
  draw = random.Random(key)
  for _ in range(300):
    _Try(params.Copy(), draw.choice(paths), draw.choice(_VALUES))


@pytest.mark.parametrize(
  'override',
  [
    'task.dtype:tf.string', 'task.stack.fprop_dtype:x', 'task.num_layers:None',
    'task.train.learner.learning_rate:None', 'task.stack.ties:None', 'task.stack.splits:None',
    'task.stack.batch_dim:-2147483649', 'task.random_seed:1e40',
    'task.train.init_from_checkpoint_rules:{1:([],[])}', 'task.vocab_size:1e300',
    'task.num_layers:1e300', 'input.batch_size:1e30', 'task.stack.num_micro_batches:1000003',
    'task.stack.num_micro_batches:60000;task.stack.num_stages:6', 'task.stack.num_stages:1000003',
    'task.train.max_steps:1e30', 'input.num_epochs:1e18', 'input.seq_len:1e18',
    'task.train.learner.bprop_variable_filter:(', 'task.softmax_tpl.cls:type/os/system',
    'task.softmax_tpl.cls:type/tasks.lm.stdlib_input/StdlibInput', 'task.params_init:5',
    'task.softmax_tpl.cls:type/lingvo_gpipe.layers.norm/LayerNorm',
    'task.stack:None', 'task.train.callbacks:[1]', 'task.train.eval_datasets:[[]]',
    'task.stack.cls:type/lingvo_gpipe.core.base_layer/BaseLayer',
    'task.ff_init_depth_exponent:-1e300', 'task.name:A b', "input.name:'\\ud800'",
    'task.softmax_tpl.cls:type/lingvo_gpipe.layers.linear/LinearLayer.__eq__',
    'task.stack.schedule:gpip', 'task.train.learner.learning_rate:1e300',
    'task.train.learner.lr_schedule.cls:type/lingvo_gpipe.learning.optimizer/KerasOptimizer',
  ],
)  # fmt: skip
def testValuesThatCannotBeAreRefused(override):
  from tasks.lm import stdlib_input  # noqa: F401  (A class of the project, but no layer.)

  params = registry.GetParams(_TRANSFORMER, 'Train')
  params.FromText(override.rpartition(';')[0])
  path, text = override.rpartition(';')[2].split(':', 1)
  assert path.rpartition('.')[2] in _Try(params, path, text)


def testHugeSetsOfExamplesAreRefused():
  params = registry.GetParams('image.digits.LeNet5', 'Train')
  assert 'num_fake_examples' in _Try(params, 'input.num_fake_examples', '1e18')


@pytest.mark.parametrize(
  'key', [_TRANSFORMER, 'mt.cldr.Bilingual', 'image.digits.AmoebaNetDGPipe2']
)
def testTheTextOfParamsCanBeReadBack(key):
  """All of it, with templates whose sizes are not set yet."""
  params = registry.GetParams(key, 'Train')
  assert params.Copy().FromText(params.ToText()) == params


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
