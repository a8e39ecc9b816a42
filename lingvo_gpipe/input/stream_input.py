# SPDX-License-Identifier: Apache-2.0
"""Input generators of examples without an index; tf.data's iterator holds the position of a run.

Prefer `BaseInputGenerator` if examples can have an index: its position is one integer, and stays
valid when the pipeline changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import domain, files, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, index_order, pipeline_graph, stream_iterator

# Number of batches of two passes to compare, to detect differences between passes.
_NUM_COMPARED = 3

# The state of an iterator is one protobuf message.
_MAX_STATE_BYTES = 2**31 - 2**20

# Errors of missing, unreadable and damaged files.
_INPUT_FILE_ERRORS = (
  OSError,
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.DataLossError,
)
_NO_FILES = 'No files matched pattern'  # The message of list_files.


class BaseStreamInput(base_input_generator.BaseInputGenerator):
  """Batches of a stream of examples.

  A subclass implements `_Stream(epoch)`, and `_FingerprintParts()`, which identifies its data.
  Batches, weights and padding are as in BaseInputGenerator. Checkpoints hold the state of tf.data's
  iterator with everything that was read ahead: the examples in the shuffle buffer, `p.num_prefetch`
  batches, and the elements in progress in parallel operations of the stream. So a run resumes
  exactly, but only with the same pipeline: a state may be rejected if the operations change, for
  example from or to num_prefetch=0 or num_epochs=0, or with another release of TensorFlow.

  The position counts examples without the padded rows of weight 0 at the end of the data. A data
  set cannot start from a position. One process reads the stream for any number of replicas, so
  their number may change.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a stream."""
    p = super().Params()
    p.Define(
      'shuffle_buffer_size',
      1000,
      'With shuffle: number of examples to draw the next one from. Checkpoints hold them all.',
      domain.Int(1, domain.MAX_EXAMPLES),
    )
    p.Delete('num_parallel_calls')  # `_Stream` chooses its parallel operations itself.
    return p

  # Implemented by subclasses.

  def _Stream(self, epoch: tf.Tensor) -> tf.data.Dataset:
    """Returns the examples of an epoch, or an endless data set, as NestedMaps (or dicts) of
    tensors.

    Runs inside the graph of a tf.data pipeline. It must be a function of the epoch alone: random
    draws must be stateless and seeded by it, and a shuffle within it, for example of files, needs a
    seed and reshuffle_each_iteration=False. The result is shuffled as the Params say. With
    tf.data.AUTOTUNE, TensorFlow tunes a number only for num_prefetch=-1, and otherwise chooses it.

    Args:
      epoch: int64 scalar, from 0 on.
    """
    raise NotImplementedError(f'_Stream of {type(self).__name__}')

  # Called by trainers and evaluators.

  def NumExamples(self) -> int:
    """Returns 0: the number of examples is unknown."""
    return 0

  def NumPadded(self, batch: nested_map.NestedMap) -> int:
    """See the base class."""
    return int(tf.math.count_nonzero(batch.example_weights == 0.0)) if self.params.num_epochs else 0

  def Dataset(self, start: int = 0) -> tf.data.Dataset:
    """Returns the batches from the start; use `Iterator` for runs that must be resumable.

    Raises:
      ValueError: `start` is not 0, or a batch does not match `BatchSpec`.
    """
    if start:
      raise ValueError(f'{self._who} has no positions: expected start=0, got {start}')
    p = self.params
    batches = self._Batches(p.shuffle)
    return batches.prefetch(p.num_prefetch) if p.num_prefetch else batches

  def Iterator(self) -> stream_iterator.StreamIterator:
    """Returns an iterator over `Dataset()` that can be saved and restored."""
    return stream_iterator.StreamIterator(self.Dataset, is_checked=True)

  def PipelineDigest(self) -> str:
    """Returns 16 hexadecimal digits that change with the operations and sizes of the pipeline.

    The state of another pipeline may fit by chance, and would then continue with other examples; a
    state with other sizes would bring its own buffers and end.
    """
    p = self.params
    functions = sorted(' '.join(node.op for node in nodes) for nodes in self._operations)
    sizes = [p.batch_size, p.num_epochs, p.shuffle_buffer_size]
    text = '\n'.join([*functions, str(sizes), str(self.BatchSpec())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def Explain(self, error: Exception) -> Exception:
    """See the base class; returns a one-line error for missing, unreadable or damaged files."""
    if not isinstance(error, _INPUT_FILE_ERRORS) and _NO_FILES not in str(error):
      return error
    return ValueError(
      f'{self._who} cannot be read: {files.OneLine(error).rstrip(".")}. Check the params '
      'that name the data, and that the files exist, are complete and are readable'
    )

  def CheckComplete(self) -> None:
    """See the base class."""
    if any('IgnoreErrors' in n.op for n in itertools.chain(*self._operations)):
      raise ValueError(
        f'{self._who} drops examples that fail, by ignore_errors, without any report: remove it. '
        'TfRecordStream can leave out damaged records and count them'
      )

  def CheckRestarts(self) -> None:
    """Checks that a run can be resumed; reads some batches without shuffling.

    Raises:
      ValueError: there are no examples, the pipeline cannot be saved, or it differs from call to
        call.
    """
    self.CheckComplete()
    self._CheckOperations()
    self._CheckSize()
    with self._ExplainErrors():
      self._CheckIterators()

  # Parts of the pipeline.

  def _Size(self) -> str:
    return 'a stream of examples'

  def _NumPositions(self) -> int | None:
    """Returns None: the number of examples is unknown."""
    return None

  @contextlib.contextmanager
  def _ExplainErrors(self) -> Generator[None]:
    """Replaces errors by the result of `Explain`."""
    try:
      yield
    except files.FILE_ERRORS as e:
      explained = self.Explain(e)
      if explained is e:
        raise
      raise explained from e

  def _CheckIterators(self) -> None:
    """Checks the iterators for `CheckRestarts` by reading."""
    first_epoch = stream_iterator.StreamIterator(lambda: self._Stream(tf.constant(0, tf.int64)))
    if next(first_epoch, None) is None:
      raise ValueError(
        f'{self._who}: the stream is empty: check the params that name the data, and that the data '
        'exist'
      )
    iterator, other = (
      stream_iterator.StreamIterator(lambda: self._Batches(shuffle=False), is_checked=True)
      for _ in range(2)
    )
    are_same = all(
      base_input_generator.AreEqual(next(iterator, None), next(other, None))
      for _ in range(_NUM_COMPARED)
    )
    try:
      # Only `first_epoch` is checked for external state. In the pipeline of all epochs every
      # shuffle has a seed generator, which counts as external state even if it never draws again.
      first_epoch.Save()
      other.Restore(iterator.Save())
    except tf.errors.OpError as e:
      raise ValueError(
        f'{self._who} cannot be saved, so a run could not be resumed: '
        f'{files.OneLine(e).rstrip(".")}. Use only operations of tf.data and TensorFlow, without '
        'Python (from_generator, py_function, numpy_function) and without a shuffle inside '
        'interleave or flat_map, and draw by stateless functions such as '
        'tf.random.stateless_uniform; or give the examples an index: see BaseInputGenerator'
      ) from e
    if not (are_same and base_input_generator.AreEqual(next(iterator, None), next(other, None))):
      raise ValueError(
        f'{self._who}: _Stream(epoch) returns different data from call to call, so a run could '
        'not be resumed: make it depend on the epoch alone, and give shuffles a seed'
      )

  @property
  def _who(self) -> str:
    name = f' {self.params.name!r}' if self.params.name else ''
    return f'{type(self).__name__}{name}'

  def _ExampleSpec(self) -> nested_map.NestedMap:
    return self._example_spec

  @functools.cached_property
  def _example_spec(self) -> nested_map.NestedMap:
    """A run asks for it ten times, and each time the functions of a stream would be traced."""
    with self._ExplainErrors():
      spec: Any = self._Stream(tf.constant(0, tf.int64)).element_spec
    if not isinstance(spec, Mapping):
      raise ValueError(
        f'{type(self).__name__}._Stream: expected a data set of NestedMaps, got elements {spec}'
      )
    return nested_map.NestedMap(spec)

  def _Batches(self, shuffle: bool) -> tf.data.Dataset:
    p = self.params
    spec = self.BatchSpec()

    # Without AutoGraph an exception keeps its type and line.
    @tf.autograph.experimental.do_not_convert
    def Epoch(epoch: tf.Tensor) -> tf.data.Dataset:
      examples = self._Stream(epoch)
      if not shuffle:
        return examples
      seed = tf.cast(index_order.TensorHash64(p.random_seed, epoch), tf.int64)
      return examples.shuffle(p.shuffle_buffer_size, seed, reshuffle_each_iteration=False)

    @tf.autograph.experimental.do_not_convert
    def MakeBatch(rows: Mapping[str, Any]) -> nested_map.NestedMap:
      batch = nested_map.NestedMap(rows)
      example_weights = tf.ones([p.batch_size], tf.float32)
      if p.num_epochs:
        slots = tf.range(p.batch_size)
        num_rows = tf.shape(batch.Flatten()[0])[0]
        example_weights = tf.cast(slots < num_rows, tf.float32)
        batch = batch.Transform(lambda x: tf.gather(x, tf.minimum(slots, num_rows - 1)))
      batch = base_input_generator.ApplyWeights(batch, example_weights)
      self._CheckMatches(batch, spec, '_Stream')
      return batch

    epochs = tf.data.Dataset.counter(dtype=tf.int64)
    if p.num_epochs:
      epochs = tf.data.Dataset.range(p.num_epochs)
    # Not `repeat`: when a shuffle has ended, tf.data does not save its epoch.
    rows = epochs.flat_map(Epoch).batch(p.batch_size, drop_remainder=not p.num_epochs)
    options = tf.data.Options()
    options.deterministic = True
    # A state fits the operations that really run, so these must be the operations of the code.
    options.experimental_optimization.apply_default_optimizations = False
    return self._DisableTuner(rows.map(MakeBatch).with_options(options))

  def _CheckOperations(self) -> None:
    """Raises ValueError if tf.data saves an operation without its complete state."""
    nodes = list(itertools.chain(*self._operations))
    if any(n.op.startswith('Shuffle') and n.attr['reshuffle_each_iteration'].b for n in nodes):
      raise ValueError(
        f'{self._who} shuffles in an order that depends on the number of passes so far, which a '
        'restart may not know: in _Stream(epoch) give each shuffle a seed, which may depend on the '
        'epoch, and reshuffle_each_iteration=False; give list_files shuffle=False'
      )
    if any(n.attr['rerandomize_each_iteration'].b for n in nodes):
      raise ValueError(
        f'{self._who} draws random numbers that depend on the number of passes so far, which a '
        'restart may not know: set rerandomize_each_iteration=False, and seed by the epoch'
      )
    if any(n.attr['deterministic'].s == b'false' or n.attr['sloppy'].b for n in nodes):
      raise ValueError(
        f'{self._who} returns examples in the order in which they are finished, which a restart '
        'does not repeat: give map, interleave and other parallel operations deterministic=True'
      )
    mixes = [n for n in nodes if n.op == 'DirectedInterleaveDataset']
    if not all(n.attr['stop_on_empty_dataset'].b for n in mixes):
      # TensorFlow 2.21 never returns if it is restored after an input of the mix has ended.
      raise ValueError(
        f'{self._who} mixes streams beyond the end of one of them, and tf.data cannot resume from '
        'there: give sample_from_datasets and choose_from_datasets stop_on_empty_dataset=True; '
        'repeated streams do not end'
      )

  def _CheckSize(self) -> None:
    """Raises ValueError if the elements read ahead are together too large to be saved."""
    p = self.params
    specs = self.BatchSpec().Flatten()
    batch = sum((x.shape.num_elements() or 0) * x.dtype.size for x in specs)
    ahead = batch * p.num_prefetch
    if p.shuffle:
      ahead += batch // p.batch_size * p.shuffle_buffer_size
    if ahead >= _MAX_STATE_BYTES:
      raise ValueError(
        f'{self._who} reads {ahead:,} bytes ahead, but the state of an iterator, which holds them, '
        f'must be smaller than {_MAX_STATE_BYTES:,}: reduce shuffle_buffer_size '
        f'({p.shuffle_buffer_size}) or num_prefetch ({p.num_prefetch})'
      )

  @functools.cached_property
  def _operations(self) -> list[Sequence[Any]]:
    """The operations of the pipeline."""
    self.BatchSpec()  # First, as a stream may cache what it learns from the data.
    return pipeline_graph.Operations(pipeline_graph.Trace(self.Dataset))
