# SPDX-License-Identifier: Apache-2.0
"""The source files of the running Python's standard library: 30 MB of text without a download."""

from __future__ import annotations

import hashlib
import os
import pathlib
import sysconfig

from lingvo_gpipe import base_input_generator, hyperparams, text_bytes, text_files

# Upper ends of the splits' ranges of hash values modulo 100.
_SPLIT_ENDS = {'train': 90, 'dev': 95, 'test': 100}

_SKIPPED_DIRS = frozenset(['site-packages', 'dist-packages', '__pycache__'])


class _StdlibFiles(base_input_generator.BaseInputGenerator):
  """The .py files of the standard library, without installed packages.

  A file belongs to a split by a hash of its name below the library's root: about 90 % of the files
  are in train, 5 % in dev and 5 % in test. The files differ between versions of Python; the
  fingerprint tells.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('split', 'train', 'Which files: train, dev or test.')
    p.Define('root', '', 'The directory of the library; empty: that of the running Python.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams):
    super().__init__(params)
    p = self.params
    if p.split not in _SPLIT_ENDS:
      raise ValueError(
        f'{self._Where("split")}: expected {" or ".join(_SPLIT_ENDS)}, got {p.split!r}'
      )
    if p.file_pattern:
      raise ValueError(
        f'{self._Where("file_pattern")} has no effect here, got {p.file_pattern!r}: use split, or '
        'TextBytesInput or TextFilesInput for files of your own'
      )

  def Files(self) -> list[str]:
    """The split's files, sorted by their names below the root.

    Raises:
      ValueError: there is no source file (as where the library is a zip archive), or none of them
        is in this split.
    """
    root = self._Root()
    names = _SourceNames(root)
    if not names:
      raise ValueError(
        f'{type(self).__name__}: no .py file below the standard library {root!r} of this Python: '
        'it may be a zip archive or compiled only. Use a Python that has its source files, or '
        'TextBytesInput with a file_pattern of your own'
      )
    split = self.params.split
    chosen = [name for name in names if SplitOf(name) == split]
    if not chosen:
      raise ValueError(
        f'{self._Where("split")}: none of the {len(names)} files below {root!r} is in {split!r}'
      )
    return [os.path.join(root, *name.split('/')) for name in chosen]

  def DocumentName(self, path: str) -> str:
    return pathlib.Path(os.path.relpath(path, self._Root())).as_posix()

  def _Root(self) -> str:
    return self.params.root or sysconfig.get_path('stdlib')


class StdlibInput(_StdlibFiles, text_bytes.TextBytesInput):
  """Their bytes, one file after another."""


class StdlibTokensInput(_StdlibFiles, text_files.TextFilesInput):
  """Their tokens under a SentencePiece vocabulary; a document is a file.

  A few files are not in UTF-8, to test just that: what does not fit is read as U+FFFD.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.documents = 'files'
    return p

  def _FileText(self, content: bytes, path: str) -> str:
    del path
    return content.decode(errors='replace')


def SplitOf(name: str) -> str:
  """The split of a file: 'train', 'dev' or 'test', by SHA-256 of its posix name below the root."""
  digest = hashlib.sha256(name.encode()).digest()
  value = int.from_bytes(digest[:8], 'big') % 100
  return next(split for split, end in _SPLIT_ENDS.items() if value < end)


def _SourceNames(root: str) -> list[str]:
  """Sorted posix names, below `root`, of the .py files that are not of installed packages."""
  names = []
  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRS]
    for file in files:
      path = pathlib.Path(directory, file)
      if path.suffix == '.py' and path.is_file():
        names.append(path.relative_to(root).as_posix())
  return sorted(names)
