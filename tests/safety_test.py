# SPDX-License-Identifier: Apache-2.0
"""No text is run as code, and no name leads out of the log directory."""

import ast
import hashlib
import json
import os
import pathlib
import sys

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import lingvo_gpipe
from lingvo_gpipe.checkpoint import assets, checkpointer, logdir_lock
from lingvo_gpipe.core import base_layer, weight_params
from lingvo_gpipe.evaluation import dataset_pass
from lingvo_gpipe.experiment import registry
from tests import fuzzing, naming, processes

_ROOT = pathlib.Path(lingvo_gpipe.__file__).parents[1]
_RUNS_TEXT = {'eval', 'exec', 'compile', '__import__'}
_RUNS_DATA = {
  'pickle',
  'cPickle',
  'dill',
  'cloudpickle',
  'joblib',
  'marshal',
  'shelve',
  'yaml',
  'code',
}
# Files that may import by name, or start processes. The last two import the files of a folder.
_IMPORTERS = {
  'lingvo_gpipe/__init__.py',
  'lingvo_gpipe/experiment/registry.py',
  'lingvo_gpipe/pipeline/schedule/schedules.py',
  'tools/site/reference.py',
}

_PARTS = [
  '..',
  '/',
  '\\',
  '.',
  '~',
  'Test',
  'test',
  '\0',
  '%2e',
  'x',
  '\n',
  'etc/passwd',
  '_',
  'lm.stdlib',
]
_hostile = st.lists(st.sampled_from(_PARTS), max_size=6).map(''.join) | st.text(max_size=9)


def _Trees():
  for package in ('lingvo_gpipe', 'tasks', 'params', 'tools'):
    for path in sorted((_ROOT / package).rglob('*.py')):
      yield path.relative_to(_ROOT).as_posix(), ast.parse(path.read_text(encoding='utf-8'))


def testNothingEvaluatesTextOrUnpickles():
  for name, tree in _Trees():
    for node in ast.walk(tree):
      if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] + [getattr(node, 'module', None) or '']
        assert not {m.split('.')[0] for m in modules} & _RUNS_DATA, f'{name}:{node.lineno}'
      if not isinstance(node, ast.Call):
        continue
      called = ast.unparse(node.func)
      assert called not in _RUNS_TEXT, f'{name}:{node.lineno}: {called}'
      assert called not in ('os.system', 'os.popen'), f'{name}:{node.lineno}: {called}'
      if called.startswith('importlib.') and 'metadata' not in called and 'util' not in called:
        assert name in _IMPORTERS or 'machinery' in called, f'{name}:{node.lineno}: {called}'
      for keyword in node.keywords:
        is_set = isinstance(keyword.value, ast.Constant) and keyword.value.value
        assert not (keyword.arg in ('shell', 'allow_pickle') and is_set), f'{name}:{node.lineno}'


@fuzzing.Settings(0.05)
@hypothesis.given(_hostile)
def testKeysAndDataSetsAreNames(text):
  registry.GetParams(processes.MODEL, 'Train')
  modules = set(sys.modules)
  try:
    params = registry.GetParams(processes.MODEL, text)
    assert text.lower() in ('train', 'dev', 'test') and params
  except LookupError:
    pass
  for key in (text, f'lm.stdlib.{text}', f'{text}.ByteTransformerGPipe2'):
    try:
      registry.GetClass(key)
    except (ValueError, LookupError):
      continue
    assert key == processes.MODEL
  with pytest.raises((ValueError, LookupError)):
    registry.GetClass('a.B', packages=[text])
  assert {m for m in set(sys.modules) - modules if not m.startswith('params')} == set()


@fuzzing.Settings(0.3)
@hypothesis.given(_hostile)
@hypothesis.example('x')
def testPathsOfLayersAreNames(text):
  """Paths of weights too: no file name derived from them has a folder in it."""
  params = base_layer.BaseLayer.Params().Set(name=text)
  try:
    layer = params.Instantiate()
    layer.CreateVariable(text, weight_params.WeightParams([1]))
  except ValueError:
    assert text != 'x'
    return
  (path,) = layer.WeightSpecs()
  assert path == f'{text}.{text}' and os.sep not in path and text not in ('.', '..')


@fuzzing.Settings(0.3)
@hypothesis.given(_hostile)
def testNamesOfDataSetsAreNotPaths(text):
  """Directories in the log directory are named after data sets."""
  try:
    # The code behind the check of the name.
    dataset_pass.DatasetPass(None, None, text, 'run', None)
  except ValueError as e:
    assert naming.Names(str(e), 'letters')
  except AttributeError:
    assert text == os.path.basename(text) and text.isidentifier()


def testLinksAreNotFollowed(tmp_path):
  """A link may lead out of the log directory; its target is neither removed nor emptied."""
  outside = tmp_path / 'outside'
  outside.mkdir()
  (outside / 'mine').write_text('kept')
  directory = tmp_path / 'run' / 'train'
  directory.mkdir(parents=True)
  (directory / 'ckpt-00000001-0123abcd').symlink_to(outside)
  (directory / 'ckpt-00000001.json.tmp-0123abcd').symlink_to(outside / 'mine')
  (directory / logdir_lock.FILE_NAME).symlink_to(outside / 'mine')
  names = f"'{directory}'", logdir_lock.FILE_NAME, 'symbolic links'
  with pytest.raises(OSError, match=naming.Naming(*names)):
    logdir_lock.HoldLock(str(directory)).__enter__()
  checkpointer.Checkpointer(directory).Save(2, {'v': tf.Variable(1.0)}, {})
  assert (outside / 'mine').read_text() == 'kept'
  assert sorted(os.listdir(directory)) == [
    *sorted(name for name in os.listdir(directory) if name.startswith('ckpt-00000002')),
    logdir_lock.FILE_NAME,
  ]
  # A commit file with a correct digest cannot lead out either.
  path = directory / 'ckpt-00000002.json'
  record = json.loads(path.read_text())['checkpoint']
  for folder in ('../../outside', str(outside), '..', 'ckpt-00000002-0123abcd/../../..'):
    record['folder'] = folder
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    path.write_text(json.dumps({'sha256': digest, 'checkpoint': record}))
    with pytest.raises(
      checkpointer.DamagedError, match=naming.Naming(path.name, 'step 2', repr(folder))
    ):
      checkpointer.Checkpointer(directory).Latest()


def testAssetsStayInTheFolderOfTheRun(tmp_path):
  """Whatever the path of the file, and whatever exists in its place."""
  source, outside = tmp_path / 'v.model', tmp_path / 'outside'
  source.write_text('vocabulary')
  outside.write_text('kept')
  folder = tmp_path / 'run' / assets.FOLDER
  folder.mkdir(parents=True)
  (folder / 'v.model').symlink_to(outside)
  assets.Keep(str(tmp_path / 'run'), [f'{tmp_path}/run/../v.model'], is_resumed=False)
  assert os.listdir(folder) == ['v.model'] and (folder / 'v.model').read_text() == 'vocabulary'
  assert outside.read_text() == 'kept'
  for path in (f'{tmp_path}/run/..', f'{tmp_path}/'):
    with pytest.raises((OSError, tf.errors.OpError)):
      assets.Keep(str(tmp_path / 'run'), [path], is_resumed=False)
  assert os.listdir(folder) == ['v.model']


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
