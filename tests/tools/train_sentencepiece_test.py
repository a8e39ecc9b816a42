# SPDX-License-Identifier: Apache-2.0
"""The program that trains vocabularies on the texts of an experiment or on files."""

import sys
import textwrap

import pytest

from lingvo_gpipe.input.text import sentencepiece_tokenizer, sentencepiece_training
from tests import naming, processes
from tests.toys import projects

_PROGRAM = str(processes.ROOT / 'tools' / 'train_sentencepiece.py')


def _Run(*args, cwd):
  return processes.Run('train_sentencepiece', *args, command=[sys.executable, _PROGRAM], cwd=cwd)


@pytest.fixture
def folder(tmp_path):
  with open(textwrap.__file__) as f:
    source = f.read()
  (tmp_path / 'a.txt').write_text(source)
  rows = [f'left {i}\tnever\t{line or "right"}' for i, line in enumerate(source.split('\n'))]
  (tmp_path / 'pairs.tsv').write_text('\n'.join(line for line in rows if line.count('\t') == 2))
  return tmp_path


def testVocabularyOfAnExperiment(folder, forks):
  projects.Write(folder, projects.Experiments('text_lines'), module='text')
  (folder / 'params' / '__init__.py').touch()  # Not to be hidden by this repository's.
  done = processes.Succeeded(_Run('--model=text.Lines', '--control_symbols=<2de>', cwd=folder))
  vocabulary = sentencepiece_tokenizer.SentencePieceTokenizer(str(folder / 'vocab/lines.model'))
  line = f'vocab/lines.model: 400 pieces, fingerprint {vocabulary.fingerprint}\n'
  assert done.stdout == line
  assert processes.Messages(done.stderr) == []
  assert vocabulary.vocab_size == 400 and vocabulary.PieceId('<2de>') > 3
  # It does not overwrite a vocabulary.
  done = forks.Run(_PROGRAM, '--model=text.Lines', cwd=folder)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, 'vocab/lines.model', 'exists')


def testVocabularyOfColumns(folder, forks):
  args = ['--files=*.tsv', '--columns=0,2', '--vocab_size=400', '--prefix=v']
  processes.Succeeded(forks.Run(_PROGRAM, *args, cwd=folder))
  vocabulary = sentencepiece_tokenizer.SentencePieceTokenizer(str(folder / 'v.model'))
  text = (folder / 'v.vocab').read_text()
  assert text == vocabulary.Text()
  assert 'left' in text and 'never' not in text


def testFlagsReachTheTraining(folder, forks):
  args = ['--files=a.txt', '--prefix=v', '--vocab_size=350', '--type=bpe', '--lossless', '--seed=3']
  args += ['--max_sentences=60', '--character_coverage=0.98', '--user_defined_symbols=return']
  processes.Succeeded(forks.Run(_PROGRAM, *args, cwd=folder))
  expected = sentencepiece_training.Train(
    (folder / 'a.txt').read_text().split('\n'),
    str(folder / 'w'),
    350,
    model_type='bpe',
    lossless=True,
    random_seed=3,
    max_sentences=60,
    character_coverage=0.98,
    user_defined_symbols=['return'],
  )
  tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(str(folder / 'v.model'))
  assert tokenizer.fingerprint == expected.fingerprint
  processes.Succeeded(forks.Run(_PROGRAM, *args, '--overwrite', '--seed=4', cwd=folder))
  other = sentencepiece_tokenizer.SentencePieceTokenizer(str(folder / 'v.model'))
  assert other.fingerprint != tokenizer.fingerprint


def testErrorsAreOneLine(folder, forks):
  args = ['--files=*.tsv', '--prefix=v', '--vocab_size=400', '--columns=3']
  done = forks.Run(_PROGRAM, *args, cwd=folder)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, './pairs.tsv', 'line 1', '3 columns', '--columns', 'number 3')
  assert not (folder / 'v.model').exists()
  args = ['--model=image.digits_tasks.DigitAndParity', '--model_task_name=c']
  done = forks.Run(_PROGRAM, *args)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, 'digit, parity', '--model_task_name')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
