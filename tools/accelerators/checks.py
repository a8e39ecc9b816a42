# SPDX-License-Identifier: Apache-2.0
"""The checks of `tools.accelerator_check`, each in a process of its own.

A check is a function of a `Place` that calls `Report` for each row of the table; `CHECKS` lists
them. A row is printed as soon as it is known, so it survives the end of the process.

python -m tools.accelerators.checks '<JSON: check, platform, folder>'
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform as platform_lib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from lingvo_gpipe import PipelinedModel, cluster, dropout, linear, pipelining_layer  # noqa: E402
from lingvo_gpipe.distributed import accelerators  # noqa: E402
from lingvo_gpipe.pipeline import verify  # noqa: E402
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules  # noqa: E402
from lingvo_gpipe.pipeline.stages import micro_batch  # noqa: E402
from lingvo_gpipe.runners import train_runner  # noqa: E402
from tools import program  # noqa: E402
from tools.benchmarking import stage_memory, workloads  # noqa: E402

# The measured memory may be up to this many times the predicted one, and the reverse.
_MEMORY_FACTOR = 2
# Log directories of the checks that run the trainer.
RUNS = ('main_job', 'straight', 'resumed')
_LOSS_BOUND, _NARROW_BOUND = 1e-4, 3e-2
# The sizes of workload (a) in the check of an accelerator's memory: 32 MiB a tensor.
_MEMORY_SIZES = {'dim': 1024, 'batch': 65536}


class Place:
  """The devices of a check, and the folder of its files; starts TensorFlow when it is asked.

  Attributes:
    folder: the folder.
    flags: the flags with which a program uses the same devices.
  """

  def __init__(self, platform: str, folder: str) -> None:
    self.folder = folder
    gpus = tf.config.list_physical_devices('GPU') if platform in ('auto', 'gpu') else []
    self._platform = platform if platform != 'auto' else 'gpu' if gpus else 'cpu'
    self._num_logical = 2 if len(gpus) == 1 else None
    self.flags = [f'--platform={self._platform}']
    if self._num_logical:
      self.flags.append(f'--logical_devices_per_gpu={self._num_logical}')

  @functools.cached_property
  def cluster(self) -> cluster.Cluster:
    """All accelerators, two logical devices of a single GPU, or two logical CPU devices."""
    return cluster.Cluster.Create(
      2 if self.is_cpu else None,
      platform=self._platform,
      logical_devices_per_gpu=self._num_logical,
    )

  @property
  def devices(self) -> list[str]:
    """The names of the devices; at most 8, so that all schedules stay short."""
    return list(self.cluster.devices)[:8]

  @property
  def is_cpu(self) -> bool:
    """Whether the devices are logical CPU devices."""
    return self._platform == 'cpu'

  @property
  def shares_card(self) -> bool:
    """Whether the devices are parts of one GPU."""
    return bool(self._num_logical)


def Report(row: str, is_pass: Any, text: str, **figures: Any) -> None:
  """Prints a row of the table as a line of JSON."""
  print(
    json.dumps({'row': row, 'pass': bool(is_pass), 'text': text, 'figures': figures}), flush=True
  )


def _Devices(place: Place) -> None:
  """Reports versions and devices."""
  build = tf.sysconfig.get_build_info()
  names = ('cuda_version', 'cudnn_version')
  versions = {
    'Python': platform_lib.python_version(),
    'TensorFlow': tf.__version__,
    'Keras': keras.__version__,
    'NumPy': np.__version__,
    **{name: build[name] for name in names if name in build},
    'system': platform_lib.platform(),
  }
  Report('versions', True, ', '.join(f'{k} {v}' for k, v in versions.items()), **versions)
  gpus = tf.config.list_physical_devices('GPU')
  for gpu in gpus:
    details = tf.config.experimental.get_device_details(gpu)
    problem = accelerators.XlaProblem([gpu])
    memory = accelerators.Memory(gpu)
    text = f'{details}; total and free MiB: {memory}; {problem or "XLA runs on it"}'
    Report(gpu.name, True, text, memory=memory)
  count = len(place.devices)
  Report('devices', count > 1, place.cluster.Describe(), names=place.devices)


def _Stack(place: Place, dim: int, rows: int, num_layers: int = 2, **options: Any) -> Any:
  """Returns a placed pipeline of layers with dropout, and a batch `(inputs, side)`."""
  hidden = linear.ProjectionLayer.Params().Set(input_dim=dim, output_dim=dim, activation='TANH')
  block = [hidden, dropout.DropoutLayer.Params().Set(keep_prob=0.9)]
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack', num_stages=len(place.devices), num_micro_batches=4, random_seed=1
  )
  p.Set(**options)
  p.sub = [layer.Copy() for _ in range(num_layers * p.num_stages) for layer in block]
  stack = p.Instantiate()
  stack.Place(place.devices, tf.TensorSpec([rows, dim]), loss_fn=_Loss)
  x = np.random.default_rng(0).standard_normal([rows, dim]).astype('float32')
  return stack, (tf.constant(x), tf.ones([rows]))


def _Loss(theta: Any, outputs: Any, side: Any) -> dict[str, Any]:
  del theta
  squares = tf.reduce_mean(tf.square(tf.cast(outputs[0], tf.float32)), axis=1)
  return {'loss': (tf.reduce_mean(squares), tf.reduce_sum(side))}


def _Equality(place: Place, xla: bool) -> None:
  """Compares each schedule and policy with the same layers without a pipeline."""
  # The reference is not compiled by XLA, and would round differently.
  tf.config.experimental.enable_tensor_float_32_execution(False)
  size = len(place.devices)
  if xla and not _HasXla(place):
    return
  names = [name for name in schedules.Names() if name != 'forward_only']
  # XLA takes seconds for each pair on a GPU.
  policies = rematerialisation.POLICIES if not xla else ('stage', 'none')
  for schedule, policy in itertools.product(names, policies):
    per_device = 2 if schedules.TakesStagesPerDevice(schedule, 2) else 1
    stack, (x, side) = _Stack(
      place, 16, 4 * size, 1, schedule=schedule, remat_policy=policy, xla=xla,
      stages_per_device=per_device, num_stages=per_device * size, num_micro_batches=2 * size,
    )  # fmt: skip
    report = verify.Verify(stack, (x,), side, loss_fn=_Loss, loss_weight=tf.reduce_sum, step=3)
    error = max(report.Error(v) for v in report.variables)
    failures = '; '.join(report.Failures())
    text = failures or f'largest error of a gradient {error:.1e}'
    Report(f'{schedule} {policy}', not failures, text, error=error)


def _HasXla(place: Place) -> bool:
  """Returns whether XLA runs on the devices; reports it if not."""
  if accelerators.UsesXla(None, place.devices):
    return True
  problem = accelerators.XlaProblem(tf.config.get_visible_devices('GPU'))
  Report('XLA', True, f'left out: {problem}')
  return False


def _Masks(place: Place) -> None:
  """Compares the masks of dropout on each device, with and without XLA, with the CPU's."""
  devices = place.devices  # Before TensorFlow starts.
  seed, x = tf.constant([3, 5], tf.int64), tf.ones([64, 64])

  def Mask() -> tf.Tensor:
    return dropout.ApplyDropout(x, 0.7, x.shape, seed)

  with tf.device('/device:CPU:0'):
    expected = Mask().numpy() > 0
  for device, xla in itertools.product(devices, (False, True)):
    if not xla or accelerators.UsesXla(None, [device]):
      with tf.device(device):
        actual = tf.function(Mask, autograph=False, jit_compile=xla)().numpy() > 0
      text = f'{np.sum(actual != expected)} of {actual.size} elements differ'
      Report(f'mask {device[-5:]}{" XLA" * xla}', (actual == expected).all(), text)


