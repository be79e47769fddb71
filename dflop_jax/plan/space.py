"""Which devices and parallelism a plan may give to its modules: the search space, as data.

A layout puts the modules into blocks; a block has consecutive devices of its own, which its modules
share, each with a (data, model) of its own. A module that is alone in its block may be a pipeline.
Outlines that differ in sizes only form a family, whose numbers are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple, TypedDict

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.baselines import BASELINES
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.placement import Form, Outline, Placement

_FEW_BLOCKS = 2  # up to here every split of the devices and every pair of pipelines is tried
_GRAINS = 16  # at least, into which the devices are divided for more blocks


class Kind(NamedTuple):
    """What a module's form is but for its data degree."""

    n_segments: int
    stage: int
    model: int

    @property
    def size(self) -> int:
        """Devices of one data rank."""
        return self.n_segments * self.stage * self.model

    def form(self, data: int) -> Form:
        return Form((self.stage, data, self.model), self.n_segments)


@dataclass(frozen=True)
class Family:
    """Outlines that differ in sizes only.

    kinds, blocks: of every module. data, first: degree and first device, [n_outlines, n_modules].
    """

    kinds: tuple[Kind, ...]
    blocks: tuple[int, ...]
    data: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.data)

    @property
    def group_size(self) -> int:
        return max(k.stage for k in self.kinds)

    @property
    def alone(self) -> tuple[bool, ...]:
        """Of every module, whether it has its devices for itself."""
        return tuple(self.blocks.count(b) == 1 for b in self.blocks)

    def outline(self, i: int) -> Outline:
        forms = zip(self.kinds, self.data[i].tolist(), strict=True)
        return Outline(tuple(k.form(d) for k, d in forms), tuple(self.first[i].tolist()))

    def rows(self, keep: np.ndarray) -> Family:
        return replace(self, data=self.data[keep], first=self.first[keep])


def separate(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    unstaged: Collection[str] = (),
    degrees: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Family]:
    """DFLOP: modules in two blocks at least, each with its own (stage, data, model); a model of
    one module has all devices for it.

    Beyond two blocks the devices are divided in coarser steps and one module at most is a pipeline.
    Modules that are `unstaged` are pipelines of segments only, never of stages. `degrees` are the
    tensor-parallel degrees by module; None: all up to `max_model`.
    """
    n_blocks_at_least = min(2, len(n_layers))
    models = degrees or dict.fromkeys(n_layers, range(1, max_model + 1))
    for blocks in _partitions(len(n_layers)):
        n_blocks = max(blocks) + 1
        if n_blocks < n_blocks_at_least or n_blocks > n_devices:
            continue
        sizes = _splits(n_devices, n_blocks)
        kinds = [
            _kinds(n, n_devices, models[m], max_stage, m not in unstaged)
            if blocks.count(b) == 1
            else _kinds(n, n_devices, models[m], 1, False)
            for (m, n), b in zip(n_layers.items(), blocks, strict=True)
        ]
        most_pipelines = len(n_layers) if n_blocks <= _FEW_BLOCKS else 1
        for chosen in product(*kinds):
            if sum(k.n_segments * k.stage > 1 for k in chosen) <= most_pipelines:
                yield from _family(chosen, blocks, sizes)


def shared(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    unstaged: Collection[str] = (),
    degrees: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Family]:
    """OrchMLLM: every module on all devices, each with its own parallelism, one after the other;
    the last module may be a loop of stages. Each module is balanced over its own data ranks."""
    models = degrees or dict.fromkeys(n_layers, range(1, max_model + 1))
    *others, last = n_layers
    kinds = [_kinds(n_layers[m], n_devices, models[m], 1, False) for m in others]
    loops = _kinds(n_layers[last], n_devices, models[last], max_stage, last not in unstaged)
    kinds.append([k for k in loops if k.n_segments == 1])
    for chosen in product(*kinds):
        yield from _family(chosen, (0,) * len(n_layers), np.array([[n_devices]]))


SPACES = {"dflop": separate, "orch": shared}


def _partitions(n: int) -> Iterator[tuple[int, ...]]:
    """Every way to put `n` modules into blocks, as the block of each; blocks count from 0 in the
    order of their first modules."""
    if n == 0:
        yield ()
        return
    for before in _partitions(n - 1):
        for block in range(max(before, default=-1) + 2):
            yield (*before, block)


def _splits(n_devices: int, n_blocks: int) -> np.ndarray:
    """Devices of every block, [n_splits, n_blocks]. For many blocks, cuts lie on multiples of a
    power of two of which the devices hold 16 at least."""
    grain = 1
    while n_blocks > _FEW_BLOCKS and 2 * grain * _GRAINS <= n_devices:
        grain *= 2
    cuts = combinations(range(grain, n_devices, grain), n_blocks - 1)
    ends = np.array([(0, *c, n_devices) for c in cuts]).reshape(-1, n_blocks + 1)
    return np.diff(ends, axis=1)


