# SPDX-License-Identifier: Apache-2.0
"""Models of KerasHub: pipelines equal plain Keras, presets, LoRA and preprocessors."""

import dataclasses
import functools
import json
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import PipelinedModel
from tests import naming
from tests.toys import hugging_face, keras_fits, stacks
from tools import keras_models
from tools.keras_zoo import zoo
from tools.keras_zoo.case import Case

keras_hub = pytest.importorskip('keras_hub')
MODELS = keras_hub.models
CONFIG = {
  'vocabulary_size': 20,
  'num_layers': 1,
  'num_heads': 2,
  'hidden_dim': 16,
  'intermediate_dim': 32,
  'max_sequence_length': 6,
  'dropout': 0.0,
}
IDS, LABELS = keras_fits.Integers(20, 6, 6), keras_fits.Integers(20, 6, 6, seed=1)
BATCH = {'token_ids': IDS, 'padding_mask': np.ones_like(IDS)}


def _Case(name):
  """Returns the case of that name, with a single block, six tokens and no dropout."""
  (case,) = (c for c in zoo.Cases() if c.name == name)
  *args, config = case.make.args
  make = functools.partial(case.make.func, *args, {**config, 'num_layers': 1, 'dropout': 0.0})
  return dataclasses.replace(case, make=make, length=6)


def _Lora():
  backbone = MODELS.GPT2Backbone(**CONFIG)
  backbone.enable_lora(4)
  return MODELS.GPT2CausalLM(backbone, preprocessor=None)


@pytest.mark.parametrize('name', ['GPT-2, LoRA', 'Qwen 3 MoE'])
def testPipelinesEqualKeras(name):
  small = Case(name, _Lora, length=6) if 'LoRA' in name else _Case(name)
  row = keras_models.Compare(small, stacks.Devices()[:2], xla=False)
  assert row.is_green, row
  assert not row.is_refused


@pytest.mark.parametrize('name', ['Llama 2, tied', 'BERT'])
def testFitEqualsKeras(name):
  case = _Case(name)
  model = keras_fits.Seeded(case.make)
  x = case.Inputs(model, 4, seed=1)
  y = case.Targets(model, keras.tree.map_structure(np.asarray, model(x)), seed=2)

  def Compiled():
    return {'loss': 'mse', 'metrics': [], 'weighted_metrics': []}

  keras_fits.CheckFit(case.make, x, y, Compiled, bound=1e-4, epochs=1)


def testADeepModelHasThreeKindsOfStages():
  """4 blocks in four stages: the first, two inner ones that are alike, and the last."""
  backbone = MODELS.GPT2Backbone(**{**CONFIG, 'num_layers': 4})
  model = MODELS.GPT2CausalLM(backbone, preprocessor=None)
  pipe = keras_fits.Pipe(model, 4, schedule='1f1b')
  _Compile(pipe).train_on_batch(BATCH, LABELS)
  engine = pipe.stack.engine
  assert len(pipe.stack.layers) >= 4
  assert len({s.structure for s in engine.stages}) == 3
  assert engine.functions.num_traces == 6  # Forward and backward of each.


# ---- presets -------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def preset(tmp_path_factory):
  """Returns the directory of a preset, and its plain model."""
  model = keras_fits.Seeded(
    lambda: MODELS.GPT2CausalLM(backbone=MODELS.GPT2Backbone(**CONFIG), preprocessor=None)
  )
  path = str(tmp_path_factory.mktemp('preset') / 'gpt2')
  model.save_to_preset(path)
  return path, model


def _Pipe(path, **options):
  return PipelinedModel.from_preset(
    path,
    2,
    example=BATCH,
    keras_class=MODELS.GPT2CausalLM,
    preset_arguments={'preprocessor': None},
    devices=stacks.Devices()[:2],
    xla=False,
    **{'num_micro_batches': 2, **options},
  )


def _Compile(model, optimizer=keras_fits.Sgd):
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  options = {'jit_compile': False, 'run_eagerly': not isinstance(model, PipelinedModel)}
  model.compile(optimizer=optimizer(), loss=loss, weighted_metrics=[], **options)
  return model


