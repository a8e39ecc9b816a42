# SPDX-License-Identifier: Apache-2.0
"""What the binaries share: the flags that choose a model, and errors as one line."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from absl import flags, logging


@contextlib.contextmanager
def _QuietStderr() -> Iterator[None]:
  """Drops what native code writes to stderr, unless the enclosed code fails; the log goes on.

  TensorFlow's libraries announce themselves at import, before any log level has an effect; a
  user's mistake is to be one line.
  """
  sys.stderr.flush()
  saved = os.dup(2)
  log = logging.get_absl_handler().python_handler
  with tempfile.TemporaryFile() as dropped, open(saved, 'w', errors='backslashreplace') as kept:
    os.dup2(dropped.fileno(), 2)
    log_stream = log.setStream(kept)
    try:
      yield
    except (ValueError, OSError):  # Ours, with a message of its own.
      raise
    except BaseException:
      dropped.seek(0)
      os.write(saved, dropped.read())
      raise
    finally:
      log.setStream(log_stream)
      os.dup2(saved, 2)


# This module is the first of the package that a binary imports.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
with _QuietStderr():
  import tensorflow as tf

  # Keras looks for GPUs as it is imported; `Cluster` tells what there is.
  from lingvo_gpipe.learning import optimizer as _  # noqa: F401

from lingvo_gpipe.cli import command_line, compilation_cache  # noqa: E402
from lingvo_gpipe.core import heartbeat, params_text  # noqa: E402
from lingvo_gpipe.distributed import cluster, cluster_spec, local_workers, worker_connection  # noqa: E402
from lingvo_gpipe.experiment import model as model_lib  # noqa: E402
from lingvo_gpipe.experiment import registry  # noqa: E402

FLAGS = flags.FLAGS


# The flags of libraries, which --help leaves out.
_others: set[str] = set()
# What stands on the command line beside the flags.
arguments: list[str] = []


class UsageError(Exception):
  """A mistake of the user's: printed as one line, exit status 2."""


def DefineDeviceFlags() -> None:
  """Defines the flags that choose devices; called by the binaries alone, before their own."""
  _others.update(FLAGS)
  flags.DEFINE_enum(
    'platform',
    'auto',
    list(cluster.PLATFORMS),
    'Kind of device; auto: TPU cores, else GPUs, else CPU.',
  )
  flags.DEFINE_string(
    'cluster', None, 'JSON file of the addresses of workers; if not given, TF_CONFIG, if it is set.'
  )
  flags.DEFINE_string(
    'xla_cache', None, 'Directory that keeps what XLA compiled, for the next start.'
  )
  flags.DEFINE_bool('stack_trace', False, "Show a stack trace for a user's mistake too.")


def DefineFlags() -> None:
  """Defines the flags of the binaries that take an experiment, `DefineDeviceFlags` included."""
  DefineDeviceFlags()
  flags.DEFINE_string(
    'model', None, 'Key of the experiment, such as lm.stdlib.ByteTransformerGPipe2.'
  )
  flags.DEFINE_string('logdir', None, 'Directory of the run: checkpoints, summaries, descriptions.')
  flags.DEFINE_multi_string(
    'model_params_override', [], "'task.train.max_steps:100;...'; applied after the file's."
  )
  flags.DEFINE_string('model_params_file_override', None, 'A file of overrides, one a line.')
  flags.DEFINE_multi_string('params_package', [], 'A further package to look experiments up in.')
  flags.DEFINE_integer(
    'num_devices', None, 'At most so many devices are used; as many as stages.', lower_bound=1
  )
  flags.DEFINE_list(
    'devices', None, 'Which GPUs or TPU cores are used, such as 0,2, of those that are visible.'
  )
  flags.DEFINE_integer(
    'num_replicas', 1, 'How often the stages are there, each with its share of a batch.', 1
  )
  flags.DEFINE_integer(
    'max_steps', None, 'The last step; the experiment says, if not given.', lower_bound=0
  )
  flags.DEFINE_integer(
    'local_workers',
    None,
    'Start so many workers on this machine, with the stages on their CPU devices.',
    lower_bound=1,
  )
  flags.DEFINE_string(
    'model_task_name', '', 'Of an experiment of several tasks train, evaluate or export this alone.'
  )


def Packages() -> list[str]:
  """Where experiments are looked up: the working directory's `params`, then what flags name."""
  # First, whatever PYTHONPATH says: the user's own `params` and `tasks` are those meant.
  here = os.getcwd()
  sys.path[:] = [here, *(path for path in sys.path if path not in (here, ''))]
  return ['params', *FLAGS.params_package]


