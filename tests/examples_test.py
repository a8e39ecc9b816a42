# SPDX-License-Identifier: Apache-2.0
"""The examples in docs/examples are valid, and name flags and files that exist."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from lingvo_gpipe.distributed import cluster_spec
from tests import worker_processes

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLES = _ROOT / 'docs' / 'examples'
_FLAG = re.compile(r'(?<![\w-])--([a-z]\w+)')


def _DefinedFlags(*programs):
  text = ''.join((_ROOT / 'lingvo_gpipe' / f'{name}.py').read_text() for name in programs)
  return set(re.findall(r"flags\.DEFINE_\w+\(\s*'(\w+)'", text))


def _CheckCommands(text):
  """Checks the flags of calls of `worker` and `trainer`, up to the end of the line or command."""
  for program in ('worker', 'trainer'):
    (arguments,) = re.findall(rf'\b{program} (--[^\n&]*)', text)
    assert set(_FLAG.findall(arguments)) <= _DefinedFlags('cli/binary', 'cli/supervised', program)
    if program == 'trainer':
      area, file, name = re.search(r'--model=(\w+)\.(\w+)\.(\w+)', arguments).groups()
      assert f'class {name}(' in (_ROOT / 'params' / area / f'{file}.py').read_text()
    else:
      assert '--trusted_network' in arguments


def testSlurmScript(tmp_path):
  path = _EXAMPLES / 'slurm.sh'
  done = subprocess.run(['bash', '-n', path], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr) == (0, '')
  text = path.read_text()
  _CheckCommands(text)
  # The lines that write the addresses, run for two nodes.
  (pipe,) = re.findall(r'^scontrol show hostnames [^|]*\|\n(.*) > ', text, re.M)
  done = subprocess.run(
    ['bash', '-c', pipe], input='node1\nnode2\n', env={'port': '20017', 'PATH': '/usr/bin:/bin'},
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  (tmp_path / 'hosts.json').write_text(done.stdout)
  cluster = cluster_spec.FromText((tmp_path / 'hosts.json').read_text(), '')
  assert cluster.workers == ('node1:20017', 'node2:20017')


@pytest.mark.parametrize('signal_name', ['USR1', 'TERM'])
def testSlurmScriptQueuesItsJobAgainOnlyIfTheTimeIsUp(tmp_path, signal_name):
  """Slurm sends USR1 before the time limit, and TERM for `scancel --batch --signal=TERM`."""
  programs = {
    'scontrol': 'echo "$@" >> calls; [[ $1 != show ]] || echo node1',
    'srun': 'exit 1',  # The workers have ended before the script ends them.
    'trainer': "trap 'exit 143' TERM; touch started; while :; do sleep 0.01; done",
  }
  for name, text in programs.items():
    (tmp_path / name).write_text(f'#!/bin/bash\n{text}\n')
    (tmp_path / name).chmod(0o755)
  environment = {'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'node1'}
  environment['PATH'] = f'{tmp_path}:/usr/bin:/bin'
  script = subprocess.Popen(
    ['bash', _EXAMPLES / 'slurm.sh'],
    cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True,
  )  # fmt: skip
  try:
    worker_processes.Await('start of the trainer', (tmp_path / 'started').exists)
    script.send_signal(getattr(signal, f'SIG{signal_name}'))
    assert script.communicate(timeout=60)[1] == b''
    assert script.returncode == 143
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(script.pid, signal.SIGKILL)
  assert ('requeue 7' in (tmp_path / 'calls').read_text()) == (signal_name == 'USR1')
  assert not list(tmp_path.glob('hosts-*.json'))


def testKubernetesObjects(tmp_path):
  yaml = pytest.importorskip('yaml')
  objects = list(yaml.safe_load_all((_EXAMPLES / 'kubernetes.yaml').read_text()))
  by_kind = {item['kind']: item for item in objects}
  assert len(by_kind) == len(objects)
  (tmp_path / 'hosts.json').write_text(by_kind['ConfigMap']['data']['hosts.json'])
  hosts = cluster_spec.FromText((tmp_path / 'hosts.json').read_text(), '')
  service, workers = by_kind['Service'], by_kind['StatefulSet']
  name = service['metadata']['name']
  worker = workers['metadata']['name']
  assert workers['spec']['serviceName'] == name
  assert hosts.workers == tuple(
    f'{worker}-{index}.{name}:2222' for index in range(workers['spec']['replicas'])
  )
  trainer = by_kind['Job']['spec']['template']['spec']
  assert hosts.chief == f'{trainer["hostname"]}.{trainer["subdomain"]}:2222'
  # The service names the pods that the network policy admits.
  labels = service['spec']['selector']
  policy = by_kind['NetworkPolicy']['spec']
  assert policy['podSelector']['matchLabels'] == labels
  assert policy['ingress'][0]['from'] == [{'podSelector': {'matchLabels': labels}}]
  commands = []
  for kind in (workers, by_kind['Job']):
    template = kind['spec']['template']
    assert labels.items() <= template['metadata']['labels'].items()
    spec = template['spec']
    (container,) = spec['containers']
    commands.append(' '.join(container['command']))
    mounted = {mount['name'] for mount in container['volumeMounts']}
    assert mounted == {volume['name'] for volume in spec['volumes']}
  _CheckCommands('\n'.join(commands))
  assert json.dumps(objects)  # kubectl turns the objects into JSON.


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
