# SPDX-License-Identifier: Apache-2.0
"""Start of the programs: their common flags, errors as one line, and the exit."""

from __future__ import annotations

from lingvo_gpipe.cli import interrupts  # First: from here on Ctrl-C ends a program in one line.

# isort: split
import contextlib
import gc
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import flags, logging

from lingvo_gpipe.distributed import native_output


@contextlib.contextmanager
def _HideModules(*names: str) -> Iterator[None]:
  """Makes the imports of these modules fail unless they are imported already."""
  hidden = [name for name in names if name not in sys.modules]
  sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
  try:
    yield
  finally:
    for name in hidden:
      del sys.modules[name]


@contextlib.contextmanager
def _PauseGarbageCollection() -> Iterator[None]:
  """Imports without garbage collection, a fifth of their time, and exempts the modules for good."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    if was_enabled:
      gc.enable()


# Programs import this module before any other module of the package.
# Errors only: a failed step has dozens of warnings, which say less than the exception.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# Keras imports them, if they are installed, for wrappers and plots that no program makes: it would
# take a third of the time in which a program starts.
with _PauseGarbageCollection(), native_output.DropOutput(), _HideModules('matplotlib', 'sklearn'):
  import tensorflow as tf  # noqa: F401

  # Importing Keras searches for GPUs; `Cluster` reports the devices.
  from lingvo_gpipe.learning import optimizer as _  # noqa: F401

from lingvo_gpipe.cli import command_line, error_report  # noqa: E402
from lingvo_gpipe.cli import subjects as subjects_lib  # noqa: E402
from lingvo_gpipe.core import files, heartbeat, params_text  # noqa: E402
from lingvo_gpipe.distributed import accelerators, cluster, worker_connection  # noqa: E402
from lingvo_gpipe.experiment import model as model_lib  # noqa: E402
from lingvo_gpipe.experiment import registry  # noqa: E402

FLAGS = flags.FLAGS


# Flags of libraries, which --help leaves out.
_library_flags: set[str] = set()
# Arguments of the command line that are not flags.
arguments: list[str] = []


class UsageError(Exception):
  """A mistake of the user: printed as one line, with exit status 2."""


def DefineDeviceFlags() -> None:
  """Defines the flags that choose devices; only programs call it, before they define others."""
  _library_flags.update(FLAGS)
  flags.DEFINE_enum(
    'platform',
    'auto',
    list(cluster.PLATFORMS),
    'Kind of device; auto: GPUs, else CPU. tpu takes the TPU of TPU_NAME or of this machine.',
  )
  flags.DEFINE_integer(
    'logical_devices_per_gpu', None, 'Split each GPU into this many devices.', 1, 256
  )
  flags.DEFINE_enum(
    'gpu_memory', 'growth', list(accelerators.MEMORY), 'Allocation of memory of GPUs.'
  )
  flags.DEFINE_bool(
    'deterministic',
    False,
    'Make GPUs repeat a run to the last bit, more slowly. CPUs do so with equal threads.',
  )
  flags.DEFINE_string(
    'cluster', None, 'JSON file with the addresses of workers; defaults to TF_CONFIG if it is set.'
  )
  flags.DEFINE_string('xla_cache', None, 'Directory of compiled XLA code, which later runs reuse.')
  flags.DEFINE_bool(
    'stack_trace', False, 'Print the stack trace of an error, even of a mistake of the user.'
  )


def DefineFlags() -> None:
  """Defines the flags of programs that run an experiment, including `DefineDeviceFlags`."""
  DefineDeviceFlags()
  flags.DEFINE_string(
    'model', None, 'Key of the experiment, such as lm.stdlib.ByteTransformerGPipe2.'
  )
  flags.DEFINE_string('logdir', None, 'Directory of the run: checkpoints, summaries, descriptions.')
  flags.DEFINE_multi_string(
    'model_params_override',
    [],
    "Params to change, such as 'task.train.max_steps:100;...'; applied after the file's.",
  )
  flags.DEFINE_string('model_params_file_override', None, 'File of Params to change, one per line.')
  flags.DEFINE_multi_string('params_package', [], 'Another package of experiments to search.')
  flags.DEFINE_integer(
    'num_devices', None, 'Most devices to use; by default one per stage.', lower_bound=1
  )
  flags.DEFINE_list(
    'devices', None, 'Indices of the visible GPUs or TPU cores to use, such as 0,2.'
  )
  flags.register_validator(
    'devices',
    lambda x: x is None or (bool(x) and all(re.fullmatch('[0-9]{1,4}', i) for i in x)),
    'it must be a list of indices such as 0,2',
  )
  flags.DEFINE_integer(
    'num_replicas',
    1,
    'Number of copies of the pipeline; each gets its share of a batch.',
    lower_bound=1,
    upper_bound=cluster.MAX_CPU_DEVICES,
  )
  flags.DEFINE_integer(
    'max_steps', None, 'The last step; defaults to the value of the experiment.', lower_bound=0
  )
  flags.DEFINE_integer(
    'local_workers',
    None,
    'Number of workers to start on this machine, with the stages on their CPU devices.',
    lower_bound=1,
    upper_bound=256,
  )
  flags.DEFINE_string(
    'model_task_name', '', 'The only task to train, evaluate or export, of several tasks.'
  )


def Packages() -> list[str]:
  """Returns the packages with experiments: `params`, then the values of --params_package."""
  # The working directory precedes PYTHONPATH: the user means the local `params` and `tasks`.
  directory = os.getcwd()
  sys.path[:] = [directory, *(path for path in sys.path if path not in (directory, ''))]
  return ['params', *FLAGS.params_package]


def ModelParams(dataset: str, key: str = '') -> Any:
  """Returns the Params of a model with a data set, after the overrides of the flags.

  Args:
    dataset: name of the data set.
    key: the experiment; '' for --model.

  Raises:
    UsageError: --model is missing, or --model_task_name is set for a model of one task.
    OSError: the file of overrides cannot be read.
    LookupError: the model or the data set is unknown.
    ValueError, AttributeError: an override does not fit.
  """
  key = key or FLAGS.model
  if not key:
    raise UsageError(
      '--model is needed, such as --model=lm.stdlib.ByteTransformerGPipe2; --mode=list lists all'
    )
  params = registry.GetParams(key, dataset, packages=Packages())
  for text in Overrides():
    params.ApplyOverrides(params_text.ParseOverrides(text))
  if FLAGS.max_steps is not None:
    model_lib.FindTrainParams(params).max_steps = FLAGS.max_steps
  if FLAGS.model_task_name:
    if 'task_name' not in params:
      raise UsageError(
        f'--model_task_name={FLAGS.model_task_name}: {key} has one task; leave the flag out, or '
        'name another experiment by --model'
      )
    params.task_name = FLAGS.model_task_name
  return params


def Overrides() -> list[str]:
  """Returns the texts of the overrides; the text of the file comes first."""
  texts = []
  if path := FLAGS.model_params_file_override:
    texts.append(files.ReadText(path, '--model_params_file_override'))
  return texts + list(FLAGS.model_params_override)


@contextlib.contextmanager
def ExitIfAWorkerFails(status: int) -> Iterator[None]:
  """Ends the process with one line and this status if a worker fails in the enclosed code.

  A normal exit would wait for workers that no longer exist.
  """
  try:
    yield
  except Exception as e:
    if not worker_connection.IsFailure(e):
      raise
    text = '; '.join([f'a worker failed: {e}', *getattr(e, '__notes__', [])])
    print(' '.join(text.split()), file=sys.stderr, flush=True)
    _Leave(status)


def LogDir() -> str:
  """Returns --logdir; raises UsageError if it is missing."""
  if not FLAGS.logdir:
    raise UsageError('--logdir is needed: the directory of the run')
  return os.path.expanduser(FLAGS.logdir)


def _PrintError(error: Exception) -> int:
  """Prints an error and returns the exit status: one line on stderr and 2 for a user's mistake.

  A mistake is an error that this package raises itself, or a ValueError with which a task, layer or
  input of the working directory rejects its Params. All other errors, and all errors raised while
  the registry runs an experiment's file, have a stack trace, see `error_report`.
  """
  kinds = (ValueError, LookupError, AttributeError, TypeError, OSError)
  is_mistake = isinstance(error, kinds) and _IsUsersMistake(error)
  if FLAGS.stack_trace or not (is_mistake or isinstance(error, UsageError)):
    logdir = os.path.expanduser(FLAGS.logdir or '' if 'logdir' in FLAGS else '')
    error_report.Print(error, None if FLAGS.stack_trace else logdir)
    return 1
  notes = ''.join(f' ({note})' for note in getattr(error, '__notes__', []))
  text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
  print(' '.join(f'{text or type(error).__name__}{notes}'.split()), file=sys.stderr)
  return 2


def _IsUsersMistake(error: BaseException) -> bool:
  """Whether this package, or a check in the user's project, rejected a value of the user."""
  package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
  files = [
    os.path.abspath(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)
  ]
  below_registry = itertools.dropwhile(lambda file: file != registry.__file__, files)
  in_experiment = any(not file.startswith(package) for file in below_registry)
  in_project = files[-1].startswith(os.getcwd() + os.sep) and 'site-packages' not in files[-1]
  is_rejection = files[-1].startswith(package) or (isinstance(error, ValueError) and in_project)
  return is_rejection and not in_experiment


