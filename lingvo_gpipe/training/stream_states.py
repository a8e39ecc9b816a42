# SPDX-License-Identifier: Apache-2.0
"""`StreamStates`: where the streams among a run's inputs are, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.input import base_input_generator, stream_input, stream_iterator


class StreamStates:
  """The iterators of a run's streams, and the names of their states among a checkpoint's tensors.

  A checkpoint tells of each stream its pipeline's digest, a state of its iterator, and how many
  batches were taken since then. That is none, unless reading ahead has failed: tf.data keeps the
  error in the state, and whoever went on from there would meet it though the file is mended.

  Attributes:
    iterators: {task: where its stream goes on} of those that are trained; `task_batches` puts those
      of workers there. Inputs of indexed examples are not among them: their position tells it all.
  """

  iterators: dict[str, stream_iterator.StreamIterator]

  def __init__(
    self,
    inputs: Mapping[str, base_input_generator.BaseInputGenerator],
    trained: Collection[str],
  ) -> None:
    """At the beginning of each stream.

    Args:
      inputs: {task: its input}; the name of a single task is ''.
      trained: the tasks of this call. Where the streams of others are, checkpoints keep.
    """
    streams = {
      name: source
      for name, source in inputs.items()
      if isinstance(source, stream_input.BaseStreamInput)
    }
    read = {name: source for name, source in streams.items() if name in trained}
    self.iterators = {name: source.Iterator() for name, source in read.items()}
    self._who = {name: type(source).__name__ for name, source in read.items()}
    self._pipelines = {name: source.PipelineDigest() for name, source in read.items()}
    # {task: (a state in which nothing has failed, after how many batches)}; '': the beginning.
    self._sound = {name: (tf.constant(''), 0) for name in read}
    with tf.device('/device:CPU:0'):
      self._restored = {name: tf.Variable(['', '', '0'], trainable=False) for name in streams}

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}, to be assigned from a checkpoint before `AfterRestore`."""
    return {_Key(name): variable for name, variable in self._restored.items()}

  def AfterRestore(self, checkpoint: str) -> None:
    """Goes to where the streams were at a checkpoint.

    Args:
      checkpoint: its file, for messages.

    Raises:
      ValueError: the state is that of another pipeline.
    """
    for name, iterator in self.iterators.items():
      pipeline, state, num_since = self._restored[name].read_value()
      if not pipeline:
        continue  # This task was not trained before.
      try:
        if pipeline != self._pipelines[name]:
          raise ValueError('it consists of other operations, or has other sizes')
        if state:
          iterator.Restore(state)
        self._sound[name] = state, iterator.num_taken
        for _ in range(int(num_since.numpy())):
          next(iterator, None)
      except (ValueError, tf.errors.OpError) as e:
        raise ValueError(
          f'{self._who[name]} cannot go on from {checkpoint!r}, whose {_Key(name)} does not fit '
          f'its pipeline: {files.OneLine(e)}. Were _Stream, batch_size, num_epochs, '
          'shuffle_buffer_size, num_prefetch, files or TensorFlow changed? Take those of the run; '
          'or give another --logdir, to begin a run that takes over the weights of this one by '
          'task.train.init_from_checkpoint_rules'
        ) from e
      self._restored[name].assign(['', '', '0'])  # It may be large.

  def Now(self) -> dict[str, tf.Tensor]:
    """{name: state} of what was taken so far, to be saved.

    Raises:
      ValueError: a stream cannot be saved.
    """
    found = {_Key(name): variable.read_value() for name, variable in self._restored.items()}
    for name, iterator in self.iterators.items():
      try:
        state = iterator.Save()
      except tf.errors.OpError as e:
        raise ValueError(
          f'{self._who[name]}: where the stream is cannot be saved: {files.OneLine(e)}'
        ) from e
      if not stream_iterator.HasFailed(state):
        self._sound[name] = state, iterator.num_taken
      state, num_taken = self._sound[name]
      found[_Key(name)] = tf.stack(
        [self._pipelines[name], state, str(iterator.num_taken - num_taken)]
      )
    return found


def _Key(task_name: str) -> str:
  return f'input/{task_name}/iterator' if task_name else 'input/iterator'
