# SPDX-License-Identifier: Apache-2.0
"""Random pipelines from a seed: layers, nests between them, skips, ties, cut, schedule, policy.

`Make(seed)` returns a pipeline and all that a test needs to run it; `features` names its special
features, and `Text` shows it.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import dropout, linear, norm, sequential, skip
from lingvo_gpipe.pipeline.schedule import actions, schedules
from lingvo_gpipe.pipeline.stages import micro_batch
from tests.toys import random_layer

POLICIES = ('stage', 'except_last', 'layer', 'none')
_DIM, _VOCAB = random_layer.DIM, random_layer.VOCAB
_ONE_A_DEVICE = ('gpipe', 'fused_fill_drain', '1f1b', '1f1b_fused', 'zb_h1', 'looped_bfs')
SCHEDULES = (*_ONE_A_DEVICE, 'interleaved_1f1b')


@dataclasses.dataclass
class RandomPipeline:
  """A pipeline and a batch for it.

  Attributes:
    seed: the seed of the pipeline.
    sub: the layers' Params.
    options: Params of the PipeliningLayer.
    inputs: a nest of tensors for each argument of the first layer.
    side: NestedMap(weights, labels, none), the side inputs of the loss.
    step: the training step.
    frozen: paths of the weights that are not trained.
    features: names of its special features.
  """

  seed: int
  sub: list[Any]
  options: dict[str, Any]
  inputs: tuple[Any, ...]
  side: nested_map.NestedMap
  step: int
  frozen: frozenset[str]
  features: set[str]

  @property
  def is_trained(self) -> Callable[[str], bool] | None:
    """Returns the predicate of trained paths for `Place`; None if all weights are trained."""
    return (lambda path: path not in self.frozen) if self.frozen else None

  def Loss(self, theta, outputs, side):
    """Returns a loss of all floating outputs, weights of the last layer and labels."""
    axis = 1 - self.options['batch_dim']
    weights = tf.reshape(side.weights, [-1])
    dtype = weights.dtype
    y = tf.cast(tf.reshape(side.labels, [-1]), dtype) * 0.1
    for i, x in enumerate(x for x in tf.nest.flatten(outputs) if x is not None):
      if x.dtype.is_floating:
        y *= 1.0 + tf.reduce_mean(tf.cast(x, dtype) ** 2 + 0.3 * i * tf.cast(x, dtype), axis)
    if 'v' in theta[-1]:
      y += 0.2 * tf.reduce_sum(theta[-1].v ** 2)
    total = tf.reduce_sum(weights)
    loss = tf.math.divide_no_nan(tf.reduce_sum(y * weights), total)
    return {'loss': (loss, total), 'greatest': (tf.reduce_max(y), tf.ones([], dtype))}

  def Text(self) -> str:
    """Returns a human-readable description."""
    specs = tf.nest.map_structure(
      lambda t: None if t is None else f'{t.dtype.name}{t.shape.as_list()}', self.inputs
    )
    lines = [f'seed {self.seed}: {", ".join(sorted(self.features))}', f'inputs {specs}']
    ends = self.options['splits']
    for i, p in enumerate(self.sub):
      default = p.cls.Params()
      changed = {k: v for k, v in p.IterParams() if v != default.Get(k)}
      k = sum(end <= i for end in ends)
      lines.append(f'  stage {k} layers[{i}] {p.cls.__name__} {changed}')
    for name, value in self.options.items():
      if isinstance(value, schedules.Schedule):
        value = f'own\n{value.ToText()}'
      lines.append(f'{name} {value}')
    lines.append(f'weights {self.side.weights.numpy().ravel().tolist()}, step {self.step}')
    lines.append(f'frozen {sorted(self.frozen)}')
    return '\n'.join(lines)


def Make(seed: int, **options: Any) -> RandomPipeline:
  """Returns the pipeline of a seed; `options` are Params of the PipeliningLayer."""
  return _Maker(seed).Make(options)


def RandomSchedule(
  choose: random.Random, num_stages: int, num_micro_batches: int, num_devices: int
) -> schedules.Schedule:
  """Returns actions in any valid order, with any way of doing backward.

  Stages may be on any devices, and each device has a stage.
  """
  kind = actions.Kind
  needs: dict[actions.Action, list[actions.Action]] = {}
  for m in range(num_micro_batches):
    forward = [actions.Action(k, kind.FORWARD, m) for k in range(num_stages)]
    way = [choose.choice(('B', 'IW')) for _ in range(num_stages)]
    if choose.random() < 0.4:
      forward[-1] = actions.Action(num_stages - 1, kind.FORWARD_BACKWARD, m)
    for k, action in enumerate(forward):
      needs[action] = forward[k - 1 : k] if k else []
    gradient = forward[-1]  # The action of stage k + 1 that computes the gradient for stage k.
    for k in reversed(range(num_stages)):
      if forward[k].kind is kind.FORWARD_BACKWARD:
        continue
      back = actions.Action(k, kind.BACKWARD if way[k] == 'B' else kind.INPUT_GRADIENT, m)
      needs[back] = [forward[k], gradient]
      if way[k] != 'B':
        needs[actions.Action(k, kind.WEIGHT_GRADIENT, m)] = [back]
      gradient = back
  place = random.Random(len(needs))  # Other random choices do not depend on it.
  owners = [*range(num_devices), *place.choices(range(num_devices), k=num_stages - num_devices)]
  place.shuffle(owners)
  rows: list[list[actions.Action]] = [[] for _ in range(num_devices)]
  done: set[actions.Action] = set()
  while len(done) < len(needs):
    ready = [a for a, needed in needs.items() if a not in done and done.issuperset(needed)]
    action = choose.choice(ready)
    rows[owners[action.stage]].append(action)
    done.add(action)
  return schedules.Schedule('own', num_stages, num_micro_batches, rows, owners)


def _Letters(nest: Any) -> list[str]:
  return [letter for letter in tf.nest.flatten(nest) if letter != 'n']


class _Maker:
  """The state while layers are added one by one.

  `args` is the nest of letters (see random_layer) between the last layer and the next; `skips` has
  the nest of each skip connection.
  """

  def __init__(self, seed: int) -> None:
    self._seed = seed
    self._choose = random.Random(seed)
    self._features: set[str] = set()
    # Float32 between layers allows loose bounds only.
    self._mixed = self._choose.random() < 0.2
    self._sub: list[Any] = []
    self._args: tuple[Any, ...] = ()
    self._skips: dict[str, Any] = {}
    self._batch_dim = 0
    self._uses: dict[str, list[int]] = {}

  def _Has(self, probability: float, feature: str = '') -> bool:
    if self._choose.random() >= probability:
      return False
    if feature:
      self._features.add(feature)
    return True

  # ---- layers ----------------------------------------------------------------------------------

  def _Nest(self, letters: str, num: int, depth: int = 2) -> Any:
    """Returns a tuple of `num` nests of letters."""

    def One(depth: int) -> Any:
      kind = self._choose.choice(('leaf', 'leaf', 'leaf', 'list', 'dict', 'tuple'))
      if kind == 'leaf' or not depth:
        return self._Letter(letters)
      self._features.add('nest')
      members = [One(depth - 1) for _ in range(self._choose.randint(1, 3))]
      if kind == 'dict':
        return dict(zip('abc', members, strict=False))
      return members if kind == 'list' else tuple(members)

    return tuple(One(depth) for _ in range(num))

  def _Letter(self, letters: str) -> str:
    letter = self._choose.choice(letters)
    if letter == 'h':
      letter = 'h' if self._mixed else 'f'
      self._features.update({'float32'} if self._mixed else ())
    if letter == 'p':
      arguments = _Letters(self._args)
      letter = f'p{self._choose.randrange(len(arguments))}' if arguments else 'f'
    return letter

  def _Resolve(self, nest: Any) -> Any:
    """Returns the nest with the letter of the argument in place of `p3`."""
    arguments = _Letters(self._args)

    def Leaf(letter: str) -> str:
      return arguments[int(letter[1:])] if letter.startswith('p') else letter

    return random_layer.MapSpec(nest, Leaf)

  def _Outputs(self, is_last: bool) -> Any:
    """What the next layer returns, with at least one batched leaf; floating in the last layer."""
    letters, least = 'fffffilbhpppsccnn', random_layer.BATCHED
    if is_last:
      letters, least = 'ffffilbhn', 'f'
    elif self._Has(0.1, 'integers only'):
      letters, least = 'ilbcn', 'ilb'
    elif self._Has(0.35):
      return ('f',)
    while True:
      outputs = self._Nest(letters, self._choose.randint(1, 3))
      if set(_Letters(self._Resolve(outputs))) & set(least):
        return outputs

  def _Take(self, name: str) -> None:
    self._uses.setdefault(name, []).append(len(self._sub))

  def _AddRandom(self, is_last: bool) -> None:
    choose = self._choose
    batched = [n for n, s in self._skips.items() if set(_Letters(s)) & set(random_layer.BATCHED)]
    takes = [n for n in self._skips if self._Has(0.25)][::-1]  # A layer may take them in any order.
    if not self._args and not set(takes) & set(batched):
      takes.append(batched[0])
    leaves = _Letters((self._args, [self._skips[n] for n in takes]))
    p = random_layer.RandomLayer.Params().Set(takes=takes, batch_dim=self._batch_dim)
    for name in takes:
      self._Take(name)
    if self._Has(0.3, 'unused input'):
      p.ignore = choose.sample(range(len(leaves)), choose.randint(1, len(leaves)))
    if self._Has(0.8):
      p.weights = [name for name in 'wvb' if choose.random() < {'w': 0.9, 'v': 0.2, 'b': 0.4}[name]]
    else:
      self._features.add('no weights')
    p.table = bool(set(leaves) & set('il')) and self._Has(0.6, 'sparse gradients')
    p.fixed = self._Has(0.1, 'not trainable')
    p.keep_prob = 0.7 if self._Has(0.3, 'dropout') else 1.0
    p.stop = not is_last and self._Has(0.05, 'gradients stop')
    if self._Has(0.2, 'auxiliary losses'):
      names = ('one', 'two')[: choose.randint(1, 2)]
      p.aux = {name: round(choose.uniform(0.1, 2.0), 2) for name in names}
    makes: dict[str, Any] = {}
    for _ in range(choose.choice((0, 0, 1, 1, 2)) if not is_last else 0):
      name = f's{len(self._sub)}_{len(makes)}'
      makes[name] = self._Nest('fffffilbpppsn', 1)
    p.makes = {name: repr(nest) for name, nest in makes.items()}
    outputs = self._Outputs(is_last)
    new_skips = {name: self._Resolve(nest)[0] for name, nest in makes.items()}
    reach = {**self._skips, **new_skips}
    if (
      not is_last
      and any(set(_Letters(s)) & set(random_layer.BATCHED) for s in reach.values())
      and self._Has(0.05, 'no arguments')
    ):
      outputs = ()
    p.outputs = repr(outputs)
    self._args = self._Resolve(outputs)
    self._skips = reach
    self._sub.append(p)

  def _AddFromLibrary(self) -> bool:
    """Adds a layer of the library that can take the arguments as they are, if it can."""
    single = len(self._args) == 1
    kinds = ['stash']
    if self._args[0] == 'f':
      kinds += ['drop', 'pop'] + ([] if self._batch_dim else ['norm'] + ['square'] * 2 * single)
    kind = self._choose.choice(kinds)
    i = len(self._sub)
    if kind == 'stash':
      p = skip.StashLayer.Params().Set(key=f's{i}')
      self._skips = {**self._skips, f's{i}': self._args[0]}
    elif kind == 'pop':
      if not self._skips:
        return False
      key = self._choose.choice(sorted(self._skips))
      stashed = self._skips[key]
      combine = 'add' if stashed == 'f' and self._Has(0.6) else 'append'
      p = skip.PopLayer.Params().Set(key=key, combine=combine)
      self._Take(key)
      self._args += (stashed,) if combine == 'append' else ()
    elif kind == 'drop':
      p = dropout.DropoutLayer.Params().Set(keep_prob=0.8)
      self._features.add('dropout')
    elif kind == 'norm':
      p = norm.LayerNorm.Params().Set(input_dim=_DIM)
    else:
      p = linear.ProjectionLayer.Params().Set(
        input_dim=_DIM, output_dim=_DIM, has_bias=True, activation='TANH'
      )
    self._sub.append(p)
    return True

  def _AddLayers(self) -> None:
    choose = self._choose
    num_layers = choose.randint(3, 9)
    while len(self._sub) < num_layers - 1:
      if not (self._args and self._Has(0.3) and self._AddFromLibrary()):
        self._AddRandom(is_last=False)
    self._AddRandom(is_last=True)

  # ---- what is around them ---------------------------------------------------------------------

  def _Cut(self) -> dict[str, Any]:
    """num_stages, stages_per_device and splits."""
    choose, n = self._choose, len(self._sub)
    v = 2 if n >= 4 and self._Has(0.3, 'several stages a device') else 1
    k = choose.randint(1, min(4, n // v))
    stages = k * v
    self._features.add(f'K={k}')
    splits = [*sorted(choose.sample(range(1, n), stages - 1)), n]
    return {'num_stages': stages, 'stages_per_device': v, 'splits': splits}

  def _Schedule(self, cut: dict[str, Any], num_micro_batches: int) -> Any:
    stages, v = cut['num_stages'], cut['stages_per_device']
    k = stages // v
    if self._Has(0.2, 'own schedule'):
      schedule = RandomSchedule(self._choose, stages, num_micro_batches, k)
      return schedule.Validate()
    names = _ONE_A_DEVICE if v == 1 else ('looped_bfs', 'interleaved_1f1b')
    if num_micro_batches % k:
      names = [n for n in names if n != 'interleaved_1f1b']
    name = self._choose.choice(names)
    if stages > 1 and num_micro_batches > 1:
      self._features.add(name)
    return name

  def _SkipFeatures(self, ends: list[int]) -> None:
    stage_of = [sum(end <= i for end in ends) for i in range(len(self._sub))]
    for name, users in self._uses.items():
      maker = stage_of[int(name[1:].partition('_')[0])]
      self._features.add('skip')
      stages = {stage_of[i] for i in users}
      if len(users) > 1:
        self._features.add('skip used twice')
      if len(stages - {maker}) > 1:
        self._features.add('skip to several stages')
      if maker in stages:
        self._features.add('skip within a stage')
      if any(k > maker + 1 for k in stages):
        self._features.add('skip over stages')

  def _Weights(self) -> dict[str, Any]:
    """Returns {path below the pipeline: shape} of the trainable weights."""
    p = sequential.SequentialLayer.Params().Set(name='stack', sub=self._sub, dtype=tf.float64)
    specs = p.Instantiate().WeightSpecs()
    return {
      path.partition('.')[2]: tuple(w.shape) for path, (w, trainable) in specs.items() if trainable
    }

  def _Ties(self, weights: dict[str, Any]) -> list[list[str]]:
    ties: dict[str, str] = {}
    for _ in range(self._choose.choice((0, 0, 1, 2, 3))):
      tied, owner = self._choose.choice(list(weights)), self._choose.choice(list(weights))
      free = tied not in ties and tied not in ties.values() and owner not in ties
      if tied != owner and weights[tied] == weights[owner] and free:
        ties[tied] = owner
        self._features.add('ties')
        if list(weights).index(tied) < list(weights).index(owner):
          self._features.add('tied to a later weight')
    return [list(pair) for pair in ties.items()]

  def _Frozen(self, weights: dict[str, Any], ties: list[list[str]]) -> frozenset[str]:
    """Returns paths of frozen weights: of some layers, of the first or last, or all but one."""
    choose = self._choose
    owned = [path for path in weights if path not in {tied for tied, _ in ties}]
    layers = sorted({int(path[len('layers[') : path.index(']')]) for path in owned})
    ways = ('none', 'none', 'none', 'none', 'first', 'last', 'layer', 'some', 'all but one')
    way = choose.choice(ways)
    if way != 'none':
      self._features.add(f'frozen: {way}')
    some = choose.randint(1, max(1, len(layers) - 1))
    chosen = {
      'none': [],
      'first': layers[:some],
      'last': layers[some:],
      'layer': choose.sample(layers, some),
    }.get(way)
    if chosen is not None:
      frozen = {path for i in chosen for path in owned if path.startswith(f'layers[{i}].')}
    elif way == 'some':
      frozen = {path for path in owned if choose.random() < 0.5}
    else:
      frozen = set(owned) - {choose.choice(owned)}
    return frozenset(f'stack.{path}' for path in frozen)

  def _Inputs(self, size: int) -> tuple[Any, ...]:
    values = np.random.default_rng(self._seed)

    def Leaf(letter: str) -> Any:
      if letter == 'n':
        return None
      shape = [size, _DIM if letter in 'fh' else 1]
      if letter in 'fh':
        x = tf.constant(values.normal(size=shape), tf.float64 if letter == 'f' else tf.float32)
      elif letter == 'b':
        x = tf.constant(values.uniform(size=shape) < 0.5)
      else:
        dtype = tf.int32 if letter == 'i' else tf.int64
        x = tf.constant(values.integers(0, _VOCAB, shape), dtype)
      return tf.transpose(x) if self._batch_dim else x

    return random_layer.MapSpec(self._args, Leaf)

  def _Side(self, size: int, num_micro_batches: int) -> nested_map.NestedMap:
    values = np.random.default_rng(self._seed + 1)
    weights = values.uniform(0.2, 2.0, [size])
    if num_micro_batches > 1 and self._Has(0.3, 'micro-batch of weight 0'):
      sizes = micro_batch.Sizes(size, num_micro_batches)
      m = self._choose.randrange(num_micro_batches)
      weights[sum(sizes[:m]) : sum(sizes[: m + 1])] = 0.0
    labels = values.integers(1, 5, [size])
    shape = [1, size] if self._batch_dim else [size]
    return nested_map.NestedMap(
      weights=tf.constant(weights.reshape(shape)),
      labels=tf.constant(labels.reshape(shape)),
      none=None,
    )

  def Make(self, options: dict[str, Any]) -> RandomPipeline:
    choose = self._choose
    self._batch_dim = int(self._Has(0.15, 'batch_dim 1'))
    size, m = choose.randint(1, 7), choose.randint(1, 6)
    if size < m:
      self._features.add('batch smaller than M')
    elif size % m:
      self._features.add('micro-batches of two sizes')
    micro_batches = min(size, m)
    letters = choose.choice(('f', 'i', 'ffilbhn'))
    while not set(_Letters(self._args)) & set(random_layer.BATCHED):
      self._args = self._Nest(letters, choose.randint(1, 3))
    inputs = self._Inputs(size)
    while True:
      state = choose.getstate(), set(self._features), self._args
      self._AddLayers()
      weights = self._Weights()
      if weights:
        break
      _, self._features, self._args = state
      self._sub, self._skips, self._uses = [], {}, {}
    cut = self._Cut()
    self._SkipFeatures(cut['splits'])
    policy = choose.choice(POLICIES)
    schedule = self._Schedule(cut, micro_batches)
    if isinstance(schedule, schedules.Schedule) or schedule == 'interleaved_1f1b':
      m = micro_batches  # These schedules need a different number.
    ties = self._Ties(weights)
    if cut['num_stages'] > 1 and micro_batches > 1:
      self._features.add(policy)
    return RandomPipeline(
      seed=self._seed,
      sub=self._sub,
      options={
        **cut,
        'num_micro_batches': m,
        'schedule': schedule,
        'remat_policy': policy,
        'ties': ties,
        'batch_dim': self._batch_dim,
        **options,
      },
      inputs=inputs,
      side=self._Side(size, micro_batches),
      step=choose.choice((0, 7, 10**7)),
      frozen=self._Frozen(weights, ties),
      features=self._features,
    )