def _Memory(place: Place) -> None:
  """Compares predicted with measured memory: per device, on CPUs of one stage and its process."""
  if place.is_cpu:
    for policy in ('stage', 'none'):
      wide = stage_memory.Setting(2, 4, 'gpipe', 1, policy, rows=32768, dim=128)
      narrow = stage_memory.Setting(2, 4, 'gpipe', 1, policy, rows=8, dim=128)
      measured, besides = (
        float(program.ResultOf('tools.benchmarking.stage_memory', setting.ToJson(), 60))
        for setting in (wide, narrow)
      )
      _ReportMemory(policy, stage_memory.Predict(wide), measured - besides)
    return
  for policy in rematerialisation.POLICIES:
    num_stages = len(place.devices)
    task, batch = workloads.Make(
      'a',
      {'layers': 4 * num_stages, **_MEMORY_SIZES},
      {'num_stages': num_stages, 'num_micro_batches': 8, 'remat_policy': policy},
    )
    for device in place.devices:
      tf.config.experimental.reset_memory_stats(_Short(device))
    spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
    runner = train_runner.TrainRunner(task, place.devices, spec)
    before = [_AllocatedBytes(device)['current'] for device in place.devices]
    for _ in range(2):
      runner.TrainStep(batch)
    for k, device in enumerate(place.devices):
      measured = _AllocatedBytes(device)['peak'] - before[k]
      predicted = runner.cut.memory[k].activations
      _ReportMemory(f'{policy} {_Short(device)}', predicted / 2**20, measured / 2**20)


def _ReportMemory(row: str, predicted: float, measured: float) -> None:
  ratio = measured / predicted
  Report(
    f'memory {row}',
    1 / _MEMORY_FACTOR < ratio < _MEMORY_FACTOR,
    f'activations: predicted {predicted:.0f} MiB, measured {measured:.0f} MiB',
    predicted_mib=predicted,
    measured_mib=measured,
  )


