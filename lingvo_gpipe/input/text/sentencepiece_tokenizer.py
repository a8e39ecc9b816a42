# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, by a SentencePiece model (`pip install sentencepiece`).

The four special tokens have the same ids in every vocabulary of this project;
`sentencepiece_training` makes such vocabularies.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

PAD_ID = 0  # Fills a row after its tokens.
SOS_ID = 1  # Before the first token.
EOS_ID = 2  # After the last token.
UNK_ID = 3  # Text that the vocabulary lacks.

# SentencePiece's mark of white space, before each word, in its pieces.
_SPACE = '\u2581'

_SPECIAL_IDS = {'pad': PAD_ID, 'sos': SOS_ID, 'eos': EOS_ID, 'unk': UNK_ID}


def Library() -> types.ModuleType:
  """Returns the package sentencepiece; ValueError that says how to install it if it is missing."""
  try:
    import sentencepiece
  except ImportError as e:
    raise ValueError(
      "the package sentencepiece is not installed: pip install 'sentencepiece', or this project "
      "with its extra, pip install 'lingvo_gpipe[text]'"
    ) from e
  return sentencepiece


class SentencePieceTokenizer:
  """A SentencePiece model whose special tokens have the ids of this module.

  Attributes:
    vocab_size: number of ids.
    fingerprint: 16 hexadecimal digits that change with the model file.
  """

  def __init__(self, model_path: str) -> None:
    """Reads the model.

    Args:
      model_path: any path that tf.io.gfile takes.

    Raises:
      ValueError: there is no such file, it is not a SentencePiece model, its special tokens have
        other ids, or the package sentencepiece is missing. The message says how to fix it.
    """
    library = Library()
    try:
      with tf.io.gfile.GFile(model_path, 'rb') as f:
        model = f.read()
    except tf.errors.OpError as e:
      raise ValueError(
        f'the vocabulary {model_path!r} cannot be read ({e.message}): train one by `python -m '
        'tools.train_sentencepiece` (see --help), or correct the path'
      ) from e
    try:
      # Empty bytes would count as no model, which fails only at the first use.
      self._processor = library.SentencePieceProcessor(model_proto=model or b'\0')
    except (RuntimeError, ValueError) as e:
      raise ValueError(f'{model_path!r} is damaged or not a SentencePiece model: {e}') from e
    self._path = model_path
    self.vocab_size: int = self._processor.GetPieceSize()
    self.fingerprint: str = hashlib.sha256(model).hexdigest()[:16]
    p = self._processor
    ids = {'pad': p.pad_id(), 'sos': p.bos_id(), 'eos': p.eos_id(), 'unk': p.unk_id()}
    if ids != _SPECIAL_IDS:
      raise ValueError(
        f'the vocabulary {model_path!r}: expected the special tokens {_SPECIAL_IDS}, got {ids} '
        '(-1: none): train it by `python -m tools.train_sentencepiece`'
      )

  def Encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the tokens of each text, int32 [length], without sos and eos."""
    # Threads share the texts; the result does not depend on their number.
    return [np.array(ids, np.int32) for ids in self._processor.Encode(list(texts), out_type=int)]

  def Decode(self, ids: Iterable[int]) -> str:
    """Returns the text of some tokens.

    Args:
      ids: integers, for example an array. pad, sos, eos and control symbols have no text; an id
        outside the vocabulary (a softmax may have more rows) decodes as the unknown token.
    """
    known = [int(i) if 0 <= i < self.vocab_size else UNK_ID for i in ids]
    return self._processor.Decode(known) if known else ''

  def PieceId(self, piece: str) -> int:
    """Returns the id of a piece such as '<2de>'; ValueError if the vocabulary has no such piece."""
    piece_id = int(self._processor.PieceToId(piece))
    if piece_id == UNK_ID and piece != self._processor.IdToPiece(UNK_ID):
      raise ValueError(
        f'the vocabulary {self._path!r} has no piece {piece!r}: train it with this symbol'
      )
    return piece_id

  def WordStarts(self) -> np.ndarray:
    """Returns float32 [vocab_size]: the number of words that begin in each piece.

    A word is a run of characters without white space.

    Raises:
      ValueError: the vocabulary keeps every space, so that its pieces do not show words.
    """
    p = self._processor
    if ''.join(p.Encode('  a  b ', out_type=str)).count(_SPACE) != 2:
      raise ValueError(
        f'the vocabulary {self._path!r} keeps every space, so its pieces do not show words: '
        'train one without --lossless'
      )
    return np.array([p.IdToPiece(i).count(_SPACE) for i in range(self.vocab_size)], np.float32)

  def Text(self) -> str:
    """Returns every piece and its score, one per line in the order of ids."""
    p = self._processor
    pieces = ((p.IdToPiece(i), p.GetScore(i)) for i in range(self.vocab_size))
    return ''.join(f'{_OneLine(piece)}\t{score:.6g}\n' for piece, score in pieces)


def _OneLine(piece: str) -> str:
  return piece.replace('\n', '\\n').replace('\r', '\\r').replace('\t', '\\t')


def Load(model_path: str, max_vocab_size: int, context: str) -> SentencePieceTokenizer:
  """Returns the tokenizer that the Params of an input name.

  Args:
    model_path: the path of the model.
    max_vocab_size: maximum number of pieces; 0: any number.
    context: start of messages, such as 'TextFilesInput: param vocab_filepath'.

  Raises:
    ValueError: the path is empty or cannot be read, or there are too many pieces.
  """
  if not model_path:
    raise ValueError(
      f'{context} is not set: train a vocabulary by `python -m tools.train_sentencepiece` (see '
      '--help)'
    )
  try:
    tokenizer = SentencePieceTokenizer(model_path)
  except ValueError as e:
    raise ValueError(f'{context}: {e}') from e
  if max_vocab_size and tokenizer.vocab_size > max_vocab_size:
    raise ValueError(
      f'{context}: the vocabulary {model_path!r} has {tokenizer.vocab_size} pieces, but vocab_size '
      f'is {max_vocab_size}'
    )
  return tokenizer
