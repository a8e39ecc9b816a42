# SPDX-License-Identifier: Apache-2.0
"""The registry of experiments, tested on projects in temporary directories."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
import types

import pytest

import lingvo_gpipe
from lingvo_gpipe import experiment
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.experiment import registry
from tests import naming

_ENTRY_POINTS = importlib.metadata.entry_points

_HEADER = """\
from lingvo_gpipe import hyperparams, registry

def _Named(name):
  p = hyperparams.Params()
  p.Define('name', name, '')
  return p

class _Base(registry.SingleTaskModelParams):
  def Train(self): return _Named('train data')
  def Test(self): return _Named('test data')
  def Task(self): return _Named('task')
  def Model(self):
    p = _Named('model')
    p.Define('task', self.Task(), '')
    p.Define('input', None, '')
    p.Define('model', '', '')
    return p
"""


def _Experiment(*names, body='  pass\n'):
  """Returns the source of a module with one experiment for each name."""
  classes = [f'\n@registry.RegisterSingleTaskModel\nclass {name}(_Base):\n{body}' for name in names]
  return _HEADER + ''.join(classes)


class _Project:
  """A directory on sys.path for the modules of a user's project."""

  def __init__(self, root):
    self.root = root

  def Write(self, path, source):
    file = self.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))
    importlib.invalidate_caches()
    return file


@pytest.fixture(name='project')
def _MakeProject(tmp_path, monkeypatch):
  """Yields a new project; removes imported modules and registered classes after the test."""
  before = dict(sys.modules)
  for name in [m for m in before if m.split('.')[0] in ('params', 'tasks', 'mycompany')]:
    del sys.modules[name]  # Modules of this checkout that another test has imported.
  # Leave out folders with experiments: a namespace package would include them.
  paths = [path for path in sys.path if not os.path.isdir(os.path.join(path, 'params'))]
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *paths])
  importlib.invalidate_caches()
  monkeypatch.setattr(registry, '_ENTRIES', dict(registry._ENTRIES))
  monkeypatch.setattr(importlib.metadata, 'entry_points', lambda **_: [])
  yield _Project(tmp_path)
  for name in set(sys.modules) - set(before):
    if name.split('.')[0] in ('params', 'tasks', 'mycompany', 'installed'):
      del sys.modules[name]
  sys.modules.update(before)


def _OneLine(error):
  text = str(error.value)
  assert '\n' not in text
  return text


# --- keys and look-up ---


def testKeyIsModulePathAndClass(project):
  project.Write('params/lm/stdlib.py', _Experiment('Big', 'Small'))
  project.Write('params/lm/__init__.py', _Experiment('Direct'))
  cls = registry.GetClass('lm.stdlib.Small')
  assert cls.__name__ == 'Small' and cls.__module__ == 'params.lm.stdlib'
  assert registry.GetClass('lm.Direct').__module__ == 'params.lm'
  assert registry.ListKeys() == ['lm.Direct', 'lm.stdlib.Big', 'lm.stdlib.Small']


@pytest.mark.parametrize('with_init', [False, True])
def testOnlyTheNamedModuleIsImported(project, with_init):
  project.Write('params/lm/stdlib.py', _Experiment('Big'))
  project.Write('params/lm/sibling.py', _Experiment('Other') + 'raise SystemError\n')
  project.Write('params/mt/cousin.py', 'raise SystemError\n')
  if with_init:
    project.Write('params/__init__.py', '')
    project.Write('params/lm/__init__.py', '')
  registry.GetClass('lm.stdlib.Big')
  imported = {name for name in sys.modules if name.split('.')[0] == 'params'}
  assert imported == {'params', 'params.lm', 'params.lm.stdlib'}


