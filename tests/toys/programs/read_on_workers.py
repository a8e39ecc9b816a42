# SPDX-License-Identifier: Apache-2.0
"""Trains on the workers of a file, and prints the places of its batches as JSON."""

import inspect
import itertools
import json
import os
import socket
import struct
import sys
import textwrap

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe import nested_map
from lingvo_gpipe.distributed import cluster, cluster_spec
from lingvo_gpipe.experiment import model
from lingvo_gpipe.input import base_input_generator, synthetic
from lingvo_gpipe.input.records import tf_record_index
from lingvo_gpipe.input.text import parallel_text, sentencepiece_training, text_files
from lingvo_gpipe.runners import batch_placement, task_batches, train_runner
from params import toy
from tasks import regression

logging.set_verbosity(logging.INFO)
devices = cluster.Cluster.Connect(cluster_spec.FromText(open(sys.argv[1]).read(), ''), 2).devices


class Input(synthetic.SyntheticRegressionInput):
  @classmethod
  def Params(cls):
    return super().Params().Set(num_examples=20)


class Stream(regression.Draws):
  @classmethod
  def Params(cls):
    return super().Params().Set(num_draws=30, shuffle_buffer_size=20)


class OwnDataset(Input):
  def Dataset(self, start=0):
    return super().Dataset(start)


class Pairs(parallel_text.ParallelText):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Set(num_fake_examples=30, vocab_size=12, target_language_token='source')
    return p.Set(bucket_upper_bound=[6, 8, 9], bucket_batch_limit=[9, 5, 1])


class Counted(Input):
  def _Examples(self, indices):
    traced.append('examples')
    return super()._Examples(indices)


class CountedPairs(Pairs):
  def _Rows(self, tensors, indices, length, example_weights):
    traced.append('rows')
    return super()._Rows(tensors, indices, length, example_weights)


class PythonPairs(Pairs):
  def _Rows(self, tensors, indices, length, example_weights):
    indices = tf.ensure_shape(tf.numpy_function(np.copy, [indices], tf.int64), indices.shape)
    return super()._Rows(tensors, indices, length, example_weights)


class Python(Input):
  def _Examples(self, indices):
    indices = tf.ensure_shape(tf.numpy_function(np.copy, [indices], tf.int64), indices.shape)
    return super()._Examples(indices)


class Variable(Input):
  def _Examples(self, indices):
    return super()._Examples(indices + zero)


class OwnFile(Input):
  def _Examples(self, indices):
    size = tf.strings.length(tf.io.read_file(f'/proc/self/task/{os.getpid()}/stat'))
    return super()._Examples(indices + tf.cast(tf.minimum(size, 0), tf.int64))


class OtherFiles(Input):
  def _Examples(self, indices):
    count = tf.size(tf.io.matching_files(f'/proc/self/task/{os.getpid()}'))
    return super()._Examples(indices + tf.cast(count, tf.int64))


class WholeBatch(Input):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    examples.inputs -= tf.reduce_mean(examples.inputs, axis=0)
    return examples


class Records(Input):
  def _Examples(self, indices):
    records = tf.map_fn(index.Read, indices, fn_output_signature=tf.string)
    return super()._Examples(tf.strings.to_number(records, tf.int64))


class Task(toy.Regression):
  def CheckBatch(self, batch):
    checked.append([float(tf.reduce_max(x)) for x in batch.Flatten()])

  def LossInputs(self, batch):
    return nested_map.NestedMap(targets=batch.targets, example_weights=batch.example_weights)


class TokensTask(Task):
  def PipelineInputs(self, batch):
    return (tf.cast(batch.ids, tf.float32),)

  def LossInputs(self, batch):
    targets = tf.cast(batch.labels[:, :1], tf.float32)
    return nested_map.NestedMap(targets=targets, example_weights=batch.example_weights)


class PairsTask(Task):
  def PipelineInputs(self, batch):
    return (tf.reduce_sum(tf.one_hot(batch.src_ids, 32), axis=1),)

  def LossInputs(self, batch):
    targets = tf.reduce_sum(batch.tgt_weights, axis=1, keepdims=True)
    return nested_map.NestedMap(targets=targets, example_weights=batch.example_weights)


def Make(cls=Input, num_replicas=1, run=None, task=Task, streams=None, **values):
  p = model.SingleTaskModel.Params()
  p.task = task.Params().MergeCommonKeysFrom(toy.Toy().Task())
  p.task.stack.Set(xla=False)
  if num_replicas > 1:
    p.task.stack.Set(num_stages=1, splits=[])
  p.input = cls.Params().Set(batch_size=7)
  p.input.Set(**values)
  instance = p.Instantiate()
  spec = instance.input.BatchSpec()
  run = run or train_runner.TrainRunner(instance.task, devices, spec, num_replicas=num_replicas)
  return run, task_batches.Batches(instance, 0, lambda name: 3, run, streams)


def Sent():
  # Bytes that left this process and arrived.
  total = 0
  for fd in map(int, os.listdir('/proc/self/fd')):
    try:
      if not os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
        continue
      with socket.socket(fileno=os.dup(fd)) as s:
        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        total += struct.unpack_from('=Q', info, 120)[0]  # tcpi_bytes_acked
    except OSError:
      pass
  return total


def Devices(batch):
  parts = getattr(batch, '_asdict', dict)()
  return {name: [[x.device for x in part] for part in parts[name]] for name in parts}


