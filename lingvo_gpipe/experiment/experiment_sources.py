# SPDX-License-Identifier: Apache-2.0
"""Where the source files of a package of experiments are, and what they say they register.

Nothing of a package is imported or run: modules are located on Python's path, and decorated classes
are read off the syntax. This module imports neither TensorFlow nor the registry.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator

# The registry's decorators, by which a file's experiments are told.
DECORATORS = ('RegisterSingleTaskModel', 'RegisterMultiTaskModel')

# --- places ---


def _FindSpec(name: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module or package without importing anything, its parent packages included."""
  top, *rest = name.split('.')
  if top in sys.modules:
    # None for a script, where find_spec would raise.
    spec = getattr(sys.modules[top], '__spec__', None)
  else:
    spec = importlib.util.find_spec(top)
  for part in rest:
    if spec is None or spec.submodule_search_locations is None:
      return None
    # The path says where to look; with the dotted name a namespace package would ask for its
    # parent module, which is not imported.
    path = list(spec.submodule_search_locations)
    spec = importlib.machinery.PathFinder.find_spec(part, path)
  return spec


def FindModule(name: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module without importing it; None for a directory that holds no code of its own."""
  spec = _FindSpec(name)
  return None if spec is None or spec.origin is None else spec


def IsPackage(spec: importlib.machinery.ModuleSpec) -> bool:
  """Whether `spec` is that of a package, not of a module in one file."""
  return spec.submodule_search_locations is not None


def DescribeLocation(package: str) -> str:
  """Returns where the package is, and the folder that one might have expected instead."""
  spec = _FindSpec(package)
  if spec is None or not spec.submodule_search_locations:
    return 'no such package'
  there = list(spec.submodule_search_locations)[0]
  for root in sys.path:
    folder = os.path.join(os.path.abspath(root), *package.split('.'))
    if os.path.abspath(there) == folder:
      break
    if os.path.isdir(folder):
      # Python prefers a package with that file anywhere on the path to a folder without it.
      return f'{there}, which hides {folder}: that has no __init__.py'
  return there


# --- files ---


def SourceFiles(package: str) -> Iterator[tuple[str, str]]:
  """Yields (module name, path) of the package's source files, tests excepted."""
  spec = _FindSpec(package)
  for root in (spec and spec.submodule_search_locations) or ():
    for folder, subfolders, files in os.walk(root):
      subfolders[:] = sorted(name for name in subfolders if name.isidentifier())
      parts = [part for part in os.path.relpath(folder, root).split(os.sep) if part != '.']
      for file in sorted(files):
        stem, extension = os.path.splitext(file)
        if extension != '.py' or not stem.isidentifier() or stem.endswith('_test'):
          continue
        module = [*parts] if stem == '__init__' else [*parts, stem]
        if module:
          yield '.'.join([package, *module]), os.path.join(folder, file)


def FindRegistrations(path: str) -> list[tuple[str | None, int]]:
  """Returns (class name, line) of each use of the decorator in a file; no name: used by a call."""
  try:
    with open(path, 'rb') as f:
      source = f.read()
    if not any(decorator.encode() in source for decorator in DECORATORS):
      return []
    tree = ast.parse(source)
  except (OSError, SyntaxError, ValueError):
    return []
  found: list[tuple[str | None, int]] = []
  names = set(DECORATORS)
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      names.update(a.asname for a in node.names if a.name in DECORATORS and a.asname)
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      lines = [d.lineno for d in node.decorator_list if _LastName(d) in names]
      found.extend((node.name, line) for line in lines)
    elif isinstance(node, ast.Call) and _LastName(node.func) in names:
      found.append((None, node.lineno))
  return found


def _LastName(node: ast.expr) -> str | None:
  """Returns 'c' of the expression `c` or `a.b.c`."""
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else None
