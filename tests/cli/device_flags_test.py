# SPDX-License-Identifier: Apache-2.0
"""The flags that choose devices, as TensorFlow gets them."""

import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.cli import device_flags


@pytest.mark.parametrize('deterministic', [False, True])
def testGpusRepeatARunIfTheyAreAskedTo(deterministic, monkeypatch):
  calls = []
  monkeypatch.setattr(tf.config.experimental, 'enable_op_determinism', lambda: calls.append(1))
  values = types.SimpleNamespace(xla_cache=None, deterministic=deterministic)
  monkeypatch.setattr(device_flags, 'FLAGS', values)
  with device_flags.StartingTensorFlow():
    assert len(calls) == deterministic


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
