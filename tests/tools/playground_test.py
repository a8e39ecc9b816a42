# SPDX-License-Identifier: Apache-2.0
"""The playground computes in a browser what the simulator computes, and shows it to everyone."""

import html
import json
import random
import re
import shutil
import subprocess
import sys

import pytest

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import timeline_html
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming, processes

_BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
_DOCS = processes.ROOT / 'docs'
pytestmark = pytest.mark.skipif(_BROWSER is None, reason='no Chromium: apt-get install chromium')

_RUN = """
const results = INPUTS.map((values) => {
  try {
    const r = PlaygroundModel.Compute(values);
    return {
      makespan: r.makespan, busy: r.busy, bubble: r.bubble, overall: r.overallBubble,
      activations: r.peakActivations, bytes: r.devicePeakBytes,
      spans: r.timeline.flat().map((s) => [s.action.text, s.part, s.start, s.end]),
    };
  } catch (e) {
    if (!(e instanceof PlaygroundModel.InputError)) throw e;
    return [e.field, e.message];
  }
});
document.querySelector('pre').textContent = JSON.stringify(results);
"""


def _Load(path, text, fragment=''):
  """Returns the document that the browser makes of a page."""
  page = path / 'page.html'
  page.write_text(f'<!DOCTYPE html><meta charset="utf-8">{text}')
  for script in _DOCS.glob('playground*.*s'):
    shutil.copy(script, path)
  command = [
    _BROWSER, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={path}/profile',
    '--dump-dom', f'{page.as_uri()}#{fragment}',
  ]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert done.returncode == 0, done.stderr
  return done.stdout


def _Compute(path, inputs):
  """Returns the playground's results of forms."""
  scripts = f'const INPUTS = {json.dumps(inputs)};{_RUN}'
  text = _Load(
    path, f'<pre></pre><script src="playground_model.js"></script><script>{scripts}</script>'
  )
  return json.loads(html.unescape(re.search('<pre>(.*?)</pre>', text, re.DOTALL)[1]))


def _Expected(schedule, costs, sizes, policy):
  result = simulator.Simulate(
    schedule,
    simulator.Costs(**costs),
    remat_policy=policy,
    sizes=simulator.ActivationSizes(**sizes),
  )
  return {
    'makespan': result.makespan, 'busy': result.busy, 'bubble': result.bubble,
    'overall': result.overall_bubble, 'activations': result.peak_activations,
    'bytes': result.device_peak_bytes,
    'spans': [(str(s.action), s.part, s.start, s.end) for row in result.timeline for s in row],
  }  # fmt: skip


def _AssertEqual(actual, expected):
  for name, value in expected.items():
    if name == 'spans':
      assert [s[:2] for s in actual[name]] == [list(s[:2]) for s in value]
      for i in (2, 3):
        assert [s[i] for s in actual[name]] == pytest.approx([s[i] for s in value])
    else:
      assert actual[name] == pytest.approx(value), name


def _Case(rng):
  """A form's values, and the simulator's result; the names of the fields if there is none."""
  name, policy = rng.choice(schedules.Names()), rng.choice(['none', 'stage', 'except_last'])
  num_devices, per_device = rng.randint(1, 5), rng.randint(1, 3)
  num_stages, num_micro_batches = num_devices * per_device, rng.randint(1, 12)
  values = {
    'schedule': name, 'devices': str(num_devices), 'stages': str(num_stages),
    'micro_batches': str(num_micro_batches), 'remat_policy': policy,
  }  # fmt: skip

  def Field(name, count, is_shared):
    numbers = [rng.randint(1, 9) / 4 for _ in range(rng.choice([1, count or 1]))]
    values[name] = ', '.join(map(str, numbers))
    # One number is the sum of all stages of a device.
    return [numbers[0] / per_device**is_shared] * count if len(numbers) == 1 else numbers

  costs = {
    name: Field(name, num_stages, is_shared=True)
    for name in ('forward', 'input_gradient', 'weight_gradient', 'backward', 'fused', 'recompute')
    if name == 'forward' or rng.random() < 0.6
  }
  for name in ('transfer', 'latency'):
    if rng.random() < 0.5:
      costs[name] = Field(name, num_stages - 1, is_shared=False)
  if rng.random() < 0.3:
    values['transfer_occupies_devices'] = 'on'
    costs['transfer_occupies_devices'] = True
  sizes = {
    name: Field(name, num_stages, is_shared=name == 'inner') for name in ('stage_input', 'inner')
  }
  try:
    schedule = schedules.Get(values['schedule'], num_stages, num_micro_batches, num_devices)
  except ValueError:
    return values, ('stages', 'micro_batches')
  return values, _Expected(schedule, costs, sizes, policy)


