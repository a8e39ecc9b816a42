# SPDX-License-Identifier: Apache-2.0
"""Task schedulers: frequencies of the tasks, reproducible draws, changing weights, and errors."""

import collections
import math
import sys

import pytest

from lingvo_gpipe.experiment import task_scheduler
from tests import naming


def _Draws(weights, num, seed=3):
  return [task_scheduler.Draw(weights, seed, step) for step in range(num)]


def testTasksAreDrawnInProportionToTheirWeights():
  num = 4000
  counts = collections.Counter(_Draws({'a': 5, 'b': 3.0, 'never': 0.0, 'c': 2}, num))
  for task, share in (('a', 0.5), ('b', 0.3), ('c', 0.2)):
    # Four standard deviations.
    assert abs(counts[task] / num - share) < 4 * math.sqrt(share * (1 - share) / num), counts
  assert counts['never'] == 0


def testADrawDependsOnSeedAndStepOnly():
  weights = {'a': 1.0, 'b': 1.0}
  draws = _Draws(weights, 200)
  assert [task_scheduler.Draw(weights, 3, step) for step in reversed(range(200))] == draws[::-1]
  assert _Draws(weights, 200, seed=4) != draws
  # Only the ratios of the weights matter.
  assert _Draws({'a': 0.125, 'b': 0.125}, 200) == draws
  # The same on every machine, because the draw is a hash.
  assert ''.join(draws[:12]) == 'aaaabbabbaaa'


def testTheOrderOfTheWeightsHasNoEffect():
  weights = {'a': 2.0, 'b': 1.0, 'c': 1.0}
  assert _Draws(dict(reversed(weights.items())), 200) == _Draws(weights, 200)


def testExponentialWeightsGoFromTheFirstToTheLast():
  p = task_scheduler.ExponentialScheduler.Params().Set(
    alpha=0.01, task_probs={'a': [1.0, 0.0], 'b': [0.0, 0.5]}
  )
  scheduler = p.Instantiate()
  assert scheduler.Weights(0) == {'a': 1.0, 'b': 0.0}
  assert scheduler.Weights(100) == pytest.approx({'a': math.exp(-1), 'b': 0.5 * (1 - math.exp(-1))})
  assert scheduler.Weights(10**6) == pytest.approx({'a': 0.0, 'b': 0.5})


@pytest.mark.parametrize('last', [2, -1])
def testSequentialTasksFollowOneAnother(last):
  p = task_scheduler.SequentialScheduler.Params()
  p.task_steps = [['a', 2], ['b', 3], ['a', last]]
  scheduler = p.Instantiate()
  drawn = [task_scheduler.Draw(scheduler.Weights(step), 0, step) for step in range(9)]
  assert ''.join(drawn) == 'aabbbaaaa'


@pytest.mark.parametrize(
  'weights', [{}, {'a': 0.0}, {'a': 2.0, 'b': -1.0}, {'a': math.nan}, {'a': math.inf, 'b': 1.0}]
)
def testInvalidWeightsAreRejected(weights):
  with pytest.raises(ValueError, match=naming.Naming('weights', '7', weights)):
    task_scheduler.Draw(weights, 0, 7)


_MALFORMED = {
  'ConstantScheduler': {
    'task_probs': [
      {}, None, 3, [['a', 1.0]], {'a': 'x'}, {'a': None}, {'a': True}, {'a': [1.0, 2.0]},
      {'a': 0.0}, {'a': 2.0, 'b': -1.0}, {'a': math.nan}, {'a': math.inf}, {'a': 1e308, 'b': 1e308},
      {'a': 10**400},
    ]
  },
  'ExponentialScheduler': {
    'alpha': ['x', None, -0.1, math.nan, math.inf, [1.0]],
    'task_probs': [
      {}, None, [['a', [1.0, 2.0]]], {'a': 1.0}, {'a': [1.0]}, {'a': [1.0, 2.0, 3.0]}, {'a': 'xy'},
      {'a': [1.0, 'x']}, {'a': [1.0, -1.0]}, {'a': [1.0, math.nan]}, {'a': [1.0, 0.0]},
      {'a': [0.0, 1.0], 'b': [0.0, 1.0]},
    ],
  },
  'SequentialScheduler': {
    'task_steps': [
      [], None, 'ab', 5, ['a', 'b'], [['a']], [['a', 1, 2]], [[3, 1]], [[['a'], 1]], [['a', '5']],
      [['a', 1.5]], [['a', None]], [['a', True]], [['a', -2]], {'a': 3},
      [['a', -1], ['b', 5]], [['a', 3], ['b', -1], ['a', 3]],
    ]
  },
}  # fmt: skip


@pytest.mark.parametrize(
  'name, param, value',
  [
    (name, param, value)
    for name, params in _MALFORMED.items()
    for param, values in params.items()
    for value in values
  ],
)
def testInvalidParamsAreRejectedByName(name, param, value):
  p = getattr(task_scheduler, name).Params()
  if name == 'ExponentialScheduler':
    p.task_probs = {'a': [1.0, 2.0]}
  with pytest.raises(ValueError) as e:
    p.Set(**{param: value}).Instantiate()
  message = str(e.value)
  assert message.startswith(f'{name}: {param} ') and f' got {value!r}'[:60] in message


@pytest.mark.parametrize('weights', [{'a': 'x'}, {'a': None}, {'a': 1e308, 'b': 1e308}])
def testWeightsOfACustomSchedulerAreChecked(weights):
  with pytest.raises(ValueError, match=naming.Naming('weights', '7', weights)):
    task_scheduler.Draw(weights, 0, 7)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