def _kinds(
    n_layers: int, n_devices: int, models: Sequence[int], max_stage: int, stages: bool
) -> list[Kind]:
    """Kinds of a module. A pipeline of depth s comes as s segments, and as one segment with stage=s
    where `stages` are allowed and divide its layers."""
    kinds = []
    for depth in range(1, min(max_stage, n_layers, n_devices) + 1):
        for model in (m for m in models if depth * m <= n_devices):
            if depth == 1 or (stages and n_layers % depth == 0):
                kinds.append(Kind(1, depth, model))
            if depth > 1:
                kinds.append(Kind(depth, 1, model))
    return kinds


def _family(kinds: Sequence[Kind], blocks: tuple[int, ...], sizes: np.ndarray) -> Iterator[Family]:
    """The family of these kinds on the splits that they divide, unless it is empty or no group of
    microbatches can be one of every segment's."""
    most = max(k.stage for k in kinds)
    if any(most % k.stage for k in kinds):
        return
    own = sizes[:, list(blocks)]
    unit = np.array([k.size for k in kinds])
    fits = (own % unit == 0).all(axis=1)
    if fits.any():
        firsts = (np.cumsum(sizes, axis=1) - sizes)[:, list(blocks)]
        yield Family(tuple(kinds), blocks, (own // unit)[fits], firsts[fits])


def families(rules: Rules, n_devices: int, config: PlanConfig) -> dict[str, list[Family]]:
    """By searched policy, the configured space, as far as the profile has timings of its
    tensor-parallel degrees and these stay inside a node; none for a baseline.

    Raises:
      ValueError: nothing is left.
    """
    wanted = ("dflop", "orch") if config.policy == "auto" else (config.policy,)
    limits = _limits(rules, n_devices, config)
    crossing = _crossing(rules, n_devices)
    timed = {(t.module, t.model) for t in rules.profile.timings}
    degrees = {
        m: [k for k in range(1, limits["max_model"] + 1) if (m, k) in timed] for m in rules.n_layers
    }
    spaces: dict[str, list[Family]] = {}
    for policy in wanted:
        if policy not in SPACES:
            continue
        kept = spaces.setdefault(policy, [])
        for family in SPACES[policy](
            n_devices, rules.n_layers, **limits, unstaged=rules.unstaged, degrees=degrees
        ):
            inside = np.ones(len(family), bool)
            for m, kind in enumerate(family.kinds):
                ranks = family.data[:, m] * kind.n_segments * kind.stage
                inside &= ranks <= crossing(kind.model)[family.first[:, m] % rules.node(n_devices)]
            if inside.any():
                kept.append(family.rows(inside))
    if spaces and not any(spaces.values()):
        raise ValueError(_none(config, n_devices))
    return spaces


def baseline(rules: Rules, n_devices: int, config: PlanConfig) -> list[Placement]:
    """Placements of a baseline policy, as far as `families` would take them; none for others.

    Raises:
      ValueError: nothing is left.
    """
    if config.policy not in BASELINES:
        return []
    timed = {(t.module, t.model) for t in rules.profile.timings}
    crossing, node = _crossing(rules, n_devices), rules.node(n_devices)

    def lies_well(p: Placement) -> bool:
        segments = ((s.module, p.mesh_of(s)) for s in p.segments)
        return all(
            (module, m.model) in timed
            and m.n_devices // m.model <= crossing(m.model)[m.first % node]
            for module, m in segments
        )

    space = BASELINES[config.policy]
    kept = list(
        filter(lies_well, space(n_devices, rules.n_layers, **_limits(rules, n_devices, config)))
    )
    if not kept:
        raise ValueError(_none(config, n_devices))
    return kept


class _Limits(TypedDict):
    max_model: int
    max_stage: int


def _limits(rules: Rules, n_devices: int, config: PlanConfig) -> _Limits:
    return {
        "max_model": min(config.max_model, rules.node(n_devices)),
        "max_stage": config.max_stage,
    }


def _crossing(rules: Rules, n_devices: int) -> Callable[[int], np.ndarray]:
    """For a tensor-parallel degree: by the place in a node where a module begins, how many groups
    of so many devices it may have before one crosses into the next node."""
    node = rules.node(n_devices)
    known: dict[int, np.ndarray] = {}

    def of(model: int) -> np.ndarray:
        if model not in known:
            whole = np.arange(node)[:, None] + np.arange(node + 1) * model
            crosses = whole % node + model > node
            first = np.where(crosses.any(axis=1), crosses.argmax(axis=1), np.iinfo(int).max)
            known[model] = first
        return known[model]

    return of


def _none(config: PlanConfig, n_devices: int) -> str:
    return (
        f"policy {config.policy} has no placement on {n_devices} devices: modules on devices of "
        "their own need one each; raise plan.devices or use plan.policy auto"
    )
