# SPDX-License-Identifier: Apache-2.0
"""The documents are true: their programs run, and everything they name exists."""

import ast
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

import lingvo_gpipe
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming, processes, worker_processes

hosts = worker_processes.hosts

ROOT = pathlib.Path(lingvo_gpipe.__file__).parents[1]
README = ROOT / 'README.md'
OWN_LOOP = ROOT / 'docs' / 'own_loop.md'
LINGVO_USERS = ROOT / 'docs' / 'lingvo_users.md'
ARCHITECTURE = ROOT / 'docs' / 'architecture.md'
OWN_EXPERIMENT = ROOT / 'docs' / 'own_experiment.md'
INSPECTION = ROOT / 'docs' / 'inspection.md'
KERAS = ROOT / 'docs' / 'keras.md'
SCHEDULES = ROOT / 'docs' / 'schedules.md'
ERRORS = ROOT / 'docs' / 'errors.md'
DOCS = [README, *sorted((ROOT / 'docs').glob('*.md'))]
MAX_LINES = {README: 120, ARCHITECTURE: 300}

TIMEOUT = 150
# Tolerance of a float32 loss between two cuts; the bound for the first 20 losses is 1e-4.
MAX_DIFFERENCE = 1e-5

_BLOCK = re.compile(r'^```(\w*)\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_FILE_NAME = re.compile(r'# ((?:params|tasks)/\w+\.py)\n')
_LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')
# Text that looks like a file of the repository: it has a folder and a known extension.
_FILE = re.compile(r'`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))`')
_FLAG = re.compile(r'(?<![\w-])--([a-z][a-z_]+)')
_CODE = re.compile(r'`([^`\n]+)`|^    (.*)$', re.MULTILINE)
_DEFINED_FLAG = re.compile(r"flags\.DEFINE_\w+\(\s*'(\w+)'")
# A program of tools/ with its arguments, up to the end of the code or of the line.
_TOOL = re.compile(r'-m tools\.([\w.]+)((?:\\\n|[^`\n])*)')
# An experiment: an existing area, a file, a class. `X` stands for any of them.
_KEY = re.compile(r'(?<![\w.])(?:image|lm|mt)\.[a-z]\w*\.(?!X\b)[A-Z]\w*')
# Flags of Lingvo that the documents mention and that do not exist here.
_LINGVO_FLAGS = {
  'add_summary', 'checkpoint_in_trainer_tpu', 'cluster_spec', 'enable_asserts',
  'enable_check_numerics', 'inspect_model_topn', 'inspect_params_dataset_name', 'pdb_on_exception',
  'ps_replicas', 'run_locally', 'saver_keep_checkpoint_every_n_hours', 'saver_max_to_keep',
  'tf_master', 'tpu', 'use_eager', 'worker_gpus', 'worker_split_size', 'xla_device',
}  # fmt: skip

cases = pytest.mark.parametrize


def _Ids(path):
  return path.name


def _Blocks(path, language):
  return [text for kind, text in _BLOCK.findall(path.read_text()) if kind == language]


def _ProjectFiles():
  """Returns {path: text} of the guide's experiment: blocks whose first line names their file."""
  blocks = _Blocks(OWN_EXPERIMENT, 'python')
  return {match[1]: text for text in blocks if (match := _FILE_NAME.match(text))}


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
  """Returns the environment of a user who has installed lingvo_gpipe only."""
  packages = tmp_path_factory.mktemp('packages')
  (packages / 'lingvo_gpipe').symlink_to(ROOT / 'lingvo_gpipe', target_is_directory=True)
  return {**os.environ, 'PYTHONPATH': str(packages)}


def _Run(args, environment, directory):
  """Runs Python with `args` in a directory; returns what it printed."""
  done = subprocess.run(
    [sys.executable, *args],
    env=environment,
    cwd=directory,
    capture_output=True,
    text=True,
    timeout=TIMEOUT,
    check=False,
  )
  assert done.returncode == 0, f'{args}: exit status {done.returncode}\n{done.stdout}{done.stderr}'
  return done.stdout


def _RunProgram(text, forks, directory):
  """Runs a program in a directory; returns what it printed."""
  path = directory / 'program.py'
  path.write_text(text)
  return processes.Succeeded(forks.Run(str(path), cwd=directory)).stdout


# --- programs ---


def testTheCustomLoopTrainsEquallyWithAnyNumberOfStages(forks, tmp_path):
  (program,) = _Blocks(OWN_LOOP, 'python')
  assert program.count('\n') <= 45
  output = _RunProgram(program, forks, tmp_path)
  first, last = map(float, re.findall(r'[\d.]+', output.splitlines()[-2]))
  assert last < first / 2
  assert float(output.split()[-1]) <= MAX_DIFFERENCE
  # The output equals the output on the page, except for numbers.
  (output_on_page,) = _Blocks(OWN_LOOP, 'text')
  numbers = re.compile(r'\d[\d.e+-]*')
  assert numbers.sub('#', output_on_page) == numbers.sub(
    '#', '\n'.join(output.splitlines()[-2:]) + '\n'
  )


def testTheLayerForLingvoUsersRuns(forks, tmp_path):
  (program,) = _Blocks(LINGVO_USERS, 'python')
  lines = _RunProgram(program, forks, tmp_path).splitlines()
  assert lines[-2:] == ['(2, 3)', "['tanh.w', 'tanh.gain']"]


def testTheKerasModelTrains(forks, tmp_path):
  program = _Blocks(KERAS, 'python')[0]
  output = _RunProgram(program, forks, tmp_path)
  losses = [float(x) for x in re.findall(r' loss: (\S+)', output)]
  assert len(losses) == 3
  assert losses[-1] < losses[0] - 0.5, output
  assert 'stage 1: ' in output
  assert (tmp_path / 'lm.keras').exists()


def testTheKerasModelTrainsOnOtherHosts(forks, hosts, tmp_path):
  program = _Blocks(KERAS, 'python')[1]
  addresses = worker_processes.Addresses(hosts)
  for host, address in zip(('alpha:2222', 'beta:2222'), addresses, strict=True):
    program = program.replace(host, address)
  output = _RunProgram(program, forks, tmp_path)
  losses = [float(x) for x in re.findall(r' loss: (\S+)', output)]
  assert len(losses) == 3
  assert losses[-1] < losses[0]
  assert '/job:worker/replica:0/task:0' in output
  assert '/job:worker/replica:0/task:1' in output


def testTheKerasModelTrainsInACustomLoop(forks, tmp_path):
  program = _Blocks(KERAS, 'python')[2]
  output = _RunProgram(program, forks, tmp_path)
  losses = [float(x) for x in re.findall(r'step \d+ loss (\S+)', output)]
  assert len(losses) == 20
  assert losses[-1] < losses[0] / 2, output


def testCustomSchedulesTrain(forks, tmp_path):
  (program,), (output_on_page,) = _Blocks(SCHEDULES, 'python'), _Blocks(SCHEDULES, 'text')
  assert program.count('\n') <= 50
  assert _RunProgram(program, forks, tmp_path) == output_on_page


def testTheFirstExampleOfTheReadmeRuns(forks, tmp_path):
  program = _Blocks(README, 'python')[0]
  assert README.read_text().index(program) < README.read_text().index('\n## ')
  more = 'print(len(gradients), len({v.device for v in net.trainable_variables}))\n'
  output = _RunProgram(program + more, forks, tmp_path)
  assert output == '8 2\n'


def testTheKerasProgramOfTheReadmeTrains(environment, tmp_path):
  (tmp_path / 'program.py').write_text(_Blocks(README, 'python')[1])
  output = _Run(['program.py'], environment, tmp_path)  # Like a user: imports everything itself.
  losses = [float(x) for x in re.findall(r'loss: ([\d.]+)', output)]
  assert losses[-1] < losses[0] / 2
  assert (tmp_path / 'model.keras').exists()


def testTheExperimentOfTheGuideTrainsInAnEmptyDirectory(forks, tmp_path):
  files = _ProjectFiles()
  assert sorted(files) == ['params/toy.py', 'tasks/toy.py']
  for path, text in files.items():
    assert text.count('\n') <= 24, f'{path} is long for a first example'
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(text)
    (tmp_path / path).with_name('__init__.py').touch()
  args = ['--model=toy.Toy', '--logdir=runs/toy']
  assert f'`trainer {" ".join(args)}`' in OWN_EXPERIMENT.read_text().replace('\n', ' ')
  output = processes.Succeeded(forks.Run('trainer', *args, cwd=tmp_path)).stdout
  losses = [float(x) for x in re.findall(r'loss (\S+)', output)]
  assert naming.AnyLineNames(output, 'Test', 'step 300')
  assert losses[-1] < losses[0] / 4, output
  # Resumes in four stages, with the command of the guide.
  more = re.search(
    r"`--model_params_override='(\S+)' (--max_steps=400)`", OWN_EXPERIMENT.read_text()
  )
  args += [f'--model_params_override={more[1]}', more[2]]
  output = processes.Succeeded(forks.Run('trainer', *args, cwd=tmp_path)).stdout
  assert naming.AnyLineNames(output, 'resuming', 'step 300')
  assert 'K=4 stages' in output
  assert naming.AnyLineNames(output, 'Test', 'step 400')


def testThePictureOfTheGuideEqualsTheOutputOfInspectPartition(forks):
  command = re.search(r'`trainer (--mode=inspect_partition \S+)` prints', INSPECTION.read_text())
  output = processes.Succeeded(forks.Run('trainer', *command[1].split())).stdout
  assert output.strip() in [block.strip() for block in _Blocks(INSPECTION, 'text')]


# --- names ---


def _Anchors(path):
  """Returns the anchors of the headings of a page, as GitHub generates them."""
  headings = re.findall(r'^#+ (.*)$', _BLOCK.sub('', path.read_text()), re.MULTILINE)
  return {re.sub(r'[^\w -]', '', h.lower()).replace(' ', '-') for h in headings}


@cases('path', [*DOCS, ROOT / 'CONTRIBUTING.md'], ids=_Ids)
def testLinkTargetsExist(path):
  for link in _LINK.findall(path.read_text()):
    if link.startswith('https://'):
      continue
    target, _, anchor = link.partition('#')
    file = (path.parent / target) if target else path
    assert file.exists(), f'{path.name} links to {link}'
    assert not anchor or anchor in _Anchors(file), f'{path.name} links to {link}'


@cases('path', DOCS, ids=_Ids)
def testNamedFilesExist(path):
  project_files = _ProjectFiles()
  for name in _FILE.findall(path.read_text()):
    assert name in project_files or (ROOT / name).exists(), f'{path.name} names {name}'


def testTheTableOfSchedulesIsComplete():
  assert sorted(re.findall(r'^\| `(\w+)` \|', SCHEDULES.read_text(), re.MULTILINE)) == (
    schedules.Names()
  )


def _Texts():
  """Yields the texts in the code of lingvo_gpipe, with `…` for each value in a text."""
  for path in (ROOT / 'lingvo_gpipe').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else '…' for v in node.values]
        yield ''.join(parts)
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def testTheMessagesOfThePageOfErrorsExist():
  """A message may end early, and its `…` may stand for several values and words."""
  messages = re.findall(r'^\| `(.*?)` \|', ERRORS.read_text().partition('## Messages')[2], re.M)
  texts = '\n'.join(text.replace('\n', ' ') for text in _Texts())
  assert len(messages) > 30
  for message in messages:
    parts = [re.escape(part) for part in message.split('…') if part.strip()]
    assert re.search('.*'.join(parts), texts), message


