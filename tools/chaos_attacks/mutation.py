# SPDX-License-Identifier: Apache-2.0
"""Damages texts, bytes and files at random."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
from typing import Any

# Text that some reader treats specially.
_PARTS = [
  ':', ';', '\n', '\\', "'", '"', '"""', '[', ']', '(', ')', '{', '}', ',', '=', '.', '#', '/', '-',
  'None', 'nan', '-inf', '1e999', '9' * 400, '-1', '0', '1e30', '2147483648', 'True', 'type/',
  'type/os/system', 'type/builtins/eval("1")', 'tf.string', 'range(', 'set(range(10**9))',
  'lambda: 0', '__import__("os")', '\x00', '\u2028', '\ud7ff', '漢', '(((', '*[1]', '{[]}', '..',
  ' ', '0F0', '1B1', '9B9', 'worker', 'localhost:0', 'null', '1' * 30, '[[[[', '"x": 1,', '\t',
  '\r', '0x' + 'f' * 5000,
]  # fmt: skip
_BYTES = [b'', b'\0', b'\xff', b'\xfe\xff', b'\n', b'\x00' * 50, b'\xff' * 9, b'\xc3\x28']

_VALUES: list[Any] = [
  None, True, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, 0.5, 1e-300, 1e308, float('nan'),
  float('inf'), '', '1', 'x', '../x', '/etc/passwd', '\ud7ff', '\n', [], [1], {}, {'x': 1}, [[]],
]  # fmt: skip


def Text(draw: random.Random, text: str) -> str:
  """Returns a text with some parts removed, repeated, moved or replaced."""
  for _ in range(draw.randint(1, 4)):
    begin = draw.randint(0, len(text))
    end = min(len(text), begin + draw.choice([0, 0, 1, 3, 20, 1000]))
    cut = draw.randint(0, len(text))
    part = draw.choice([draw.choice(_PARTS), text[cut : cut + 20], chr(draw.randint(1, 0xD7FF))])
    text = text[:begin] + part * draw.choice([1, 1, 1, 2, 300 if len(part) < 4 else 1]) + text[end:]
  return text


def Json(draw: random.Random, text: str) -> str:
  """Returns valid JSON in which one value is replaced, removed or renamed."""
  root = [json.loads(text)]
  inner: Any = root
  while True:
    key = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    if not isinstance(inner[key], dict | list) or not inner[key] or draw.random() < 0.2:
      break
    inner = inner[key]
  kind = draw.choice(['replace', 'replace', 'replace', 'remove', 'rename'])
  if kind == 'replace' or inner is root:
    inner[key] = draw.choice(_VALUES)
  elif kind == 'remove':
    del inner[key]
  elif isinstance(inner, dict):
    inner[draw.choice(['', 'x', '../x', *inner])] = inner.pop(key)
  else:
    inner.insert(key, inner[key])
  return json.dumps(root[0])


def Bytes(draw: random.Random, data: bytes) -> bytes:
  """Returns bytes with flipped bits, or parts removed, repeated or replaced; never equal ones."""
  changed = bytearray(data)
  for _ in range(draw.choice([1, 1, 2, 5])):
    at = draw.randrange(len(changed) + 1)
    kind = draw.choice(['flip', 'flip', 'cut', 'insert', 'repeat', 'zero'])
    if kind == 'flip' and at < len(changed):
      changed[at] ^= 1 << draw.randrange(8)
    elif kind == 'cut':
      del changed[at : draw.choice([at + 1, at + 20, len(changed)])]
    elif kind == 'insert':
      changed[at:at] = draw.choice([draw.choice(_BYTES), draw.randbytes(draw.randint(1, 20))])
    elif kind == 'repeat':
      changed[at:at] = changed[: draw.randint(1, 50)]
    elif kind == 'zero':
      changed[at : at + 16] = bytes(len(changed[at : at + 16]))
  return bytes(changed) if changed != data else data + b'\0'


def File(draw: random.Random, path: pathlib.Path) -> str:
  """Damages a file, or replaces it by something else; returns a description."""
  kinds = ['bytes', 'bytes', 'bytes', 'empty', 'remove', 'folder', 'link', 'truncate']
  data = path.read_bytes()
  text = ''
  with contextlib.suppress(ValueError):
    text = data.decode()
    kinds += ['text'] * 3
    kinds += ['json'] * 6 * bool(json.loads(text))
  kind = draw.choice(kinds)
  if kind == 'bytes':
    path.write_bytes(Bytes(draw, data))
  elif kind == 'text':
    path.write_bytes(Text(draw, text).encode())
  elif kind == 'json':
    path.write_bytes(Json(draw, text).encode())
  elif kind == 'truncate':
    os.truncate(path, draw.randrange(max(1, len(data))))
  elif kind == 'empty':
    path.write_bytes(b'')
  else:
    path.unlink()
    if kind == 'folder':
      path.mkdir()
    elif kind == 'link':
      path.symlink_to(draw.choice(['/nowhere', str(path), '/etc/hostname']))
  return f'{kind} of {path.name}'


def CopyTree(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Copies a folder; returns the copy."""
  return pathlib.Path(shutil.copytree(source, target, symlinks=True))
