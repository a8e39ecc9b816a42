# SPDX-License-Identifier: Apache-2.0
"""Input generators: data sets of indexed examples, read in a seeded, restartable order.

The state of a run over the data is one integer, the *position*: the number of examples consumed
since the start of the run. It does not depend on the batch size, on the number of replicas or on
tf.data's iterators, and `Dataset(start=position)` continues exactly at the example at which a run
stopped.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import inspect
import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import index_order

# Paths of fields with the weight of each row; it becomes 0 in padded rows.
_WEIGHTS = re.compile(r'(.+\.)?(example_)?weights')

# Number of batches after a restart that are compared with the batches of the run.
_NUM_COMPARED = 4
# Restarts at the end of an epoch are checked up to this size: a run is read up to there.
_MAX_EPOCH_READ = 4096

# Operations whose draws depend on how often they were called.
_STATEFUL_DRAW = re.compile(
  r'Random(Uniform|UniformInt|StandardNormal|Gamma|Poisson|PoissonV2|Shuffle)|Multinomial|'
  r'(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox(V2)?|'
  r'Stateful(RandomBinomial|StandardNormal|StandardNormalV2|TruncatedNormal|Uniform\w*)'
)
_PYTHON = frozenset(('PyFunc', 'PyFuncStateless', 'EagerPyFunc'))


class BaseInputGenerator:
  """Batches of an indexed data set.

  A subclass implements `NumExamples()`, `_Examples(indices)` and `_FingerprintParts()`, which
  identifies its data. Each batch is a NestedMap of tensors of shape [batch, ...] with static
  shapes: the fields of `_Examples` and

  * `example_weights`, float32 [batch]: 1 for an example, 0 for a padded row. If `_Examples` returns
    this field, too, the two are multiplied.

  Floating fields `weights` of shape [batch, ...] (such as the weight of each predicted token) are
  also multiplied by `example_weights`, and so are such fields at any depth, as in `tgt.weights`.
  No weight may be negative. Only the last batch of a run of `p.num_epochs` epochs has padding;
  padded rows repeat the last example, so that ids stay legal.

  With `p.num_epochs=0` there is no last batch, and batches cross the boundaries of epochs, so that
  each is full. With `p.num_epochs=1, p.shuffle=False` every example comes exactly once, in the
  order of indices.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', '', 'Name of this input, for messages.')
    p.Define(
      'batch_size',
      0,
      'Examples in a batch, over all replicas. Must be set.',
      domain.Int(0, 1 << 24),
    )
    p.Define('random_seed', 0, 'Seed of the order of the examples.', domain.Int())
    p.Define(
      'shuffle',
      True,
      'Whether each epoch has its own random order; False: the order of indices.',
    )
    p.Define(
      'num_epochs', 0, 'Number of epochs; 0 or None: endless.', domain.Int(0, 1 << 20) | domain.NONE
    )
    p.Define(
      'num_prefetch',
      2,
      'Batches to prepare ahead; -1 lets tf.data choose, 0: none.',
      domain.Int(-1, 1 << 20),
    )
    p.Define(
      'num_parallel_calls',
      1,
      'Batches to prepare in parallel (never changes their order); -1 lets tf.data choose.',
      domain.Int(1, 1024) | domain.Int(-1, -1),
    )
    p.Define(
      'read_on_workers',
      True,
      'If stages run on workers: whether each worker reads the data it needs, if it can.',
      domain.BOOL | domain.NONE,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams):
    """Checks and copies `params`.

    Raises:
      ValueError: a param is out of range; the message names the input and the param.
    """
    self.params = params.Copy()
    self._last_dataset: tuple[int, tf.data.Dataset] | None = None
    self._calls_python = False  # Known after `_Examples` was traced.
    self._CheckBatchSize()

  # Implemented by subclasses.

  def NumExamples(self) -> int:
    """Returns the number of examples; indices are 0 ... NumExamples() - 1."""
    raise NotImplementedError(f'NumExamples of {type(self).__name__}')

  def _Examples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    """Returns the examples at some indices: int64 [n] -> NestedMap of tensors [n, ...].

    Runs inside the graph of a tf.data pipeline, on the host. It must be a function of the indices
    alone (random draws must be seeded by them), and the shapes must be static except for n.
    """
    raise NotImplementedError(f'_Examples of {type(self).__name__}')

  def _ExamplesInEpochs(self, indices: tf.Tensor, epochs: tf.Tensor) -> nested_map.NestedMap:
    """Returns the examples at some indices and epochs, both int64 [n].

    Override it in place of `_Examples` if examples change with the epoch, for example by
    augmentation.
    """
    del epochs
    return self._Examples(indices)

  def _FingerprintParts(self) -> list[Any]:
    """Returns strings and numbers that identify the data; `Fingerprint` is their hash."""
    raise NotImplementedError(f'_FingerprintParts of {type(self).__name__}')

  def NumDamaged(self) -> int:
    """Returns the number of damaged records left out; above 0 only if params ask for that."""
    return 0

  def CheckComplete(self) -> None:
    """Raises ValueError if examples may be left out without a report."""

  def Assets(self) -> list[str]:
    """Returns paths of files that define the examples, such as a vocabulary; runs copy them."""
    return []

  def _ExampleSpec(self) -> nested_map.NestedMap:
    """Returns a NestedMap of tf.TensorSpec of one example, without the batch dimension.

    The default traces `_Examples`. Override it if the shapes follow from the params, so that a
    model can be inspected without the data.
    """
    return self._traced_spec.copy()  # A subclass may change it.

  @functools.cached_property
  def _traced_spec(self) -> nested_map.NestedMap:
    """A run asks for the spec several times, and tracing `_Examples` takes long."""
    traced = []

    def Trace(indices: tf.Tensor) -> None:
      traced.append(self._Examples(indices).Transform(lambda x: tf.TensorSpec(x.shape, x.dtype)))

    indices_spec = tf.TensorSpec([self.params.batch_size], tf.int64)
    tf.function(Trace, autograph=False).get_concrete_function(indices_spec)
    return traced[-1].TransformWithKey(self._WithoutBatchDimension)

  # Called by trainers and evaluators.

  def Describe(self) -> str:
    """Returns the size of the data set as human-readable text."""
    left_out = self.NumDamaged()
    note = f' ({left_out:,} damaged records were left out)' if left_out else ''
    return f'{self._Size()}{note}'

  def Dataset(self, start: int = 0) -> tf.data.Dataset:
    """Returns the batches from a position on.

    Args:
      start: position: the number of examples consumed since the start of the run.

    Returns:
      tf.data.Dataset of NestedMaps that match `BatchSpec()`: endless for p.num_epochs=0, empty if
      `start` is at or after the end.

    Raises:
      ValueError: `start` is negative, the data set is empty, a field does not have a static shape
        or differs from the spec, or `_Examples` draws random numbers that a restart would not
        repeat.
    """
    if not tf.executing_eagerly():  # The data set belongs to a graph.
      return self.RowsDataset(start, range(self.params.batch_size))
    # Each pass of an evaluation asks for the same one, and tracing `_Examples` takes longer than a
    # small pass.
    if self._last_dataset is None or self._last_dataset[0] != start:
      self._last_dataset = (start, self.RowsDataset(start, range(self.params.batch_size)))
    return self._last_dataset[1]

  def RowsDataset(
    self, start: int, rows: range, keys: Sequence[str] | None = None
  ) -> tf.data.Dataset:
    """Returns some rows of each batch of `Dataset`, without making the other rows.

    Not for subclasses that override `Dataset`.

    Args:
      start: position: the number of examples consumed since the start of the run.
      rows: consecutive rows of each batch.
      keys: paths of the fields to return; elements then are tuples of these tensors, and nothing
        else is computed. None: NestedMaps of all fields.
    """
    p = self.params
    start = self._CheckStart(start)
    num_examples = self._CheckNumExamples()
    num_positions = self._NumPositions()
    spec = self.BatchSpec().Transform(lambda x: tf.TensorSpec([len(rows), *x.shape[1:]], x.dtype))

    # Without AutoGraph an exception in _Examples keeps its type and line.
    @tf.autograph.experimental.do_not_convert
    def MakeBatch(first: tf.Tensor) -> Any:
      positions = first + tf.range(rows.start, rows.stop, dtype=tf.int64)
      epochs = positions // num_examples
      example_weights = tf.ones([len(rows)], tf.float32)
      if num_positions is not None:
        example_weights = tf.cast(positions < num_positions, tf.float32)
        positions = tf.minimum(positions, num_positions - 1)
      if p.shuffle:
        indices = index_order.ShuffledIndices(positions, num_examples, p.random_seed)
      else:
        indices = tf.math.floormod(positions, num_examples)
      batch = ApplyWeights(self._ExamplesInEpochs(indices, epochs), example_weights)
      self._CheckMatches(batch, spec)
      if not tf.executing_eagerly():  # tf.data has a debug mode that is eager.
        self._CheckGraph(indices.graph)
      return batch if keys is None else tuple(batch.GetItem(key) for key in keys)

    if num_positions is None:
      firsts = tf.data.Dataset.counter(start, p.batch_size, dtype=tf.int64)
    else:
      firsts = tf.data.Dataset.range(start, num_positions, p.batch_size, output_type=tf.int64)
    # A single call keeps the order anyway, and tf.data warns about `deterministic` with it.
    parallel = {}
    if p.num_parallel_calls != 1:
      parallel = {'num_parallel_calls': p.num_parallel_calls, 'deterministic': True}
    dataset = firsts.map(MakeBatch, **parallel)
    if p.num_prefetch:
      dataset = dataset.prefetch(p.num_prefetch)
    options = tf.data.Options()
    options.deterministic = True
    return self._DisableTuner(dataset.with_options(options))

  def _DisableTuner(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set whose iterators run without tf.data's tuner if there is nothing to tune.

    An iterator with a tuner may take up to a minute to end: TensorFlow wakes the tuner before it
    can see that it should stop, so that it often sleeps again, each time longer.
    """
    p = self.params
    if p.num_prefetch == -1 or ('num_parallel_calls' in p and p.num_parallel_calls == -1):
      return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)

  def BatchSpec(self) -> nested_map.NestedMap:
    """Returns a NestedMap of tf.TensorSpec of a batch, with static dimensions only.

    Raises:
      ValueError: a field of an example has a dimension that is not static.
    """
    spec = nested_map.NestedMap(self._ExampleSpec())
    spec.example_weights = tf.TensorSpec([], tf.float32)
    return spec.TransformWithKey(self._WithBatchDimension)

  def BatchSpecs(self) -> list[nested_map.NestedMap]:
    """Returns the specs of all batch shapes, including the largest one, `BatchSpec()`."""
    return [self.BatchSpec()]

  def NumBatches(self, start: int = 0) -> int | None:
    """Returns the number of batches from position `start` on; None if they never end."""
    num_positions = self._NumPositions()
    if num_positions is None:
      return None
    num_left = max(0, num_positions - self._CheckStart(start))
    return -(-num_left // self.params.batch_size)

  def PositionAfter(self, position: int, num_rows: int) -> int:
    """Returns the position after `num_rows` rows of batches that begin at `position`.

    Rows that pad the last batch are not examples: a run with more epochs continues after the last
    example.
    """
    after, end = position + num_rows, self._NumPositions()
    return after if end is None else max(position, min(after, end))

  def NumPadded(self, batch: Any) -> int:
    """Returns the number of padded rows of a batch that `PositionAfter` cannot know of."""
    del batch
    return 0

  def Explain(self, error: Exception) -> Exception:
    """Returns the exception to raise for an error in reading or making a batch; it may say more."""
    return error

  def CheckRestarts(self) -> None:
    """Checks that a run can continue from a position, if a subclass may prevent it.

    A `Dataset` of the subclass is read from the start and from later positions. `_Examples` that
    call Python, where draws are not seen, make the first batch twice.

    Raises:
      ValueError: the batches differ, or `Dataset` takes no position.
    """
    if type(self).Dataset is BaseInputGenerator.Dataset:
      self._CheckPython()
      return
    name = f'{type(self).__name__}.Dataset'
    advice = (
      'so a run could not be resumed. Let Dataset(start) continue after that many rows, in an '
      'order that is the same at each start (it may skip them, after any repeat), or override '
      '_Examples(indices) instead of Dataset'
    )
    if 'start' not in inspect.signature(self.Dataset).parameters:
      raise ValueError(f'{name} takes no position `start`, {advice}')
    positions, batches = self._ReadRun()
    for restart in self._Restarts(positions):
      expected = batches[restart : restart + _NUM_COMPARED]
      again = itertools.islice(self.Dataset(start=positions[restart]), len(expected))
      if expected != [_BatchDigest(batch) for batch in again]:
        raise ValueError(
          f'{name}: the batches from position {positions[restart]} on differ from the batches of '
          f'the run after {restart} batches, {advice}'
        )

  def _ReadRun(self) -> tuple[list[int], list[bytes]]:
    """Returns the positions before some first batches of a run, and digests of the batches.

    They are the first ones, or for a small data set all of an epoch. _NUM_COMPARED batches follow,
    because an order without a seed may agree by chance in one batch.
    """
    num_examples = self.NumExamples()
    least = num_examples if num_examples <= _MAX_EPOCH_READ else 1
    positions, digests = [0], []
    try:
      for batch in self.Dataset(start=0):
        digests.append(_BatchDigest(batch))
        num_rows = int(batch.Flatten()[0].shape[0])
        positions.append(self.PositionAfter(positions[-1], num_rows))
        if len(digests) > _NUM_COMPARED and positions[-1 - _NUM_COMPARED] >= least:
          break
    except tf.errors.OpError:
      pass  # The run reports it, with the position, when the batch is due.
    return positions[: len(digests)], digests

  def _Restarts(self, positions: Sequence[int]) -> list[int]:
    """Returns the numbers of batches after which to restart.

    A restart near the end of an epoch sees how the next one begins, and a restart after it whether
    its order is the order of the run.
    """
    end = bisect.bisect_left(positions, self.NumExamples())
    restarts = {1, end - 1, end} if end < len(positions) else {1}
    return [n for n in sorted(restarts) if 0 < n < len(positions)]

  def _CheckPython(self) -> None:
    """Raises ValueError if Python in `_Examples` does not repeat the first batch."""
    dataset = self.Dataset(0)
    if not self._calls_python:
      return
    try:
      # The second pass begins when the first has ended: Python may use state of the process.
      passes = [list(dataset.take(1)) for _ in range(2)]
    except tf.errors.OpError:
      return  # The run reports it, with the position, when the batch is due.
    if not all(map(AreEqual, *passes)):
      raise ValueError(
        f'{type(self).__name__}._Examples calls Python (numpy_function or py_function), which '
        'returns another batch for the same indices, so a run could not be resumed. Make it a '
        'function of the indices: draw for example by np.random.default_rng([seed, index])'
      )

  def Fingerprint(self) -> str:
    """Returns 16 hexadecimal digits that change with the data; checkpoints store them.

    They do not depend on the batch size or on the order of the examples.
    """
    digest = hashlib.sha256()
    for part in [self.NumExamples(), *self._FingerprintParts()]:
      digest.update(repr(part).encode() + b'\n')
    return digest.hexdigest()[:16]

  def _Size(self) -> str:
    return f'{self.NumExamples():,} examples'

  # Checks.

  def _Context(self, param_name: str) -> str:
    """Returns the class, the name of the input and a param, to start a message."""
    name = f' {self.params.name!r}' if self.params.name else ''
    return f'{type(self).__name__}{name}: param {param_name}'

  def _CheckBatchSize(self) -> None:
    if not self.params.batch_size:
      raise ValueError(
        f'{self._Context("batch_size")} is not set: set it to the number of examples in a batch'
      )

  def _CheckStart(self, start: int) -> int:
    """Returns `start` as an int; ValueError if it is negative."""
    start = operator.index(start)
    if start < 0:
      raise ValueError(
        f'{type(self).__name__}: start, the number of examples consumed so far, must be at least '
        f'0, got {start}'
      )
    return start

  def _CheckNumExamples(self) -> int:
    """Returns `NumExamples()`; ValueError if it is 0."""
    num_examples = self.NumExamples()
    if num_examples < 1:
      raise ValueError(
        f'{type(self).__name__} {self.params.name!r}: the data set is empty (NumExamples() is '
        f'{num_examples}): check the params that name the data, and that the data exist'
      )
    return num_examples

  def _NumPositions(self) -> int | None:
    num_epochs = self.params.num_epochs
    return num_epochs * self._CheckNumExamples() if num_epochs else None

  def _WithoutBatchDimension(self, key: str, spec: tf.TensorSpec) -> tf.TensorSpec:
    if not spec.shape.rank:
      raise ValueError(
        f'{type(self).__name__}._Examples: field {key!r}: expected shape [n, ...] of known rank, '
        f'got {spec.shape}'
      )
    return tf.TensorSpec(spec.shape[1:], spec.dtype)

  def _WithBatchDimension(self, key: str, spec: tf.TensorSpec) -> tf.TensorSpec:
    shape = tf.TensorShape([self.params.batch_size]).concatenate(spec.shape)
    if not shape.is_fully_defined():
      raise ValueError(
        f'{type(self).__name__}: field {key!r} of a batch has the shape {shape}, but every '
        'dimension must be static: pad or truncate the examples to one size, and use '
        'tf.ensure_shape or set_shape if TensorFlow cannot infer it'
      )
    return tf.TensorSpec(shape, spec.dtype)

  def _CheckGraph(self, graph: tf.Graph) -> None:
    """Raises ValueError if a restart would draw other random numbers; notes calls of Python."""
    graph_def = graph.as_graph_def()
    nodes = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    operations = {node.op for node in itertools.chain(*nodes)}
    self._calls_python = not operations.isdisjoint(_PYTHON)
    stateful = sorted(op for op in operations if _STATEFUL_DRAW.fullmatch(op))
    if stateful:
      raise ValueError(
        f'{type(self).__name__}._Examples draws random numbers by {", ".join(stateful)}: they '
        'depend on earlier draws, so a run could not be resumed. Use functions such as '
        'tf.random.stateless_uniform or tf.image.stateless_random_crop, seeded by the indices'
      )

  def _CheckMatches(
    self, batch: nested_map.NestedMap, spec: nested_map.NestedMap, made_by: str = '_Examples'
  ) -> None:
    """Raises ValueError if a batch's fields, dtypes or static shapes differ from `spec`."""
    context = f'{type(self).__name__}.{made_by}'
    got, expected = dict(batch.FlattenItems()), dict(spec.FlattenItems())
    if got.keys() != expected.keys():
      raise ValueError(f'{context}: expected the fields {sorted(expected)}, got {sorted(got)}')
    for key, value in got.items():
      if not isinstance(value, tf.Tensor):
        raise ValueError(f'{context}: field {key!r}: expected a tensor, got {value!r}')
      if value.shape != expected[key].shape or value.dtype != expected[key].dtype:
        raise ValueError(
          f'{context}: field {key!r}: expected '
          f'{expected[key].dtype.name} {expected[key].shape}, got {value.dtype.name} {value.shape}'
        )


def AreEqual(batch: nested_map.NestedMap | None, other: nested_map.NestedMap | None) -> bool:
  """Whether two batches are bit-for-bit equal; None is the end of the data and equals itself."""
  if batch is None or other is None:
    return batch is other
  return _Bytes(batch) == _Bytes(other)


def _Bytes(batch: nested_map.NestedMap) -> dict[str, bytes]:
  return {key: tf.io.serialize_tensor(x).numpy() for key, x in batch.FlattenItems()}


def _BatchDigest(batch: nested_map.NestedMap) -> bytes:
  digest = hashlib.sha256()
  for key, value in _Bytes(batch).items():
    digest.update(f'{key} {len(value)} '.encode() + value)
  return digest.digest()


def ApplyWeights(
  examples: nested_map.NestedMap, example_weights: tf.Tensor
) -> nested_map.NestedMap:
  """Returns `examples` with their weight fields multiplied by the weights of the rows.

  A weight that is negative or not a number is an error when the batch is made.
  """

  def Apply(key: str, value: Any) -> Any:
    if not _WEIGHTS.fullmatch(key) or not isinstance(value, tf.Tensor):
      return value
    if not value.dtype.is_floating or not value.shape.rank:
      raise ValueError(
        f'field {key!r}: expected weights, floating numbers of shape [batch, ...], '
        f'got {value.dtype.name} {value.shape}'
      )
    tf.debugging.assert_non_negative(value, f'field {key!r}: a weight must not be negative')
    rows = tf.reshape(example_weights, [-1] + [1] * (value.shape.rank - 1))
    return value * tf.cast(rows, value.dtype)

  batch = nested_map.NestedMap(examples).TransformWithKey(Apply)
  if 'example_weights' not in batch:
    batch.example_weights = example_weights
  return batch