def testTheTreeOfArchitectureNamesEveryFolder():
  """A line `  schedule/   text` of the tree names a folder inside the less indented one above."""
  tree = re.search(r'```text\nlingvo_gpipe/\n(.*?)```', ARCHITECTURE.read_text(), re.S)[1]
  named, parents = set(), []
  for line in tree.splitlines():
    if entry := re.match(r'( +)([a-z_]+)/ ', line):
      parents = [*parents[: len(entry[1]) // 2 - 1], entry[2]]
      named.add('/'.join(parents))
  package = ROOT / 'lingvo_gpipe'
  folders = {p.parent.relative_to(package).as_posix() for p in package.rglob('__init__.py')}
  assert named == folders - {'.'}


def _NumLines(path, symbols):
  """The lines of a file, or of the classes, functions and methods in it that symbols name."""
  text = path.read_text()
  if not symbols:
    return text.count('\n')
  spans = {}
  for node in ast.parse(text).body:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
      spans[node.name] = node
      for method in node.body if isinstance(node, ast.ClassDef) else ():
        spans[f'{node.name}.{getattr(method, "name", "")}'] = method
  return sum(spans[name].end_lineno - spans[name].lineno + 1 for name in symbols)


def testTheGuidedTourIsTenShortReadings():
  tour = ARCHITECTURE.read_text().partition('## Guided tour')[2].partition('| Question')[0]
  rows = re.findall(r'^\| \[[^]]*\]\(\.\./([^)]*)\) \| (.*?) \|', tour, re.MULTILINE)
  assert len(rows) == 10
  for path, symbols in rows:
    assert _NumLines(ROOT / path, re.findall(r'`([\w.]+)`', symbols)) <= 200, path


def testTheTableOfPlacesNamesExistingFiles():
  table = ARCHITECTURE.read_text().partition('| Question')[2].partition('## ')[0]
  for symbol, path in re.findall(r'`([\w.]+)` in `([\w/]+\.py)`', table):
    assert _NumLines(ROOT / path, [symbol])
  for path in re.findall(r'`([a-z_/]+\.py)`', table):
    assert (ROOT / path).exists(), path


@cases('path', DOCS, ids=_Ids)
def testDocsUseThePublicNames(path):
  """Modules in folders are private: examples import from lingvo_gpipe itself."""
  assert not re.findall(r'^\s*(?:from|import) lingvo_gpipe\..*', path.read_text(), re.MULTILINE)


@pytest.fixture(scope='module')
def program_help(forks):
  """Returns the output of `--help` of the programs."""
  runs = [forks.Run(name, '--help') for name in ('trainer', 'evaluator', 'worker')]
  return ''.join(processes.Succeeded(done).stdout for done in runs)


@cases('path', DOCS, ids=_Ids)
def testNamedFlagsExist(path, program_help):
  flags = set(re.findall(r'^  --(\w+):', program_help, re.MULTILINE))
  assert not flags & _LINGVO_FLAGS
  of_tools = {file.stem: _DefinedFlags(file) for file in (ROOT / 'tools').glob('*.py')}
  text = path.read_text()
  known = flags.union({'help'}, *of_tools.values())
  for flag in set(_FLAG.findall(text)) - _LINGVO_FLAGS:
    assert flag in known, f'{path.name} names --{flag}'
  for tool, arguments in _TOOL.findall(text):
    assert tool in of_tools, f'{path.name} names tools.{tool}'
    for flag in _FLAG.findall(arguments):
      assert flag in of_tools[tool], f'{path.name} gives tools.{tool} the flag --{flag}'


def _DefinedFlags(file):
  """Returns the flags of a program of tools/, and flags from other modules that it uses."""
  text = file.read_text()
  flags = _DEFINED_FLAG.findall(text)
  if 'binary.' in text:
    flags += _DEFINED_FLAG.findall((ROOT / 'lingvo_gpipe' / 'cli' / 'binary.py').read_text())
  if 'program.DefineOutput' in text:
    flags.append('output')
  return set(flags)


@cases('path', [*DOCS, ROOT / 'CONTRIBUTING.md'], ids=_Ids)
def testNamedExperimentsExist(path):
  for key in _KEY.findall(path.read_text()):
    area, file, name = key.split('.')
    source = ROOT / 'params' / area / f'{file}.py'
    registered = rf'@registry\.Register(Single|Multi)TaskModel\nclass {name}\('
    assert source.exists() and re.search(registered, source.read_text()), f'{path.name} names {key}'


@cases('path', DOCS, ids=_Ids)
def testNamedModesExist(path, program_help):
  modes = re.search(r'--mode:\s+<(.*?)>', program_help)[1].split('|')
  # The first column of the table of flags has Lingvo's.
  text = re.sub(r'^\| `--.*?\|', '|', path.read_text(), flags=re.MULTILINE)
  named = re.findall(r'--mode=(\w+)|\b(inspect_\w+)\b', text)
  for mode in {a or b for a, b in named}:
    assert mode in modes, f'{path.name} names the mode {mode}'


@cases('path', [*DOCS, ROOT / 'CONTRIBUTING.md'], ids=_Ids)
def testNamedMakeTargetsExist(path):
  targets = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
  for words in [''.join(code).split() for code in _CODE.findall(path.read_text())]:
    if words[:1] == ['make']:
      for target in itertools.takewhile(re.compile('[a-z-]+$').match, words[1:]):
        assert target in targets, f'{path.name} names make {target}'


@cases('path', list(MAX_LINES), ids=_Ids)
def testFrontPagesStayShort(path):
  assert path.read_text().count('\n') <= MAX_LINES[path]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
