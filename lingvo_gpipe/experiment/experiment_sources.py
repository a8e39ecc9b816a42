# SPDX-License-Identifier: Apache-2.0
"""Finds the source files of a package of experiments and the experiments they register.

No code of the package is imported or run: modules are located on Python's path, and decorated
classes are read from the syntax tree. This module imports neither TensorFlow nor the registry.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator

# The registry's decorators, which mark the experiments of a file.
DECORATORS = ('RegisterSingleTaskModel', 'RegisterMultiTaskModel')

# --- locations ---


def _FindSpec(name: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module or package without importing it or any of its parent packages."""
  top, *submodules = name.split('.')
  if top in sys.modules:
    # None for a script, where find_spec would raise.
    spec = getattr(sys.modules[top], '__spec__', None)
  else:
    spec = importlib.util.find_spec(top)
  for part in submodules:
    if spec is None or spec.submodule_search_locations is None:
      return None
    # Search for the last part alone: given the dotted name, a namespace package would look up its
    # parent module, which is not imported.
    path = list(spec.submodule_search_locations)
    spec = importlib.machinery.PathFinder.find_spec(part, path)
  return spec


def FindModule(name: str) -> importlib.machinery.ModuleSpec | None:
  """Finds a module without importing it; returns None for a directory without an `__init__.py`."""
  spec = _FindSpec(name)
  return None if spec is None or spec.origin is None else spec


def IsPackage(spec: importlib.machinery.ModuleSpec) -> bool:
  """Whether `spec` belongs to a package rather than to a single-file module."""
  return spec.submodule_search_locations is not None


def DescribeLocation(package: str) -> str:
  """Describes where Python finds the package, and any folder of that name that it hides."""
  spec = _FindSpec(package)
  if spec is None or not spec.submodule_search_locations:
    return 'no such package'
  location = list(spec.submodule_search_locations)[0]
  for root in sys.path:
    folder = os.path.join(os.path.abspath(root), *package.split('.'))
    if os.path.abspath(location) == folder:
      break
    if os.path.isdir(folder):
      # Python prefers a package with an __init__.py anywhere on the path to a folder without one.
      return f'{location}, which hides {folder}: add an __init__.py to that folder'
  return location


# --- files ---


def SourceFiles(package: str) -> Iterator[tuple[str, str]]:
  """Yields (module name, path) for each source file of the package except tests."""
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
  """Returns (class name, line) for each use of a decorator in a file; name None marks a call."""
  try:
    with open(path, 'rb') as f:
      source = f.read()
    if not any(decorator.encode() in source for decorator in DECORATORS):
      return []
    tree = ast.parse(source)
  except (OSError, SyntaxError, ValueError):
    return []
  registrations: list[tuple[str | None, int]] = []
  names = set(DECORATORS)
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      names.update(a.asname for a in node.names if a.name in DECORATORS and a.asname)
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      lines = [d.lineno for d in node.decorator_list if _LastName(d) in names]
      registrations.extend((node.name, line) for line in lines)
    elif isinstance(node, ast.Call) and _LastName(node.func) in names:
      registrations.append((None, node.lineno))
  return registrations


def _LastName(node: ast.expr) -> str | None:
  """Returns 'c' for the expression `c` or `a.b.c`."""
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else None