def testPackagesAreSearchedInOrderAndInstalledOnesLast(project, monkeypatch):
  project.Write('params/lm/a.py', _Experiment('X'))
  project.Write('mycompany/models/params/lm/a.py', _Experiment('X', 'Y'))
  project.Write('mycompany/models/__init__.py', '')
  project.Write('installed/experiments/lm/a.py', _Experiment('X', 'Y', 'Z'))
  point = importlib.metadata.EntryPoint('any', 'installed.experiments', 'lingvo_gpipe.params')
  groups = []
  monkeypatch.setattr(
    importlib.metadata, 'entry_points', lambda group: groups.append(group) or [point]
  )
  packages = ('params', 'mycompany.models.params')

  def _Module(*args):
    return registry.GetClass(*args).__module__

  assert _Module('lm.a.X', packages) == 'params.lm.a'
  assert 'installed' not in sys.modules and 'mycompany' not in sys.modules
  assert _Module('lm.a.X', packages[::-1]) == 'mycompany.models.params.lm.a'
  assert _Module('lm.a.Y', packages) == 'mycompany.models.params.lm.a'
  assert _Module('lm.a.Y') == 'installed.experiments.lm.a'
  assert _Module('lm.a.Z', packages) == 'installed.experiments.lm.a'
  assert registry.ListKeys(packages) == ['lm.a.X', 'lm.a.Y', 'lm.a.Z']
  assert set(groups) == {'lingvo_gpipe.params'}


def testADeclaredEntryPointOfAnInstalledDistributionIsFound(project, monkeypatch):
  monkeypatch.setattr(importlib.metadata, 'entry_points', _ENTRY_POINTS)
  project.Write('installed/x.py', _Experiment('E'))
  project.Write('some-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\nName: some\nVersion: 1.0\n')
  project.Write('some-1.0.dist-info/entry_points.txt', '[lingvo_gpipe.params]\nmine = installed\n')
  assert registry.GetClass('x.E').__module__ == 'installed.x'


def testUnknownKeyErrorIsOneLineWithPlacesAndClosestKeys(project):
  project.Write('params/lm/stdlib.py', _Experiment('ByteTransformerGPipe2', 'Plain'))
  project.Write('params/lm/broken.py', _Experiment('Broken') + 'def (\n')
  project.Write('params/image/digits.py', _Experiment('LeNet'))
  project.Write('params/lm/bad.py', _Experiment('ByteTransformerGPipe3') + 'import nothing_such\n')
  for key in ('lm.stdlib.ByteTransformrGPipe2', 'lm.stdlb.ByteTransformerGPipe2'):
    with pytest.raises(LookupError) as error:
      registry.GetClass(key)
    assert type(error.value) is LookupError
    text = _OneLine(error)
    assert naming.Names(text, f"'{key}'", project.root / 'params')
    assert naming.Names(text, 'lm.stdlib.ByteTransformerGPipe2 or lm.bad.ByteTransformerGPipe3')
  with pytest.raises(LookupError, match=naming.Naming("'lenet.lenet'", 'image.digits.LeNet?')):
    registry.GetClass('lenet.lenet')
  with pytest.raises(LookupError, match=naming.Naming('4 known keys', '--mode=list')):
    registry.GetClass('zzzz.qqqqqqqqqqqq')
  with pytest.raises(LookupError, match=naming.Naming('mycompny', 'lm.stdlib.Plain?')):
    registry.GetClass('lm.stdlib.Plan', ('params', 'mycompny'))
  assert not {'params.lm.bad', 'params.image.digits'} & set(sys.modules)


def testAnUndecoratedClassIsReported(project):
  project.Write('params/lm/stdlib.py', _Experiment('X') + '\nclass Forgotten(_Base): pass\n')
  with pytest.raises(LookupError) as error:
    registry.GetClass('lm.stdlib.Forgotten')
  assert 'without @RegisterSingleTaskModel' in _OneLine(error)


def testAKeyNamesTheModuleThatDefinesTheClass(project):
  project.Write('params/a.py', _Experiment('X'))
  project.Write('params/b.py', 'from params.a import X\n')
  with pytest.raises(LookupError, match=naming.Naming("'b.X'", 'params/b.py', 'a.X?')):
    registry.GetClass('b.X')


def testAFolderWithoutInitThatAnotherPackageHidesIsReported(project):
  project.Write('params/x.py', _Experiment('X'))
  project.Write('elsewhere/params/__init__.py', '')
  project.Write('elsewhere/params/y.py', _Experiment('Y'))
  elsewhere = project.root / 'elsewhere'
  sys.path.append(str(elsewhere))
  with pytest.raises(LookupError) as error:
    registry.GetClass('x.X')
  hidden = project.root / 'params'
  expected = f'{elsewhere / "params"}, which hides {hidden}: add an __init__.py'
  assert expected in _OneLine(error)
  project.Write('params/__init__.py', '')
  assert registry.GetClass('x.X').__name__ == 'X'


def testNoExperimentsAtAll(project):
  with pytest.raises(LookupError, match=naming.Naming('`params`', '--params_package')):
    registry.GetClass('lm.stdlib.X')
  assert registry.ListKeys() == []


