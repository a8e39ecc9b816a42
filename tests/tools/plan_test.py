# SPDX-License-Identifier: Apache-2.0
"""The program `tools.plan`: its command runs, and the trainer makes the same predictions."""

import json
import os
import re
import shlex
import signal
import sys
from xml.etree import ElementTree

import pytest
import tensorflow as tf

from lingvo_gpipe.core import params_text
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.learning import lr_schedules
from tests import naming, processes, worker_processes
from tests.toys import projects
from tools.planning import experiment, report

_PROGRAM = str(processes.ROOT / 'tools' / 'plan.py')
_DEVICES = {
  'num_devices': 4,
  'devices_per_host': 2,
  'memory_bytes': 1e6,
  'flops_per_second': 1e10,
  'within_host': {'bandwidth': 1e9, 'latency': 1e-6},
  'between_hosts': {'bandwidth': 1e8, 'latency': 1e-5},
}
_MODEL = [f'--model={processes.MODEL}', f'--model_params_override={processes.TINY}']


def _File(tmp_path, **changes):
  path = tmp_path / 'devices.json'
  path.write_text(json.dumps({**_DEVICES, **changes}))
  return f'--device_file={path}'


def _Bytes(text):
  number, unit = re.fullmatch(r'([\d.,]+)(B|KiB|MiB|GiB)', text).groups()
  return float(number.replace(',', '')) * 1024 ** ('B', 'KiB', 'MiB', 'GiB').index(unit)


def testTheCommandRunsAndTheTrainerPredictsTheSameMemory(forks, tmp_path):
  done = forks.Run(
    _PROGRAM, *_MODEL, _File(tmp_path), '--global_batch=8', '--num_stages=2', '--num_replicas=2',
    '--max_steps=7', '--schedules=1f1b,zb_h1', '--remat_policies=stage', '--stages_per_device=1',
    '--vocabularies=one', f'--plot={tmp_path}/plan.svg',
  )  # fmt: skip
  out = processes.Succeeded(done).stdout
  assert processes.Messages(done.stderr) == []
  picture = (tmp_path / 'plan.svg').read_text()
  assert ElementTree.fromstring(picture).get('viewBox') and picture.count('(chosen)') == 1
  (chosen,) = [line.split() for line in out.splitlines() if line.endswith('  chosen')]
  assert chosen[:2] == ['2', '2'] and chosen[6] == 'stage'
  assert re.search(r'^R \\ K +2\n +2 +[\d.]+[mu]s$', out, re.MULTILINE)
  (command,) = [line for line in out.splitlines() if line.startswith('trainer ')]
  args = shlex.split(command)[1:]
  assert '--num_replicas=2' in args and args.pop(1) == '--logdir=LOGDIR'
  # The overrides of the plan follow the overrides that the plan was made with.
  assert '--max_steps=7' in args
  assert [a for a in args if a.startswith('--model_params_override=')][0] == _MODEL[1]
  partition = processes.Succeeded(forks.Run('trainer', '--mode=inspect_partition', *args)).stdout
  sizes = 'K=2', f'M={chosen[3]}'
  assert naming.AnyLineNames(partition, *sizes, chosen[5], 'remat_policy stage')
  stages = [line.split() for line in partition.splitlines() if re.match(r'\s*[01] ', line)]
  assert len(stages) == 2
  needs = max(sum(map(_Bytes, row[-3:-1])) for row in stages)
  assert needs == pytest.approx(_Bytes(chosen[-2]), rel=2e-3)


# Two layers of one kind: a measurement spends nearly all of its time on tracing each kind.
_EXPERIMENT = f"""
{worker_processes.EXPERIMENT}

@registry.RegisterSingleTaskModel
class Even(Toy):
  def Task(self):
    p = super().Task()
    p.stack.Set(sub=[p.stack.sub[0]] * 2, splits=[], xla=False)
    p.train.learner.optimizer = optimizer.SGD.Params()
    return p
"""
# Measures in a tenth of the time: how exactly is not tested here.
_DRIVER = f"""
import sys
sys.path.append({str(processes.ROOT)!r})
from lingvo_gpipe.pipeline.cutting import layer_profile
layer_profile._MAX_CALLS = 128
from tools import plan
plan.Run()
"""
_MEASURE = (
  '--model=toy.Even', '--measure', '--measured_sizes=2', '--remat_policies=none',
  '--schedules=gpipe', '--global_batch=4',
)  # fmt: skip


@pytest.fixture(scope='module')
def driver(tmp_path_factory):
  """Returns a file that runs the program, in the folder of a project."""
  project = projects.Write(tmp_path_factory.mktemp('project'), _EXPERIMENT)
  (project / 'params' / '__init__.py').touch()  # Not to be hidden by this repository's.
  (project / 'driver.py').write_text(_DRIVER)
  return project / 'driver.py'


def testThisMachineIsMeasuredAndPlansAreChecked(forks, driver):
  done = forks.Run(
    str(driver), *_MEASURE, '--num_devices=2', '--platform=cpu', '--check=1', '--repeats=1',
    cwd=driver.parent,
  )  # fmt: skip
  out = processes.Succeeded(done).stdout
  described = json.loads(out.splitlines()[0])
  assert described['num_devices'] == 2 and described['all_reduce'] == 'send'
  assert all(described[k] > 0 for k in ('flops_per_second', 'memory_bandwidth', 'memory_bytes'))
  assert described['slowdown'] >= 1
  row = out.splitlines()[-1].split()
  assert int(row[0]) * int(row[1]) <= 2
  assert all(re.fullmatch(r'[\d.,e+]+(s|ms|us)', cell) for cell in row[2:5]) and row[5][-1] == '%'


