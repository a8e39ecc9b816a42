# SPDX-License-Identifier: Apache-2.0
"""Find returns the last, the best or a named checkpoint, or lists the existing ones."""

import sys

import numpy as np
import pytest

from lingvo_gpipe.checkpoint import checkpoint_choice, checkpointer
from tests import naming


@pytest.fixture
def saved(tmp_path):
  """Returns checkpoints of steps 2, 4 and 6; step 2 is the best."""
  store = checkpointer.Checkpointer(tmp_path)
  for step in (2, 4, 6):
    store.Save(step, {'v': np.float32([step])}, {'early_stop': {'best_step': 2}})
  return store


@pytest.mark.parametrize('which, step', [('last', 6), ('best', 2), ('4', 4), ('00000006', 6)])
def testFindsTheLastTheBestAndANumberedCheckpoint(saved, which, step):
  assert checkpoint_choice.Find(saved, which).step == step


@pytest.mark.parametrize('which', ['newest', '', '-4', '4.0', 'ckpt-00000004.json', '٤', '9' * 19])
def testOtherChoicesAreAnError(saved, which):
  with pytest.raises(ValueError, match=naming.Naming('--checkpoint', 'last', 'best', repr(which))):
    checkpoint_choice.Find(saved, which)


def testAMissingCheckpointIsAnErrorThatListsTheExistingSteps(saved, tmp_path):
  missing = naming.Naming('step 5', tmp_path, 'step 2, step 4, step 6')
  with pytest.raises(ValueError, match=missing):
    checkpoint_choice.Find(saved, '5')
  saved.Save(7, {'v': np.float32([7])}, {'early_stop': {'best_step': 3}}, protected=[2, 4])
  missing = naming.Naming('step 3', tmp_path, 'step 2, step 4, step 6, step 7')
  with pytest.raises(ValueError, match=missing):
    checkpoint_choice.Find(saved, 'best')
  for metadata in ({}, {'early_stop': {'best_step': None}}):
    saved.Save(8, {'v': np.float32([8])}, metadata)
    with pytest.raises(ValueError, match=naming.Naming(tmp_path, 'train.early_stop.metric')):
      checkpoint_choice.Find(saved, 'best')


@pytest.mark.parametrize('which', ['last', 'best', '4'])
def testNoCheckpointsIsAnError(tmp_path, which):
  with pytest.raises(ValueError, match=naming.Naming('no checkpoint', tmp_path)):
    checkpoint_choice.Find(checkpointer.Checkpointer(tmp_path), which)


def testADamagedCheckpointIsAnErrorIfItIsChosenByStep(saved, tmp_path):
  for path in tmp_path.glob('ckpt-00000004-*/*data*'):
    path.write_bytes(b'')
  with pytest.raises(
    checkpointer.DamagedError,
    match=naming.Naming('ckpt-00000004', 'tensors.data-00000-of-00001', '0 bytes', 4),
  ):
    checkpoint_choice.Find(checkpointer.Checkpointer(tmp_path), '4')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
