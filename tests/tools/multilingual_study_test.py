# SPDX-License-Identifier: Apache-2.0
"""The multilingual study: its models, restarts, and the report of finished models."""

import json
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from tasks.mt import cldr_names
from tests import naming
from tools import multilingual_study as study
from tools.studies import language_report

_LANGUAGES = ['de', 'fr', 'sv']


@pytest.fixture(scope='module', autouse=True)
def defined_flags():
  study.DefineFlags()
  flags.FLAGS(['study'])


@pytest.fixture
def output(tmp_path):
  with flagsaver.flagsaver(output=str(tmp_path), languages=_LANGUAGES, batch_factors=['4']):
    yield tmp_path


def _Result(setting, score):
  metrics = {'bleu': score, 'chrf': 2 * score, 'exact': score / 100}
  if not setting.name.startswith('bilingual'):
    for name, value in list(metrics.items()):
      metrics |= {f'{name}/{language}-en': value + i for i, language in enumerate(_LANGUAGES)}
  return {
    'name': setting.name,
    'overrides': list(setting.overrides),
    'num_params': 2_000_000,
    'steps': 10,
    'seconds': 1.0,
    'total_seconds': 2.0,
    'is_done': False,
    'dev_loss': 1.5,
    'metrics': metrics,
  }


def testModelsOfTheStudy(output):
  names = [s.name for s in study.Settings()]
  assert names == [
    'bilingual-de',
    'bilingual-fr',
    'bilingual-sv',
    'multilingual',
    'deep',
    'wide',
    'multilingual-batch-x4',
  ]
  by_name = {s.name: s for s in study.Settings()}
  assert by_name['bilingual-fr'].Params('Test').input.languages == ['fr']
  learner = by_name['multilingual-batch-x4'].Params('Train').task.train.learner
  assert learner.num_accumulated_mini_batches == 4
  # Equally many examples of warm-up; the learning rate grows with the root of the batch size.
  first = by_name['multilingual'].Params('Train').task.train.learner.lr_schedule
  assert learner.lr_schedule.warmup_steps == first.warmup_steps // 4
  rates = [p.Instantiate().Value(p.warmup_steps) for p in (first, learner.lr_schedule)]
  assert float(rates[1]) == pytest.approx(2 * float(rates[0]), rel=0.02)  # Steps count from 0.
  with flagsaver.flagsaver(model_params_override='task.num_layers:1'):
    assert all(s.Params('Dev').task.num_layers == 1 for s in study.Settings())
  # The layers of the deep and the wide model have equally many parameters, as in the paper.
  deep, wide = (by_name[name].Params('Train').task for name in ('deep', 'wide'))
  sizes = [
    p.num_layers * (12 * p.num_heads * p.dim_per_head + 4 * p.hidden_dim) for p in (deep, wide)
  ]
  assert sizes[0] == sizes[1]


def testFinishedModelsAreReportedAndNotTrainedAgain(output):
  results = [_Result(s, 10.0 + i) for i, s in enumerate(study.Settings())]
  lines = ''.join(json.dumps(result) + '\n' for result in results)
  (output / 'results.jsonl').write_text(lines + '{"name": "bro')  # Killed while writing.
  assert study.Run() == 0
  report = (output / 'report.md').read_text()
  # The deep model's score 14 is two above the Swedish baseline, 12; German comes first.
  assert '| sv | 10 | 12.0 | 15.0 | 16.0 | 17.0 |' in report
  assert '| multilingual-batch-x4 | 2.00M | 10 | 1 s | 1.500 | 16.0 | 32.0 | 0.16 |' in report
  assert (output / 'gains.png').read_bytes().startswith(b'\x89PNG')
  assert len(study.ReadResults(output / 'results.jsonl')) == len(results)
  with flagsaver.flagsaver(model_params_override='task.num_layers:1'):
    with pytest.raises(ValueError, match=naming.Naming('--output', 'bilingual-de', 'overrides')):
      study.Run()


@pytest.mark.parametrize('content', [b'[]\n', b'{"name": "x"}\n', b'\xff'])
def testOtherResultsAreRefused(tmp_path, content):
  path = tmp_path / 'results.jsonl'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f"^--output: '?{path}.*$"):
    study.ReadResults(path)


@pytest.mark.parametrize(
  'changes',
  [
    {'name': []},
    {'overrides': None},
    {'is_done': 'no'},
    {'steps': '1'},
    {'num_params': 10**400},
    {'dev_loss': True},
    {'metrics': []},
    {'metrics': {'bleu': 1.0, 'chrf': 2.0}},
    {'metrics': {'bleu': 1.0, 'chrf': 2.0, 'exact': 0.1, 'bleu/de-en': None}},
  ],
  ids=lambda changes: next(iter(changes)),
)
def testAResultWithAWrongValueIsRefused(output, changes):
  path = output / 'results.jsonl'
  result = _Result(study.Settings()[0], 1.0)
  path.write_text(json.dumps(result) + '\n' + json.dumps({**result, **changes}) + '\n')
  with pytest.raises(ValueError, match=f'^--output: {path}, line 2: .*$'):
    study.ReadResults(path)


def testGainsOverTheBaselines():
  sizes = {'de': 100, 'fr': 10}
  baselines = {language: {'bleu': 20.0} for language in sizes}
  gains = language_report.Gains(
    'bleu', sizes, baselines, {'bleu': 0.0, 'bleu/de-en': 21.0, 'bleu/fr-en': 30.0}
  )
  assert gains == [(100, 1.0), (10, 10.0)]


@pytest.mark.parametrize(
  'values, names',
  [
    ({'studies': ['all']}, ['languages, batch_sizes']),
    ({'languages': ['xx']}, [', '.join(cldr_names.STUDIED)]),
    ({'batch_factors': ['1']}, ['at least 2']),
    ({'minutes': 0.0}, ['--minutes', 'positive']),
    ({'output': None}, ['--output', 'needed']),
  ],
)
def testInvalidFlagsAreRejected(output, values, names):
  message = naming.Naming(*names)
  with flagsaver.flagsaver(**values), pytest.raises(ValueError, match=message):
    study.Run()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
