# SPDX-License-Identifier: Apache-2.0
"""The source files of Python's standard library: 30 MB of text; needs no download."""

from __future__ import annotations

import hashlib
import os
import pathlib
import sysconfig

from lingvo_gpipe import base_input_generator, domain, hyperparams, text_bytes, text_files

# Upper bounds of the hash values, modulo 100, of each split.
_SPLIT_ENDS = {'train': 90, 'dev': 95, 'test': 100}

_SKIPPED_DIRS = frozenset(['site-packages', 'dist-packages', '__pycache__'])


class _StdlibFiles(base_input_generator.BaseInputGenerator):
  """The .py files of the standard library, without installed packages.

  A hash of its name below the library's root assigns a file to a split: about 90 % of the files are
  in train, 5 % in dev and 5 % in test. The files, and with them the fingerprint, differ between
  versions of Python.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('split', 'train', 'Which files: train, dev or test.', domain.OneOf(*_SPLIT_ENDS))
    p.Define('root', '', 'Directory of the library; empty: the library of the running Python.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams):
    super().__init__(params)
    p = self.params
    if p.file_pattern:
      raise ValueError(
        f'{self._Context("file_pattern")} has no effect here, got {p.file_pattern!r}: use split, '
        'or TextBytesInput or TextFilesInput for your own files'
      )

  def Files(self) -> list[str]:
    """Returns the files of the split, sorted by their names below the root.

    Raises:
      ValueError: the library has no source file, for example because it is a zip archive, or the
        split has no file.
    """
    root = self._Root()
    names = _SourceNames(root)
    if not names:
      raise ValueError(
        f'{type(self).__name__}: no .py file below the standard library {root!r} of this Python: '
        'it may be a zip archive or compiled only. Use a Python that has its source files, or '
        'TextBytesInput with your own file_pattern'
      )
    split = self.params.split
    files = [name for name in names if GetSplit(name) == split]
    if not files:
      raise ValueError(
        f'{self._Context("split")}: none of the {len(names)} files below {root!r} is in {split!r}'
      )
    return [os.path.join(root, *name.split('/')) for name in files]

  def DocumentName(self, path: str) -> str:
    return pathlib.Path(os.path.relpath(path, self._Root())).as_posix()

  def _Root(self) -> str:
    return self.params.root or sysconfig.get_path('stdlib')


class StdlibInput(_StdlibFiles, text_bytes.TextBytesInput):
  """The bytes of the files, one file after another."""


class StdlibTokensInput(_StdlibFiles, text_files.TextFilesInput):
  """The tokens of the files in a SentencePiece vocabulary; each file is a document.

  A few test files of Python are not in UTF-8; their invalid bytes are read as U+FFFD.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.documents = 'files'
    return p

  def _FileText(self, content: bytes, path: str) -> str:
    del path
    return content.decode(errors='replace')


def GetSplit(name: str) -> str:
  """Returns the split of a file, 'train', 'dev' or 'test', by SHA-256 of its POSIX name."""
  digest = hashlib.sha256(name.encode()).digest()
  value = int.from_bytes(digest[:8], 'big') % 100
  return next(split for split, end in _SPLIT_ENDS.items() if value < end)


def _SourceNames(root: str) -> list[str]:
  """Returns sorted POSIX names below `root` of all .py files except installed packages."""
  names = []
  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRS]
    for file in files:
      path = pathlib.Path(directory, file)
      if path.suffix == '.py' and path.is_file():
        names.append(path.relative_to(root).as_posix())
  return sorted(names)
