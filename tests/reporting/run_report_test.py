# SPDX-License-Identifier: Apache-2.0
"""An evaluator that follows a run can read any report.json, however damaged."""

import sys

import pytest

from lingvo_gpipe.reporting import run_report


@pytest.mark.parametrize(
  'data, step',
  [
    (b'{"step": 7, "is_finished": true}', 7),
    (b'{"step": 7, "is_finished": false}', None),
    (b'', None),
    (b'{"step": 7', None),
    (b'{"is_finished": true}', None),
    (b'[7]', None),
    (b'{"step": null, "is_finished": true}', None),
    (b'{"step": NaN, "is_finished": true}', None),
    (b'{"step": Infinity, "is_finished": true}', None),
    (b'{"step": 1e999, "is_finished": true}', None),
    (b'[' * 100_000, None),
    (b'\xff', None),
  ],
)
def testADamagedReportDoesNotEndTraining(tmp_path, data, step):
  (tmp_path / 'report.json').write_bytes(data)
  assert run_report.FinishedStep(str(tmp_path)) == step


def testNoReportOrAFolderDoesNotEndTraining(tmp_path):
  assert run_report.FinishedStep(str(tmp_path)) is None
  (tmp_path / 'report.json').mkdir()
  assert run_report.FinishedStep(str(tmp_path)) is None


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
