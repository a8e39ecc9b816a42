# SPDX-License-Identifier: Apache-2.0
"""Reading the addresses of a run's processes, and the errors for each mistake."""

import json
import sys

import pytest

from lingvo_gpipe.distributed import cluster_spec
from tests import naming


def _Read(text):
  return cluster_spec.FromText(text, 'hosts.json')


def testReadsTheAddressesInAFile():
  spec = _Read('{"worker": ["a-1.b_c:2222", "[::1]:1"], "chief": ["127.0.0.1:65535"]}')
  assert spec.workers == ('a-1.b_c:2222', '[::1]:1')
  assert spec.chief == '127.0.0.1:65535'
  assert spec.Address(1) == '[::1]:1'
  assert _Read('{"worker": ["a:1"]}').chief == ''


@pytest.mark.parametrize(
  'text, names',
  [
    ('', ('JSON', 'line 1', '{"worker"')),
    ('{"worker": ["a:1"', ('JSON', 'column 18')),
    ('["a:1"]', ('JSON object',)),
    ('{"workers": ["a:1"]}', ("'workers'", '{"worker"')),
    ('{"worker": ["a:1"], "ps": []}', ("'ps'",)),
    ('{"worker": "a:1"}', ("'worker'", 'list', "'a:1'")),
    ('{"worker": [1]}', ("'worker'", 'list', '[1]')),
    ('{"worker": []}', ('no worker',)),
    ('{"chief": ["a:1"]}', ('no worker',)),
    ('{"worker": ["a"]}', ("'worker'", "'a'", 'host:port')),
    ('{"worker": ["a:0"]}', ("'worker'", "'a:0'", 'host:port')),
    ('{"worker": ["a:65536"]}', ("'worker'", "'a:65536'", 'host:port')),
    # Digits of other scripts, too.
    ('{"worker": ["localhost:\u0661\u0662"]}', ("'worker'", 'localhost:\u0661\u0662', 'host:port')),
    ('{"worker": ["[::1%\u0661]:1"]}', ("'worker'", '::1', 'host:port')),
    ('{"worker": ["grpc://a:1"]}', ("'worker'", "'grpc://a:1'", 'host:port')),
    ('{"worker": ["a b:1"]}', ("'worker'", "'a b:1'", 'host:port')),
    ('{"worker": ["a:1", "b:1", "a:1"]}', ('a:1', 'twice')),
    ('{"worker": ["a:1"], "chief": ["a:1"]}', ('a:1', 'twice')),
    ('{"worker": ["a:1"], "worker": ["b:1"]}', ("'worker'", 'twice')),
    ('{"worker": ["a:1"], "chief": ["b:1", "c:1"]}', ('2 addresses', 'chief')),
    ('[' * 100000, ('JSON', 'recursion')),
  ],
)
def testMistakesInAFileAreNamed(text, names):
  with pytest.raises(ValueError, match=naming.Naming('hosts.json', *names)):
    _Read(text)


def testAnUnknownWorkerIsAnError():
  with pytest.raises(ValueError, match=naming.Naming('worker 2', 'workers 0 to 1', 'a:1, b:1')):
    _Read('{"worker": ["a:1", "b:1"]}').Address(2)


def testReadsTheEnvironment():
  config = {'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}}
  spec = cluster_spec.FromEnvironment({'TF_CONFIG': json.dumps(config)})
  assert (spec.workers, spec.task_type, spec.task_index) == (('a:1', 'b:1'), 'worker', 1)
  for nothing in ({}, {'TF_CONFIG': ''}, {'TF_CONFIG': '{}'}):
    assert cluster_spec.FromEnvironment(nothing) is None


@pytest.mark.parametrize(
  'text, names',
  [
    ('no', ('JSON', 'line 1')),
    ('[]', ('JSON object',)),
    ('{"cluster": {"worker": ["a"]}}', ("'worker'", "'a'", 'host:port')),
    ('{"cluster": {"worker": ["a:1"]}, "task": 1}', ('"task"', 'object')),
    ('{"cluster": {"worker": ["a:1"]}, "task": {"index": "1"}}', ('"task"', '"index"', 'integer')),
  ],
)
def testMistakesInTheEnvironmentAreNamed(text, names):
  with pytest.raises(ValueError, match=naming.Naming('TF_CONFIG', *names)):
    cluster_spec.FromEnvironment({'TF_CONFIG': text})


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
