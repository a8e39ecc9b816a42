# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: a quiet TensorFlow on the CPU with four logical devices.

Tests that never import TensorFlow do not wait for it: a hook creates the devices right after the
first import of TensorFlow, whether a test file imports it or a function that runs later.
"""

import ast
import gc
import importlib.abc
import importlib.metadata
import importlib.util
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile

import hypothesis
import pytest

# Collections would find nothing while the test files are imported, and take a seventh of the time.
gc.disable()

NUM_DEVICES = 4

_FOLDER = pathlib.Path(__file__).parent

# The processes that tests start inherit these. A value that the user has set stays.
os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# NumPy's library of matrices would start a thread for each core, which spins after each product.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')
# XLA compiles in half of the time without LLVM's optimisations and with its older generator of
# fused loops, and no test is about these; with `XLA_FLAGS= make test` the tests run with them.
# TensorFlow 2.22 has no older generator, and its flag would end the process.
_XLA_FLAGS = ['--xla_backend_optimization_level=0']
if any(x.version < '2.22' for x in importlib.metadata.distributions(name='tensorflow')):
  _XLA_FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ.setdefault('XLA_FLAGS', ' '.join(_XLA_FLAGS))

# The same examples in each run, on slow machines too; --hypothesis-profile=default draws new ones.
hypothesis.settings.register_profile('repeatable', deadline=None, derandomize=True)
hypothesis.settings.load_profile('repeatable')


def FilesInBuild(name):
  """Returns the test files in the list `name` of tests/BUILD; none if Bazel runs a single file."""
  build = _FOLDER / 'BUILD'
  if not build.exists():
    return set()
  text = re.search(rf'^{name} = (\[.*?^\])', build.read_text(), re.M | re.S)[1]
  return {_FOLDER / file for file in ast.literal_eval(text)}


def pytest_addoption(parser):
  parser.addoption(
    '--sample', action='store_true', help='run only the files in SAMPLE of tests/BUILD'
  )


def pytest_ignore_collect(collection_path, config):
  """With --sample, leaves the other test files unread: importing all of them takes 15 seconds."""
  is_test = collection_path.name.endswith('_test.py')
  if config.getoption('--sample') and is_test and collection_path not in FilesInBuild('SAMPLE'):
    return True
  return None


def pytest_collection_modifyitems(items):
  """Runs the files in SLOW of tests/BUILD first, so that no worker is left with one at the end."""
  slow = FilesInBuild('SLOW')
  items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope='session', autouse=True)
def temporary_files(tmp_path_factory):
  """Removes what TensorFlow, TFDS and killed programs leave in the temporary directory."""
  folder = tmp_path_factory.mktemp('temporary')
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(tempfile, 'tempdir', str(folder))
    patched.setenv('TMPDIR', str(folder))  # For the processes that tests start.
    yield
  shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Seeds Python's generator, from which Keras draws the seeds of initial weights, and NumPy's.

  Lets TensorFlow optimise graphs, as for users, in tests and files with the mark
  `optimized_graphs`, before their fixtures. With `OPTIMIZE_GRAPHS=1 make test` it does so in all.
  """
  random.seed(0)
  if numpy := sys.modules.get('numpy'):
    numpy.random.seed(0)
  is_marked = item.get_closest_marker('optimized_graphs') is not None
  if is_marked or 'tensorflow' in sys.modules:
    from tests import fast_tracing

    fast_tracing.OptimizeGraphs(is_marked)


def pytest_collection_finish():
  """Collects garbage from now on, except among the half a million objects that were imported."""
  gc.freeze()
  gc.enable()


@pytest.fixture(scope='module', autouse=True)
def garbage():
  """Collects garbage after each file, and exempts the survivors, millions of objects, for good."""
  yield
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def forks(tmp_path_factory):
  """Runs programs that share one import of TensorFlow: `processes.Forks`."""
  from tests import processes

  runner = processes.Forks(tmp_path_factory.mktemp('forks'))
  yield runner
  runner.Close()


def _ConfigureTensorFlow():
  """Creates the devices, before TensorFlow initialises the default one, and saves time."""
  tf = sys.modules['tensorflow']
  tf.config.threading.set_intra_op_parallelism_threads(1)
  cpu = tf.config.list_physical_devices('CPU')[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
  )
  from tests import fast_tracing

  fast_tracing.Configure()


class _AfterTensorFlowImport(importlib.abc.MetaPathFinder):
  """Finds `tensorflow` as usual, and calls _ConfigureTensorFlow once it is loaded."""

  def find_spec(self, fullname, path=None, target=None):
    if fullname != 'tensorflow':
      return None
    sys.meta_path.remove(self)
    spec = importlib.util.find_spec(fullname)
    if spec is None or spec.loader is None:
      return spec
    execute = spec.loader.exec_module

    def _ExecuteThenConfigure(module):
      # Keras would import these to support them: a fifth of the time. No test uses that.
      hidden = {'matplotlib', 'sklearn'} - sys.modules.keys()
      sys.modules.update(dict.fromkeys(hidden))
      execute(module)
      for name in hidden:
        del sys.modules[name]
      _ConfigureTensorFlow()

    spec.loader.exec_module = _ExecuteThenConfigure
    return spec


if 'tensorflow' in sys.modules:
  _ConfigureTensorFlow()
else:
  sys.meta_path.insert(0, _AfterTensorFlowImport())
