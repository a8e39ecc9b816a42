# SPDX-License-Identifier: Apache-2.0
"""Input generators: data sets of indexed examples, read in a seeded, restartable order.

The state of a run over the data is one integer, the *position*: the number of examples consumed
since the start of the run. It does not depend on the batch size, on the number of replicas or on
tf.data's iterators, and `Dataset(start=position)` continues exactly at the example at which a run
stopped.
"""

from __future__ import annotations

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

# Fields with the weight of each row; it becomes 0 in padded rows.
_WEIGHT_FIELDS = ('example_weights', 'weights')

# Number of batches that are read twice to check that a run can be resumed.
_NUM_COMPARED = 4

# Operations whose draws depend on how often they were called.
_STATEFUL_DRAW = re.compile(
  r'Random(Uniform|UniformInt|StandardNormal|Gamma|Poisson|PoissonV2|Shuffle)|Multinomial|'
  r'(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox(V2)?|'
  r'Stateful(RandomBinomial|StandardNormal|StandardNormalV2|TruncatedNormal|Uniform\w*)'
)


class BaseInputGenerator:
  """Batches of an indexed data set.

  A subclass implements `NumExamples()`, `_Examples(indices)` and `_FingerprintParts()`, which
  identifies its data. Each batch is a NestedMap of tensors of shape [batch, ...] with static
  shapes: the fields of `_Examples` and

  * `example_weights`, float32 [batch]: 1 for an example, 0 for a padded row. If `_Examples` returns
    this field, too, the two are multiplied.

  A floating field `weights` of shape [batch, ...] (such as the weight of each predicted token) is
  also multiplied by `example_weights`. Only the last batch of a run of `p.num_epochs` epochs has
  padding; padded rows repeat the last example, so that ids stay legal.

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
    p.Define('random_seed', 0, 'Seed of the order of the examples.')
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
      domain.Int(-1, 1024),
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
    p = self.params
    self._CheckBatchSize()
    if 'num_parallel_calls' in p:  # Streams do not have it.
      if p.num_parallel_calls == 0:
        raise ValueError(f'{self._Where("num_parallel_calls")}: expected -1 or at least 1, got 0')

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
        self._CheckDraws(indices.graph)
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
    return self._Untuned(dataset.with_options(options))

  def _Untuned(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
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
    """Checks that a run can continue from a position, if a subclass overrides `Dataset`.

    Compares the batches after the first one with the batches from the first one's end on. Several,
    because an order without a seed may agree by chance in one batch.

    Raises:
      ValueError: they differ, or `Dataset` takes no position.
    """
    cls = type(self)
    if cls.Dataset is BaseInputGenerator.Dataset:
      return
    advice = (
      'so a run could not be resumed. Let Dataset(start) continue after that many rows, in an '
      'order that is the same at each start (it may skip them), or override _Examples(indices) '
      'instead of Dataset'
    )
    if 'start' not in inspect.signature(self.Dataset).parameters:
      raise ValueError(f'{cls.__name__}.Dataset takes no position `start`, {advice}')
    batches = list(itertools.islice(self.Dataset(start=0), 1 + _NUM_COMPARED))
    if len(batches) < 2:
      return
    position = self.PositionAfter(0, int(batches[0].Flatten()[0].shape[0]))
    again = itertools.islice(self.Dataset(start=position), len(batches) - 1)
    if not all(itertools.starmap(AreEqual, itertools.zip_longest(batches[1:], again))):
      raise ValueError(
        f'{cls.__name__}.Dataset: the batches from position {position} on differ from the batches '
        f'after the first one of the run, {advice}'
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

  def _Where(self, param_name: str) -> str:
    """Returns the class, the name of the input and a param, to start a message."""
    name = f' {self.params.name!r}' if self.params.name else ''
    return f'{type(self).__name__}{name}: param {param_name}'

  def _CheckBatchSize(self) -> None:
    if not self.params.batch_size:
      raise ValueError(
        f'{self._Where("batch_size")} is not set: set it to the number of examples in a batch'
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

  def _CheckDraws(self, graph: tf.Graph) -> None:
    """Raises ValueError if a restart would draw other random numbers than the run."""
    graph_def = graph.as_graph_def()
    nodes = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    operations = {node.op for node in itertools.chain(*nodes)}
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


def ApplyWeights(
  examples: nested_map.NestedMap, example_weights: tf.Tensor
) -> nested_map.NestedMap:
  """Returns `examples` with their weight fields multiplied by the weights of the rows."""
  batch = nested_map.NestedMap(examples)
  for key in _WEIGHT_FIELDS:
    if key not in batch:
      continue
    value = batch[key]
    if not value.dtype.is_floating or not value.shape.rank:
      raise ValueError(
        f'field {key!r}: expected weights, floating numbers of shape [batch, ...], '
        f'got {value.dtype.name} {value.shape}'
      )
    rows = tf.reshape(example_weights, [-1] + [1] * (value.shape.rank - 1))
    batch[key] = value * tf.cast(rows, value.dtype)
  if 'example_weights' not in batch:
    batch.example_weights = example_weights
  return batch
