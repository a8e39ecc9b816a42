# SPDX-License-Identifier: Apache-2.0
"""`StreamStates`: positions of the input streams of a run, saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tensorflow as tf

from lingvo_gpipe.core import files
from lingvo_gpipe.input import base_input_generator, stream_input, stream_iterator


class StreamStates:
  """The iterators of a run's streams, and their states among the tensors of a checkpoint.

  A checkpoint holds for each stream the digest of its pipeline, a state of its iterator, and the
  number of batches taken since that state. This number is 0 unless reading ahead has failed:
  tf.data stores the error in the state, and a run that resumes from this state would raise it again
  even if the file was repaired. An earlier state without the error is saved instead.

  Attributes:
    iterators: {task: iterator of its stream} of the trained tasks; `task_batches` replaces them if
      workers read. An input of indexed examples has none, because its position is enough.
  """

  iterators: dict[str, stream_iterator.StreamIterator]

  def __init__(
    self,
    inputs: Mapping[str, base_input_generator.BaseInputGenerator],
    trained: Collection[str],
  ) -> None:
    """Starts at the beginning of each stream.

    Args:
      inputs: {task: its input}; the name of a single task is ''.
      trained: the tasks of this call. Checkpoints keep the positions of the other streams.
    """
    streams = {
      name: source
      for name, source in inputs.items()
      if isinstance(source, stream_input.BaseStreamInput)
    }
    read = {name: source for name, source in streams.items() if name in trained}
    self.iterators = {name: source.Iterator() for name, source in read.items()}
    self._class_names = {name: type(source).__name__ for name, source in read.items()}
    self._pipelines = {name: source.PipelineDigest() for name, source in read.items()}
    # {task: (state without an error, number of batches before it)}; '' is the beginning.
    self._sound = {name: (tf.constant(''), 0) for name in read}
    with tf.device('/device:CPU:0'):
      self._restored = {name: tf.Variable(['', '', '0'], trainable=False) for name in streams}

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns {name: variable}, to assign from a checkpoint before `AfterRestore`."""
    return {_Key(name): variable for name, variable in self._restored.items()}

  def AfterRestore(self, checkpoint: str) -> None:
    """Moves the streams to their positions in a checkpoint.

    Args:
      checkpoint: its file, for messages.

    Raises:
      ValueError: the state belongs to another pipeline.
    """
    for name, iterator in self.iterators.items():
      pipeline, state, num_since = self._restored[name].read_value()
      if not pipeline:
        continue  # This task has no saved stream: it was not trained before.
      try:
        if pipeline != self._pipelines[name]:
          raise ValueError('it has other operations or other sizes')
        if state:
          iterator.Restore(state)
        self._sound[name] = state, iterator.num_taken
        for _ in range(int(num_since.numpy())):
          next(iterator, None)
      except (ValueError, tf.errors.OpError) as e:
        raise ValueError(
          f'{self._class_names[name]} cannot resume from {checkpoint!r}, whose {_Key(name)} does '
          f'not fit its pipeline: {files.OneLine(e)}. Were _Stream, batch_size, num_epochs, '
          'shuffle_buffer_size, num_prefetch, files or TensorFlow changed? Restore them; or give '
          'another --logdir, for a new run that loads the weights of this run by '
          'task.train.init_from_checkpoint_rules'
        ) from e
      self._restored[name].assign(['', '', '0'])  # The restored state may be large.

  def Now(self) -> dict[str, tf.Tensor]:
    """Returns {name: state} after the batches taken so far, to save in a checkpoint.

    Raises:
      ValueError: a stream cannot be saved.
    """
    states = {_Key(name): variable.read_value() for name, variable in self._restored.items()}
    for name, iterator in self.iterators.items():
      try:
        state = iterator.Save()
      except tf.errors.OpError as e:
        raise ValueError(
          f'{self._class_names[name]}: the position of the stream cannot be saved: '
          f'{files.OneLine(e)}'
        ) from e
      if not stream_iterator.HasFailed(state):
        self._sound[name] = state, iterator.num_taken
      state, num_taken = self._sound[name]
      states[_Key(name)] = tf.stack(
        [self._pipelines[name], state, str(iterator.num_taken - num_taken)]
      )
    return states


def _Key(task_name: str) -> str:
  return f'input/{task_name}/iterator' if task_name else 'input/iterator'
