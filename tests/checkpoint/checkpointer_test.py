# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are restored exactly, and a failing save leaves earlier checkpoints whole."""

import contextlib
import errno
import json
import os
import pathlib
import random
import resource
import shutil
import stat
import sys

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer, tensor_bundle
from lingvo_gpipe.core import files
from tests import naming, processes

# The result of `tensor_bundle.Write` for a checkpoint without files.
_WRITTEN = {'files': {}, 'index_sha256': '0' * 64}


class Killed(BaseException):
  """Stands for SIGKILL: no later operation has an effect."""


def _Variables(step, n=3):
  """Returns variables on several devices with the step as their value."""
  out = {}
  for i in range(n):
    with tf.device(f'/device:CPU:{i % 4}'):
      out[f'lm.layers[{i}].w'] = tf.Variable(tf.fill([4, 5], float(step)))
  return out


def _Save(directory, step, value=None, **kwargs):
  variables = _Variables(step if value is None else value)
  return checkpointer.Checkpointer(directory, **kwargs).Save(step, variables, {'step': step})


def _Value(directory):
  """Restores the newest checkpoint as a new process does; returns (step, value)."""
  variables = _Variables(-1)
  info, metadata = checkpointer.Checkpointer(directory).RestoreLatest(variables)
  values = {float(x) for v in variables.values() for x in v.numpy().ravel()}
  assert len(values) == 1 and metadata == {'step': info.step}
  return info.step, values.pop()


def _Steps(directory):
  return [info.step for info in checkpointer.Checkpointer(directory).All()]


def _AssertTidy(directory):
  """Asserts that the directory holds only commit files and the folders they name."""
  expected = set()
  for info in checkpointer.Checkpointer(directory).All():
    expected |= {os.path.basename(info.path), os.path.basename(os.path.dirname(info.prefix))}
  assert set(os.listdir(directory)) == expected


@pytest.mark.parametrize('group_bytes', [1, 100, 2**28])
def testTensorsOfAllKindsAreRestored(tmp_path, monkeypatch, group_bytes):
  monkeypatch.setattr(tensor_bundle, 'GROUP_BYTES', group_bytes)
  values = {
    'lm.stack.layers[3].self_atten.w': tf.random.stateless_normal([7, 9], [1, 2]),
    'a/b:0 é~ ': tf.constant(['text', b'\xff\x00', '']),
    'half': tf.cast(tf.random.stateless_normal([3], [1, 2]), tf.bfloat16),
    'f64': tf.constant([np.nan, np.inf, -0.0], tf.float64),
    'scalar': tf.constant(2**60, tf.int64),
    'flags': tf.constant([True, False]),
    'empty': tf.zeros([0, 3], tf.float16),
    'complex': tf.constant(1 + 2j),
  }
  variables = {}
  for i, (path, value) in enumerate(values.items()):
    with tf.device(f'/device:CPU:{i % 4}'):
      variables[path] = (tf.Variable(value), value, value.numpy())[i % 3]
  saver = checkpointer.Checkpointer(tmp_path / 'new' / 'folder')
  assert saver.Latest() is None and saver.All() == [] and not tmp_path.joinpath('new').exists()
  metadata = {'data': {'position': 10**20, 'x': [0.1, None, True, 'ä']}, 'nan': -1e400}
  assert saver.Save(205, variables, metadata) == str(tmp_path / 'new/folder/ckpt-00000205.json')

  info = checkpointer.Checkpointer(tmp_path / 'new' / 'folder').Latest()
  assert info.step == 205 and info in saver.All()
  assert saver.ReadMetadata(info) == metadata
  assert info.tensors == {k: tf.TensorSpec(v.shape, v.dtype) for k, v in values.items()}
  fresh = {}
  for i, (path, value) in enumerate(values.items()):
    with tf.device(f'/device:CPU:{3 - i % 4}'):
      fresh[path] = tf.Variable(tf.zeros_like(value))
  devices = {path: v.device for path, v in fresh.items()}
  assert saver.Restore(info, fresh) == metadata
  plain = tf.train.load_checkpoint(info.prefix)
  for path, value in values.items():
    assert fresh[path].numpy().tobytes() == value.numpy().tobytes() or value.dtype == tf.string
    np.testing.assert_array_equal(fresh[path].numpy(), value.numpy())
    assert fresh[path].device == devices[path]
    np.testing.assert_array_equal(plain.get_tensor(path), value.numpy())
  # A group is at most GROUP_BYTES, except for a larger tensor.
  parts = [name for name in info.written['files'] if '.data-' in name]
  assert len(parts) == {1: 8, 100: 2, 2**28: 1}[group_bytes]


