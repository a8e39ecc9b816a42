# SPDX-License-Identifier: Apache-2.0
"""Damaged or forged files raise the documented errors, and no others."""

import hashlib
import inspect
import json
import os
import sys

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer
from lingvo_gpipe.distributed import cluster_spec
from lingvo_gpipe.input.text import sentencepiece_tokenizer, sentencepiece_training, token_store
from tests import fuzzing, naming

_TEXT = 'a plain sentence, with words and 漢字.'
_BYTES = [b'', b'\0', b'\xff', b'\n', b'\x0a\x05', b'\x08\x80', b'\xff' * 9, b'\x00' * 50]

_leaf = st.one_of(
  st.none(), st.booleans(), st.integers(), st.sampled_from([-1, 10**30, 1e400, 0.5, float('nan')]),
  st.text(max_size=3), st.sampled_from(['..', '../x', '/etc/passwd', 'float32', 'resource']),
)  # fmt: skip
_json = st.recursive(
  _leaf,
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=4,
)


@st.composite
def _Changed(draw, record):
  """Returns a copy of nested JSON with one part changed or left out."""
  if not isinstance(record, dict | list) or not record or draw(st.integers(0, 3)) == 0:
    return draw(_json)
  new = dict(record) if isinstance(record, dict) else dict(enumerate(record))
  key = draw(st.sampled_from(list(new)))
  if draw(st.integers(0, 5)) == 0:
    del new[key]
  else:
    new[key] = draw(_Changed(new[key]))
  return new if isinstance(record, dict) else list(new.values())


# ---- vocabularies --------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """Returns the bytes of two vocabularies."""
  folder = tmp_path_factory.mktemp('vocabularies')
  for name, options in (('unigram', {}), ('bpe', {'model_type': 'bpe', 'lossless': True})):
    texts = [inspect.getsource(json), _TEXT]
    sentencepiece_training.Train(texts, str(folder / name), 400, **options)
  return folder, [(folder / f'{name}.model').read_bytes() for name in ('unigram', 'bpe')]


@fuzzing.Settings(0.5)
@hypothesis.given(st.data())
def testVocabularies(models, data):
  folder, samples = models
  damaged = fuzzing.NearlyRight(samples, [*_BYTES, b'<unk>', b'</s>'], st.binary(max_size=8))
  path = folder / 'damaged.model'
  path.write_bytes(data.draw(damaged | st.binary(max_size=99)))
  try:
    loaded = sentencepiece_tokenizer.Load(str(path), 400, 'here')
  except ValueError as e:
    assert 'here' in str(e)
    return
  # A vocabulary that loads can be used: it may be a valid one with other content.
  for ids in loaded.Encode([_TEXT, '', '\0\ud7ff<unk> ']):
    assert ids.dtype == np.int32
    loaded.Decode(ids)
  loaded.Decode(range(-5, loaded.vocab_size + 5))
  assert loaded.Text().count('\n') == loaded.vocab_size


# ---- token stores --------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """Returns a folder with a token store, and the contents of its files."""
  folder = tmp_path_factory.mktemp('stores') / 'store'
  token_store.TokenStore.Write(str(folder), [[1, 2, 3], [], [4]])
  return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


@fuzzing.Settings()
@hypothesis.given(st.data())
def testTokenStores(stored, data):
  folder, files = stored
  name = data.draw(st.sampled_from(sorted(files)))
  damaged = data.draw(fuzzing.NearlyRight([files[name]], _BYTES, st.binary(max_size=4)))
  if name.endswith('.json') and data.draw(st.booleans()):
    damaged = json.dumps(data.draw(_Changed(json.loads(files[name])))).encode()
  (folder / name).write_bytes(damaged)
  try:
    loaded = token_store.TokenStore.Load(str(folder))
    assert [list(loaded[i]) for i in range(len(loaded))] == [[1, 2, 3], [], [4]]
  except token_store.DamagedStoreError as e:
    assert str(folder) in str(e)
  finally:
    (folder / name).write_bytes(files[name])


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Returns (a directory with one checkpoint, the commit file)."""
  directory = tmp_path_factory.mktemp('run')
  values = {'net.w': tf.ones([2, 3]), 'step': tf.constant(5, tf.int64)}
  commit = checkpointer.Checkpointer(directory).Save(5, values, {'cut': [1, 2], 'model': 'x'})
  return directory, commit


@fuzzing.Settings()
@hypothesis.given(st.data())
def testCommitFiles(saved, data):
  directory, commit = saved
  with open(commit, encoding='utf-8') as f:
    text = f.read()
  record = json.loads(text)['checkpoint']
  if data.draw(st.booleans()):
    # An attacker can compute a matching digest.
    record = data.draw(_Changed(record))
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    changed = json.dumps({'sha256': digest, 'checkpoint': record})
  else:
    changed = data.draw(fuzzing.NearlyRight([text], ['"', '{', ']', '1'], st.text(max_size=4)))
  try:
    info = checkpoint_info.ParseCommit(str(directory), commit, changed)
  except checkpointer.DamagedError:
    return
  except ValueError as e:
    assert naming.Names(str(e), commit, 'format', 'reads')
    return
  # All files that it refers to are inside the directory.
  assert os.path.dirname(os.path.dirname(info.prefix)) == str(directory)
  assert all(os.path.basename(name) == name for name in info.written['files'])
  try:
    checkpointer.Checkpointer(directory).Verify(info)
  except checkpointer.DamagedError:
    pass


# ---- clusters ------------------------------------------------------------------------------------


@fuzzing.Settings()
@hypothesis.given(st.data())
def testClusters(data):
  record = {'cluster': {'worker': ['a:1', 'b:2'], 'chief': ['c:3']}, 'task': {'index': 0}}
  near = fuzzing.NearlyRight([json.dumps(record)], [':', '"', '[]', '1'], st.text(max_size=4))
  text = data.draw(near | _Changed(record).map(json.dumps))
  try:
    loaded = cluster_spec.FromEnvironment({'TF_CONFIG': text})
  except ValueError as e:
    assert 'TF_CONFIG' in str(e)
    return
  assert loaded is None or all(0 < int(a.rpartition(':')[2]) < 2**16 for a in loaded.workers)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