def testWorkersAreMeasuredAndPlansAreChecked(forks, driver):
  done = forks.Run(
    str(driver), *_MEASURE, '--local_workers=2', '--num_stages=2', '--check=1', '--repeats=1',
    cwd=driver.parent,
  )  # fmt: skip
  lines = processes.Succeeded(done).stdout.splitlines()
  described = json.loads(lines[0])
  assert (described['num_devices'], described['devices_per_host']) == (2, 2)
  of_machine = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  assert described['memory_bytes'] == pytest.approx(of_machine / 2)
  assert naming.Names(lines[2], 'within a host')
  layers, within_host = 'layers on worker 0 CPU:0', 'host from worker 0 CPU:0 to worker 1 CPU:0'
  assert naming.Names(lines[3], 'measured', layers, within_host)
  (command,) = [line for line in lines if line.startswith('trainer ')]
  assert '--local_workers=2' in shlex.split(command)
  assert lines[-1].split()[:2] == ['1', '2'] and lines[-1][-1] == '%'


def testAFailedWorkerIsReportedInOneLine(forks, driver):
  args = [*_MEASURE, '--local_workers=2', '--num_stages=2']
  pid = forks.Start(str(driver), *args, cwd=driver.parent)
  forks.Await(' Devices: 2 CPU devices of 2 workers')
  workers = worker_processes.Children(pid)
  (first,) = [w for w in workers if '--task_index=0' in worker_processes.CommandLine(w)]
  os.kill(first, signal.SIGKILL)
  done = forks.Wait()
  assert done.returncode == 1
  line = done.stderr.splitlines()[-1]  # After TensorFlow's messages.
  assert naming.Names(line, 'worker', 'failed')
  worker_processes.AwaitEnd(workers)


def testOnlyLearnersThatTrainALayerUpdateIt():
  params = registry.GetParams(processes.MODEL, 'Train')
  params.ApplyOverrides(params_text.ParseOverrides(processes.TINY))
  base = params.task.train.learner.Copy().Set(lr_schedule=lr_schedules.Constant.Params())
  params.task.train.learner = [
    base.Copy().Set(name='first', bprop_variable_filter=r'layers\[0\]'),
    base.Copy().Set(name='others', bprop_variable_exclusion=r'layers\[0\]'),
  ]
  chosen = experiment.Experiment(params, None)
  weight = tf.Variable(tf.ones([2, 3]))
  for path in ('lm.stack.layers[0].emb', 'lm.stack.layers[2].scale'):
    gradient = tf.Variable(tf.ones([2, 3]), trainable=False)
    update = chosen._Update(weight.device, {path: weight}, [gradient])
    before = weight.numpy()
    assert tf.function(update, autograph=False)().numpy() == pytest.approx(6**0.5)
    assert (weight.numpy() != before).all() and not gradient.numpy().any()


def testTheTrainerSharesAVocabularyAsPlanned(forks, tmp_path):
  done = forks.Run(
    _PROGRAM, *_MODEL, _File(tmp_path), '--global_batch=8', '--num_stages=2', '--num_replicas=2',
    '--schedules=1f1b', '--remat_policies=stage', '--stages_per_device=1', '--vocabularies=shared',
    f'--plot={tmp_path}/plan.svg',
  )  # fmt: skip
  out = processes.Succeeded(done).stdout
  assert ' shared vocabulary' in (tmp_path / 'plan.svg').read_text()
  (chosen,) = [line.split() for line in out.splitlines() if line.endswith('  chosen')]
  assert chosen[8] == 'shared'
  (command,) = [line for line in out.splitlines() if line.startswith('trainer ')]
  assert 'task.stack.vocabulary:shared' in command
  args = [arg for arg in shlex.split(command)[1:] if arg != '--logdir=LOGDIR']
  partition = processes.Succeeded(forks.Run('trainer', '--mode=inspect_partition', *args)).stdout
  assert naming.AnyLineNames(partition, '2 stages', '2 slices', 'K=2')
  (needs,) = re.findall(r'([\d.,]+\w+) on the fullest device', partition)
  assert _Bytes(needs) == pytest.approx(_Bytes(chosen[-2]), rel=2e-3)


@pytest.mark.parametrize(
  'changes, flags, names',
  [
    ({'flops': 1}, [], ['unknown', "'flops'"]),
    ({'memory_bytes': 100}, [], ['nothing fits']),
    ({}, ['--global_batch=4', '--model=mt.cldr.Multilingual'], ['bucket_batch_limit']),
    (None, [], ['--device_file=FILE']),
    ({}, ['--local_workers=2'], ['--local_workers', '--measure']),
    (None, ['--measure', '--cluster=none.json'], ['none.json']),
    ({}, ['--model=image.digits_tasks.DigitAndParity'], ['one task']),
  ],
)
def testErrorsAreOneLine(forks, tmp_path, changes, flags, names):
  where = [] if changes is None else [_File(tmp_path, **changes)]
  model = _MODEL[:1] if any('--model=' in flag for flag in flags) else _MODEL
  done = forks.Run(_PROGRAM, *model, *where, *flags)
  assert done.returncode == 2, done.stdout + done.stderr
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, *names)


def testAProcessOfItsOwnReportsAMistake():
  """Other tests run the program in forks that have imported modules already."""
  done = processes.Run('plan', *_MODEL[:1], command=[sys.executable, '-m', 'tools.plan'])
  assert done.returncode == 2
  assert naming.Names(processes.Messages(done.stderr)[-1], '--device_file=FILE')


@pytest.mark.parametrize(
  'seconds, text',
  [(1.234, '1.23s'), (12.0, '12s'), (0.0456, '45.6ms'), (7.89e-5, '78.9us'), (12345, '12,345s')],
)
def testSecondsAreFormatted(seconds, text):
  assert report.SecondsText(seconds) == text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
