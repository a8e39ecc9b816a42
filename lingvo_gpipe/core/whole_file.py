# SPDX-License-Identifier: Apache-2.0
"""Writing a file that others see whole or not at all."""

from __future__ import annotations

import secrets

import tensorflow as tf

from lingvo_gpipe.checkpoint import tensor_bundle


def Write(path: str, content: str | bytes) -> None:
  """Writes a text or bytes under another name and renames it, over an older file of that name.

  Args:
    path: any path that tf.io.gfile takes; its directory exists.
    content: text becomes UTF-8; half of a surrogate pair, which UTF-8 cannot hold, becomes an
      escape such as `\\ud800`.

  Raises:
    OSError: it cannot be written; nothing is left behind then.
  """
  if isinstance(content, str):
    content = content.encode('utf-8', errors='backslashreplace')
  temporary = f'{path}.tmp-{secrets.token_hex(4)}'
  try:
    try:
      with tf.io.gfile.GFile(temporary, 'wb') as f:
        f.write(content)
      # Else a power failure may leave the new name with nothing in it.
      tensor_bundle.Sync(temporary)
      tf.io.gfile.rename(temporary, path, overwrite=True)
    except BaseException:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.remove(temporary)
      raise
  except tf.errors.OpError as e:
    raise OSError(f'Cannot write {path!r}: {e.message}') from e
