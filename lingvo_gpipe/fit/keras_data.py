# SPDX-License-Identifier: Apache-2.0
"""The data of a task of KerasHub: raw text or images, which the task preprocesses.

KerasHub's tasks override `fit`, `evaluate` and `predict`: these preprocess their data and pass them
to Keras's methods. The pipeline of a task needs the same data, so here KerasHub's methods run with
substitutes for Keras's, which return their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

_METHODS = (
  *('fit', 'evaluate', 'predict'),
  *('train_on_batch', 'test_on_batch', 'predict_on_batch'),
)


def PreprocessedMethod(name: str) -> Callable[..., Any]:
  """Returns the method of keras.Model of that name, for a `PipelinedModel`.

  It preprocesses its data if `model`, the model in the pipeline, is a task of KerasHub.
  """
  method = getattr(keras.Model, name)

  @functools.wraps(method)
  def Method(self: Any, *args: Any, **kwargs: Any) -> Any:
    for base in type(self.model).__mro__:
      if {'fit', 'preprocess_samples'} <= vars(base).keys():
        recorder: Any = object.__new__(_Recorder(base))
        recorder.__dict__['preprocess_samples'] = self.model.preprocess_samples
        args, kwargs = getattr(recorder, name)(*args, **kwargs)
    return method(self, *args, **kwargs)

  return Method


@functools.cache
def _Recorder(base: type) -> type:
  """Returns a class with the methods of a class of KerasHub, which calls no method of Keras."""

  def Record(self: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs

  keras_methods = type('_KerasMethods', (keras.Model,), dict.fromkeys(_METHODS, Record))
  return type('_Recorder', (base, keras_methods), {})
