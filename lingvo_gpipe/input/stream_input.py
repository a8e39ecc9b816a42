# SPDX-License-Identifier: Apache-2.0
"""Input generators of examples without an index: where a run is, the iterator of tf.data tells.

Where an index can be had, `BaseInputGenerator` is to be preferred: its position is one integer, and
fits whatever becomes of the pipeline behind it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import files, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, index_order, pipeline_graph, stream_iterator

# So many batches of two passes are compared, to find what is not the same each time.
_NUM_COMPARED = 3

# The state of an iterator is one message.
_MAX_STATE_BYTES = 2**31 - 2**20

# What is raised where a file is missing, cannot be read, or is damaged.
_OF_FILES = (
  OSError,
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.DataLossError,
)
_NO_FILES = 'No files matched pattern'  # So list_files says it.


class BaseStreamInput(base_input_generator.BaseInputGenerator):
  """Batches of examples that come one after the other.

  A subclass gives `_Stream(epoch)`, and what identifies its data in `_FingerprintParts()`. Batches,
  weights and padding are as BaseInputGenerator has them. Checkpoints hold the state of tf.data's
  iterator, and with it what was read ahead: the examples of the shuffle's buffer, `p.num_prefetch`
  batches, and what parallel operations of the stream have under way. So a run goes on exactly, but
  with the same pipeline only: what changes its operations (such as from or to num_prefetch=0 or
  num_epochs=0, or another release of TensorFlow) may be refused.

  The position counts examples; where the data end, rows of weight 0 are none. Nothing starts from
  it. One process reads the stream, however many replicas share the batches, so that their number
  may change.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a stream."""
    p = super().Params()
    p.Define(
      'shuffle_buffer_size',
      1000,
      'With shuffle: the next example is drawn of so many. Each checkpoint holds them.',
    )
    p.Delete('num_parallel_calls')  # `_Stream` says itself what is made at the same time.
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._CheckInteger('shuffle_buffer_size', minimum=1)

  # What a subclass gives.

  def _Stream(self, epoch: tf.Tensor) -> tf.data.Dataset:
    """The examples of an epoch, or without end: NestedMaps (or dicts) of tensors [...].

    Runs inside the graph of a tf.data pipeline. It must be a function of the epoch alone: random
    draws are to be stateless and seeded by it, and a shuffle of its own, such as one of files,
    needs a seed and reshuffle_each_iteration=False. What it returns is shuffled as Params say.

    Args:
      epoch: int64 scalar, from 0 on.
    """
    raise NotImplementedError(f'_Stream of {type(self).__name__}')

  # What a trainer or an evaluator calls.

  def NumExamples(self) -> int:
    """0: nobody knows."""
    return 0

  def NumPadded(self, batch: nested_map.NestedMap) -> int:
    """See the parent."""
    return int(tf.math.count_nonzero(batch.example_weights == 0.0)) if self.params.num_epochs else 0

  def Dataset(self, start: int = 0) -> tf.data.Dataset:
    """The batches from the beginning on; `Iterator` is for runs that are to go on.

    Raises:
      ValueError: `start` is not 0, or a batch is not what `BatchSpec` says.
    """
    if start:
      raise ValueError(f'{self._who} has no positions: expected start=0, got {start}')
    p = self.params
    batches = self._Batches(p.shuffle)
    return batches.prefetch(p.num_prefetch) if p.num_prefetch else batches

  def Iterator(self) -> stream_iterator.StreamIterator:
    """Goes through `Dataset()`, and can be saved and restored."""
    return stream_iterator.StreamIterator(self.Dataset, is_checked=True)

  def PipelineDigest(self) -> str:
    """16 hexadecimal digits that change with the operations of the pipeline and with its sizes.

    A state of another pipeline may fit by chance, and then goes on with other examples; one of
    other sizes has its buffers and its end.
    """
    p = self.params
    functions = sorted(' '.join(node.op for node in nodes) for nodes in self._operations)
    sizes = [p.batch_size, p.num_epochs, p.shuffle_buffer_size]
    text = '\n'.join([*functions, str(sizes), str(self.BatchSpec())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def Explain(self, error: Exception) -> Exception:
    """See the parent: one line where a file is missing, cannot be read, or is damaged."""
    if not isinstance(error, _OF_FILES) and _NO_FILES not in str(error):
      return error
    return ValueError(
      f'{self._who} cannot be read: {files.OneLine(error).rstrip(".")}. Check the params '
      'that name the data, and that the files are there, whole, and may be read'
    )

  def CheckComplete(self) -> None:
    """See the parent."""
    if any('IgnoreErrors' in n.op for n in itertools.chain(*self._operations)):
      raise ValueError(
        f'{self._who} leaves out by ignore_errors what cannot be read or made, and nobody is told: '
        'take it away. TfRecordStream leaves out damaged records, and counts them'
      )

  def CheckRestarts(self) -> None:
    """Checks that a run can go on; reads some batches, not shuffled.

    Raises:
      ValueError: there are no examples, the pipeline cannot be saved, or it is not the same each
        time.
    """
    self.CheckComplete()
    self._CheckOperations()
    self._CheckSize()
    with self._Explaining():
      self._CheckIterators()

  # Parts of the pipeline.

  def _Size(self) -> str:
    return 'a stream of examples'

  def _NumPositions(self) -> int | None:
    """None: nobody knows."""
    return None

  @contextlib.contextmanager
  def _Explaining(self) -> Generator[None]:
    """Raises what `Explain` makes of errors."""
    try:
      yield
    except files.FILE_ERRORS as e:
      told = self.Explain(e)
      if told is e:
        raise
      raise told from e

  def _CheckIterators(self) -> None:
    """What `CheckRestarts` does by reading."""
    first_epoch = stream_iterator.StreamIterator(lambda: self._Stream(tf.constant(0, tf.int64)))
    if next(first_epoch, None) is None:
      raise ValueError(
        f'{self._who}: the stream is empty: check the params that name the data, and that the data '
        'are there'
      )
    one, other = (
      stream_iterator.StreamIterator(lambda: self._Batches(shuffle=False), is_checked=True)
      for _ in range(2)
    )
    same = all(
      base_input_generator.AreEqual(next(one, None), next(other, None))
      for _ in range(_NUM_COMPARED)
    )
    try:
      # In the pipeline of all epochs any shuffle has a seed generator, which counts as state of
      # its own, whether it draws anew or not.
      first_epoch.Save()
      other.Restore(one.Save())
    except tf.errors.OpError as e:
      raise ValueError(
        f'{self._who} cannot be saved, so a run could not go on where it stopped: '
        f'{files.OneLine(e).rstrip(".")}. Make it of operations of tf.data and '
        'TensorFlow alone, without Python (from_generator, py_function, numpy_function) and '
        'without a shuffle inside of interleave or flat_map, and draw by '
        'tf.random.stateless_uniform and the like; or give the examples an index: see '
        'BaseInputGenerator'
      ) from e
    if not (same and base_input_generator.AreEqual(next(one, None), next(other, None))):
      raise ValueError(
        f'{self._who}: what _Stream(epoch) returns is not the same each time, so a run could not '
        'go on where it stopped: let it depend on the epoch alone, and give shuffles a seed'
      )

  @property
  def _who(self) -> str:
    name = f' {self.params.name!r}' if self.params.name else ''
    return f'{type(self).__name__}{name}'

  def _ExampleSpec(self) -> nested_map.NestedMap:
    with self._Explaining():
      spec: Any = self._Stream(tf.constant(0, tf.int64)).element_spec
    if not isinstance(spec, Mapping):
      raise ValueError(
        f'{type(self).__name__}._Stream: expected a data set of NestedMaps, its elements are {spec}'
      )
    return nested_map.NestedMap(spec)

  def _Batches(self, shuffle: bool) -> tf.data.Dataset:
    p = self.params
    spec = self.BatchSpec()

    # Without AutoGraph an exception keeps its type and its line.
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
        places = tf.range(p.batch_size)
        num_rows = tf.shape(batch.Flatten()[0])[0]
        example_weights = tf.cast(places < num_rows, tf.float32)
        batch = batch.Transform(lambda x: tf.gather(x, tf.minimum(places, num_rows - 1)))
      batch = base_input_generator.ApplyWeights(batch, example_weights)
      self._CheckMatches(batch, spec, '_Stream')
      return batch

    epochs = tf.data.Dataset.counter(dtype=tf.int64)
    if p.num_epochs:
      epochs = tf.data.Dataset.range(p.num_epochs)
    # Not `repeat`: tf.data forgets in which epoch a shuffle is whose iterator has ended already.
    rows = epochs.flat_map(Epoch).batch(p.batch_size, drop_remainder=not p.num_epochs)
    options = tf.data.Options()
    options.deterministic = True
    # A state fits the operations that really run: they are to be those that were written.
    options.experimental_optimization.apply_default_optimizations = False
    return rows.map(MakeBatch).with_options(options)

  def _CheckOperations(self) -> None:
    """Raises ValueError where tf.data saves an operation, but not all that it goes on from."""
    nodes = list(itertools.chain(*self._operations))
    if any(n.op.startswith('Shuffle') and n.attr['reshuffle_each_iteration'].b for n in nodes):
      raise ValueError(
        f'{self._who} shuffles in an order that hangs on how often it was gone through, which a '
        'restart may not know: in _Stream(epoch) give each shuffle a seed, which may depend on the '
        'epoch, and reshuffle_each_iteration=False, and list_files shuffle=False'
      )
    if any(n.attr['rerandomize_each_iteration'].b for n in nodes):
      raise ValueError(
        f'{self._who} draws in an order that hangs on how often it was gone through, which a '
        'restart may not know: give rerandomize_each_iteration=False, and seeds of the epoch'
      )
    if any(n.attr['deterministic'].s == b'false' or n.attr['sloppy'].b for n in nodes):
      raise ValueError(
        f'{self._who} gives examples in the order in which they come to be made, which a restart '
        'does not repeat: give map, interleave and the like deterministic=True'
      )
    mixes = [n for n in nodes if n.op == 'DirectedInterleaveDataset']
    if not all(n.attr['stop_on_empty_dataset'].b for n in mixes):
      # Seen in TensorFlow 2.21: restored where its inputs have ended, it never returns.
      raise ValueError(
        f'{self._who} mixes streams past the end of one of them, from where tf.data does not go '
        'on: give sample_from_datasets and choose_from_datasets stop_on_empty_dataset=True; '
        'streams that begin again by repeat() do not end'
      )

  def _CheckSize(self) -> None:
    """Raises ValueError where what is read ahead, as a whole, would be too large to be saved."""
    p = self.params
    specs = self.BatchSpec().Flatten()
    batch = sum((x.shape.num_elements() or 0) * x.dtype.size for x in specs)
    ahead = batch * p.num_prefetch
    if p.shuffle:
      ahead += batch // p.batch_size * p.shuffle_buffer_size
    if ahead >= _MAX_STATE_BYTES:
      raise ValueError(
        f'{self._who} reads {ahead:,} bytes ahead, and the state of an iterator, which holds them, '
        f'has less than {_MAX_STATE_BYTES:,}: give a smaller shuffle_buffer_size '
        f'({p.shuffle_buffer_size}) or num_prefetch ({p.num_prefetch})'
      )

  @functools.cached_property
  def _operations(self) -> list[Sequence[Any]]:
    """Those of the pipeline."""
    self.BatchSpec()  # What a stream keeps of its first look at the data is none of them.
    return pipeline_graph.Operations(pipeline_graph.Trace(self.Dataset))
