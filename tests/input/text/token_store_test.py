# SPDX-License-Identifier: Apache-2.0
"""Token stores return their sequences, from memory and from files, or name the damage."""

import json
import logging
import os
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gpipe.input.text import token_store
from tests import naming

_SEQUENCES = [[5, 6, 7], [], [8], [9, 10, 11, 12], []]


def _Store(sequences=_SEQUENCES):
  return token_store.TokenStore.Build(sequences)


def _Same(store, sequences):
  assert store.tokens.dtype == np.int32 and store.offsets.dtype == np.int64
  assert [list(store[i]) for i in range(len(store))] == [list(s) for s in sequences]
  assert list(store.lengths) == [len(s) for s in sequences]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=20))
def testStoreReturnsItsSequences(sequences):
  _Same(_Store(sequences), sequences)


@pytest.mark.parametrize('sequences', [_SEQUENCES, [], [[]], [np.arange(300), (1, 2)]])
def testSavedStoreIsEqual(tmp_path, monkeypatch, sequences):
  monkeypatch.setattr(token_store, '_BLOCK', 2)  # Writes several blocks.
  store = _Store(sequences)
  store.Save(str(tmp_path / 'a' / 'saved'))
  token_store.TokenStore.Write(str(tmp_path / 'written'), iter(sequences))
  for path in ('a/saved', 'written'):
    loaded = token_store.TokenStore.Load(str(tmp_path / path))
    _Same(loaded, sequences)
    assert loaded.fingerprint == store.fingerprint
  assert sorted(os.listdir(tmp_path)) == ['a', 'written']  # No unfinished folder is left.


def testFingerprintDependsOnTokensAndLengths():
  stores = [[[5, 6], [7]], [[5], [6, 7]], [[5, 6], [8]], [[5, 6], [7], []], [[5, 6]]]
  assert len({_Store(sequences).fingerprint for sequences in stores}) == len(stores)


def testLoadedTokensAreMapped(tmp_path):
  path = str(tmp_path / 'store')
  _Store([np.arange(1 << 20)]).Save(path)
  loaded = token_store.TokenStore.Load(path)
  with pytest.raises(ValueError, match='read-only'):
    loaded.tokens[0] = 1
  with open('/proc/self/maps') as f:
    assert f'{path}/tokens.int32' in f.read()


def testTensorsShareTheMemoryOfTheArrays(tmp_path):
  sequences = [np.arange(1 << 18)]
  memory = _Store(sequences)
  memory.Save(str(tmp_path / 'store'))
  mapped = token_store.TokenStore.Load(str(tmp_path / 'store'))
  shutil.rmtree(tmp_path / 'store')
  for store in (memory, mapped):
    tensors = tf.function(lambda store=store: store.tensors).get_concrete_function().captured_inputs
    for tensor, array in zip(tensors, store.tensors, strict=True):
      assert tensor is array
    for tensor, array in zip(tensors, (store.tokens, store.offsets), strict=True):
      np.testing.assert_array_equal(tensor, array)
      assert tensor.dtype == array.dtype and tensor.device.endswith('CPU:0')
      assert np.asarray(memoryview(tensor)).ctypes.data == array.ctypes.data
    _Same(store, sequences)


def testReplacedStoreStaysReadable(tmp_path):
  path = str(tmp_path / 'store')
  _Store().Save(path)
  old = token_store.TokenStore.Load(path)
  _Store([[1]]).Save(path)
  _Same(token_store.TokenStore.Load(path), [[1]])
  _Same(old, _SEQUENCES)


def _Truncate(path):
  with open(f'{path}/tokens.int32', 'r+b') as f:
    f.truncate(8)


def _Change(path):
  with open(f'{path}/tokens.int32', 'r+b') as f:
    f.write(b'\1')


def _ChangeOffsets(path):
  with open(f'{path}/offsets.int64', 'r+b') as f:
    f.seek(8)
    f.write(b'\2')


def _Edit(path, **values):
  with open(f'{path}/store.json') as f:
    info = json.load(f)
  with open(f'{path}/store.json', 'w') as f:
    json.dump({**info, **values}, f)


# {damage: parts of the message}.
_DAMAGES = {
  _Truncate: ('tokens.int32', '8 bytes', 32),
  _Change: ('changed', 'fingerprint'),
  _ChangeOffsets: ('changed', 'fingerprint'),
  lambda path: os.remove(f'{path}/store.json'): ('store.json',),
  lambda path: open(f'{path}/store.json', 'w').close(): ('complete', 'char 0'),
  lambda path: _Edit(path, version=7): ('version 7', 1),
  lambda path: _Edit(path, version='a\nb'): ("version 'a\\nb'",),
  lambda path: _Edit(path, fingerprint='a\nb'): ("fingerprint 'a\\nb'",),
  lambda path: _Edit(path, num_tokens=None): ('complete', 'NoneType'),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def testDamageIsDetectedAndRepaired(tmp_path, caplog, damage):
  path = str(tmp_path / 'store')
  calls = []

  def Make():
    calls.append(1)
    return _SEQUENCES

  caplog.set_level(logging.WARNING)
  for _ in range(2):
    _Same(token_store.LoadOrWrite(path, Make), _SEQUENCES)
  assert len(calls) == 1 and not caplog.records
  damage(path)
  with pytest.raises(token_store.DamagedStoreError, match=naming.Naming(path, *_DAMAGES[damage])):
    token_store.TokenStore.Load(path)
  _Same(token_store.LoadOrWrite(path, Make), _SEQUENCES)
  assert len(calls) == 2
  assert naming.AnyLineNames(caplog.text, path, 'again')
  assert os.listdir(tmp_path) == ['store']


def testFailureLeavesNoFiles(tmp_path):
  def Fails():
    yield [1]
    raise RuntimeError('no more')

  with pytest.raises(RuntimeError, match='no more'):
    token_store.LoadOrWrite(str(tmp_path / 'store'), Fails)
  assert not os.listdir(tmp_path)
  with pytest.raises(FileNotFoundError, match=naming.Naming('no token store', tmp_path / 'store')):
    token_store.TokenStore.Load(str(tmp_path / 'store'))


def testAFolderTooDeepForPythonCannotBeWritten(tmp_path):
  with pytest.raises(OSError, match=naming.Naming('tokens', 'recursion')):
    token_store.TokenStore.Write(str(tmp_path) + '/x' * 2500, [[1]])


def testAnotherProcessMayWriteFirst(tmp_path):
  path = str(tmp_path / 'store')

  def Make():
    _Store().Save(path)  # The other process.
    return [[1]]

  _Same(token_store.LoadOrWrite(path, Make), [[1]])
  assert os.listdir(tmp_path) == ['store']


@pytest.mark.parametrize(
  'tokens, offsets, names',
  [
    (np.zeros([3], np.int64), np.array([0, 3]), ('int32 [total]', 'int64 [3]')),
    (np.zeros([3], np.int32), np.array([0, 2]), ('offsets', '0 to 3')),
    (np.zeros([3], np.int32), np.array([1, 3]), ('offsets', '0 to 3')),
    (np.zeros([3], np.int32), np.array([0, 2, 1, 3]), ('offsets', 'ascending')),
    (np.zeros([0], np.int32), np.zeros([0], np.int64), ('offsets', '0 to 0')),
  ],
)
def testInvalidArraysAreErrors(tokens, offsets, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    token_store.TokenStore(tokens, offsets)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
