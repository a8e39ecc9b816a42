# SPDX-License-Identifier: Apache-2.0
"""The structure of the source tree: import directions, names, and the contents of every file."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import lingvo_gpipe

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = ('lingvo_gpipe', 'params', 'tasks', 'tools')

# The folders of lingvo_gpipe, and the programs next to them. A folder imports only folders of the
# rows above its own. docs/architecture.md has a sentence for each.
_ROWS = (
  ('graph', 'pipeline.schedule'),
  ('core',),
  ('layers', 'decoding', 'distributed', 'reporting', 'pipeline.cost'),
  ('layers.keras', 'checkpoint', 'input', 'pipeline.profiling', 'pipeline.stages'),
  ('input.records', 'learning', 'pipeline.cutting'),
  ('input.text', 'pipeline', 'planner'),
  ('input.tfds', 'experiment'),
  ('cli', 'fit', 'runners'),
  ('evaluation',),
  ('training',),
  ('trainer', 'evaluator', 'worker'),
)
_ROW_OF = {folder: row for row, folders in enumerate(_ROWS) for folder in folders}
_MOST_MODULES = 21

# Modules that do not load TensorFlow: two whole folders, and these.
_NO_TENSORFLOW_FOLDERS = ('pipeline.schedule', 'pipeline.cost')
_NO_TENSORFLOW_MODULES = (
  'lingvo_gpipe',
  'lingvo_gpipe.cli.command_line',
  'lingvo_gpipe.cli.completion',
  'lingvo_gpipe.cli.interrupts',
  'lingvo_gpipe.cli.steady_output',
  'lingvo_gpipe.core.heartbeat',
  'lingvo_gpipe.core.hyperparams',
  'lingvo_gpipe.core.literals',
  'lingvo_gpipe.core.nested_map',
  'lingvo_gpipe.core.nested_tree',
  'lingvo_gpipe.core.params_diff',
  'lingvo_gpipe.core.params_text',
  'lingvo_gpipe.core.params_tree',
  'lingvo_gpipe.core.text_file',
  'lingvo_gpipe.core.text_table',
  'lingvo_gpipe.distributed.cluster_spec',
  'lingvo_gpipe.distributed.local_workers',
  'lingvo_gpipe.distributed.native_output',
  'lingvo_gpipe.distributed.stop_request',
  'lingvo_gpipe.distributed.supervisor',
  'lingvo_gpipe.experiment.experiment_sources',
  'lingvo_gpipe.experiment.registry',
  'lingvo_gpipe.pipeline.profiling.measured_schedule',
  'lingvo_gpipe.pipeline.profiling.timeline_html',
  'lingvo_gpipe.planner.device_description',
  'lingvo_gpipe.planner.model_costs',
  'lingvo_gpipe.planner.plan_bound',
  'lingvo_gpipe.planner.plan_choice',
  'lingvo_gpipe.planner.plan_schedules',
  'lingvo_gpipe.planner.plan_times',
  'lingvo_gpipe.planner.planner',
)

# The registry creates the default models, and imports them when an experiment needs one.
_LAZY_IMPORTS = {
  ('lingvo_gpipe.experiment.registry', 'lingvo_gpipe.experiment.model'),
  ('lingvo_gpipe.experiment.registry', 'lingvo_gpipe.experiment.multi_task_model'),
}

_TENSORFLOW = ('tensorflow', 'keras', 'tensorboard', 'tensorflow_datasets')
_PROGRAMS = ('lingvo_gpipe.trainer', 'lingvo_gpipe.evaluator', 'lingvo_gpipe.worker')

# {file: names of TensorFlow that are old or not public, and have no other name}.
_OLD_TENSORFLOW = {
  # The profiler's messages: generated code, next to TensorFlow's own.
  'lingvo_gpipe/pipeline/profiling/profiler_trace.py': {
    'tensorflow.tsl.profiler.protobuf.profiler_options_pb2',
    'tensorflow.tsl.profiler.protobuf.xplane_pb2',
  },
  'tests/pipeline/profiling/profiler_trace_test.py': {
    'tensorflow.tsl.profiler.protobuf.xplane_pb2'
  },
  'lingvo_gpipe/pipeline/stages/vjp.py': {'tf.compat.v1.wrap_function'},  # For its prune.
  # To see where the functions of custom gradients begin and end.
  'lingvo_gpipe/graph/side_effects.py': {
    'tensorflow.python.ops',
    'tensorflow.python.ops.custom_gradient',
  },
  # To turn off what no public name turns off.
  'tests/fast_tracing.py': {
    'tensorflow.python.eager.context',
    'tensorflow.python.framework.op_def_library',
    'tensorflow.python.pywrap_tfe',
    'tensorflow.python.util.deprecation',
    'tensorflow.python.util.tf_contextlib',
    'tensorflow.python.util.tf_stack',
  },
}

# {file: names that the interface of another package requires}.
_FOREIGN_NAMES = {
  'tests/pipeline/stages/parts_test.py': {'build', 'call'},
  'lingvo_gpipe/fit/pipelined_model.py': {
    'call',
    'compile',
    'export',
    'from_preset',
    'generate',
    'get_config',
    'load_weights',
    'make_predict_function',
    'make_test_function',
    'make_train_function',
    'save',
    'save_to_preset',
    'save_weights',
    'summary',
  },  # Keras.
  'lingvo_gpipe/fit/keras_loss.py': {'add_update', 'call', 'get_current_value'},
  'lingvo_gpipe/layers/keras/keras_cell_layer.py': {'add_update', 'get_current_value'},
  'lingvo_gpipe/layers/keras/keras_trace.py': {'get_current_value'},
  'lingvo_gpipe/layers/keras/keras_functions.py': {'call'},
  'lingvo_gpipe/layers/keras/keras_symbols.py': {'call'},
  'lingvo_gpipe/layers/keras/keras_preset.py': {'get_tensor', 'keys'},  # safetensors.
  'lingvo_gpipe/pipeline/profiling/schedule_svg.py': {'_repr_html_'},  # Jupyter.
  'tools/keras_models.py': {'apply'},
  'tools/keras_zoo/shapes.py': {'call'},
  'tools/release/readme.py': {'update'},
  'tools/site/hooks.py': {'on_config', 'on_files', 'on_page_markdown'},
  'tests/fit/keras_generation_test.py': {'call_with_cache'},
  'tests/fit/keras_loss_test.py': {'call'},
  'tests/fit/loss_chunks_test.py': {'update_state'},
  'tests/fit/pipelined_model_test.py': {
    'apply',
    'apply_gradients',
    'call',
    'reset_state',
    'result',
    'train_step',
    'update_state',
  },
  'tests/layers/keras/keras_symbols_test.py': {'build', 'call'},
  'tests/layers/keras/keras_cell_layer_test.py': {
    'build',
    'call',
    'compute_output_shape',
    'result',
    'update_state',
  },
  'tests/layers/keras/keras_equality_test.py': {'call'},
  'tests/layers/keras/keras_functions_test.py': {'call'},
  'tests/layers/keras/keras_graph_test.py': {'call'},
  'tests/layers/keras/keras_opening_test.py': {'call'},
  'tests/tools/keras_models_test.py': {'train_step'},
  'lingvo_gpipe/core/nested_map.py': {'copy', 'setdefault', 'update'},  # dict.
  'lingvo_gpipe/cli/steady_output.py': {'write', 'flush'},  # io.
  'lingvo_gpipe/learning/optimizer.py': {
    'add_variable_from_reference',
    '_should_use_adamw',
  },  # Keras.
  'tests/conftest.py': {'find_spec'},  # importlib.
  'tests/input/tfds/tfds_images_test.py': {
    '_info',
    '_split_generators',
    '_generate_examples',
  },  # TFDS.
  'tests/input/tfds/tfds_pairs_test.py': {'_info', '_split_generators', '_generate_examples'},
  'tests/input/tfds/tfds_text_test.py': {'_info', '_split_generators', '_generate_examples'},
  'tools/chaos_attacks/data_files.py': {'_info', '_split_generators', '_generate_examples'},
  'tests/reporting/progress_terminal_test.py': {'isatty'},  # io.
  'tests/toys/experiments/refused.py': {'Task_Test'},  # The registry: the task of a data set.
  'tests/toys/keras_layers.py': {'build', 'call', 'compute_mask'},  # Keras.
  'tests/toys/programs/hang_after_error.py': {'flush'},  # io.
}


def _Files(*packages):
  paths = [p for name in packages for p in sorted((_ROOT / name).rglob('*.py'))]
  assert paths
  return paths


def _Relative(path):
  return path.relative_to(_ROOT).as_posix()


def _Module(path):
  parts = path.relative_to(_ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def _Tree(path):
  return ast.parse(path.read_text(encoding='utf-8'), str(path))


@functools.cache
def _Imports(path):
  """Returns [(name, line, whether at the top of the module)]; `from a import b` is a.b."""
  tree = _Tree(path)
  imports = []

  def Walk(node, at_top):
    for child in ast.iter_child_nodes(node):
      if isinstance(child, ast.Import):
        imports.extend((alias.name, child.lineno, at_top) for alias in child.names)
      elif isinstance(child, ast.ImportFrom):
        assert not child.level, f'{_Relative(path)}:{child.lineno}: a relative import'
        names = [f'{child.module}.{alias.name}' for alias in child.names]
        imports.extend((name, child.lineno, at_top) for name in names)
      inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
      Walk(child, at_top and not inside)

  Walk(tree, True)
  return imports


_MODULES = {_Module(path): path for path in _Files(*_PACKAGES)}


def _Target(name):
  """Returns the module of this repository that contains a name; None if another package does."""
  parts = name.split('.')
  if parts[0] not in _PACKAGES:
    return None
  if name.removeprefix('lingvo_gpipe.') in lingvo_gpipe._MODULE_OF:
    return f'lingvo_gpipe.{lingvo_gpipe._MODULE_OF[parts[-1]]}'
  if name.removeprefix('lingvo_gpipe.') in lingvo_gpipe._FOLDER_OF:
    return f'lingvo_gpipe.{lingvo_gpipe._FOLDER_OF[parts[-1]]}.{parts[-1]}'
  while parts and '.'.join(parts) not in _MODULES:
    parts.pop()
  assert parts, f'{name} is not a module'
  return '.'.join(parts)


def _OwnImports():
  """Returns [(importer, imported, file and line, whether at the top)] within this repository."""
  return [
    (module, target, f'{_Relative(path)}:{line}', at_top)
    for module, path in _MODULES.items()
    for name, line, at_top in _Imports(path)
    if (target := _Target(name)) not in (None, module)
  ]


def _Folder(module):
  """Returns the folder of a module, such as `pipeline.cost`; for a program, its name."""
  parts = module.split('.')[1:]
  is_package = _MODULES[module].name == '__init__.py'
  return '.'.join(parts if is_package or len(parts) == 1 else parts[:-1])


def testTheTableNamesEveryFolder():
  folders = {_Folder(m) for m in _MODULES if m.startswith('lingvo_gpipe.')}
  assert folders == _ROW_OF.keys()


def testFoldersImportOneWay():
  wrong = []
  for module, target, where, _ in _OwnImports():
    if module.startswith('lingvo_gpipe.') and (module, target) not in _LAZY_IMPORTS:
      folder, imported = _Folder(module), _Folder(target)
      if folder != imported and _ROW_OF[imported] >= _ROW_OF[folder]:
        wrong.append(f'{where}: {folder} imports {imported}, which is not above it in _ROWS')
  assert not wrong, '\n'.join(wrong)


def testNoFolderHasTooManyModules():
  for folder in _ROW_OF:
    modules = [m for m in _MODULES if m.startswith('lingvo_gpipe.') and _Folder(m) == folder]
    assert len(modules) <= _MOST_MODULES, folder


def testModuleNamesAreUnique():
  """Modules are imported by name, so `stage.X` must mean one thing in every file."""
  names = {}
  for module, path in _MODULES.items():
    if module.startswith('lingvo_gpipe.') and path.name != '__init__.py':
      assert names.setdefault(path.stem, module) == module, f'{module} and {names[path.stem]}'


def testTheLazyImportsAreLazy():
  at_top = {(m, t): at_top for m, t, _, at_top in _OwnImports() if (m, t) in _LAZY_IMPORTS}
  assert at_top == dict.fromkeys(_LAZY_IMPORTS, False)


def testTheSampleCoversEachFolder():
  """`make test-quick` runs tests of each folder of lingvo_gpipe, and of tasks and tools."""
  build = (_ROOT / 'tests' / 'BUILD').read_text(encoding='utf-8')
  text = re.search(r'^SAMPLE = (\[.*?^\])', build, re.M | re.S)[1]
  sample = [pathlib.PurePosixPath(name) for name in ast.literal_eval(text)]
  assert all((_ROOT / 'tests' / name).exists() for name in sample)
  covered = {'.'.join(name.parent.parts) for name in sample}
  folders = {
    folder for folder in _ROW_OF if (_ROOT / 'lingvo_gpipe' / folder.replace('.', '/')).is_dir()
  }
  assert folders | {'tools'} <= covered
  assert any(name.startswith('tasks.') for name in covered)


def testNoCycles():
  sorter = graphlib.TopologicalSorter()
  for module, target, _, _ in _OwnImports():
    if (module, target) not in _LAZY_IMPORTS:
      sorter.add(module, target)
  try:
    sorter.prepare()
  except graphlib.CycleError as e:
    pytest.fail(f'modules import each other: {" <- ".join(e.args[1])}')


def testLayersDoNotImportThePipeline():
  for module, target, where, _ in _OwnImports():
    if module.startswith('lingvo_gpipe.layers'):
      assert not target.startswith('lingvo_gpipe.pipeline'), where


def testNothingImportsParamsToolsOrPrograms():
  for module, target, where, _ in _OwnImports():
    package = target.split('.')[0]
    assert package not in ('params', 'tools') or package == module.split('.')[0], where
    assert target not in _PROGRAMS, where


def testTheLibraryDoesNotImportTasksOrParams():
  for module, target, where, _ in _OwnImports():
    if module.startswith('lingvo_gpipe'):
      assert target.startswith('lingvo_gpipe'), where
    if module.startswith('tasks'):
      assert not target.startswith('params'), where


def testExperimentsAndTasksUseThePublicNames():
  for package in ('params', 'tasks'):
    for path in _Files(package):
      for name, line, _ in _Imports(path):
        if name.split('.')[0] == 'lingvo_gpipe':
          public = name.removeprefix('lingvo_gpipe.') in lingvo_gpipe.__all__
          assert public, f'{_Relative(path)}:{line}: {name} is not in lingvo_gpipe.__all__'


def testTheLibraryImportsFromFoldersNotFromItsPublicFace():
  for path in _Files('lingvo_gpipe'):
    for name, line, _ in _Imports(path):
      is_public = name.removeprefix('lingvo_gpipe.') in lingvo_gpipe.__all__
      assert not is_public, f'{_Relative(path)}:{line}: name the folder of {name}'


def testTypeCheckersSeeTheSamePublicNames():
  """The imports under TYPE_CHECKING equal the imports at run time."""
  folders, modules = lingvo_gpipe._FOLDER_OF, lingvo_gpipe._MODULE_OF
  public_modules = {f'lingvo_gpipe.{folder}.{name}' for name, folder in folders.items()}
  classes = {f'lingvo_gpipe.{module}.{name}' for name, module in modules.items()}
  seen = {name for name, _, _ in _Imports(_MODULES['lingvo_gpipe'])}
  assert seen - {'importlib', 'typing.TYPE_CHECKING', 'typing.Any'} == public_modules | classes
  assert public_modules <= _MODULES.keys()
  for name, folder in folders.items():
    assert getattr(lingvo_gpipe, name).__name__ == f'lingvo_gpipe.{folder}.{name}'
  for name, module in modules.items():
    assert getattr(lingvo_gpipe, name).__module__ == f'lingvo_gpipe.{module}'


def testOnlyProgramsDefineFlags():
  for path in _Files('lingvo_gpipe', 'params', 'tasks'):
    module = _Module(path)
    if module in _PROGRAMS or module.startswith('lingvo_gpipe.cli.'):
      continue
    for name, line, _ in _Imports(path):
      assert name not in ('absl.flags', 'argparse'), f'{_Relative(path)}:{line}'


# ---- TensorFlow --------------------------------------------------------------------------


def _NoTensorFlow():
  in_folders = [
    module
    for folder in _NO_TENSORFLOW_FOLDERS
    for module in _MODULES
    if module.startswith(f'lingvo_gpipe.{folder}.')
  ]
  return [*_NO_TENSORFLOW_MODULES, *in_folders]


def testModulesThatLoadNoTensorFlow():
  """One process imports them all: if none of them loads TensorFlow, none does alone."""
  modules = _NoTensorFlow()
  for module in modules:
    for name, line, at_top in _Imports(_MODULES[module]):
      assert not (at_top and name.split('.')[0] in _TENSORFLOW), f'{module}:{line}'
  program = f"""
