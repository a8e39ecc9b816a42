# SPDX-License-Identifier: Apache-2.0
"""The one-line messages of TensorFlow's errors."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import files


def testTheFirstOfSeveralErrorsIsTheMessage():
  """TensorFlow lists the operations that fail at once, as these almost always do."""
  near, far = (d.name for d in tf.config.list_logical_devices('CPU')[:2])

  @tf.function(autograph=False)
  def Read():
    with tf.device(far):
      lengths = [tf.strings.length(tf.io.read_file(f'/no/such/{name}')) for name in 'ab']
    with tf.device(near):
      return tf.add_n(lengths)

  for _ in range(20):
    with pytest.raises(tf.errors.NotFoundError) as failure:
      Read()
    line = files.OneLine(failure.value)
    assert line in [f'/no/such/{name}; No such file or directory' for name in 'ab']


def testTheErrorOfAWorkerNamesIt():
  message = (
    '2 root error(s) found.\n  (0) NOT_FOUND:  /a; No such file or directory\n'
    '\t [[{{node ReadFile}}]]\n'
    'Additional GRPC error information from remote target /job:worker/replica:0/task:0 while '
    'calling /tensorflow.eager.EagerService/RunComponentFunction:\n:{"grpc_status":5}\n'
    '\t [[Identity/_10]]\n'
    '  (1) NOT_FOUND:  /a; No such file or directory\n\t [[{{node ReadFile}}]]\n'
    '0 successful operations.\n0 derived errors ignored. [Op:__inference_Run_7]'
  )
  line = files.OneLine(tf.errors.NotFoundError(None, None, message))
  assert line == '/a; No such file or directory (of /job:worker/replica:0/task:0)'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