def Train(where):
  checked.clear()
  # 256 KiB of inputs, and 16 KiB of what the loss needs.
  run, data = Make(run=trained, read_on_workers=where == 'workers', batch_size=2048)
  for name, variable in run.Variables().items():
    variable.assign(initial[name])
  run.AfterRestore()
  results = {'losses': [], 'sent': []}
  for _ in range(4):
    before = Sent()
    batch = next(data)
    results['losses'].append(run.TrainStep(batch)['loss'].hex())
    results['sent'].append(Sent() - before)
  # The next one may be there already.
  return {**results, 'checked': checked[:4], 'devices': Devices(batch)}


checked, traced = [], []
trained, _ = Make(batch_size=2048)
initial = {name: v.numpy() for name, v in trained.Variables().items()}
results = {where: Train(where) for where in ('workers', 'trainer')}
# Seven rows in four micro-batches, of which each replica has two.
run, data = Make(num_replicas=2, num_epochs=1)
batches = list(data)
results['replicas'] = {
  'rows': [[list(part[0].shape) for part in batch.firsts] for batch in batches],
  'devices': Devices(batches[0]),
}
# Tokens in files that the trainer maps.
text = inspect.getsource(textwrap)
with open('text', 'w') as f:
  f.write(text)
sentencepiece_training.Train([text], 'vocabulary', 400)
text = {
  'file_pattern': 'text',
  'vocab_filepath': 'vocabulary.model',
  'cache_dir': 'tokens',
  'seq_len': 32,
}
of_tokens, on_workers = Make(text_files.TextFilesInput, task=TokensTask, **text)
_, on_trainer = Make(text_files.TextFilesInput, run=of_tokens, read_on_workers=False, **text)
results['tokens'] = []
for _ in range(2):
  batch, expected = next(on_workers), next(on_trainer)
  ((_, view, _),) = of_tokens.placement.Views(batch)
  assert base_input_generator.AreEqual(view, expected)
  results['tokens'].append(Devices(batch))
# Sentence pairs in buckets, beyond an epoch; of the largest there is no row for the other replica.
pairs = {'task': PairsTask, 'batch_size': 0}
results['pairs'] = []
for num_replicas in (1, 2):
  of_pairs, on_workers = Make(Pairs, num_replicas, **pairs)
  _, on_trainer = Make(Pairs, num_replicas, of_pairs, read_on_workers=False, **pairs)
  for _ in range(8):
    batch, expected = next(on_workers), next(on_trainer)
    assert task_batches._Bytes(of_pairs, batch) == task_batches._Bytes(of_pairs, expected)
    assert of_pairs._NumMicroBatches(batch) == of_pairs._NumMicroBatches(expected)
    results['pairs'].append([[len(part[0]) for part in batch.firsts], Devices(batch)])
# What evaluations do: several passes of one source.
results['traces'] = []
for cls, batch_size, of_cls in ((Counted, 7, run), (CountedPairs, 0, of_pairs)):
  p = cls.Params().Set(batch_size=batch_size, num_epochs=1, shuffle=False)
  source = task_batches.Source(p.Instantiate(), of_cls)
  counts, passes = [], []
  for _ in range(2):
    passes.append([task_batches._Bytes(of_cls, batch) for batch in source.Batches()[0]])
    counts.append(len(traced))
  assert passes[0] == passes[1] and len(passes[0]) > 2
  results['traces'].append(counts)
# A stream, beyond an epoch; its state goes from the worker to the trainer and back.
results['stream'] = []
for num_replicas in (1, 2):
  stream = Stream.Params().Set(batch_size=7).Instantiate()
  expected, streams, of_stream = iter(stream.Dataset()), {}, None
  for read_on_workers in (True, False, True)[: num_replicas + 1]:
    of_stream, on_workers = Make(
      Stream, num_replicas, of_stream, streams=streams, read_on_workers=read_on_workers
    )
    for _ in range(5):
      batch = next(on_workers)
      parts = of_stream.Shares(batch)
      whole = tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
      assert base_input_generator.AreEqual(whole, next(expected))
      results['stream'].append([streams[''].num_taken, Devices(batch)])
    state = streams[''].Save()
    streams = {'': stream.Iterator()}
    streams[''].Restore(state)
# Batches of an evaluation may have another size than the runner's.
results['sizes'] = []
for size in (3, 14):
  expected = iter(Stream.Params().Set(batch_size=size).Instantiate().Dataset())
  _, on_workers = Make(Stream, run=of_stream, batch_size=size)
  batch = next(on_workers)
  parts = of_stream.Shares(batch)
  whole = tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
  assert base_input_generator.AreEqual(whole, next(expected))
  results['sizes'].append([list(part[0].shape)[0] for part in batch.firsts])
# The number of rows that pad each batch.
epoch = Stream.Params().Set(batch_size=7, num_epochs=1).Instantiate()
_, on_workers = Make(Stream, run=of_stream, num_epochs=1)
results['padded'] = [sum(map(epoch.NumPadded, of_stream.Shares(batch))) for batch in on_workers]
next(Make(PythonPairs, run=of_pairs, **pairs)[1])
with tf.io.TFRecordWriter('records') as writer:
  for i in range(20):
    writer.write(str(19 - i))
index = tf_record_index.TfRecordIndex(
  [tf_record_index.FileRange(os.path.abspath('records'), 0, 20, 20)]
)
zero = tf.Variable(0, dtype=tf.int64)
for cls in (Records, OwnDataset, Python, Variable, OwnFile, OtherFiles, WholeBatch):
  list(itertools.islice(Make(cls, run=run)[1], 2))
batch_placement.MAX_BYTES_IN_MEMORY = 100
next(Make(run=run)[1])
next(Make(Pairs, run=of_pairs, **pairs)[1])
print(json.dumps(results))
