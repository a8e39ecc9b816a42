# SPDX-License-Identifier: Apache-2.0
"""The table of a log directory's checkpoints, including damaged ones."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import catalogue, checkpoint_table, checkpointer
from tests import naming


def testTheTableListsGoodAndDamagedCheckpoints(tmp_path):
  saver = checkpointer.Checkpointer(tmp_path / 'train', max_to_keep=None)
  values = {'net.w': tf.ones([30, 4]), 'step': tf.constant(7, tf.int64)}
  infos = []
  for step in (7, 1234):
    saver.Save(step, values, {'cut': [1, 2], 'params': 'a : 1\nb : 2\n'})
    infos = saver.All()
  text, are_whole = checkpoint_table.Describe(str(tmp_path))
  assert are_whole
  lines = [line.split() for line in text.splitlines()]
  size = sum(p.stat().st_size for p in (tmp_path / 'train').glob('ckpt-00000007-*/*'))
  assert [lines[1][i] for i in (0, 1, 4, 5)] == ['ckpt-00000007.json', '7', f'{size:,}', 'yes']
  assert lines[2][:2] == ['ckpt-00001234.json', '1,234']
  assert text.splitlines()[3:7] == [
    '', 'ckpt-00001234.json:', '  cut: [1, 2]', '  params: 2 lines',
  ]  # fmt: skip
  assert ['net.w', '[30,', '4]', 'float32', '120'] in lines
  assert ['step', '[]', 'int64', '1'] in lines

  data = next((tmp_path / 'train').glob('ckpt-00001234-*/*.data-*'))
  flipped = bytearray(data.read_bytes())
  flipped[100] ^= 1
  data.write_bytes(flipped)
  (tmp_path / 'train' / 'ckpt-00000009.json').write_text('{')
  text, are_whole = checkpoint_table.Describe(str(tmp_path))
  assert not are_whole
  lines = text.splitlines()
  assert lines[1].endswith('yes') and ' no: ' in lines[2]
  assert naming.Names(lines[3], 'ckpt-00000009.json', 'commit')
  # Shows the contents of the newest readable checkpoint.
  assert 'ckpt-00000007.json:' in lines
  assert [info.step for info in infos] == [7, 1234]


@pytest.mark.parametrize('max_to_keep, steps', [(3, ['2']), (2, ['3', '4'])])
def testCheckpointsMayBeSavedAndRemovedMeanwhile(tmp_path, monkeypatch, max_to_keep, steps):
  """A running trainer removes some checkpoints, or all, while they are read."""
  saver = checkpointer.Checkpointer(tmp_path / 'train', max_to_keep)
  values = {'net.w': tf.ones([3])}
  for step in (1, 2):
    saver.Save(step, values, {})
  verify = catalogue.Catalogue.Verify

  def Verify(self, info):
    if info.step == 1:
      for step in (3, 4):
        saver.Save(step, values, {})
    verify(self, info)

  monkeypatch.setattr(catalogue.Catalogue, 'Verify', Verify)
  text, are_whole = checkpoint_table.Describe(str(tmp_path))
  rows = [line.split() for line in text.splitlines()]
  assert are_whole and [row[1] for row in rows[1 : rows.index([])]] == steps


def testNoCheckpointsIsAnError(tmp_path):
  with pytest.raises(ValueError, match=naming.Naming('no checkpoint', tmp_path / 'train')):
    checkpoint_table.Describe(str(tmp_path))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