def testAPresetIsLoadedIntoTheStages(preset):
  path, model = preset
  pipe = _Pipe(path)
  devices = {v.value.device for v in pipe.model.weights}
  assert len(devices) == 2
  _CheckWeights(pipe, model)
  np.testing.assert_allclose(pipe.predict(BATCH, verbose=0), model(BATCH), rtol=1e-4, atol=1e-5)
  plain = _Compile(MODELS.GPT2CausalLM.from_preset(path, preprocessor=None))
  _Compile(pipe)
  for _ in range(2):
    expected = plain.train_on_batch(BATCH, LABELS)
    assert pipe.train_on_batch(BATCH, LABELS) == pytest.approx(expected, rel=1e-5)


def testLoraBeginsAtThePresetAndTrainsItsOwnWeights(preset):
  """It also trains the biases of its layers, as KerasHub does."""
  path, model = preset
  pipe = _Pipe(path, lora_rank=2)
  np.testing.assert_allclose(pipe.predict(BATCH, verbose=0), model(BATCH), rtol=1e-4, atol=1e-5)
  before = {v.path: v.numpy() for v in pipe.model.weights}
  _Compile(pipe, keras.optimizers.Adam)
  losses = [pipe.train_on_batch(BATCH, LABELS) for _ in range(3)]
  assert losses[-1] < losses[0]
  changed = {v.path for v in pipe.model.weights if not np.array_equal(v, before[v.path])}
  assert changed == {v.path for v in pipe.model.trainable_weights}
  assert {name.split('/')[-1] for name in changed} == {'lora_kernel_a', 'lora_kernel_b', 'bias'}


