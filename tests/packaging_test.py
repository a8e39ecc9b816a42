# SPDX-License-Identifier: Apache-2.0
"""The contents of a wheel, and ways to run the tests."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile

import pytest
from packaging import requirements

import lingvo_gpipe
from tests import processes


def testWheelContainsThePackageOnly(tmp_path):
  # A copy: a build writes next to the sources, and Bazel's tree has links to other places.
  source = tmp_path / 'source'
  source.mkdir()
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(processes.ROOT / name, source / name)
  for name in ('lingvo_gpipe', 'params', 'tasks', 'tests', 'tools'):
    if (processes.ROOT / name).exists():
      ignored = shutil.ignore_patterns('__pycache__')
      shutil.copytree(processes.ROOT / name, source / name, ignore=ignored)
  (source / 'dist').mkdir()
  build = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '-w', 'dist', '.']
  if importlib.util.find_spec('hatchling'):  # Without this pip would download the build system.
    build = [sys.executable, '-c', 'import hatchling.build as b; b.build_wheel("dist")']
  done = subprocess.run(
    build, cwd=source, capture_output=True, text=True, timeout=processes.TIMEOUT, check=False
  )
  assert done.returncode == 0, done.stderr
  (wheel,) = (source / 'dist').glob('lingvo_gpipe-*-py3-none-any.whl')
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    entries, metadata = (
      archive.read(next(name for name in names if name.endswith(end))).decode()
      for end in ('entry_points.txt', 'METADATA')
    )
  assert {name.split('/')[0].partition('-')[0] for name in names} == {'lingvo_gpipe'}
  inside = {name for name in names if name.startswith('lingvo_gpipe/')}
  expected = {
    os.path.relpath(os.path.join(folder, file), source)
    for folder, _, files in os.walk(source / 'lingvo_gpipe')
    for file in files
    if file.endswith('.py') or file == 'py.typed'
  }
  assert inside == expected
  for program in ('trainer', 'evaluator', 'worker'):
    assert f'{program} = lingvo_gpipe.{program}:Run' in entries
  assert any(name.endswith('licenses/LICENSE') for name in names)
  assert f'\nVersion: {lingvo_gpipe.__version__}\n' in metadata
  # A package index has no files to which a link or a picture could lead.
  targets = re.findall(r'\]\(([^)]*)\)|src(?:set)?="([^"]*)', metadata.partition('\n\n')[2])
  assert targets and all(''.join(target).startswith('https://') for target in targets)


def testTheChangelogBeginsWithTheVersion():
  heading = re.search(r'^## \[(.*?)\]', (processes.ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
  assert heading[1] == lingvo_gpipe.__version__


def testThePageOfInstallationListsEachExtra():
  page = (processes.ROOT / 'docs' / 'install.md').read_text()
  rows = re.findall(r'^\| `([\w-]+)` \| .* \| (.*) \|$', page, re.MULTILINE)
  project = tomllib.loads((processes.ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  assert sorted(name for name, _ in rows) == sorted(extras)
  for name, brought in rows:
    packages = {_Name(requirements.Requirement(line)) for line in extras[name]}
    assert name == 'dev' or set(brought.split(', ')) == packages


def testEachDependencyHasATestedVersion():
  project = tomllib.loads((processes.ROOT / 'pyproject.toml').read_text())['project']
  lines = [*project['dependencies'], *sum(project['optional-dependencies'].values(), [])]
  pinned = {}
  for line in (processes.ROOT / 'constraints.txt').read_text().splitlines():
    if line and not line.startswith('#'):
      requirement = requirements.Requirement(line)
      pinned.setdefault(_Name(requirement), []).append(requirement)
  for line in lines:
    requirement = requirements.Requirement(line)
    for pin in pinned[_Name(requirement)]:
      (version,) = pin.specifier
      assert requirement.specifier.contains(version.version), (line, str(pin))


def _Name(requirement):
  return requirement.name.lower().replace('_', '-')


def testConcurrentRemovalOfOldTemporaryFoldersIsNotAnError():
  # Pytest warns after its last test if another run was faster; warnings are errors here.
  warnings.warn(pytest.PytestWarning('(rm_rf) error removing garbage-1\nOSError'), stacklevel=1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