@pytest.mark.parametrize(
  'key',
  ['', '.', 'X', 'lm..X', '.lm.X', 'lm.X.', 'lm/x.X', '../x.X', '..x.X', 'lm.1a.X', 'a b.X', 3],
)
def testAKeyMustBeDottedIdentifiers(project, key):
  project.Write('params/lm.py', _Experiment('X'))
  project.Write('x.py', _Experiment('X'))
  with pytest.raises(ValueError, match=naming.Naming('experiment key', repr(key))) as error:
    registry.GetClass(key)
  assert key != 'X' or naming.Names(_OneLine(error), 'lm.X?')
  assert 'x' not in sys.modules


@pytest.mark.parametrize('package', ['', 'a..b', '../params', 'a/b', 'a-b', 3])
def testAPackageMustBeDottedIdentifiers(project, package):
  for call in (lambda p: registry.GetClass('lm.X', p), registry.ListKeys):
    with pytest.raises(ValueError, match=naming.Naming('package of experiments', repr(package))):
      call((package,))


def testPackagesMustNotBeAString(project):
  with pytest.raises(TypeError, match=naming.Naming('packages', 'sequence', "'params'")):
    registry.GetClass('lm.X', 'params')


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('import nothing_such', ModuleNotFoundError),
    ('import params.lm.nothing_such', ModuleNotFoundError),
    ('from lingvo_gpipe import nothing_such', ImportError),
    ('{}["x"]', KeyError),
    ('def (', SyntaxError),
    ('1 / 0', ZeroDivisionError),
  ],
)
@pytest.mark.parametrize('file', ['params/lm/x.py', 'params/lm/__init__.py', 'params/__init__.py'])
def testAnErrorInsideAModulePropagates(project, source, expected, file):
  project.Write('params/lm/x.py', _Experiment('X'))
  project.Write(file, source + '\n')
  with pytest.raises(expected) as error:
    registry.GetClass('lm.x.X')
  assert type(error.value) is expected
  # The broken file affects neither the listing nor the hint for another key.
  assert registry.ListKeys() in ([], ['lm.x.X'])
  with pytest.raises(LookupError, match=naming.Naming("'lm.y.X'")):
    registry.GetClass('lm.y.X')


@pytest.mark.parametrize('key', ['lm.x.X.Y', 'lm.x.x.X', 'lm.X', 'nix.X', 'lm.x.y.z.X'])
def testKeysWithExtraOrMissingPartsAreUnknown(project, key):
  project.Write('params/lm/x.py', _Experiment('X'))
  with pytest.raises(LookupError, match=naming.Naming(repr(key), 'lm.x.X?')):
    registry.GetClass(key)


# --- list ---


def testListingDoesNotRunSources(project):
  project.Write('params/a.py', 'raise SystemError\n' + _Experiment('A'))
  project.Write(
    'params/b.py',
    """\
    from lingvo_gpipe.experiment import registry as model_registry
    from lingvo_gpipe.registry import RegisterSingleTaskModel as Reg
    from lingvo_gpipe.registry import RegisterSingleTaskModel
    import heavy_thing
    @model_registry.RegisterSingleTaskModel
    class B1(Base): pass
    @Reg
    class B2(Base): pass
    if True:
      @some.Other
      @RegisterSingleTaskModel
      class B3(Base): pass
    @some.Other
    class No(Base): pass
    # @RegisterSingleTaskModel
    class Neither(Base): '@RegisterSingleTaskModel'
    """,
  )
  project.Write('params/deep/er/c.py', _Experiment('C'))
  project.Write('params/a_test.py', _Experiment('T'))
  project.Write('params/not-a-module.py', _Experiment('D'))
  project.Write('params/not-a-package/e.py', _Experiment('E'))
  bad = project.Write('params/bad.py', '')
  bad.write_bytes(b'\xff\xfe RegisterSingleTaskModel')
  project.Write('params/null.py', 'RegisterSingleTaskModel\0')
  project.Write('mycompany/__init__.py', 'raise SystemError')
  project.Write('mycompany/params/f.py', _Experiment('F'))
  keys = registry.ListKeys(('params', 'mycompany.params'))
  assert keys == ['a.A', 'b.B1', 'b.B2', 'b.B3', 'deep.er.c.C', 'f.F']
  assert not {'params', 'mycompany'} & {name.split('.')[0] for name in sys.modules}


