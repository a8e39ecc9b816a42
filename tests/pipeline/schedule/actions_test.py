# SPDX-License-Identifier: Apache-2.0
"""Actions: their text, and which of them compute anything."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.schedule import actions
from tests import naming

Action, Kind = actions.Action, actions.Kind


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 300), st.sampled_from(list(Kind)), st.integers(0, 5000))
def testActionTextReadsBack(stage, kind, micro_batch):
  action = Action(stage, kind, micro_batch)
  assert str(action) == f'{stage}{kind.value}{micro_batch}'
  assert Action.FromText(f' {action}\t') == action


def testNotationIsPyTorchs():
  kinds = {
    '1F0': Kind.FORWARD,
    '0B3': Kind.BACKWARD,
    '2I1': Kind.INPUT_GRADIENT,
    '2W1': Kind.WEIGHT_GRADIENT,
    '3V0': Kind.FORWARD_BACKWARD,
    '0O4': Kind.OFFLOAD,
    '0L4': Kind.LOAD,
  }
  for text, kind in kinds.items():
    assert Action.FromText(text) == Action(int(text[0]), kind, int(text[2]))


@pytest.mark.parametrize('text', ['', 'F0', '1F', '1f0', '1X0', '-1F0', '1F-1', '1F0.5', '1 F0'])
def testOtherTextIsNotAnAction(text):
  with pytest.raises(
    ValueError, match=naming.Naming(repr(text), 'action', '<stage><kind><micro-batch>')
  ):
    Action.FromText(text)


@pytest.mark.parametrize('text', ['1SEND_F0', '1UNSHARD', '2RECV_B3', '0REDUCE_GRAD', '', ' None '])
def testTransfersAreImplied(text):
  assert actions.ActionsOfCell(text) == ()
  if '_' in text or 'SHARD' in text:
    with pytest.raises(ValueError, match='implied'):
      Action.FromText(text)


def testAPairAtTheSameTimeIsTwoActions():
  pair = (Action(0, Kind.FORWARD, 3), Action(3, Kind.BACKWARD, 1))
  assert actions.ActionsOfCell(' (0F3;3B1)OVERLAP_F_B') == pair
  assert actions.ActionsOfCell('3B1') == pair[1:]
  with pytest.raises(ValueError, match=naming.Naming('action', '<stage><kind><micro-batch>')):
    actions.ActionsOfCell('(0F3;(3B1))OVERLAP_F_B')


def testFrozenStagesSkipGradients():
  def Letters(needs_dx, is_trained):
    return ''.join(
      k.value for k in Kind if actions.HasWork(k, needs_dx=needs_dx, is_trained=is_trained)
    )

  assert Letters(True, True) == 'FBIWVOL'
  assert Letters(False, True) == 'FBWVOL'
  assert Letters(True, False) == 'FBIVOL'
  assert Letters(False, False) == 'FV'


def testACopyToTheHostEndsBeforeTheSecondComputationAfterIt():
  def Ends(text):
    row = [Action.FromText(token) for token in text.split()]
    return ' '.join(map(str, actions.WithEndsOfCopies(row)))

  assert Ends('0F0 0O0 0F1 0O1 0F2 0F3') == '0F0 0F1 0O0 0F2 0O1 0F3'
  # A copy back waits for it, too, so that both are not there at once.
  assert Ends('0F0 0O0 0F1 0L0 0F2 0B0') == '0F0 0F1 0O0 0L0 0F2 0B0'
  assert Ends('0F0 0O0 0L0 0B0') == '0F0 0L0 0B0 0O0'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
