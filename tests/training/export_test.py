# SPDX-License-Identifier: Apache-2.0
"""Plain TensorFlow computes from an export the same outputs as the pipeline."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import hyperparams, nested_map, params_text
from lingvo_gpipe.experiment import model
from lingvo_gpipe.layers import embedding, linear
from lingvo_gpipe.runners import eval_runner
from lingvo_gpipe.training import export
from tasks.image import lenet
from tasks.lm import model as lm_model
from tasks.mt import model as mt_model
from tests import naming, processes
from tests.toys import tasks

STEP = 17
BATCH, TIME, VOCAB = 4, 5, 11

_INT, _FLOAT = tf.int32, tf.float32
_SPECS = {
  'lm': {'ids': ([TIME], _INT), 'labels': ([TIME], _INT), 'weights': ([TIME], _FLOAT)},
  'image': {'images': ([8, 8, 1], _FLOAT), 'labels': ([], _INT), 'example_weights': ([], _FLOAT)},
  'mt': {
    'src_ids': ([TIME], _INT),
    'src_paddings': ([TIME], _FLOAT),
    'tgt_ids': ([TIME - 1], _INT),
    'tgt_paddings': ([TIME - 1], _FLOAT),
    'tgt_labels': ([TIME - 1], _INT),
    'tgt_weights': ([TIME - 1], _FLOAT),
    'example_weights': ([], _FLOAT),
  },
  'plain': {'inputs': ([3], _FLOAT), 'targets': ([1], _FLOAT)},
}


class _Input:
  """An input that knows the shapes of a batch and has no data."""

  @classmethod
  def Params(cls):
    p = hyperparams.InstantiableParams(cls)
    p.Define('kind', '', 'Whose batch.')
    return p

  def __init__(self, params):
    self._specs = _SPECS[params.kind]

  def BatchSpec(self):
    return nested_map.NestedMap(
      {name: tf.TensorSpec([BATCH, *shape], dtype) for name, (shape, dtype) in self._specs.items()}
    )


def _Task(kind):
  if kind == 'lm':  # With one table for both ends.
    p = lm_model.TransformerLm.Params().Set(
      vocab_size=VOCAB, model_dim=8, hidden_dim=16, num_heads=2, num_layers=2
    )
    p.softmax_tpl = embedding.SharedSoftmaxLayer.Params()
    p.stack.ties = [['layers[5].emb', 'layers[0].emb']]
  elif kind == 'image':
    p = lenet.LeNet5.Params().Set(
      image_size=8, num_channels=1, num_classes=3, filter_size=3, filters=[4, 8], hidden_dim=16
    )
  else:
    p = mt_model.TransformerMt.Params().Set(
      vocab_size=VOCAB, model_dim=8, hidden_dim=12, num_heads=2, dim_per_head=3, num_layers=1
    )
    p.beam_search.Set(num_hyps_per_beam=1, target_seq_len=6)
  p.stack.Set(num_stages=2, num_micro_batches=2, xla=False)
  return p.Set(name=kind)


def _ModelParams(kind, task_params=None):
  data = _Input.Params().Set(kind=kind)
  return model.SingleTaskModel.Params().Set(task=task_params or _Task(kind), input=data)


def _Batch(kind, size, cut=0):
  """Returns random inputs, with rows shorter by `cut`."""
  rng = np.random.default_rng(size)
  batch = nested_map.NestedMap()
  for name, (shape, dtype) in _SPECS[kind].items():
    shape = [size, *(n - cut for n in shape)]
    values = rng.integers(0, VOCAB, shape) if dtype == _INT else rng.normal(size=shape)
    if name.endswith('_paddings'):
      values = np.arange(shape[1]) >= rng.integers(2, shape[1] + 1, [size, 1])
    batch[name] = tf.constant(values, dtype)
  return batch


def _Expected(placed, batch):
  """Returns {signature: (inputs, outputs of the pipeline)}."""
  outputs = placed.pipeline.Predict(*placed.PipelineInputs(batch)).numpy()
  log_probs = tf.nn.log_softmax(outputs).numpy()
  if 'images' in batch:
    served = {'logits': outputs, 'probabilities': np.exp(log_probs)}
    return {'serving_default': ({'images': batch.images}, served)}
  if 'ids' in batch:
    lengths = np.arange(len(outputs), dtype=np.int32) % outputs.shape[1] + 1
    last = log_probs[np.arange(len(outputs)), lengths - 1]
    return {
      'serving_default': ({'ids': batch.ids}, {'logits': outputs}),
      'next_token': ({'ids': batch.ids, 'lengths': lengths}, {'log_probs': last}),
    }
  names = ('src_ids', 'src_paddings', 'tgt_ids', 'tgt_paddings')
  translated = placed.Translate(batch)
  ids = np.zeros([len(outputs), 6], np.int32)
  for i, row in enumerate(ids):
    best = translated.Best(i)
    row[: len(best) + 1] = [*best, 2][:6]
  source = {name: batch[name] for name in names[:2]}
  return {
    'serving_default': ({name: batch[name] for name in names}, {'log_probs': log_probs}),
    'greedy': ({**source, 'first_ids': batch.tgt_ids[:, 0]}, {'ids': ids}),
  }


def testPlainTensorFlowComputesTheSameOutputs(tmp_path):
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  rng = np.random.default_rng(0)
  calls, expected = [], {}
  for kind in ('lm', 'image', 'mt'):
    params = _ModelParams(kind)
    instance = model.SingleTaskModel(params)
    run = eval_runner.EvalRunner(instance.task, devices, instance.input.BatchSpec())
    saved = run.Variables()
    for path, v in instance.task.VariablesByPath().items():
      v.assign_add(np.abs(rng.normal(size=v.shape, scale=0.3)).astype(np.float32))
      if kind == 'image':  # Its weights have averages, which are exported instead of the weights.
        saved[path + '/ema'] = v.numpy()
        saved[path] = np.zeros(v.shape, np.float32)
    run.AfterRestore()
    logdir = tmp_path / kind
    checkpointer.Checkpointer(logdir / 'train').Save(STEP, saved, {})
    (logdir / 'assets').mkdir()
    (logdir / 'assets' / 'words.txt').write_text(kind)
    done = export.Export(params, str(logdir))
    assert done.directory == str(logdir / 'export' / str(STEP)) and not done.fixed_batch
    assert done.num_averages == (len(instance.task.VariablesByPath()) if kind == 'image' else 0)
    files = []
    # Another number and length of rows than in training.
    batch = _Batch(kind, 2 * BATCH, cut=0 if kind == 'image' else 1)
    for name, (inputs, outputs) in _Expected(instance.task, batch).items():
      file = f'{kind}.{name}'
      np.savez(tmp_path / f'{file}.npz', **inputs)
      files.append((file, name))
      expected[file] = outputs
    assert {name for _, name in files} == set(done.signatures)
    calls.append((done.directory, files))
  (tmp_path / 'calls.json').write_text(json.dumps(calls))
  plain = subprocess.run(
    [sys.executable, '-I', processes.Program('run_exports')], cwd=tmp_path,
    capture_output=True, text=True, timeout=processes.TIMEOUT, check=False,
  )  # fmt: skip
  assert plain.returncode == 0, plain.stderr
  first, *graphs = plain.stdout.splitlines()
  assert first == 'none'
  for graph in graphs:
    devices, operations = json.loads(graph)
    assert devices == ['']
    assert [op for op in operations if not hasattr(tf.raw_ops, op)] == []
  assert len(graphs) == len(expected)
  for file, outputs in expected.items():
    actual = np.load(tmp_path / f'{file}.out.npz')
    assert sorted(actual) == sorted(outputs)
    for name, value in outputs.items():
      assert actual[name].dtype == value.dtype
      np.testing.assert_allclose(
        actual[name], value, rtol=1e-5, atol=1e-5, err_msg=f'{file} {name}'
      )
  extra = tmp_path / 'lm' / 'export' / str(STEP) / 'assets.extra'
  assert (extra / 'words.txt').read_text() == 'lm'
  record = json.loads((extra / 'export.json').read_text())
  assert record['step'] == STEP and set(record['signatures']) == {'serving_default', 'next_token'}
  text = (extra / 'params.txt').read_text()
  assert ('task.vocab_size', str(VOCAB)) in params_text.ParseOverrides(text)


# ---- other tasks, and what cannot be exported ----------------------------------------------------


def _Saved(tmp_path, task_params):
  params = _ModelParams('plain', task_params.Set(name='plain'))
  instance = model.SingleTaskModel(params).task
  instance.InstantiateVariables()
  checkpointer.Checkpointer(tmp_path / 'train').Save(STEP, instance.VariablesByPath(), {})
  return params, instance


def testATaskServesItsPredictionsByDefault(tmp_path):
  p = tasks.Stacked.Params()
  p.stack.sub = [
    linear.LinearLayer.Params().Set(input_dim=3, output_dim=3),
    tasks.TimesTheSize.Params(),
  ]
  params, instance = _Saved(tmp_path, p)
  done = export.Export(params, str(tmp_path), str(tmp_path / 'there' / 'model'))
  assert 'no size' in done.fixed_batch and 'no size' in done.Text()
  # Targets are not read, so the signature does not have them.
  served = '{inputs: float32[4, 3]} -> {outputs: float32[4, 3]}'
  assert done.signatures == {'serving_default': served}
  loaded = tf.saved_model.load(done.directory)
  x = np.float32(np.random.default_rng(1).normal(size=[4, 3]))
  (w,) = instance.variables
  actual = loaded.signatures['serving_default'](inputs=tf.constant(x))['outputs']
  np.testing.assert_allclose(actual, 4 * x @ w.numpy(), rtol=1e-5)


def testATaskWithoutAPipeline(tmp_path):
  params, instance = _Saved(tmp_path, tasks.TwoOutputs.Params())
  done = export.Export(params, str(tmp_path))
  served = '{inputs: float32[?, 3]} -> {outputs_0: float32[?, 2], outputs_1: float32[?, 2]}'
  assert done.signatures == {'serving_default': served}
  actual = tf.saved_model.load(done.directory).signatures['serving_default'](inputs=tf.ones([2, 3]))
  np.testing.assert_allclose(
    actual['outputs_1'], -np.ones([2, 3]) @ instance.vars.w.numpy(), rtol=1e-5
  )


def testAveragesOfNarrowWeightsAreWide(tmp_path):
  p = tasks.TwoOutputs.Params().Set(name='plain', dtype=tf.bfloat16)
  average = np.float32([[0.5, 1.0]] * 3)
  values = {'plain.w': tf.zeros([3, 2], tf.bfloat16), 'plain.w/ema': average}
  checkpointer.Checkpointer(tmp_path / 'train').Save(STEP, values, {})
  done = export.Export(_ModelParams('plain', p), str(tmp_path))
  assert naming.AnyLineNames(done.Text(), 'averages', '1 weights')
  loaded = tf.saved_model.load(done.directory)
  assert loaded.weights['plain.w'].dtype == tf.bfloat16
  np.testing.assert_array_equal(tf.cast(loaded.weights['plain.w'], tf.float32), average)


def testADirectoryMayEndWithASlash(tmp_path):
  params, _ = _Saved(tmp_path, tasks.TwoOutputs.Params())
  done = export.Export(params, str(tmp_path), f'{tmp_path}/mine/')
  assert done.directory == str(tmp_path / 'mine')
  assert 'saved_model.pb' in os.listdir(done.directory)


def testNothingIsOverwrittenAndFailuresLeaveNoFiles(tmp_path, monkeypatch):
  params, _ = _Saved(tmp_path, tasks.TwoOutputs.Params())
  folder = tmp_path / 'export'
  folder.mkdir()

  def Fail(*unused_args):
    raise tf.errors.ResourceExhaustedError(None, None, 'no space left')

  with monkeypatch.context() as patched:
    patched.setattr(tf.saved_model, 'save', Fail)
    with pytest.raises(OSError, match=naming.Naming(tmp_path / 'export/17', 'no space left')):
      export.Export(params, str(tmp_path))
  assert list(folder.iterdir()) == []
  (folder / str(STEP)).mkdir()
  (folder / str(STEP) / 'mine').touch()
  with pytest.raises(FileExistsError, match=naming.Naming(tmp_path / 'export/17', '--export_dir')):
    export.Export(params, str(tmp_path))
  assert os.listdir(folder) == [str(STEP)] and os.listdir(folder / str(STEP)) == ['mine']
  with pytest.raises(ValueError, match=naming.Naming('no checkpoint', tmp_path / 'other/train')):
    export.Export(params, str(tmp_path / 'other'))
  with pytest.raises(ValueError, match=naming.Naming('export', 'params.input')):
    export.Export(params.Copy().Set(input=None), str(tmp_path))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