def Run(
  main: Callable[[], int],
  description: str,
  num_arguments: Callable[[], int] = lambda: 0,
  subjects: Sequence[subjects_lib.Subject] = (),
) -> NoReturn:
  """Starts a program: parses the flags, runs `main` and exits with the status that it returns.

  absl's app.run lets TensorFlow search for GPUs before any check, so it is not used.

  Args:
    main: the program; `arguments` has the arguments that are not flags.
    description: docstring of the program, which --help prints.
    num_arguments: returns the number of these arguments, after the flags are parsed.
    subjects: the headings for the flags of an installed program, see `command_line.Parse`.
  """
  # A sample of text may contain characters that the encoding of the terminal lacks.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='replace')
  interrupts.Install()
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  arguments[:] = command_line.Parse(description, _library_flags, num_arguments, subjects)
  try:
    status = main()
  except KeyboardInterrupt:
    interrupts.End()
  except Exception as e:
    # Inside the handler: destroying the objects that the error refers to may hang, for example if
    # a worker is gone.
    status = 1
    try:
      status = _PrintError(e)
    finally:
      _Leave(status)
  _Leave(status)


def _Leave(status: int) -> NoReturn:
  """Ends the process without Python's own finalisation.

  Finalisation may wait forever if a thread of tf.data runs Python code to prepare the next batch.
  """
  heartbeat.End(status)  # Before the flush, which may wait for the reader of the output.
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except OSError:
      status = status or 1
  os._exit(status)
