# SPDX-License-Identifier: Apache-2.0
"""The models of the table."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tools.keras_zoo import applications, shapes
from tools.keras_zoo.case import Case


def Cases() -> Iterator[Case]:
  """Yields the models: shapes of graphs, keras.applications and, if it is installed, KerasHub."""
  yield from shapes.CASES
  yield from applications.CASES
  if importlib.util.find_spec('keras_hub'):
    from tools.keras_zoo import hub, hub_encoders

    yield from hub.CASES
    yield from hub_encoders.CASES