import importlib, sys
sys.path.insert(0, {str(_ROOT)!r})
for module in {modules!r}:
  importlib.import_module(module)
  if loaded := sorted(sys.modules.keys() & {set(_TENSORFLOW)!r}):
    sys.exit(f'importing {{module}} loads {{loaded}}')
"""
  run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stderr


def _Root(node):
  """Returns `a` of `a.b.c`; None if the expression does not begin with a name."""
  while isinstance(node, ast.Attribute):
    node = node.value
  return node.id if isinstance(node, ast.Name) else None


def testNoPrivateOrOldTensorFlow():
  """No tensorflow.python, no compat.v1 and no private name of TensorFlow."""
  for path in _Files(*_PACKAGES, 'tests'):
    for name, line, _ in _Imports(path):
      is_private = re.match(r'tensorflow\.(python|core|compiler|tsl|compat\.v1)', name)
      allowed = name in _OLD_TENSORFLOW.get(_Relative(path), ())
      assert allowed or not is_private, f'{_Relative(path)}:{line}'
    for node in ast.walk(_Tree(path)):
      if isinstance(node, ast.Attribute) and _Root(node) == 'tf':
        text = ast.unparse(node)
        if text == 'tf.compat.v1' or text in _OLD_TENSORFLOW.get(_Relative(path), ()):
          continue  # tf.compat.v1 is a prefix of the allowed names.
        assert not re.match(r'tf\.(python\b|compat\.v1\b|(\w+\.)*_[a-z])', text), (
          f'{_Relative(path)}:{node.lineno}: {text}'
        )


# ---- files -------------------------------------------------------------------------------


def testEveryFileHasALicenceAndADocstring():
  for path in _Files(*_PACKAGES, 'tests'):
    lines = path.read_text(encoding='utf-8').splitlines()
    assert lines and lines[0] == '# SPDX-License-Identifier: Apache-2.0', _Relative(path)
    assert ast.get_docstring(_Tree(path)), f'{_Relative(path)} has no docstring'


def testNoFileHasACatchAllName():
  for path in _Files(*_PACKAGES, 'tests'):
    for word in ('utils', 'util', 'common', 'helpers', 'helper', 'misc'):
      assert word not in path.stem.split('_'), _Relative(path)
      assert word not in path.parent.name.split('_'), _Relative(path)


def testPackagesImportNothing():
  for path in _Files(*_PACKAGES):
    # The public face, and the first moment of a program at which Ctrl-C can be handled.
    if path.name == '__init__.py' and _Module(path) not in ('lingvo_gpipe', 'tools'):
      body = _Tree(path).body
      assert all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in body), (
        f'{_Relative(path)}: only a docstring'
      )


def testEveryTestFileRunsByItself():
  tests = [p for p in _Files('tests') if p.name.endswith('_test.py')]
  for path in tests:
    text = path.read_text(encoding='utf-8')
    assert 'raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))' in text, _Relative(path)


def testTestsMirrorTheTree():
  """Each folder of tests has the path of a folder with sources."""
  sources = {path for path in _Files('lingvo_gpipe', 'params', 'tasks', 'tools')}
  for path in _Files('tests'):
    if not path.name.endswith('_test.py') or path.parent == _ROOT / 'tests':
      continue
    folder = path.parent.relative_to(_ROOT / 'tests')
    homes = {_ROOT / folder, _ROOT / 'lingvo_gpipe' / folder}
    assert any(source.parent in homes for source in sources), _Relative(path)


# ---- names -------------------------------------------------------------------------------

_CAMEL = re.compile(r'_{0,2}[A-Z][A-Za-z0-9]*')
_SNAKE = re.compile(r'_{0,2}[a-z][a-z0-9_]*')
_TEST = re.compile(r'test[A-Z0-9][A-Za-z0-9]*')
_DUNDER = re.compile(r'__\w+__')


def _Decorators(node):
  return {ast.unparse(d).split('(')[0].rsplit('.', 1)[-1] for d in node.decorator_list}


@pytest.mark.parametrize('package', [*_PACKAGES, 'tests'])
def testFunctionsAreCamelCaseAndAttributesSnakeCase(package):
  wrong = []
  for path in _Files(package):
    allowed = _FOREIGN_NAMES.get(_Relative(path), set())
    for node in ast.walk(_Tree(path)):
      if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        continue
      name, decorators = node.name, _Decorators(node)
      if decorators & {'property', 'cached_property', 'setter', 'deleter', 'fixture'}:
        # A fixture function may have another name than its fixture, a stand-in any name.
        good = _SNAKE.fullmatch(name) or package == 'tests'
      else:
        good = _CAMEL.fullmatch(name) or _DUNDER.fullmatch(name) or name == 'main'
        good = good or name in allowed
        if package == 'tests':
          good = good or _TEST.fullmatch(name) or name.startswith('pytest_')
      if not good:
        wrong.append(f'{_Relative(path)}:{node.lineno}: {name}')
  assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('package', _PACKAGES)
def testArgumentsAndModulesAreSnakeCase(package):
  wrong = []
  for path in _Files(package):
    if not re.fullmatch(r'(__)?[a-z][a-z0-9_]*', path.stem):
      wrong.append(_Relative(path))
    for node in ast.walk(_Tree(path)):
      if isinstance(node, ast.arg) and not re.fullmatch(r'_{0,2}[a-z0-9_]*', node.arg):
        wrong.append(f'{_Relative(path)}:{node.lineno}: {node.arg}')
  assert not wrong, '\n'.join(wrong)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