def _Short(device: str) -> str:
  return ':'.join(device.rsplit(':', 2)[-2:])


def _AllocatedBytes(device: str) -> dict[str, int]:
  """Returns the bytes that the allocator of an accelerator holds: `current` and `peak`."""
  info: dict[str, int] = tf.config.experimental.get_memory_info(_Short(device))
  return info


def _Fit(model: Any, xla: bool, steps: int = 4) -> tuple[list[float], float]:
  """Trains a Keras model for two epochs; returns the losses and the seconds of a warm step."""
  model.compile(keras.optimizers.Adam(1e-3), 'mse', jit_compile=xla)
  if not isinstance(model, PipelinedModel):  # Otherwise plain Keras traces the step twice.
    model.optimizer.build(model.trainable_variables)
  x = np.random.default_rng(0).standard_normal([32 * steps, model.input_shape[-1]])
  losses, seconds = [], 0.0
  for _ in range(2):
    start = time.perf_counter()
    losses += model.fit(x, np.sin(x), batch_size=32, shuffle=False, verbose=0).history['loss']
    seconds = (time.perf_counter() - start) / steps
  return losses, seconds


def _Keras(
  place: Place,
  policy: str = 'float32',
  bound: float = _LOSS_BOUND,
  xla: bool = False,
  **options: Any,
) -> None:
  """Compares `fit` with plain Keras on the first device."""
  devices = place.devices  # Before TensorFlow starts.
  if xla and not _HasXla(place):
    return
  dim = 128 if place.is_cpu else 2048

  def Make() -> Any:
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    dense = [keras.layers.Dense(dim, activation='tanh') for _ in range(4)]
    return keras.Sequential([keras.Input([dim]), *dense, keras.layers.Dense(dim, dtype='float32')])

  num_stages = options.pop('num_stages', 1)
  pipe = PipelinedModel(
    Make(), num_stages, devices=devices[: options.get('num_replicas', num_stages)],
    xla=xla, **options,
  )  # fmt: skip
  actual, ours = _Fit(pipe, xla)
  with tf.device(devices[0]):
    expected, plain = _Fit(Make(), xla)
  error = max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
  Report(
    ' '.join(
      [f'fit{" XLA" * xla}', policy, f'K={num_stages}', *(f'{k}={v}' for k, v in options.items())]
    ),
    error <= bound and np.isfinite(actual).all(),
    f'losses differ by {error:.1e}; {ours * 1e3:.1f} ms a step, plain Keras {plain * 1e3:.1f} ms',
    error=error,
    step_seconds=ours,
    plain_step_seconds=plain,
  )


def _Dtypes(place: Place) -> None:
  """Compares bfloat16, and float16 with a scaled loss, with plain Keras."""
  for policy in ('mixed_bfloat16', 'mixed_float16'):
    _Keras(place, policy, _NARROW_BOUND, num_stages=len(place.devices), num_micro_batches=2)


def _Replicas(place: Place) -> None:
  """Compares two replicas with plain Keras; on GPUs they meet through NCCL, which needs two."""
  if place.shares_card:
    Report('replicas', True, 'left out: NCCL needs two cards')
  else:
    _Keras(place, num_replicas=2, num_micro_batches=2)


def _Actions(place: Place) -> None:
  """Measures the time of an empty and of a full action, and of compiling."""
  for name, dim, rows in (('empty', 1, 64), ('full', 512, 4096)):
    num_micro_batches = 32
    stack, (x, side) = _Stack(place, dim, rows, num_micro_batches=num_micro_batches)
    engine = stack.engine
    engine.MakeAccumulators()

    def Step(x: tf.Tensor, side: tf.Tensor, stack: Any = stack) -> Any:
      pairs = stack.SplitBatch((x, side))
      micro_batches = [micro_batch.MicroBatch((a,), s, tf.reduce_sum(s)) for a, s in pairs]
      return stack.engine.Accumulate(micro_batches, tf.constant(0, tf.int64)).metrics['loss']

    step = tf.function(Step, autograph=False)
    start = time.perf_counter()
    step.get_concrete_function(x, side)
    trace = time.perf_counter() - start
    first, best = _Times(functools.partial(step, x, side))
    count = sum(len(row) for row in engine.TrainingSchedule(num_micro_batches).actions)
    Report(
      f'{name} actions{"" if engine.xla else " without XLA"}',
      True,
      f'{best / count * 1e6:.0f} us for each of {count} actions; {trace:.1f} s to trace, then '
      f'{first - best:.1f} s to compile',
      action_seconds=best / count,
      trace_seconds=trace,
      compile_seconds=first - best,
    )


