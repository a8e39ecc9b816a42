# SPDX-License-Identifier: Apache-2.0
"""Workers read the data of their stages: equal bits, and none of it comes from the trainer."""

import json
import re
import shutil
import sys

import pytest

from tests import naming, processes, worker_processes

hosts, project = worker_processes.hosts, worker_processes.project


@pytest.fixture(scope='module')
def output(forks, hosts, project):
  """(results that the program printed, its log lines about the place of reading)."""
  program = processes.Program('read_on_workers')
  done = processes.Succeeded(forks.Run(program, str(hosts), cwd=project))
  lines = [line.removeprefix('INFO:absl:data: ') for line in done.stderr.splitlines()]
  return json.loads(done.stdout), [line for line in lines if ', read by ' in line]


def _Readers(line):
  """Returns the input that a log line names, and its readers: of all fields, or of each end."""
  name, readers = line.split(', ', 1)
  return name, *re.findall(r'trainer|worker \d(?:, \d)*', readers)


def _Cpu(worker):
  return f'/job:worker/replica:0/task:{worker}/device:CPU:0'


def testEachWorkerReadsTheDataOfItsStage(output):
  values, _ = output
  assert values['workers']['devices'] == {'firsts': [[_Cpu(0)]], 'lasts': [[_Cpu(1)] * 2]}
  for key in ('losses', 'checked'):
    assert values['workers'][key] == values['trainer'][key]
  # The first step traces; the trainer also reads its batch.
  assert min(values['trainer']['sent'][1:]) > 256 << 10
  assert max(values['workers']['sent'][1:]) < 64 << 10


def testEachReplicaReadsItsShareToTheEnd(output):
  replicas = output[0]['replicas']
  assert replicas['rows'] == [[[4], [3]]] * 3
  assert replicas['devices'] == {'firsts': [[_Cpu(0)] * 3, [_Cpu(1)] * 3], 'lasts': [[], []]}


def testWorkersReadDocumentsAsTokens(output):
  values, lines = output
  assert ('TextFilesInput', 'worker 0', 'worker 1') in map(_Readers, lines)
  # The first stage reads `ids` of six fields.
  assert values['tokens'] == [{'firsts': [[_Cpu(0)]], 'lasts': [[_Cpu(1)] * 5]}] * 2


def testWorkersReadRecordsByIndex(output):
  assert ('Records', 'worker 0, 1') in map(_Readers, output[1])


def testTheWorkerOfTheFirstStageContinuesAStream(output):
  values, lines = output
  readers = [(name, *ends) for name, *ends in map(_Readers, lines) if name == 'Stream']
  of_worker, of_trainer = ('Stream', 'worker 0'), ('Stream', 'trainer')
  assert readers == [of_worker, of_trainer] * 2 + [of_worker] * 4
  numbers, devices = zip(*values['stream'], strict=True)
  assert list(numbers) == [*range(1, 6)] * 5
  placed = {'firsts': [[_Cpu(0)]], 'lasts': [[_Cpu(1)] * 2]}
  assert devices[:10] == (placed,) * 5 + ({},) * 5
  placed = {'firsts': [[_Cpu(0)] * 3, [_Cpu(1)] * 3], 'lasts': [[], []]}
  assert devices[10:] == (placed,) * 5 + ({},) * 5 + (placed,) * 5
  assert values['sizes'] == [[2, 1], [8, 6]]
  assert values['padded'] == [0, 0, 0, 0, 5]


def testWorkersMakeTheRowsOfBuckets(output):
  values, lines = output
  lines = [line for line in lines if line.startswith('Pairs')]
  assert [_Readers(line)[1:] for line in lines] == [
    ('worker 0', 'worker 1'), ('trainer',), ('worker 0, 1',), ('trainer',), ('trainer',)
  ]  # fmt: skip
  for i in (1, 3):
    assert naming.Names(lines[i], 'input.read_on_workers', 'False')
  assert naming.Names(lines[4], '1,908 bytes')
  one_replica, two_replicas = values['pairs'][:8], values['pairs'][8:]
  sizes = [rows for (rows,), _ in one_replica]
  assert {*sizes} == {9, 5, 1} and sum(sizes) > 30  # More than an epoch.
  assert all(d == {'firsts': [[_Cpu(0)]], 'lasts': [[_Cpu(1)] * 9]} for _, d in one_replica)
  assert {tuple(rows) for rows, _ in two_replicas} == {(5, 4), (3, 2), (1,)}