def testExperimentsRegisteredByACallAreListedOnceImported(project):
  project.Write(
    'params/gen.py',
    _HEADER
    + 'for n in (1, 2): registry.RegisterSingleTaskModel(\n'
    + "  type(f'Gen{n}', (_Base,), {'__module__': __name__}))\n",
  )
  assert registry.ListKeys() == []
  assert registry.GetClass('gen.Gen2').__name__ == 'Gen2'
  assert registry.ListKeys() == ['gen.Gen1', 'gen.Gen2']


# --- registration ---


def testDecoratorReturnsTheClassAndATestClassHasAShortKey(project):
  class Mine(registry.SingleTaskModelParams):
    pass

  assert registry.RegisterSingleTaskModel(Mine) is Mine
  assert registry.GetClass('test.Mine') is Mine
  with pytest.raises(LookupError, match=naming.Naming("'test.Mine2'", 'test.Mine?')):
    registry.GetClass('test.Mine2')
  with pytest.raises(ValueError, match=r'\btest\.Mine\b.*registry_test\.py:\d+\b.*:\d+'):

    @registry.RegisterSingleTaskModel
    class Mine(registry.SingleTaskModelParams):  # noqa: F811
      pass


@pytest.mark.parametrize('value', [object, hyperparams.Params, lambda: None, 3])
def testOnlyExperimentsCanBeRegistered(value):
  with pytest.raises(TypeError, match=naming.Naming(repr(value), 'SingleTaskModelParams')):
    registry.RegisterSingleTaskModel(value)


def testDuplicatesNameBothPlaces(project):
  file = project.Write('params/dup.py', _Experiment('X', 'Y', 'X'))
  lines = [i for i, line in enumerate(file.read_text().split('\n'), 1) if line.startswith('@')]
  with pytest.raises(ValueError) as error:
    registry.GetClass('dup.Y')
  text = _OneLine(error)
  assert 'params.dup.X' in text and f'{file}:{lines[0]} and {file}:{lines[2]}' in text


def testImportingTheSameFileAgainIsNotADuplicate(project):
  project.Write('params/x.py', _Experiment('X'))
  first = registry.GetClass('x.X')
  second = importlib.reload(sys.modules['params.x']).X
  assert second is not first and registry.GetClass('x.X') is second
  del sys.modules['params.x']
  assert registry.GetClass('x.X') is not second
  # An edit moves the decorator to another line before the reload.
  project.Write('params/x.py', '# One more line.\n' + _Experiment('X', body='  AGE = 3\n'))
  importlib.reload(sys.modules['params.x'])
  assert registry.GetClass('x.X').AGE == 3


def testAModuleOfTheSameNameReplacesOneRemovedFromSysModules(project, tmp_path):
  project.Write('params/x.py', _Experiment('X'))
  first = registry.GetClass('x.X')
  for name in ('params', 'params.x'):
    del sys.modules[name]
  sys.path.insert(0, str(tmp_path / 'other'))
  _Project(tmp_path / 'other').Write('params/x.py', '\n' + _Experiment('X'))
  assert registry.GetClass('x.X') is not first


def testAClassInANotebookCanBeDefinedAgain(project, monkeypatch):
  main = types.ModuleType('__main__')
  monkeypatch.setitem(sys.modules, '__main__', main)
  for cell in ('/tmp/cell_1.py', '/tmp/cell_2.py'):
    exec(compile(_Experiment('X', body='  pass\n'), cell, 'exec'), main.__dict__)
    assert registry.GetClass('__main__.X') is main.__dict__['X']


# --- experiments ---


def testDatasetsAreTheDefinedAndTheListedMethods():
  class _E(registry.SingleTaskModelParams):
    DATASETS = ('DevClean', 'Train')

    def Test(self):
      return None

    def Train(self):
      return None

    def DevClean(self):
      return None

    def Helper(self):
      return None

    @property
    def Size(self):
      raise AttributeError

  class _Sub(_E):
    Test = None
    DATASETS = ()

    @classmethod
    def Dev(cls):
      return None

  assert registry.SingleTaskModelParams.DatasetNames() == []
  assert _E.DatasetNames() == _E().DatasetNames() == ['Train', 'Test', 'DevClean']
  assert _Sub.DatasetNames() == ['Train', 'Dev']
  with pytest.raises(
    NotImplementedError, match=naming.Naming('_E', 'Dev()', 'Train, Test, DevClean.')
  ):
    _E().Dev()
  with pytest.raises(NotImplementedError, match=naming.Naming('_E', 'Task()')):
    _E().Task()
  with pytest.raises(NotImplementedError, match=naming.Naming('Train()', 'none.')):
    registry.SingleTaskModelParams().Train()
  assert _E().Smoke() is None