_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
  lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.dictionaries(st.text(), _JSON))
def testMetadataAreRestored(metadata):
  checkpoint_info.CheckJson('metadata', metadata)
  text = checkpoint_info.CommitText(7, 'ckpt-00000007-01234567', {}, metadata, _WRITTEN)
  info = checkpoint_info.ParseCommit('d', 'd/ckpt-00000007.json', text)
  assert info.metadata == metadata and info.prefix == 'd/ckpt-00000007-01234567/tensors'


def testAnyFlippedBitInACommitFileIsDetected():
  metadata = {'loss': 1.25, 'name': 'abc'}
  text = checkpoint_info.CommitText(7, 'ckpt-00000007-01234567', {}, metadata, _WRITTEN)
  for i in range(8 * len(text)):
    data = bytearray(text.encode())
    data[i // 8] ^= 1 << i % 8
    changed = bytes(data).decode(errors='replace')
    try:
      info = checkpoint_info.ParseCommit('d', 'd/ckpt-00000007.json', changed)
    except checkpointer.DamagedError:
      continue
    # A flipped bit may change white space or the form of a number, but not the meaning.
    assert json.loads(changed) == json.loads(text) and info.metadata == metadata


@pytest.mark.parametrize(
  'record',
  [
    {'folder': '../ckpt-00000007-01234567'},
    {'folder': '/tmp/ckpt-00000007-01234567'},
    {'folder': 'ckpt-00000008-01234567'},
    {'step': 8},
    {'step': 'x'},
    {'tensors': {'a': {'dtype': 'os.system', 'shape': [1]}}},
    {'tensors': []},
  ],
)
def testForgedCommitFilesAreRejected(record):
  text = checkpoint_info.CommitText(7, 'ckpt-00000007-01234567', {}, {}, _WRITTEN)
  forged = {**json.loads(text)['checkpoint'], **record}
  text = json.dumps({'sha256': checkpoint_info._Digest(forged), 'checkpoint': forged})
  with pytest.raises(checkpointer.DamagedError):
    checkpoint_info.ParseCommit('d', 'd/ckpt-00000007.json', text)
  for other in ('', '[]', '{}', '[' * 100000, '\x00'):
    with pytest.raises(checkpointer.DamagedError):
      checkpoint_info.ParseCommit('d', 'd/ckpt-00000007.json', other)


def testRestoreNamesAllMismatchesBeforeAssigning(tmp_path):
  _Save(tmp_path, 1)
  saver = checkpointer.Checkpointer(tmp_path)
  info = saver.Latest()
  variables = {
    'lm.layers[0].w': tf.Variable(tf.zeros([4, 5])),
    'lm.layers[1].w': tf.Variable(tf.zeros([5, 4])),
    'lm.layer[2].w': tf.Variable(tf.zeros([4, 5])),
    'zzz': tf.Variable(0),
  }
  names = (
    'ckpt-00000001.json',
    '4 variables',
    '2: lm.layer[2].w (closest: lm.layers[2].w), zzz',
    '1: lm.layers[2].w (closest: lm.layer[2].w)',
    'lm.layers[1].w (variable float32[5, 4], checkpoint float32[4, 5])',
  )
  with pytest.raises(ValueError, match=naming.Naming(*names)) as e:
    saver.Restore(info, variables)
  assert '\n' not in str(e.value)
  assert not any(v.numpy().any() for v in variables.values())
  del variables['lm.layers[1].w']
  only_there = naming.Naming('only in', 2, 'lm.layers[1].w', 'lm.layers[2].w')
  with pytest.raises(ValueError, match=only_there):
    saver.Restore(info, variables, allow_missing=True)
  with pytest.raises(ValueError, match=naming.Naming('not in', 2, 'lm.layer[2].w', 'zzz')):
    saver.Restore(info, variables, allow_extra=True)
  assert saver.Restore(info, variables, allow_missing=True, allow_extra=True) == {'step': 1}
  assert variables['lm.layers[0].w'].numpy().all() and not variables['lm.layer[2].w'].numpy().any()
  other_dtype = naming.Naming('variable float64[4, 5]', 'checkpoint float32[4, 5]')
  with pytest.raises(ValueError, match=other_dtype):
    saver.Restore(
      info, {'lm.layers[0].w': tf.Variable(tf.zeros([4, 5], tf.float64))}, allow_extra=True
    )
  many = {f'other{i}': tf.Variable(0.0) for i in range(50)}
  with pytest.raises(ValueError, match=naming.Naming(50, 'other0', '42 more')):
    saver.Restore(info, many, allow_extra=True)


def testSaveChecksItsArguments(tmp_path):
  saver = checkpointer.Checkpointer(tmp_path / 'x')
  good = {'a': tf.Variable(0.0)}
  for error, names, args in (
    (ValueError, ('step', 0, -1), (-1, good, {})),
    (ValueError, ('No variables', 'step 1', tmp_path / 'x'), (1, {}, {})),
    (ValueError, ('string', "''"), (1, {'': tf.Variable(0)}, {})),
    (TypeError, ("'a'", 'float'), (1, {'a': 1.5}, {})),
    (TypeError, ("metadata['x'][1]", 'int64', 'int(x)'), (1, good, {'x': [1, np.int64(2)]})),
    (TypeError, ("metadata['d']", 'key 3'), (1, good, {'d': {3: 4}})),
    (TypeError, ("metadata['t']", 'EagerTensor'), (1, good, {'t': tf.constant(1)})),
  ):
    with pytest.raises(error, match=naming.Naming(*names)):
      saver.Save(*args)
  assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('n', [1, 2, None])
def testTheLastCheckpointsAreKept(tmp_path, n):
  for step in (10, 20, 30, 40):
    _Save(tmp_path, step, max_to_keep=n)
  assert _Steps(tmp_path) == [10, 20, 30, 40][-n if n else 0 :]
  _AssertTidy(tmp_path)


def testCheckpointsAreKeptAtIntervalsOfTime(tmp_path, monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(checkpoint_info.time, 'time', lambda: clock[0])
  for hour in range(9):
    clock[0] = hour * 3600.0
    _Save(tmp_path, hour, max_to_keep=2, keep_every_n_hours=2.5)
  assert _Steps(tmp_path) == [0, 3, 6, 7, 8]


def testAProtectedCheckpointStaysUntilItsProtectionEnds(tmp_path):
  def Save(step, protected):
    saver = checkpointer.Checkpointer(tmp_path, max_to_keep=2)
    saver.Save(step, _Variables(step), {}, protected=protected)

  for step in (10, 20, 30, 40):
    Save(step, [10])
  assert _Steps(tmp_path) == [10, 30, 40]
  Save(50, [50])
  assert _Steps(tmp_path) == [40, 50]
  Save(60, [5])  # A protected step without a checkpoint is allowed.
  assert _Steps(tmp_path) == [50, 60]
  _AssertTidy(tmp_path)


def testSavingAStepAgainReplacesItAndKeepsLaterSteps(tmp_path):
  for step in (1, 2, 3):
    _Save(tmp_path, step, max_to_keep=2)
  _Save(tmp_path, 3, value=33.0, max_to_keep=2)
  assert _Steps(tmp_path) == [2, 3] and _Value(tmp_path) == (3, 33.0)
  _AssertTidy(tmp_path)
  _Save(tmp_path, 1, max_to_keep=1)
  assert _Steps(tmp_path) == [1, 3]


class _Faults:
  """Counts file operations and fails at the n-th; after a kill all later ones fail, too."""

  def __init__(self, monkeypatch, fatal):
    self.count = 0
    self.fail_at = None
    self._fatal = fatal
    self._dead = False
    gfile = tf.io.gfile
    for owner, name in (
      *((gfile, name) for name in ('makedirs', 'rename', 'rmtree', 'remove', 'stat', 'GFile')),
      *((tf.raw_ops, name) for name in ('SaveV2', 'MergeV2Checkpoints', 'RestoreV2')),
      (files, 'Sync'),
    ):
      monkeypatch.setattr(owner, name, self._Wrap(getattr(owner, name)))

  def Arm(self, n):
    self.count, self.fail_at, self._dead = 0, n, False

  def _Wrap(self, function):
    def Call(*args, **kwargs):
      if self._dead:
        raise Killed()
      self.count += 1
      if self.count == self.fail_at:
        if self._fatal:
          self._dead = True
          raise Killed()
        raise tf.errors.UnknownError(None, None, 'disk on fire')
      return function(*args, **kwargs)

    return Call


@pytest.mark.parametrize('step', [2, 3])
@pytest.mark.parametrize('fatal', [True, False])
def testAKillOrErrorAtAnyFileOperationLosesNothing(tmp_path, monkeypatch, step, fatal):
  """Step 3 is new; step 2 replaces the newest. Small groups give several files each."""
  monkeypatch.setattr(tensor_bundle, 'GROUP_BYTES', 100)
  faults = _Faults(monkeypatch, fatal)
  values = _Variables(100.0 + step)
  outcomes = set()
  before = tmp_path / 'before'
  for old in (1, 2):
    _Save(before, old, max_to_keep=2)
  # Leftovers of an earlier killed save.
  (before / 'ckpt-00000003-0badbeef').mkdir()
  (before / 'ckpt-00000003.json.tmp-0badbeef').write_text('{')
  for n in range(1, 100):
    directory = tmp_path / str(n)
    shutil.copytree(before, directory)
    faults.Arm(n)
    saver = checkpointer.Checkpointer(directory, max_to_keep=2)
    try:
      saver.Save(step, values, {'step': step})
      outcome = 'saved'
    except Killed:
      outcome = 'killed'
    except OSError as e:
      assert naming.Names(str(e), f'checkpoint of step {step}', 'on fire')
      assert '\n' not in str(e)
      outcome = 'refused'
    finished = faults.count < n
    faults.Arm(None)
    restored = _Value(directory)
    outcomes.add((outcome, restored))
    assert restored in ((2, 2.0), (step, 100.0 + step))
    assert restored[1] > 100 or outcome != 'saved'
    # The next save succeeds and removes leftovers.
    _Save(directory, 4, max_to_keep=2)
    assert _Value(directory) == (4, 4.0)
    assert len(_Steps(directory)) == 2
    _AssertTidy(directory)
    if finished:
      break
  else:
    pytest.fail('the save never finished')
  new = (step, 100.0 + step)
  stopped = 'killed' if fatal else 'refused'
  assert {(stopped, (2, 2.0)), (stopped, new), ('saved', new)} == outcomes
  assert n > 20


def testSigkillAtRandomMomentsLosesNothing(forks, tmp_path):
  directory = tmp_path / 'ckpts'
  kills = 10
  done = forks.Run(processes.Program('kill_loop'), str(directory), str(kills))
  assert done.returncode == 0, done.stdout + done.stderr
  resumed = [int(x) for x in pathlib.Path(f'{directory}.log').read_text().split()]
  assert len(resumed) == kills and resumed == sorted(resumed)
  variables = {f'v{i}': tf.Variable(tf.zeros([100, 100])) for i in range(4)}
  info, _ = checkpointer.Checkpointer(directory).RestoreLatest(variables)
  saved = pathlib.Path(f'{directory}.saved').read_text()
  assert info.step >= int(saved or 0) and info.step > 0
  assert all((v.numpy() == info.step).all() for v in variables.values())


def _Flip(data, rng):
  data = bytearray(data)
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  return bytes(data)


_DAMAGES = {
  'flipped': _Flip,
  'truncated': lambda data, rng: data[: rng.randrange(len(data))],
  'emptied': lambda data, rng: b'',
  'longer': lambda data, rng: data + b'\0',
  'removed': lambda data, rng: None,
}


@pytest.mark.parametrize('damage', _DAMAGES)
def testADamagedCheckpointIsLoggedAndSkipped(tmp_path, monkeypatch, caplog, damage):
  monkeypatch.setattr(tensor_bundle, 'GROUP_BYTES', 100)
  rng = random.Random(3)
  _Save(tmp_path, 1)
  _Save(tmp_path, 2)
  info = checkpointer.Checkpointer(tmp_path).Latest()
  folder = os.path.dirname(info.prefix)
  for name in sorted(os.listdir(folder)):
    path = pathlib.Path(folder, name)
    original = path.read_bytes()
    for _ in range(8 if damage == 'flipped' else 1):
      changed = _DAMAGES[damage](original, rng)
      path.unlink() if changed is None else path.write_bytes(changed)
      caplog.clear()
      reader = checkpointer.Checkpointer(tmp_path)
      assert reader.Latest().step == 1
      assert reader.Latest().step == 1
      # One warning, with the reason.
      warnings = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
      assert len(warnings) == 1 and info.prefix in warnings[0], warnings
      assert _Value(tmp_path) == (1, 1.0)
      with pytest.raises(
        checkpointer.DamagedError, match=naming.Naming('ckpt-00000002', 'tensors')
      ):
        checkpointer.Checkpointer(tmp_path).Restore(info, _Variables(0))
    path.write_bytes(original)
  assert _Value(tmp_path) == (2, 2.0)


@pytest.mark.parametrize('damage', ['truncated', 'emptied'])
def testACheckpointWithADamagedCommitFileIsSkipped(tmp_path, caplog, damage):
  _Save(tmp_path, 1)
  path = pathlib.Path(_Save(tmp_path, 2))
  original = path.read_bytes()
  path.write_bytes(_DAMAGES[damage](original, random.Random(0)))
  assert _Value(tmp_path) == (1, 1.0)
  assert any('ckpt-00000002.json' in r.getMessage() for r in caplog.records)
  # Its data stay while they are newer than the oldest kept checkpoint: it may be readable later.
  _Save(tmp_path, 3, max_to_keep=2)
  path.write_bytes(original)
  assert _Steps(tmp_path) == [1, 2, 3]
  assert checkpointer.Checkpointer(tmp_path).Latest().step == 3
  path.write_bytes(b'')
  for step in (4, 5):
    _Save(tmp_path, step, max_to_keep=2)
  assert _Steps(tmp_path) == [4, 5]
  _AssertTidy(tmp_path)


def testAFolderInPlaceOfACommitFileIsMovedAway(tmp_path):
  _Save(tmp_path, 1)
  for step in (2, 3):
    path = pathlib.Path(_Save(tmp_path, step))
    path.unlink()
    path.mkdir()
    (path / 'notes').touch()
  assert _Value(tmp_path) == (1, 1.0)
  _Save(tmp_path, 2)
  assert _Value(tmp_path) == (2, 2.0)
  for step in (4, 5):
    _Save(tmp_path, step, max_to_keep=2)
  assert _Steps(tmp_path) == [4, 5]
  assert len(list(tmp_path.glob('ckpt-0000000[23].json.folder-*/notes'))) == 2


def testLatestSkipsACheckpointThatRestoreFoundDamaged(tmp_path):
  saver = checkpointer.Checkpointer(tmp_path, max_to_keep=2)
  for step in (1, 2):
    saver.Save(step, _Variables(step), {'step': step})
  info = saver.Latest()
  data = pathlib.Path(f'{info.prefix}.data-00000-of-00001')
  data.write_bytes(_Flip(data.read_bytes(), random.Random(0)))
  assert saver.Latest() == info  # This process read it in full when it was saved.
  variables = _Variables(-1)
  with pytest.raises(checkpointer.DamagedError):
    saver.Restore(info, variables)
  assert saver.Latest().step == 1
  # A damaged checkpoint does not count towards max_to_keep: the good checkpoints stay.
  saver.Save(3, _Variables(3), {'step': 3})
  assert [i.step for i in saver.All()] == [1, 2, 3]
  saver.Save(4, _Variables(4), {'step': 4})
  assert [i.step for i in saver.All()] == [3, 4]
  _AssertTidy(tmp_path)


def testAllCheckpointsDamagedIsAnError(tmp_path):
  info = checkpointer.Checkpointer(tmp_path)
  _Save(tmp_path, 1)
  os.truncate(f'{info.Latest().prefix}.data-00000-of-00001', 10)
  for call in (lambda c: c.Latest(), lambda c: c.RestoreLatest(_Variables(0))):
    with pytest.raises(
      checkpointer.DamagedError, match=naming.Naming(tmp_path, 'ckpt-00000001', '10 bytes', 240)
    ):
      call(checkpointer.Checkpointer(tmp_path))


def testANewerFormatIsRejected(tmp_path, monkeypatch):
  _Save(tmp_path, 1)
  with monkeypatch.context() as m:
    m.setattr(checkpoint_info, 'FORMAT_VERSION', 2)
    text = checkpoint_info.CommitText(2, 'ckpt-00000002-00000000', {}, {}, _WRITTEN)
  (tmp_path / 'ckpt-00000002.json').write_text(text)
  for call in (checkpointer.Checkpointer.Latest, checkpointer.Checkpointer.All):
    with pytest.raises(ValueError, match=naming.Naming('ckpt-00000002.json', 'format 2', 1)):
      call(checkpointer.Checkpointer(tmp_path))
  with pytest.raises(ValueError, match=naming.Naming('ckpt-00000002.json', 'format 2')):
    _Save(tmp_path, 3)


def testACheckpointMayBeRemovedWhileItIsRead(tmp_path, monkeypatch, caplog):
  """As in an evaluator: the trainer saves twice and keeps one between listing and reading."""
  _Save(tmp_path, 1)
  check = tensor_bundle.CheckFiles
  saves = iter([2, 3])

  def SaveFirst(prefix, written):
    if (step := next(saves, None)) is not None:
      with monkeypatch.context() as m:
        m.setattr(tensor_bundle, 'CheckFiles', check)
        _Save(tmp_path, step, max_to_keep=1)
    check(prefix, written)

  monkeypatch.setattr(tensor_bundle, 'CheckFiles', SaveFirst)
  assert _Value(tmp_path) == (3, 3.0)
  assert not [r for r in caplog.records if r.levelname == 'WARNING']


def testAFullDiskLeavesEarlierCheckpoints(tmp_path):
  _Save(tmp_path, 1)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  big = {'v': tf.Variable(tf.zeros([1000, 100]))}
  try:
    # Imitates a full disk without root rights: files may not grow beyond this size.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    with pytest.raises(OSError, match=naming.Naming('step 2', tmp_path, 'File too large')):
      checkpointer.Checkpointer(tmp_path).Save(2, big, {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  _AssertTidy(tmp_path)
  assert _Value(tmp_path) == (1, 1.0)


@pytest.mark.parametrize('name', ['lr=[1,2]', 'back\\slash'])
def testADirectoryNameThatTensorFlowReadsAsAPatternIsRejectedBeforeTheFirstStep(tmp_path, name):
  with pytest.raises(
    ValueError, match=naming.Naming(repr(str(tmp_path / name)), 'pattern', 'backslash')
  ):
    checkpointer.Checkpointer(tmp_path / name).CheckWritable()
  assert os.listdir(tmp_path / name) == []


def testOtherDirectoryNamesWork(tmp_path):
  directory = tmp_path / "a *?{0}%s'\né"
  checkpointer.Checkpointer(directory).CheckWritable()
  _Save(directory, 1)
  assert _Value(directory) == (1, 1.0)


@pytest.mark.parametrize('fails_for_files', [False, True])
def testAFileSystemMayLackFsyncOfFolders(tmp_path, monkeypatch, fails_for_files):
  """Imitates a network file system. A failing fsync of a file is an error."""
  sync = os.fsync

  def Sync(descriptor):
    if fails_for_files or stat.S_ISDIR(os.fstat(descriptor).st_mode):
      raise OSError(errno.EINVAL, 'Invalid argument')
    sync(descriptor)

  monkeypatch.setattr(os, 'fsync', Sync)
  with pytest.raises(OSError, match='Invalid') if fails_for_files else contextlib.nullcontext():
    _Save(tmp_path, 1)
  assert _Steps(tmp_path) == ([] if fails_for_files else [1])


def testADirectoryThatCannotBeWrittenIsNamed(tmp_path):
  (tmp_path / 'file').write_text('')
  saver = checkpointer.Checkpointer(tmp_path / 'file' / 'ckpts')
  for call in (saver.CheckWritable, lambda: saver.Save(1, _Variables(1), {})):
    with pytest.raises(OSError) as e:
      call()
    assert str(tmp_path / 'file' / 'ckpts') in str(e.value) and '\n' not in str(e.value)
  with pytest.raises(OSError, match=naming.Naming('gopher://x/y', "scheme 'gopher'")):
    checkpointer.Checkpointer('gopher://x/y').Latest()
  checkpointer.Checkpointer(tmp_path / 'new').CheckWritable()
  assert os.listdir(tmp_path / 'new') == []


def testSavesToFileSystemsOfTensorFlow():
  directory = 'ram://checkpointer_test/ckpts'
  for step in (1, 2, 3, 3):
    _Save(directory, step, max_to_keep=2)
  assert _Steps(directory) == [2, 3] and _Value(directory) == (3, 3.0)
  assert len(tf.io.gfile.listdir(directory)) == 4


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
