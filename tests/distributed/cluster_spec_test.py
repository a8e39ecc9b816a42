# SPDX-License-Identifier: Apache-2.0
"""Reading the addresses of a run's processes, and the errors for each mistake."""

import json
import sys

import pytest

from lingvo_gpipe.distributed import cluster_spec


def _Read(text):
  return cluster_spec.FromText(text, 'hosts.json')


def testReadsAFile():
  spec = _Read('{"worker": ["a-1.b_c:2222", "[::1]:1"], "chief": ["127.0.0.1:65535"]}')
  assert spec.workers == ('a-1.b_c:2222', '[::1]:1')
  assert spec.chief == '127.0.0.1:65535'
  assert spec.Address(1) == '[::1]:1'
  assert _Read('{"worker": ["a:1"]}').chief == ''


@pytest.mark.parametrize(
  'text, message',
  [
    ('', r'hosts\.json .*JSON: .*line 1.*expected \{"worker"'),
    ('{"worker": ["a:1"', 'column 18'),
    ('["a:1"]', 'is not a JSON object'),
    ('{"workers": ["a:1"]}', r"has unknown keys: 'workers'; expected"),
    ('{"worker": ["a:1"], "ps": []}', r"has unknown keys: 'ps'"),
    ('{"worker": "a:1"}', "'worker' .*list of addresses, got 'a:1'"),
    ('{"worker": [1]}', "'worker' .*list of addresses"),
    ('{"worker": []}', 'names no worker'),
    ('{"chief": ["a:1"]}', 'names no worker'),
    ('{"worker": ["a"]}', "'worker' has 'a', .*host:port"),
    ('{"worker": ["a:0"]}', "has 'a:0'"),
    ('{"worker": ["a:65536"]}', "has 'a:65536'"),
    ('{"worker": ["grpc://a:1"]}', "has 'grpc://a:1'"),
    ('{"worker": ["a b:1"]}', "has 'a b:1'"),
    ('{"worker": ["a:1", "b:1", "a:1"]}', 'has a:1 twice'),
    ('{"worker": ["a:1"], "chief": ["a:1"]}', 'has a:1 twice'),
    ('{"worker": ["a:1"], "worker": ["b:1"]}', "'worker' occurs twice"),
    ('{"worker": ["a:1"], "chief": ["b:1", "c:1"]}', '2 addresses of the chief'),
    ('[' * 100000, 'cannot be read as JSON: .*recursion'),
  ],
)
def testMistakesInAFileAreNamed(text, message):
  with pytest.raises(ValueError, match=message):
    _Read(text)


def testAnUnknownWorkerIsAnError():
  with pytest.raises(ValueError, match=r'no worker 2: .*workers 0 to 1: a:1, b:1'):
    _Read('{"worker": ["a:1", "b:1"]}').Address(2)


def testReadsTheEnvironment():
  config = {'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}}
  spec = cluster_spec.FromEnvironment({'TF_CONFIG': json.dumps(config)})
  assert (spec.workers, spec.task_type, spec.task_index) == (('a:1', 'b:1'), 'worker', 1)
  for nothing in ({}, {'TF_CONFIG': ''}, {'TF_CONFIG': '{}'}):
    assert cluster_spec.FromEnvironment(nothing) is None


@pytest.mark.parametrize(
  'text, message',
  [
    ('no', 'TF_CONFIG cannot be read as JSON'),
    ('[]', 'TF_CONFIG is not a JSON object'),
    ('{"cluster": {"worker": ["a"]}}', "TF_CONFIG: 'worker' has 'a'"),
    ('{"cluster": {"worker": ["a:1"]}, "task": 1}', '"task" must be an object'),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"index": "1"}}', '"index" an integer'),
  ],
)
def testMistakesInTheEnvironmentAreNamed(text, message):
  with pytest.raises(ValueError, match=message):
    cluster_spec.FromEnvironment({'TF_CONFIG': text})


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
