# SPDX-License-Identifier: Apache-2.0
"""Files that a run depends on are copied into its log directory, and changes are an error."""

import sys

import pytest

from lingvo_gpipe.checkpoint import assets
from lingvo_gpipe.input import synthetic
from tests import naming
from tests.toys import training


def testFilesAreCopied(tmp_path):
  (tmp_path / 'v.model').write_bytes(b'\0one')
  (tmp_path / 'words.txt').write_text('two')
  paths = [str(tmp_path / name) for name in ('v.model', 'words.txt')]
  run = tmp_path / 'run'
  assets.Keep(str(run), [], is_resumed=False)
  assert not run.exists()
  for is_resumed in (False, True, True):
    assets.Keep(str(run), paths, is_resumed=is_resumed)
    copies = {path.name: path.read_bytes() for path in (run / 'assets').iterdir()}
    assert copies == {'v.model': b'\0one', 'words.txt': b'two'}
  # The input may read the copy itself.
  assets.Keep(str(run), [str(run / 'assets' / 'v.model')], is_resumed=True)


def testTwoFilesOfTheSameNameAreAnError(tmp_path):
  paths = []
  for folder in ('a', 'b'):
    (tmp_path / folder).mkdir()
    paths.append(str(tmp_path / folder / 'v.model'))
  with pytest.raises(ValueError, match=naming.Naming("'v.model'", *paths)):
    assets.Keep(str(tmp_path / 'run'), paths, is_resumed=False)


def testARunIsEvaluatedWithTheFileItWasTrainedWith(tmp_path, monkeypatch):
  vocabulary = tmp_path / 'v.model'
  monkeypatch.setattr(synthetic.SyntheticRegressionInput, 'Assets', lambda self: [str(vocabulary)])
  run = tmp_path / 'run'
  params = training.Params()
  vocabulary.write_text('first')
  training.Evaluator(run, params)  # The run may start later.
  assets.Keep(str(run), [str(vocabulary)], is_resumed=False)
  training.Evaluator(run, params)
  vocabulary.write_text('second')
  with pytest.raises(
    ValueError, match=naming.Naming(vocabulary, 'run/assets/v.model', '--allow_params_change')
  ):
    training.Evaluator(run, params)
  training.Evaluator(run, params, allow_params_change=True)


def testARunResumesOnlyWithTheFileItWasTrainedWith(tmp_path, monkeypatch):
  vocabulary = tmp_path / 'v.model'
  monkeypatch.setattr(synthetic.SyntheticRegressionInput, 'Assets', lambda self: [str(vocabulary)])
  run = tmp_path / 'run'
  copied = run / 'assets' / 'v.model'

  def Train(max_steps):
    training.Train(run, training.Params(max_steps=max_steps))
    return copied.read_text()

  vocabulary.write_text('never trained with')
  run.mkdir()
  assets.Keep(str(run), [str(vocabulary)], is_resumed=False)
  vocabulary.write_text('first')
  assert Train(1) == 'first'
  vocabulary.write_text('second')
  with pytest.raises(ValueError, match=naming.Naming(vocabulary, copied, '--logdir')):
    Train(2)
  assert copied.read_text() == 'first'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