def _CheckWeights(pipe, model):
  for a, e in zip(pipe.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_array_equal(a, e)


def testWeightsReturnFromTheirFiles(preset, tmp_path):
  """They are read from one file, and from shards."""
  path, model = preset
  pipe = _Pipe(path)
  plain = MODELS.GPT2CausalLM(backbone=MODELS.GPT2Backbone(**CONFIG), preprocessor=None)
  for name, options in [('a.weights.h5', {}), ('a.weights.json', {'max_shard_size': 5e-6})]:
    folder = tmp_path / name[2:]
    folder.mkdir()
    pipe.save_weights(folder / name, **options)
    assert (len(list(folder.iterdir())) > 2) == bool(options)
    for either in (pipe, plain):
      either.set_weights([w + 1 for w in model.get_weights()])
      either.load_weights(folder / name)
      _CheckWeights(either, model)


def testThePlainModelReturnsFromItsFiles(preset, tmp_path):
  path, _ = preset
  pipe = _Compile(_Pipe(path, num_micro_batches=1), keras.optimizers.Adam)
  pipe.train_on_batch(BATCH, LABELS)
  pipe.model.save_to_preset(str(tmp_path / 'preset'))
  _CheckWeights(_Pipe(str(tmp_path / 'preset')), pipe.model)
  _CheckWeights(MODELS.GPT2CausalLM.from_preset(str(tmp_path / 'preset'), preprocessor=None), pipe)
  pipe.save(tmp_path / 'a.keras')
  # KerasHub's tasks do not load the state of an optimizer.
  _CheckWeights(keras.models.load_model(tmp_path / 'a.keras', compile=False), pipe)


@pytest.mark.parametrize(
  ('file', 'content'),
  [
    ('config.json', b'{'),
    ('task.json', b'[]'),
    ('model.weights.h5', None),
    ('model.weights.h5', b'no HDF5'),
  ],
)
def testADamagedPresetIsRefusedInOneLine(preset, tmp_path, file, content):
  path = str(tmp_path / 'gpt2')
  shutil.copytree(preset[0], path)
  if content is None:
    (tmp_path / 'gpt2' / file).unlink()
  else:
    (tmp_path / 'gpt2' / file).write_bytes(content)
  with pytest.raises(ValueError, match=naming.Naming('preset', repr(path))) as e:
    _Pipe(path)
  assert type(e.value) is ValueError and '\n' not in str(e.value)


def testAPresetOfVeryManyLayersIsRefusedAtOnce(preset, tmp_path):
  path = tmp_path / 'gpt2'
  shutil.copytree(preset[0], path)
  config = json.loads((path / 'config.json').read_text())
  config['config']['num_layers'] = 2**31
  (path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match=naming.Naming(str(path), 'num_layers', 2**31)):
    _Pipe(str(path))


def testTheHeadOfATaskIsLoadedWithIt(tmp_path):
  model = keras_fits.Seeded(_Classifier)
  model.save_to_preset(str(tmp_path / 'resnet'))
  images = keras_fits.Integers(256, 2, 8, 8, 3).astype('float32')
  keras.utils.set_random_seed(9)
  pipe = PipelinedModel.from_preset(
    str(tmp_path / 'resnet'),
    2,
    example=images,
    keras_class=MODELS.ImageClassifier,
    devices=stacks.Devices()[:2],
    xla=False,
  )
  _CheckWeights(pipe, model)


# ---- directories of Hugging Face -----------------------------------------------------------------


@pytest.mark.parametrize(
  ('file', 'content'),
  [
    ('model-0.safetensors', b''),
    ('model.safetensors.index.json', b'{"weight_map": []}'),
    ('config.json', b'{"model_type": "gpt2", "vocab_size": -1}'),
  ],
)
def testADamagedDirectoryOfHuggingFaceIsRefusedInOneLine(tmp_path, file, content):
  pytest.importorskip('safetensors')
  hugging_face.Write(tmp_path, num_files=3)
  (tmp_path / file).write_bytes(content)
  with pytest.raises(ValueError, match=naming.Naming('preset', f"'{tmp_path}'")) as e:
    _Pipe(str(tmp_path))
  assert '\n' not in str(e.value)


@pytest.mark.parametrize(('num_files', 'dtype'), [(1, 'F32'), (3, 'BF16')])
def testADirectoryOfHuggingFaceIsLoadedIntoTheStages(tmp_path, num_files, dtype):
  pytest.importorskip('safetensors')
  hugging_face.Write(tmp_path, num_files=num_files, dtype=dtype)
  model = MODELS.GPT2CausalLM.from_preset(str(tmp_path), preprocessor=None)
  pipe = _Pipe(str(tmp_path))
  assert len({v.value.device for v in pipe.model.weights}) == 2
  _CheckWeights(pipe, model)
  np.testing.assert_allclose(pipe.predict(BATCH, verbose=0), model(BATCH), rtol=1e-4, atol=1e-5)


# ---- preprocessors -------------------------------------------------------------------------------


def _Classifier():
  """Returns an image classifier whose preprocessor scales and resizes."""
  backbone = MODELS.ResNetBackbone(
    input_conv_filters=[64],
    input_conv_kernel_sizes=[3],
    stackwise_num_filters=[64],
    stackwise_num_blocks=[1],
    stackwise_num_strides=[1],
    block_type='basic_block',
    use_pre_activation=True,
    image_shape=(8, 8, 3),
  )
  converter = keras_hub.layers.ResNetImageConverter(image_size=(8, 8), scale=1 / 255.0, offset=-0.5)
  return MODELS.ResNetImageClassifier(
    backbone=backbone,
    num_classes=3,
    preprocessor=MODELS.ResNetImageClassifierPreprocessor(image_converter=converter),
  )


def testThePreprocessorOfATaskRunsInFit():
  """There is one micro-batch, because of ResNet's batch normalization."""
  images = keras_fits.Integers(256, 6, 12, 10, 3).astype('float32')
  classes, _ = keras_fits.Classes(6, 3)

  def Compiled():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {'loss': loss, 'metrics': ['accuracy']}

  keras_fits.CheckFit(
    _Classifier, images, classes, Compiled, ((2, 1),), bound=1e-4, batch_size=3, epochs=1
  )
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Classifier), 1)
  data = tf.data.Dataset.from_tensor_slices(images).batch(2)
  expected = pipe.model(pipe.model.preprocessor(images))
  np.testing.assert_allclose(pipe.predict(data, verbose=0), expected, rtol=1e-4, atol=1e-5)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
