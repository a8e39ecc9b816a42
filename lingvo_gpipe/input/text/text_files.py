# SPDX-License-Identifier: Apache-2.0
"""Language modelling on text files: a document is a line or a file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from lingvo_gpipe.core import domain, files, hyperparams, text_file
from lingvo_gpipe.input import file_pattern
from lingvo_gpipe.input.text import text_tokens

_DOCUMENTS = ('lines', 'files')


class TextFilesInput(text_tokens.TextTokensInput):
  """Documents from UTF-8 files, in the order of their paths."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Glob of the files, or a list of globs; any tf.io.gfile path.',
      domain.STR | domain.STRINGS,
    )
    p.Define('documents', 'lines', 'Unit of a document: lines or files.', domain.OneOf(*_DOCUMENTS))
    return p

  def Files(self) -> list[str]:
    """Returns the paths of the files, in the order in which they are read.

    The default sorts the matches of `p.file_pattern`. Override it for another choice of files.

    Raises:
      ValueError: `p.file_pattern` is not set or matches no file.
    """
    return file_pattern.Files(self.params.file_pattern, self._Context('file_pattern'))

  def DocumentName(self, path: str) -> str:
    """Returns the name of a file for the key of the cache; it may omit the folder."""
    return os.path.basename(path)

  def _Documents(self) -> Iterator[str]:
    context = self._Context('file_pattern')
    for path in self.Files():
      if self.params.documents == 'lines':
        yield from file_pattern.Lines(path, context)
      else:
        yield self._FileText(files.ReadBytes(path, context), path)

  def _FileText(self, content: bytes, path: str) -> str:
    """Decodes a file that is a document; override it for files that are not in UTF-8."""
    return text_file.Decode(content, path, self._Context('file_pattern'))

  def _SourceParts(self) -> list[Any]:
    version = [file_pattern.LINES_VERSION] if self.params.documents == 'lines' else []
    return ['text_files', self.params.documents, *version, *self._digests]

  @functools.cached_property
  def _digests(self) -> list[tuple[str, str]]:
    """Name and SHA-256 of each file."""
    context = self._Context('file_pattern')
    return [(self.DocumentName(path), file_pattern.Digest(path, context)) for path in self.Files()]
