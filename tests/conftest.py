# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: a quiet TensorFlow on the CPU with four logical devices.

Tests that never import TensorFlow never pay for it: the devices are made by a hook that fires when
something imports TensorFlow for the first time, be it a test file or a function that runs later.
"""

import ast
import gc
import importlib.abc
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile

import hypothesis
import pytest

NUM_DEVICES = 4

# TensorFlow makes many objects that last: to look for garbage so often takes more than it gives.
gc.set_threshold(20_000, 20, 20)

# Inherited by the processes that tests start. Set only where the user has said nothing.
os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# The same examples in every run, however slow the machine; --hypothesis-profile=default: others.
hypothesis.settings.register_profile('repeatable', deadline=None, derandomize=True)
hypothesis.settings.load_profile('repeatable')


def pytest_collection_modifyitems(items):
  """Slow files first: `--dist=loadfile` hands out whole files, and the last one is waited for.

  Slow are those that tests/BUILD calls so. It is not there when Bazel runs a single file.
  """
  tests = pathlib.Path(__file__).parent
  if (build := tests / 'BUILD').exists():
    names = ast.literal_eval(re.search(r'^SLOW = (\[.*?^\])', build.read_text(), re.M | re.S)[1])
    slow = {tests / name for name in names}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope='session', autouse=True)
def temporary_files(tmp_path_factory):
  """Removes at the end what TensorFlow, TFDS and programs that end at once leave behind."""
  folder = tmp_path_factory.mktemp('temporary')
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(tempfile, 'tempdir', str(folder))
    patched.setenv('TMPDIR', str(folder))  # Of the processes that tests start.
    yield
  shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope='module', autouse=True)
def garbage():
  """Collects it after each file, and what is left no more: TensorFlow keeps millions of objects."""
  yield
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def forks(tmp_path_factory):
  """Runs programs that share one import of TensorFlow: `processes.Forks`."""
  from tests import processes

  made = processes.Forks(tmp_path_factory.mktemp('forks'))
  yield made
  made.Close()


def _ConfigureTensorFlow():
  """Makes the devices; nothing may have used one yet."""
  tf = sys.modules['tensorflow']
  tf.config.threading.set_intra_op_parallelism_threads(1)
  cpu = tf.config.list_physical_devices('CPU')[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
  )


class _AfterTensorFlowImport(importlib.abc.MetaPathFinder):
  """Finds `tensorflow` the usual way and calls _ConfigureTensorFlow right after it is loaded."""

  def find_spec(self, fullname, path=None, target=None):
    if fullname != 'tensorflow':
      return None
    sys.meta_path.remove(self)
    spec = importlib.util.find_spec(fullname)
    if spec is None or spec.loader is None:
      return spec
    execute = spec.loader.exec_module

    def _ExecuteThenConfigure(module):
      execute(module)
      _ConfigureTensorFlow()

    spec.loader.exec_module = _ExecuteThenConfigure
    return spec


if 'tensorflow' in sys.modules:
  _ConfigureTensorFlow()
else:
  sys.meta_path.insert(0, _AfterTensorFlowImport())