def ModelParams(dataset: str, key: str = '') -> Any:
  """The Params of a model, with that data set and the overrides that the flags name.

  Args:
    dataset: the name of a data set.
    key: the experiment; '' is that of --model.

  Raises:
    UsageError: no --model, a file of overrides that cannot be read, or --model_task_name for a
      model of one task.
    LookupError: unknown model or data set.
    ValueError, AttributeError: an override that does not fit.
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
  """The texts of the overrides, the file's first."""
  texts = []
  if path := FLAGS.model_params_file_override:
    try:
      with tf.io.gfile.GFile(path) as f:
        texts.append(f.read())
    except tf.errors.OpError as e:
      raise UsageError(f'--model_params_file_override={path} cannot be read: {e.message}') from e
  return texts + list(FLAGS.model_params_override)


def OwnDevices(num_devices: int | None, num_replicas: int = 1) -> cluster.Cluster:
  """The devices of this process that the flags allow; ValueError where they are fewer.

  Args:
    num_devices: needed for each replica; None: all accelerators.
    num_replicas: how often.
  """
  indices = None
  if FLAGS.devices is not None:
    if not FLAGS.devices or not all(re.fullmatch('[0-9]+', text) for text in FLAGS.devices):
      raise UsageError(f'--devices is a list of indices such as 0,2; got {FLAGS.devices}')
    indices = [int(text) for text in FLAGS.devices]
  with StartingTensorFlow():
    return cluster.Cluster.Create(
      num_devices,
      FLAGS.num_devices,
      FLAGS.platform,
      num_replicas=num_replicas,
      indices=indices,
    )


def OneDevice() -> cluster.Cluster:
  """A device where no stage runs: models are looked at, for whatever devices."""
  with StartingTensorFlow():
    return cluster.Cluster.Create(1, 1, FLAGS.platform)


def Devices(num_devices: int) -> cluster.Cluster:
  """The devices that the flags name, of workers or of this process; called once in a process.

  Args:
    num_devices: how many are needed for each of the --num_replicas.

  Raises:
    UsageError, ValueError, OSError: they are fewer, or the workers are not there.
  """
  if FLAGS.local_workers:
    return WorkersDevices(LocalWorkers(num_devices).spec, num_devices)
  spec = Workers()
  if spec is None:
    return OwnDevices(num_devices, FLAGS.num_replicas)
  return WorkersDevices(spec, num_devices)


