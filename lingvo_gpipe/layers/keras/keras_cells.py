# SPDX-License-Identifier: Apache-2.0
"""Groups the calls of a Keras model into cells, the smallest pieces that a pipeline may cut.

A cell has one layer with a matrix (a block of a Transformer, a convolution, an embedding) and the
small calls around it. Between two such layers the cut is where the fewest bytes cross:

    Conv  BatchNorm  ReLU | Conv  BatchNorm  Add(skip)  ReLU | Conv ...

Any number of tensors may cross. Tensors that only the next cell needs are its arguments; all other
tensors (a padding mask, a long skip, the output of an encoder) are skip connections, which pass
straight from the cell that makes them to the cells that take them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from lingvo_gpipe.layers.keras import keras_equality, keras_nodes, keras_variables

_Value = keras_nodes.Value


class Cell:
  """Consecutive calls of a Keras model.

  Attributes:
    nodes: the calls; empty if the model has no calls at all.
    args: the tensors from the previous cell.
    skips_in: tensors of earlier cells.
    outputs: the tensors for the next cell; in the last cell the outputs of the model.
    skips_out: tensors for later cells.
    results: outputs of the model.
    trained: ids of the variables that the whole model trains.
    state_uses: the state that all cells of the model change and read.
  """

  # Not a dataclass, because copies of Params would copy its fields; they share other objects.
  def __init__(
    self,
    nodes: Sequence[keras_nodes.Node],
    *,
    args: Sequence[_Value],
    skips_in: Sequence[_Value],
    outputs: Sequence[_Value],
    skips_out: Sequence[_Value],
    results: frozenset[_Value],
    trained: frozenset[int],
    state_uses: StateUses,
  ) -> None:
    self.nodes = tuple(nodes)
    self.args = tuple(args)
    self.skips_in = tuple(skips_in)
    self.outputs = tuple(outputs)
    self.skips_out = tuple(skips_out)
    self.results = results
    self.trained = trained
    self.state_uses = state_uses

  def __deepcopy__(self, memo: Any) -> Cell:
    return self

  @property
  def name(self) -> str:
    """The name of the layer with the most weights; the last of several such layers."""
    if not self.nodes:
      return 'identity'
    sizes = [sum(math.prod(v.shape) for v in node.variables) for node in self.nodes]
    last = max(range(len(sizes)), key=lambda i: (sizes[i], i))
    return self.nodes[last].operation.name

  def Weights(self) -> dict[str, Any]:
    """Returns {name: Keras variable}; blocks of equal structure have equal names."""
    return {
      name: v for name, v in _NameVariables(self._Variables()) if not keras_variables.IsSeed(v)
    }

  @property
  def has_loss(self) -> bool:
    """Whether a layer may add losses of its own."""
    regularised = any(v.regularizer is not None for v in self.Weights().values())
    return regularised or any(keras_nodes.MayAddLoss(x) for x in self.Layers())

  def Seeds(self) -> list[Any]:
    """Returns the states of the seed generators, in order."""
    return [v for v in self._Variables() if keras_variables.IsSeed(v)]

  def Layers(self) -> list[Any]:
    """Returns the Keras layers that the cell calls, and the layers inside them, each once."""
    layers = [x for n in self.nodes for x in keras_nodes.Sublayers(n.operation)]
    return list({id(x): x for x in layers}.values())

  def _Variables(self) -> list[Any]:
    return list({id(v): v for node in self.nodes for v in node.variables}.values())


class Structure:
  """Equal for two cells that compute the same function of their weights, seeds and inputs."""

  def __init__(self, cell: Cell) -> None:
    self._cell = cell
    self._key = (
      tuple(type(n.operation) for n in cell.nodes),
      tuple((name, tuple(v.shape), v.dtype) for name, v in cell.Weights().items()),
      tuple(v.index for v in (*cell.skips_in, *cell.skips_out)),
      tuple(v in cell.results for v in (*cell.outputs, *cell.skips_out)),
    )

  def __hash__(self) -> int:
    return hash(self._key)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Structure):
      return NotImplemented
    if self._cell is other._cell:
      return True
    return self._key == other._key and keras_equality.AreEqual(
      _Wiring(self._cell), _Wiring(other._cell)
    )


class StateUses:
  """The state that the cells of a model change, and the state of other cells that they read.

  All micro-batches read the state of the step before. In Keras a layer that reads state after
  another layer has changed it reads the new state.
  """

  def __init__(self, cells: Sequence[Cell]) -> None:
    self._cells = cells
    self._changed: dict[Cell, list[Any]] = {}
    self._read: dict[Cell, list[Any]] = {}

  def Add(self, cell: Cell, changed: Iterable[Any], read: Iterable[Any]) -> None:
    """Adds the variables that a call of a cell in training changes, and the others that it reads.

    Raises:
      ValueError: a cell reads a variable that an earlier cell changes.
    """
    for uses, variables in ((self._changed, list(changed)), (self._read, list(read))):
      if variables:
        uses[cell] = variables
    if not self._read:
      return
    changer: dict[int, int] = {}
    for k, v in self._VariablesOfAllCells(self._changed):
      changer[id(v)] = min(k, changer.get(id(v), k))
    for k, v in self._VariablesOfAllCells(self._read):
      if (first := changer.get(id(v), k)) < k:
        raise ValueError(
          f'the call of {self._cells[k].name} reads the variable {v.path} after the call of '
          f'{self._cells[first].name} has changed it, but a pipeline would give it the value of '
          'the step before: make both calls in one layer'
        )

  def _VariablesOfAllCells(self, uses: dict[Cell, list[Any]]) -> Iterator[tuple[int, Any]]:
    """Yields (index of a cell, variable), also for cells that share the trace of one in `uses`."""
    for cell, variables in uses.items():
      structure = Structure(cell)
      name_of = {id(v): name for name, v in cell.Weights().items()}
      for k, other in enumerate(self._cells):
        if Structure(other) == structure:
          weights = other.Weights()
          for v in variables:
            yield k, weights[name_of[id(v)]] if id(v) in name_of else v


def Cut(graph: keras_nodes.Graph) -> list[Cell]:
  """Returns the cells of a model, in order."""
  starts = [0, *_Boundaries(graph)]
  ranges = list(itertools.pairwise([*starts, len(graph.nodes)]))
  last = len(ranges) - 1
  # For each tensor the cell that makes it, and the cells that use it.
  maker = dict.fromkeys(graph.inputs, 0)
  users: dict[_Value, set[int]] = {v: {last} for v in graph.outputs}
  for k, (start, end) in enumerate(ranges):
    for node in graph.nodes[start:end]:
      maker.update(dict.fromkeys(node.outputs, k))
      for v in node.inputs:
        users.setdefault(v, set()).add(k)
  later = {v: {k for k in users.get(v, ()) if k > maker[v]} for v in maker}
  trained = frozenset(map(id, graph.model.trainable_variables))
  cells: list[Cell] = []
  state_uses = StateUses(cells)
  for k, (start, end) in enumerate(ranges):
    leaving = [v for v in maker if maker[v] == k and later[v]]
    outputs = [v for v in leaving if later[v] == {k + 1}]
    entering = [v for v in maker if maker[v] < k and k in users.get(v, ())]
    args = cells[-1].outputs if k else graph.inputs
    cells.append(
      Cell(
        graph.nodes[start:end],
        args=args,
        skips_in=[v for v in entering if v not in args],
        outputs=graph.outputs if k == last else outputs,
        skips_out=[v for v in leaving if v not in outputs],
        results=frozenset(graph.outputs),
        trained=trained,
        state_uses=state_uses,
      )
    )
  return cells


def Ties(cells: Sequence[Cell]) -> dict[tuple[int, str], tuple[int, str]]:
  """Returns {(index of a cell, name): (index of a cell, name)} of weights that are used again.

  The second weight of each pair is the first use of the variable.
  """
  first: dict[int, tuple[int, str]] = {}
  ties = {}
  for k, cell in enumerate(cells):
    for name, v in cell.Weights().items():
      if id(v) in first:
        ties[k, name] = first[id(v)]
      else:
        first[id(v)] = (k, name)
  return ties


def _Boundaries(graph: keras_nodes.Graph) -> list[int]:
  """Returns the indices of the nodes that begin a new cell, but the first."""
  crossing = _CrossingBytes(graph)
  together = _Together(graph.nodes)
  heavy = [i for i, node in enumerate(graph.nodes) if any(len(v.shape) > 1 for v in _Weights(node))]
  boundaries = []
  for before, after in itertools.pairwise(heavy):
    places = [p for p in range(before + 1, after + 1) if not any(a < p <= b for a, b in together)]
    if places:
      boundaries.append(min(reversed(places), key=lambda p: crossing[p]))
  return boundaries


def _CrossingBytes(graph: keras_nodes.Graph) -> list[int]:
  """Returns for each node the bytes of an example that pass from the nodes before it."""
  end = len(graph.nodes)
  maker = {v: i for i, node in enumerate(graph.nodes) for v in node.outputs}
  last_use = {v: i for i, node in enumerate(graph.nodes) for v in node.inputs}
  last_use.update(dict.fromkeys(graph.outputs, end))
  changes = [0] * (end + 2)
  for v, i in maker.items():
    if v in last_use:
      changes[i + 1] += v.bytes_per_example
      changes[last_use[v] + 1] -= v.bytes_per_example
  return list(itertools.accumulate(changes))


def _Together(nodes: Sequence[keras_nodes.Node]) -> list[tuple[int, int]]:
  """Returns (first, last) node of each layer whose state changes: one cell must update it."""
  calls: dict[int, list[int]] = {}
  for i, node in enumerate(nodes):
    for layer in keras_nodes.Sublayers(node.operation):
      if isinstance(layer, keras_nodes.STATEFUL):
        calls.setdefault(id(layer), []).append(i)
  return [(c[0], c[-1]) for c in calls.values()]


def _Weights(node: keras_nodes.Node) -> list[Any]:
  return [v for v in node.variables if not keras_variables.IsSeed(v)]


def _NameVariables(variables: Iterable[Any]) -> Iterator[tuple[str, Any]]:
  """Yields (name, variable): the last part of the Keras path, numbered if it repeats."""
  counts: dict[str, int] = {}
  for v in variables:
    base = re.sub(r'\W', '_', v.name).strip('_').lower()
    number = counts.get(base, 0)
    counts[base] = number + 1
    yield f'w_{base}_{number}' if number else f'w_{base}', v


def _Wiring(cell: Cell) -> list[Any]:
  """Returns the calls of a cell, with the tensors numbered from the cell's first one."""
  tensors = [*cell.args, *cell.skips_in, *(v for node in cell.nodes for v in node.outputs)]
  number = {v: i for i, v in enumerate(tensors)}

  def Number(nest: Any) -> Any:
    return keras.tree.map_structure(
      lambda x: ('tensor', number[x]) if isinstance(x, _Value) else x, nest
    )

  calls = [
    (n.operation, Number(n.args), Number(n.kwargs), n.training, n.policy) for n in cell.nodes
  ]
  ends = [number[v] for v in (*cell.outputs, *cell.skips_out)]
  return [calls, ends, [(v.shape, v.dtype) for v in tensors]]
