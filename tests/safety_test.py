# SPDX-License-Identifier: Apache-2.0
"""No code runs text, and no name leaves the log directory."""

import ast
import os
import pathlib
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

import lingvo_gpipe
from lingvo_gpipe import base_layer, registry, weight_params
from tests import fuzzing, processes

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
# Who may import by name, and start a shell's like.
_IMPORTERS = {'lingvo_gpipe/registry.py'}

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
    found = registry.GetParams(processes.MODEL, text)
    assert text.lower() in ('train', 'dev', 'test') and found
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
  """So are those of their weights: what is made of them has no folder in it."""
  params = base_layer.BaseLayer.Params().Set(name=text)
  try:
    layer = params.Instantiate()
    layer.CreateVariable(text, weight_params.WeightParams([1]))
  except ValueError:
    assert text != 'x'
    return
  (path,) = layer.WeightSpecs()
  assert path == f'{text}.{text}' and os.sep not in path and text not in ('.', '..')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