@pytest.mark.parametrize(
  ('body', 'names'),
  [
    ({'DATASETS': ('Nix',)}, ('Wrong.DATASETS', "'Nix'")),
    ({'DATASETS': ('Task',)}, ('Wrong.DATASETS', "'Task'")),
    ({'DATASETS': ('Smoke',)}, ('Wrong.DATASETS', "'Smoke'")),
    ({'DATASETS': ('_Hidden',), '_Hidden': lambda self: None}, ('Wrong.DATASETS', "'_Hidden'")),
    ({'DATASETS': ('Size',), 'Size': 3}, ('Wrong.DATASETS', "'Size'")),
    ({'DATASETS': (3,)}, ('Wrong.DATASETS', 3)),
    ({'DATASETS': 'Train'}, ('Wrong.DATASETS', 'tuple', "'Train'")),
    ({'Train': lambda self, size: None}, ('Wrong.Train', 'no argument', "'size'")),
    (
      {'DATASETS': ('X',), 'X': staticmethod(lambda self: None)},
      ('Wrong.X', 'no argument', "'self'"),
    ),
  ],
)
def testDatasetsAreCheckedAtRegistration(project, body, names):
  cls = type('Wrong', (registry.SingleTaskModelParams,), body)
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    registry.RegisterSingleTaskModel(cls)


def testDatasetsMayBeAnyKindOfMethod(project):
  body = {
    'Train': staticmethod(lambda: None),
    'Dev': classmethod(lambda cls: None),
    'Test': lambda self, size=3: None,
  }
  cls = registry.RegisterSingleTaskModel(type('Right', (registry.SingleTaskModelParams,), body))
  assert cls.DatasetNames() == ['Train', 'Dev', 'Test']


def testModelWrapsTheTaskInASingleTaskModel(monkeypatch):
  class _Model:
    @classmethod
    def Params(cls):
      p = hyperparams.InstantiableParams(cls)
      p.Define('task', None, '')
      return p

  class _E(registry.SingleTaskModelParams):
    def Task(self):
      p = hyperparams.Params()
      p.Define('name', 'mine', '')
      return p

  stub = types.ModuleType('lingvo_gpipe.experiment.model')
  stub.SingleTaskModel = _Model
  monkeypatch.setitem(sys.modules, 'lingvo_gpipe.experiment.model', stub)
  monkeypatch.setattr(experiment, 'model', stub, raising=False)
  p = _E().Model()
  assert p.cls is _Model and p.task.name == 'mine'


# --- params ---


@pytest.mark.parametrize(('dataset', 'name'), [('Train', 'train data'), ('test', 'test data')])
def testGetParams(project, dataset, name):
  file = project.Write('params/lm/x.py', _Experiment('X'))
  p = registry.GetParams('lm.x.X', dataset)
  line = file.read_text().split('\n').index('@registry.RegisterSingleTaskModel') + 1
  assert (p.input.name, p.task.name) == (name, 'task')
  assert p.model == f'lm.x.X@params/lm/x.py:{line}'  # Independent of this machine.


def testModelNamesTheFileOfAPackage(project):
  project.Write('mycompany/params/lm/__init__.py', '#\n' + _Experiment('X'))
  p = registry.GetParams('lm.X', 'Train', ('mycompany.params',))
  assert p.model.startswith('lm.X@mycompany/params/lm/__init__.py:')


def testGetParamsOfAModelWithoutAModelParam(project):
  body = '  def Model(self):\n    p = super().Model()\n    p.Delete("model")\n    return p\n'
  project.Write('params/x.py', _Experiment('X', body=body))
  assert 'model' not in registry.GetParams('x.X', 'Train')


def testATaskMethodForADatasetReplacesTheTask(project):
  body = "  def Task_Test(self): return _Named('test task')\n"
  project.Write('params/x.py', _Experiment('X', body=body))
  assert registry.GetParams('x.X', 'Test').task.name == 'test task'
  assert registry.GetParams('x.X', 'Train').task.name == 'task'