def LocalWorkers(num_devices: int) -> local_workers.LocalWorkers:
  """Starts the workers of --local_workers, with so many devices for each replica, or some more."""
  if FLAGS.cluster:
    raise UsageError('--cluster names workers that run, --local_workers starts some: give one')
  if FLAGS.platform not in ('auto', 'cpu'):
    raise UsageError('--local_workers serve CPU devices: one process uses all GPUs of a host')
  _CheckDevicesOfWorkers()
  each = -(-num_devices * FLAGS.num_replicas // FLAGS.local_workers)
  threads = max(1, cluster.Cores() // (each * FLAGS.local_workers))
  options = [f'--num_devices={each}', f'--threads_per_device={threads}', '--platform=cpu']
  if FLAGS.xla_cache:
    options.append(f'--xla_cache={os.path.abspath(os.path.expanduser(FLAGS.xla_cache))}')
  return local_workers.LocalWorkers(FLAGS.local_workers, options)


def Workers() -> cluster_spec.ClusterSpec | None:
  """The workers that the flags or TF_CONFIG name for this process; None: it computes itself."""
  spec = ClusterSpec()
  if spec is None or spec.task_type == 'evaluator':
    return None
  if spec.task_type == 'worker':
    raise UsageError(
      f'TF_CONFIG says that this process is worker {spec.task_index}: start `worker` here'
    )
  _CheckDevicesOfWorkers()
  return spec


def _CheckDevicesOfWorkers() -> None:
  """Raises UsageError for flags that choose devices of this process, where workers compute."""
  if FLAGS.devices is not None:
    raise UsageError(
      '--devices chooses GPUs of this process, and workers compute: set CUDA_VISIBLE_DEVICES where '
      'each of them is started'
    )
  if FLAGS.num_devices is not None:
    raise UsageError(
      '--num_devices limits the devices of this process, and workers compute: leave it out. '
      '`worker --num_devices` says how many a worker has; local ones have as many as are needed'
    )


def WorkersDevices(
  spec: cluster_spec.ClusterSpec,
  num_devices: int,
  timeout_seconds: float = 60.0,
  *,
  num_replicas: int | None = None,
  answers: Mapping[str, bytes] | None = None,
) -> cluster.Cluster:
  """Connects to workers that answer within the time, and takes so many of their devices.

  Args:
    spec: the workers.
    num_devices: for each replica.
    timeout_seconds: the time.
    num_replicas: other than --num_replicas.
    answers: as for `cluster.Cluster.Connect`.
  """
  with StartingTensorFlow():
    return cluster.Cluster.Connect(
      spec,
      num_devices,
      num_replicas or FLAGS.num_replicas,
      platform=FLAGS.platform,
      timeout_seconds=timeout_seconds,
      answers=answers,
    )


@contextlib.contextmanager
def LeavingWhereAWorkerFails(status: int) -> Iterator[None]:
  """Ends the process with this status, and one line, where a worker fails in the enclosed code.

  What else the process had to do at its end would wait for workers that are gone.
  """
  try:
    yield
  except Exception as e:
    if not worker_connection.IsFailure(e):
      raise
    text = '; '.join([f'a worker failed: {e}', *getattr(e, '__notes__', [])])
    print(' '.join(text.split()), file=sys.stderr, flush=True)
    _Leave(status)


def ClusterSpec() -> cluster_spec.ClusterSpec | None:
  """The workers that --cluster or TF_CONFIG names; None where neither does."""
  if FLAGS.cluster:
    return cluster_spec.FromFile(FLAGS.cluster)
  return cluster_spec.FromEnvironment(os.environ)


@contextlib.contextmanager
def StartingTensorFlow() -> Iterator[None]:
  """To be entered where TensorFlow looks for devices for the first time."""
  if FLAGS.xla_cache:
    compilation_cache.Use(FLAGS.xla_cache)
  # Where there is no NVIDIA device, TensorFlow calls that an error of the driver.
  with contextlib.nullcontext() if glob.glob('/dev/nvidia*') else _QuietStderr():
    yield


def LogDir() -> str:
  """The --logdir; UsageError where it is missing."""
  if not FLAGS.logdir:
    raise UsageError('--logdir is needed: the directory of the run')
  return os.path.expanduser(FLAGS.logdir)


def _Tell(error: Exception) -> int:
  """Prints an error and returns the exit status: a user's mistake is one line on stderr, and 2.

  Such mistakes are the errors that this package raises itself, and the ValueErrors with which a
  task, layer or input of the working directory refuses its Params. An error out of an experiment's
  own file, be it in what that calls of this package, or any other, keeps its stack trace.
  """
  kinds = (ValueError, LookupError, AttributeError, TypeError, OSError)
  is_mistake = isinstance(error, kinds) and _IsUsersMistake(error)
  if FLAGS.stack_trace or not (is_mistake or isinstance(error, UsageError)):
    traceback.print_exception(error)
    return 1
  notes = ''.join(f' ({note})' for note in getattr(error, '__notes__', []))
  text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
  print(' '.join(f'{text}{notes}'.split()), file=sys.stderr)
  return 2


def _IsUsersMistake(error: BaseException) -> bool:
  """Whether code of this package, or a check of the user's project, refused what it was given."""
  here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
  files = [
    os.path.abspath(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)
  ]
  by_registry = itertools.dropwhile(lambda file: file != registry.__file__, files)
  in_experiment = any(not file.startswith(here) for file in by_registry)
  in_project = files[-1].startswith(os.getcwd() + os.sep) and 'site-packages' not in files[-1]
  refused = files[-1].startswith(here) or (isinstance(error, ValueError) and in_project)
  return refused and not in_experiment


def Run(
  main: Callable[[], int], description: str, num_arguments: Callable[[], int] = lambda: 0
) -> NoReturn:
  """Starts a binary: parses the flags, runs `main` and exits with the status it returns.

  absl's app.run would do the same, but lets TensorFlow look for GPUs before anything was checked.

  Args:
    main: the program; it finds arguments that are no flags in `arguments`.
    description: the binary's docstring, which --help prints.
    num_arguments: how many such arguments there must be, asked once the flags are parsed.
  """
  # A sample of text may hold any character, and the terminal or the log's encoding may not.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='replace')
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  arguments[:] = command_line.Parse(description, _others, num_arguments)
  try:
    status = main()
  except Exception as e:
    # Within the handler: what the error holds may hang in its end, without a worker for instance.
    status = 1
    try:
      status = _Tell(e)
    finally:
      _Leave(status)
  _Leave(status)


def _Leave(status: int) -> NoReturn:
  """Ends the process without the interpreter's own end.

  That one waits now and then for ever, where a thread of tf.data is within Python code: the next
  batch is made ahead.
  """
  heartbeat.End(status)  # Whoever reads the output may let it wait.
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except OSError:
      status = status or 1
  os._exit(status)