def testAnotherPassTracesNothing(output):
  for first, second in output[0]['traces']:
    assert 0 < first == second


# Other tests check the steps of these inputs.
_OTHERS = ('Counted', 'TextFilesInput', 'Pairs', 'Records', 'Stream')


def testTheTrainerReadsInputsThatWorkersCannotRead(output):
  lines = [line for line in output[1] if not line.startswith(_OTHERS)]
  assert [_Readers(line) for line in lines[:3]] == [
    ('Input', 'worker 0', 'worker 1'),
    ('Input', 'trainer'),
    ('Input', 'worker 0, 1'),
  ]
  assert naming.Names(lines[1], 'input.read_on_workers', 'False')
  reasons = dict(line.split(', read by the trainer: ') for line in lines[3:])
  missing = reasons.pop('OwnFile')
  assert naming.Names(missing, 'workers', 'No such file')
  names = {
    'OwnDataset': ['OwnDataset', 'Dataset'],
    'Python': ['Python', '(PyFunc)'],
    'PythonPairs': ['PythonPairs', '(PyFunc)'],
    'Variable': ['Variable', 'variable'],
    'OtherFiles': ['workers', 'different'],
    'WholeBatch': ['workers', 'different'],
    'Input': ['Input', '2,112 bytes'],
  }
  assert reasons.keys() == names.keys()
  for key, reason in reasons.items():
    assert naming.Names(reason, *names[key]), reason


_READ = 'data: SyntheticRegressionInput, read by worker 0'


def testTheLastBatchAndThePositionEqualTheTrainers(forks, hosts, project, tmp_path):
  """One step on two stages of workers, then on two replicas to the end, which is within a batch.

  This holds for evaluations as well, after each step and by the evaluator. The trainer continues a
  copy of the first step.
  """

  def Args(name, max_steps, num_replicas, *more):
    overrides = 'input.num_epochs:1;input.num_examples:30;task.stack.xla:False'
    overrides += ';task.train.learner.num_accumulated_mini_batches:2'
    overrides += ";task.train.eval_datasets:['Train'];task.train.eval_interval_steps:1"
    if num_replicas > 1:
      overrides += ';task.stack.num_stages:1;task.stack.splits:[]'
    return [
      *processes.ToyArgs(tmp_path / name, max_steps, overrides),
      f'--num_replicas={num_replicas}', *more,
    ]  # fmt: skip

  def Train(args):
    done = processes.Succeeded(forks.Run('trainer', '--job=train_and_eval', *args, cwd=project))
    assert 'End of sequence' not in done.stderr
    # Lines of training and of all evaluations.
    assert done.stderr.count(_READ) == (2 if of_workers in args else 0)
    return done.stdout

  of_workers = f'--cluster={hosts}'
  Train(Args('workers', 1, 1, of_workers))
  shutil.copytree(tmp_path / 'workers', tmp_path / 'trainer')
  ended = {}
  for name, more in (('trainer', []), ('workers', [of_workers])):
    args = Args(name, 9, 2, *more)
    printed = Train(args)
    assert naming.AnyLineNames(printed, 'resuming', 'step 1', '16 examples')
    assert naming.AnyLineNames(printed, 'data', 'step 2')
    ended[name] = processes.Tensors(tmp_path / name, 2)
  done = processes.Succeeded(forks.Run('evaluator', '--once', '--split=Train', *args, cwd=project))
  assert done.stderr.count(_READ) == 1
  processes.AssertSameTensors(ended['workers'], ended['trainer'])
  first, last = processes.Scalars(tmp_path / 'trainer' / 'eval_train')['loss']
  assert (first[0], last[0]) == (1, 2)
  assert processes.Scalars(tmp_path / 'workers' / 'eval_train')['loss'] == [first, last, last]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
