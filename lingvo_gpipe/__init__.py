# SPDX-License-Identifier: Apache-2.0
"""GPipe for TensorFlow 2, with the framework of Lingvo around it.

The names in `__all__` are the public interface. Each is a module, or the class `PipelinedModel`:

    from lingvo_gpipe import PipelinedModel, hyperparams, linear, registry

A module is loaded when its name is first used, so importing lingvo_gpipe loads no TensorFlow. All
other modules are private and may change; docs/architecture.md says how they fit together.
"""

import importlib
from typing import TYPE_CHECKING, Any

# The only place of the version: the build reads it here.
__version__ = '0.2.0'

if TYPE_CHECKING:  # The same names as in _FOLDERS, for type checkers and editors.
  from lingvo_gpipe.checkpoint import checkpointer as checkpointer
  from lingvo_gpipe.core import base_layer as base_layer
  from lingvo_gpipe.core import domain as domain
  from lingvo_gpipe.core import fprop_context as fprop_context
  from lingvo_gpipe.core import hyperparams as hyperparams
  from lingvo_gpipe.core import nested_map as nested_map
  from lingvo_gpipe.core import shapes as shapes
  from lingvo_gpipe.core import weight_params as weight_params
  from lingvo_gpipe.decoding import beam_search as beam_search
  from lingvo_gpipe.decoding import sampling as sampling
  from lingvo_gpipe.decoding import translation_metrics as translation_metrics
  from lingvo_gpipe.distributed import cluster as cluster
  from lingvo_gpipe.experiment import registry as registry
  from lingvo_gpipe.experiment import task as task
  from lingvo_gpipe.fit import keras_step as keras_step
  from lingvo_gpipe.fit.pipelined_model import PipelinedModel as PipelinedModel
  from lingvo_gpipe.input import base_input_generator as base_input_generator
  from lingvo_gpipe.input import batches as batches
  from lingvo_gpipe.input import bucketed_input as bucketed_input
  from lingvo_gpipe.input import image_augmentation as image_augmentation
  from lingvo_gpipe.input import image_input as image_input
  from lingvo_gpipe.input import stream_input as stream_input
  from lingvo_gpipe.input import synthetic as synthetic
  from lingvo_gpipe.input.records import tf_record_stream as tf_record_stream
  from lingvo_gpipe.input.text import parallel_text as parallel_text
  from lingvo_gpipe.input.text import sentence_pairs as sentence_pairs
  from lingvo_gpipe.input.text import sentencepiece_tokenizer as sentencepiece_tokenizer
  from lingvo_gpipe.input.text import sentencepiece_training as sentencepiece_training
  from lingvo_gpipe.input.text import text_bytes as text_bytes
  from lingvo_gpipe.input.text import text_files as text_files
  from lingvo_gpipe.input.text import text_tokens as text_tokens
  from lingvo_gpipe.input.tfds import tfds_images as tfds_images
  from lingvo_gpipe.input.tfds import tfds_pairs as tfds_pairs
  from lingvo_gpipe.input.tfds import tfds_text as tfds_text
  from lingvo_gpipe.layers import activation_layer as activation_layer
  from lingvo_gpipe.layers import attention as attention
  from lingvo_gpipe.layers import batch_norm as batch_norm
  from lingvo_gpipe.layers import conv as conv
  from lingvo_gpipe.layers import conv_batch_norm as conv_batch_norm
  from lingvo_gpipe.layers import drop_path as drop_path
  from lingvo_gpipe.layers import dropout as dropout
  from lingvo_gpipe.layers import embedding as embedding
  from lingvo_gpipe.layers import factorized_reduction as factorized_reduction
  from lingvo_gpipe.layers import flatten as flatten
  from lingvo_gpipe.layers import linear as linear
  from lingvo_gpipe.layers import norm as norm
  from lingvo_gpipe.layers import pooling as pooling
  from lingvo_gpipe.layers import sequential as sequential
  from lingvo_gpipe.layers import skip as skip
  from lingvo_gpipe.layers import transformer as transformer
  from lingvo_gpipe.layers import transformer_decoder as transformer_decoder
  from lingvo_gpipe.layers.keras import keras_cut as keras_cut
  from lingvo_gpipe.layers.keras import keras_preset as keras_preset
  from lingvo_gpipe.learning import early_stopping as early_stopping
  from lingvo_gpipe.learning import learner as learner
  from lingvo_gpipe.learning import lr_schedules as lr_schedules
  from lingvo_gpipe.learning import optimizer as optimizer
  from lingvo_gpipe.pipeline import pipelining_layer as pipelining_layer
  from lingvo_gpipe.pipeline import verify as verify
  from lingvo_gpipe.pipeline.cost import schedule_search as schedule_search
  from lingvo_gpipe.pipeline.cost import simulator as simulator
  from lingvo_gpipe.pipeline.profiling import schedule_svg as schedule_svg
  from lingvo_gpipe.pipeline.schedule import schedules as schedules
  from lingvo_gpipe.training import callback as callback

_FOLDERS = {
  'checkpoint': 'checkpointer',
  'core': 'base_layer domain fprop_context hyperparams nested_map shapes weight_params',
  'decoding': 'beam_search sampling translation_metrics',
  'distributed': 'cluster',
  'experiment': 'registry task',
  'fit': 'keras_step',
  'input': (
    'base_input_generator batches bucketed_input image_augmentation image_input stream_input '
    'synthetic'
  ),
  'input.records': 'tf_record_stream',
  'input.text': (
    'parallel_text sentence_pairs sentencepiece_tokenizer sentencepiece_training text_bytes '
    'text_files text_tokens'
  ),
  'input.tfds': 'tfds_images tfds_pairs tfds_text',
  'layers': (
    'activation_layer attention batch_norm conv conv_batch_norm drop_path dropout embedding '
    'factorized_reduction flatten linear norm pooling sequential skip transformer '
    'transformer_decoder'
  ),
  'layers.keras': 'keras_cut keras_preset',
  'learning': 'early_stopping learner lr_schedules optimizer',
  'pipeline': 'pipelining_layer verify',
  'pipeline.cost': 'schedule_search simulator',
  'pipeline.profiling': 'schedule_svg',
  'pipeline.schedule': 'schedules',
  'training': 'callback',
}
_FOLDER_OF = {name: folder for folder, names in _FOLDERS.items() for name in names.split()}

# Names in a module: {name: module}.
_MODULE_OF = {'PipelinedModel': 'fit.pipelined_model'}

__all__ = sorted({*_FOLDER_OF, *_MODULE_OF})


if not TYPE_CHECKING:  # Type checkers would take any name to exist.

  def __getattr__(name: str) -> Any:
    """Imports a public module when its name is first used."""
    if name in _MODULE_OF:
      return getattr(importlib.import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
    if name not in _FOLDER_OF:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return importlib.import_module(f'{__name__}.{_FOLDER_OF[name]}.{name}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