def testParamsThatTheExperimentKeepsAreNotChanged(project):
  body = """\
  KEPT = _Named('kept')
  MODEL = _Base().Model()
  def Train(self): return self.KEPT
  def Model(self): return self.MODEL
"""
  project.Write('params/x.py', _Experiment('X', body=body))
  p = registry.GetParams('x.X', 'Train')
  p.input.name = p.task.name = 'changed'
  cls = registry.GetClass('x.X')
  assert cls.KEPT.name == 'kept' and cls.MODEL.task.name == 'task' and cls.MODEL.input is None


def testUnknownDatasetErrorIsOneLineWithTheDatasets(project):
  project.Write('params/x.py', _Experiment('X', body='  def Helper(self): pass\n'))
  for dataset in ('Dev', 'Helper', 'helper', 'Task', '', None):
    with pytest.raises(LookupError) as error:
      registry.GetParams('x.X', dataset)
    assert type(error.value) is LookupError
    assert naming.Names(_OneLine(error), "'x.X'", repr(dataset), 'Train, Test.')


def testDatasetsThatDifferOnlyByCaseAreRefused(project):
  """Both would be evaluated in eval_deva."""
  body = """\
  DATASETS = ('DevA', 'Deva')
  def DevA(self): return _Named('A')
  def Deva(self): return _Named('a')
"""
  project.Write('params/x.py', _Experiment('X', body=body))
  for name in ('DevA', 'Deva'):
    with pytest.raises(ValueError, match=naming.Naming('x.X', 'DevA', 'Deva', 'eval_deva')) as e:
      registry.GetParams('x.X', name)
    _OneLine(e)
  with pytest.raises(LookupError, match=naming.Naming("'x.X'", "'deva'", 'DevA, Deva')):
    registry.GetParams('x.X', 'deva')
  assert registry.GetParams('x.X', 'Train').input.name == 'train data'


def testDatasetsAndTasksThatJoinToOneDirectoryAreRefused(project):
  source = """
@registry.RegisterMultiTaskModel
class Two(registry.MultiTaskModelParams):
  DATASETS = ('Dev_en',)
  Model = _Base.Model
  def Task(self): return _Named('task')
  def Train(self): return {'fr': _Named('a'), 'en_fr': _Named('b')}
  def Dev(self): return {'fr': _Named('a'), 'en_fr': _Named('b')}
  def Dev_en(self): return {'fr': _Named('a')}

@registry.RegisterMultiTaskModel
class Apart(Two):
  def Dev(self): return {'fr': _Named('a'), 'en_fr': None}
"""
  project.Write('params/x.py', _HEADER + source)
  for name in ('Dev', 'dev_en'):
    expected = naming.Naming('x.Two', 'Dev', 'Dev_en', 'eval_dev_en_fr')
    with pytest.raises(ValueError, match=expected) as e:
      registry.GetParams('x.Two', name)
    _OneLine(e)
    assert registry.GetParams('x.Apart', name).input.fr.name == 'a'
  assert registry.GetParams('x.Two', 'Train').input.en_fr.name == 'b'


@pytest.mark.parametrize('method', ['Train', 'Model', 'Task', 'Task_Train'])
@pytest.mark.parametrize('error', [AttributeError, KeyError, NotImplementedError])
def testErrorsOfMethodsPropagate(project, method, error):
  body = f"  def {method}(self): raise {error.__name__}('mine')\n"
  project.Write('params/x.py', _Experiment('X', body=body))
  with pytest.raises(error, match='mine') as caught:
    registry.GetParams('x.X', 'Train')
  assert type(caught.value) is error


@pytest.mark.parametrize('method', ['Train', 'Model', 'Task_Train'])
def testMethodsMustReturnParams(project, method):
  project.Write('params/x.py', _Experiment('X', body=f'  def {method}(self): pass\n'))
  with pytest.raises(TypeError, match=naming.Naming(f'x.X.{method}()', 'params/x.py', 'NoneType')):
    registry.GetParams('x.X', 'Train')


def testImportsNoTensorFlow(project):
  project.Write('params/__init__.py', '')
  project.Write('params/x.py', _Experiment('X'))
  checkout = os.path.dirname(next(iter(lingvo_gpipe.__path__)))
  code = (
    f'import sys; sys.path[:0] = {[*sys.path, checkout]!r}\n'
    'from lingvo_gpipe.experiment import registry\n'
    "registry.GetParams('x.X', 'Train'), registry.ListKeys()\n"
    "sys.exit('tensorflow' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], check=True)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