def _Copies(place: Place) -> None:
  """Measures whether a copy between devices overlaps with the work of the receiver."""
  sender, receiver = place.devices[:2]
  size, factor = (256, 64) if place.is_cpu else (4096, 8)
  with tf.device(sender):
    x = tf.random.normal([factor * size, size])
  with tf.device(receiver):
    w = tf.random.normal([size, size]) / size

  def Copy(x: Any) -> Any:
    with tf.device(receiver):
      return tf.identity(x)[0, 0]

  def Work(w: Any) -> Any:
    y = w
    with tf.device(receiver):
      for _ in range(32):
        y = tf.matmul(y, w)
      return y[0, 0]

  def Seconds(*parts: Any) -> float:
    step = tf.function(lambda: [part() for part in parts], autograph=False)
    return _Times(step)[1]

  copy, work = functools.partial(Copy, x), functools.partial(Work, w)
  alone, busy, both = Seconds(copy), Seconds(work), Seconds(copy, work)
  overlap = min(1.0, max(0.0, (alone + busy - both) / min(alone, busy)))
  Report(
    'copies',
    True,
    f'copy {alone * 1e3:.2f} ms, work {busy * 1e3:.2f} ms, both {both * 1e3:.2f} ms: '
    f'{overlap:.0%} of the shorter one overlaps',
    copy_seconds=alone,
    work_seconds=busy,
    both_seconds=both,
  )


def _Times(step: Callable[[], Any]) -> tuple[float, float]:
  """Returns the seconds of the first call of `step`, and the fewest of five more."""
  seconds = []
  for _ in range(6):
    start = time.perf_counter()
    tf.nest.map_structure(lambda t: t.numpy(), step())
    seconds.append(time.perf_counter() - start)
  return seconds[0], min(seconds[1:])


def _Trainer(place: Place, name: str, max_steps: int, overrides: str, *flags: str) -> list[float]:
  """Runs the trainer of the README's main job in `folder/name`; returns the losses by step."""
  logdir = os.path.join(place.folder, name)
  subprocess.run(
    [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--model=lm.stdlib.ByteTransformerGPipe2'),
      *(f'--logdir={logdir}', f'--max_steps={max_steps}', *place.flags, *flags),
      f'--model_params_override=task.train.eval_datasets:[];{overrides}',
    ],
    cwd=program.ROOT,
    check=True,
    stdout=sys.stderr,
  )
  with open(os.path.join(logdir, 'metrics.jsonl'), encoding='utf-8') as f:
    lines = [json.loads(line) for line in f]
  return [line['values']['loss'] for line in lines if line['split'] == 'train']


def _MainJob(place: Place) -> None:
  """Trains the README's main job for some steps, and profiles two of them."""
  losses = _Trainer(
    place, 'main_job', 20, 'task.train.summary_interval_steps:5', '--profile_steps=10,11'
  )
  text = f'loss {losses[0]:.3f} after 5 steps, {losses[-1]:.3f} after 20'
  Report('main job', losses[-1] < losses[0], text, losses=losses)


def _Resume(place: Place) -> None:
  """Compares a run with one that was stopped and resumed from its checkpoint."""
  small = (
    'task.num_layers:2;task.model_dim:32;task.hidden_dim:64;task.num_heads:2;input.batch_size:8;'
    'input.seq_len:32;input.max_bytes:20000;task.train.summary_interval_steps:1'
  )
  expected = _Trainer(place, 'straight', 6, small, '--deterministic')
  _Trainer(place, 'resumed', 3, small, '--deterministic')
  actual = _Trainer(place, 'resumed', 6, small, '--deterministic')
  text = f'last loss {actual[-1]!r} after a stop at step 3, {expected[-1]!r} without'
  Report('resume', actual == expected, text, losses=actual, expected=expected)


# {name: (check, environment variables)}.
CHECKS: dict[str, tuple[Callable[[Place], None], dict[str, str]]] = {
  'devices': (_Devices, {}),
  'equality': (functools.partial(_Equality, xla=False), {}),
  'equality_xla': (functools.partial(_Equality, xla=True), {}),
  'masks': (_Masks, {}),
  'memory': (_Memory, {}),
  'keras': (_Keras, {}),
  'keras_xla': (functools.partial(_Keras, xla=True), {}),
  'dtypes': (_Dtypes, {}),
  'replicas': (_Replicas, {}),
  'actions': (_Actions, {}),
  'actions_no_autotuning': (_Actions, {'XLA_FLAGS': '--xla_gpu_autotune_level=0'}),
  'copies': (_Copies, {}),
  'main_job': (_MainJob, {}),
  'resume': (_Resume, {}),
}


def main(arguments: Sequence[str]) -> None:
  """Runs the check of the first argument."""
  options = json.loads(arguments[0])
  CHECKS[options['check']][0](Place(options['platform'], options['folder']))


if __name__ == '__main__':
  main(sys.argv[1:])
