# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece vocabulary on an experiment's training texts, or on files.

    python -m tools.train_sentencepiece --model=KEY
    python -m tools.train_sentencepiece --files='data/*.tsv' --columns=0,1 --vocab_size=8000 \\
        --prefix=data/vocab

The first command writes the vocabulary that the experiment's input reads, with the size from its
Params. The same texts and flags give the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from absl import flags

from lingvo_gpipe.cli import binary
from lingvo_gpipe.input import file_pattern
from lingvo_gpipe.input.text import sentencepiece_training

FLAGS = flags.FLAGS


def _DefineFlags() -> None:
  binary.DefineFlags()
  flags.DEFINE_string('files', '', 'In place of --model: a glob of text files in UTF-8.')
  flags.DEFINE_list('columns', [], 'With --files: columns to read, from 0, separated by tabs.')
  flags.DEFINE_string('prefix', '', "<prefix>.model and .vocab; empty: as the experiment's input.")
  flags.DEFINE_integer(
    'vocab_size', 0, "Number of pieces; 0: as the experiment's input.", lower_bound=0
  )
  flags.DEFINE_enum('type', 'unigram', sentencepiece_training.MODEL_TYPES, 'Kind of model.')
  flags.DEFINE_integer(
    'max_sentences', 1_000_000, 'Train on this many randomly chosen lines.', lower_bound=1
  )
  flags.DEFINE_integer('seed', 0, 'Of that choice.')
  flags.DEFINE_float(
    'character_coverage',
    0.9995,
    'Share of all characters that get their own pieces; bytes spell the rest.',
    lower_bound=sentencepiece_training.LEAST_COVERAGE,
    upper_bound=1.0,
  )
  flags.DEFINE_bool('lossless', False, 'Keep spaces and line ends unchanged, for source code.')
  flags.DEFINE_list(
    'control_symbols', [], 'Symbols that do not occur in texts, for example <2de>,<2fr>.'
  )
  flags.DEFINE_list('user_defined_symbols', [], 'Strings that are always a single piece.')
  flags.DEFINE_bool('overwrite', False, 'Replace an existing vocabulary.')


def _Train() -> int:
  if bool(FLAGS.model) == bool(FLAGS.files):
    raise binary.UsageError('one of --model and --files is needed: the source of the texts')
  prefix, vocab_size = FLAGS.prefix, FLAGS.vocab_size
  symbols = list(FLAGS.control_symbols)
  if FLAGS.files:
    texts = _FileTexts(file_pattern.Files(FLAGS.files, '--files'), _Columns())
  else:
    generator = _Input()
    texts = generator.VocabularyTexts()
    p = generator.params
    prefix = prefix or str(p.Get('vocab_filepath') or '').removesuffix('.model')
    vocab_size = vocab_size or p.Get('vocab_size')
    symbols += [s for s in _ControlSymbols(generator) if s not in symbols]
  if not prefix:
    raise binary.UsageError('--prefix is needed: the path of the vocabulary')
  if not vocab_size:
    raise binary.UsageError('--vocab_size is needed: the number of pieces')
  tokenizer = sentencepiece_training.Train(
    texts,
    prefix,
    vocab_size,
    model_type=FLAGS.type,
    max_sentences=FLAGS.max_sentences,
    random_seed=FLAGS.seed,
    character_coverage=FLAGS.character_coverage,
    lossless=FLAGS.lossless,
    control_symbols=symbols,
    user_defined_symbols=FLAGS.user_defined_symbols,
    overwrite=FLAGS.overwrite,
  )
  print(f'{prefix}.model: {tokenizer.vocab_size} pieces, fingerprint {tokenizer.fingerprint}')
  return 0


def _Input() -> Any:
  """Returns the experiment's training input; raises an error if it has no texts."""
  params = binary.ModelParams('Train').input
  if params is not None and 'cls' not in params:
    if FLAGS.model_task_name not in params:
      raise binary.UsageError(
        f'{FLAGS.model} has inputs for the tasks {", ".join(params.GetKeys())}: name one by '
        '--model_task_name'
      )
    params = params.Get(FLAGS.model_task_name)
  generator = None if params is None else params.Instantiate()
  if not hasattr(generator, 'VocabularyTexts'):
    raise binary.UsageError(
      f'the training input of {FLAGS.model} is {type(generator).__name__}, which has no texts'
    )
  return generator


def _ControlSymbols(generator: Any) -> list[str]:
  """Returns the symbols that the input needs in its vocabulary, for example of languages."""
  return list(generator.ControlSymbols()) if hasattr(generator, 'ControlSymbols') else []


def _Columns() -> list[int]:
  if wrong := [text for text in FLAGS.columns if not text.isdecimal()]:
    raise binary.UsageError(f'--columns: expected numbers such as 0,1, got {wrong[0]!r}')
  return [int(text) for text in FLAGS.columns]


def _FileTexts(paths: list[str], columns: list[int]) -> Iterator[str]:
  """Yields the lines of files, or columns of lines."""
  for path in paths:
    for number, line in enumerate(file_pattern.Lines(path, '--files'), 1):
      if not columns:
        yield line
        continue
      fields = line.split('\t')
      if len(fields) <= max(columns):
        raise binary.UsageError(
          f'{path}: line {number} has {len(fields)} columns, but --columns asks for number '
          f'{max(columns)}, counted from 0'
        )
      for column in columns:
        yield fields[column]


def Run() -> None:
  """Entry point."""
  _DefineFlags()
  binary.Run(_Train, __doc__ or '')


if __name__ == '__main__':
  Run()