def testAHundredFormsGiveTheSimulatorsNumbers(tmp_path):
  rng = random.Random(1)
  cases = [_Case(rng) for _ in range(300)]
  results = _Compute(tmp_path, [values for values, _ in cases])
  assert sum(isinstance(expected, dict) for _, expected in cases) >= 100
  for (values, expected), actual in zip(cases, results, strict=True):
    if isinstance(expected, dict):
      assert isinstance(actual, dict), (values, actual)
      _AssertEqual(actual, expected)
    else:
      assert actual[0] in expected, (values, actual)


def _Mutated(rng, text):
  """The text of a schedule with one or two faults, or with none that matters."""
  for _ in range(rng.randint(0, 2)):
    cells = re.split('([,\n])', text)
    i, j = (2 * rng.randrange(len(cells) // 2) for _ in range(2))
    fault = rng.choice(['swap', 'drop', 'double', 'garble', 'idle', 'torch'])
    if fault == 'swap':
      cells[i], cells[j] = cells[j], cells[i]
    elif fault == 'torch':
      cells[i] = f'{cells[i]} , 1SEND_F0,None, 0UNSHARD'
    else:
      cells[i] = {
        'drop': '', 'double': f'{cells[i]},{cells[j]}', 'garble': rng.choice('xFV0') + cells[i],
        'idle': f' {cells[i]} , # a comment, and more',
      }[fault]  # fmt: skip
    text = ''.join(cells)
  return text


def testTextsAreReadOrRefusedAsByTheLibrary(tmp_path):
  rng = random.Random(2)
  texts = ['', 'None,None', '0F0,0B0\n2F0,2B0', '0F0;0B0', '0F0,(0F1;0B0)OVERLAP_F_B,0B1', '1F0']
  texts += ['0F0,0B0\nNone', '0F1', '0V0,0V1', '1F0,0B0\n0F0,1B0', '0F0,0B0\n1B0,1F0', '99999999F0']
  for name in schedules.Names():
    per_device = 2 if name in ('zb_v', 'dualpipe_v', 'v_half', 'v_min', *schedules.IN_ROUNDS) else 1
    valid = schedules.Get(name, 2 * per_device, 4, 2).ToText()
    texts += [_Mutated(rng, valid) for _ in range(12)]
  forms = [
    {'schedule': 'text', 'text': text, 'forward': '1', 'stage_input': '1', 'inner': '2'}
    for text in texts
  ]
  num_valid = 0
  for text, actual in zip(texts, _Compute(tmp_path, forms), strict=True):
    try:
      schedule = schedule_lib.Schedule.FromText(text).Validate()
    except ValueError as e:
      assert isinstance(actual, list), text
      assert actual[0] == 'text'
      if position := re.search(r'line \d+, column \d+', str(e)):
        assert position[0] in actual[1]
      continue
    num_valid += 1
    share = schedule.num_devices / schedule.num_stages
    expected = _Expected(
      schedule, {'forward': share}, {'stage_input': 1, 'inner': 2 * share}, 'none'
    )
    _AssertEqual(actual, expected)
  assert 20 < num_valid < len(texts) - 20


class _Document:
  """The elements of a page as a browser writes them: (tag, attributes, text up to the next tag)."""

  def __init__(self, text):
    tags = re.findall(r'<(\w+)((?:[^">]|"[^"]*")*)>([^<]*)', text)
    self.elements = [
      (tag, dict(re.findall(r'([\w-]+)="([^"]*)"', attributes)), html.unescape(content))
      for tag, attributes, content in tags
    ]

  def Find(self, name, value=None):
    return [e for e in self.elements if name in e[1] and value in (None, e[1][name])]


def _Page(path, fragment, then=''):
  text = (_DOCS / 'playground.md').read_text()
  text = f'{text[text.index("<form") :]}<script>{then}</script>'
  return _Document(_Load(path, text, fragment))


def testThePageShowsPictureNumbersAndOverrides(tmp_path):
  page = _Page(tmp_path, 'schedule=zb_v&devices=3&stages=6&micro_batches=7&memory=5')
  schedule = schedules.Get('zb_v', 6, 7, 3)
  result = simulator.Simulate(schedule, simulator.Costs(forward=0.5), remat_policy='none')
  (summary,) = page.Find('data-output', 'summary')
  assert f'{result.makespan:g}' in summary[2]
  assert f'{100 * result.overall_bubble:.1f} %' in summary[2]
  assert 'too much' in summary[2]
  assert {e[1]['data-action'] for e in page.Find('data-action')} == {
    str(a) for row in schedule.actions for a in row
  }
  (order,) = page.Find('data-output', 'order')
  assert schedule_lib.Schedule.FromText(order[2]).actions == schedule.actions
  (command,) = page.Find('data-output', 'command')
  flags = re.findall("--model_params_override='(.*)'", command[2])
  overrides = dict(pair.split(':') for flag in flags for pair in flag.split(';'))
  assert overrides == {
    'task.stack.num_stages': '6', 'task.stack.stages_per_device': '2',
    'task.stack.num_micro_batches': '7', 'task.stack.schedule': 'zb_v',
    'task.stack.remat_policy': 'none',
  }  # fmt: skip
  options = [e[1]['value'] for e in page.elements if e[0] == 'option' and 'value' in e[1]]
  assert sorted(options) == sorted([*schedules.Names(), 'text'])
  colours = dict(re.findall(r"(\w): '(#\w+)'", (_DOCS / 'playground.js').read_text()))
  assert colours == timeline_html.COLOURS


def testAMistakeIsExplainedNextToItsField(tmp_path):
  page = _Page(tmp_path, 'schedule=v_half&devices=4&stages=4&micro_batches=8')
  (field,) = page.Find('aria-invalid', 'true')
  assert field[1]['name'] == 'stages'
  (message,) = [e for e in page.Find('role', 'alert') if e[2]]
  assert message[1]['id'] in field[1]['aria-describedby'].split()
  assert re.search(naming.Naming('v_half', 8), message[2])
  (results,) = page.Find('data-output', 'results')
  assert 'hidden' in results[1]


def testTheButtonOfAMessageRepairsTheInput(tmp_path):
  page = _Page(
    tmp_path,
    'schedule=interleaved_zb&devices=4&stages=8&micro_batches=7',
    "document.querySelector('[role=alert] button').click();"
    'document.body.dataset.focus = document.activeElement.name;'
    'document.body.dataset.address = location.hash;',
  )
  assert not page.Find('aria-invalid', 'true')
  (body,) = page.Find('data-address')
  assert 'micro_batches=8' in body[1]['data-address']
  assert body[1]['data-focus'] == 'micro_batches'


def testEveryFieldHasALabelAndItsDescriptionsExist(tmp_path):
  page = _Page(tmp_path, '')
  labels = {e[1].get('for') for e in page.elements if e[0] == 'label'}
  ids = {e[1]['id'] for e in page.Find('id')}
  fields = [e for e in page.elements if e[0] in ('input', 'select', 'textarea')]
  assert len(fields) > 15
  for _, attributes, _ in fields:
    assert attributes['id'] in labels
    assert set(attributes['aria-describedby'].split()) <= ids


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
