"""Which devices and parallelism a plan may give to its modules: the search space, as data.

A placement puts the modules into blocks; a block has consecutive devices of its own, which its
modules share, each with a (data, model) of its own. A module that is alone in its block may be a
pipeline.
Layouts that differ in sizes only form a family, whose numbers are arrays.

The systems that DFLOP (arXiv 2603.25120) is compared with have spaces of layouts, too. All give the
whole model one (data, model) per pipeline stage, on consecutive devices with tensor parallelism
inside, and take samples in the order in which they arrive; they differ in how layers are dealt to
stages. A stage that holds layers of several modules has them on one submesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from dflop_jax.plan.placement import CutCosts, Extent, Form, factors, lay_out, split_layers
from dflop_jax.profile.state import Array
from dflop_jax.records import Layout, MeshShape, SegmentPlan, SubmeshPlan

BASELINES = ("blind", "megatron", "pytorch")
# (module, first layer, last layer + 1) of each pipeline stage, in order.
Stages = list[list[tuple[str, int, int]]]
# Blocks up to which every split of the devices and every pair of pipelines is tried. Twice as many
# make spaces of three modules many times as large.
_FINELY_SPLIT_BLOCKS = 2
# Parts that devices are divided into for more blocks, at least; twice as many are four times as
# many splits into three blocks.
_LEAST_GRAINS = 16
# Rounds through the stages of a loop that are tried. With R rounds the S - 1 ticks that it takes
# beside what it needs are of 1/R of a stage's layers each; 4 would halve once more what 2 leave.
ROUNDS = (1, 2)


@dataclass(frozen=True)
class Family:
    """Layouts that differ in sizes only.

    forms: of every module, with a data degree of 1. blocks: of every module. data, first: degree
    and first device, [n_layouts, n_modules].
    """

    forms: tuple[Form, ...]
    blocks: tuple[int, ...]
    data: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.data)

    @property
    def stages(self) -> int:
        """Of the deepest loop."""
        return max(f.mesh.stage for f in self.forms)

    def layout(self, i: int, n_layers: Mapping[str, int], costs: CutCosts | None = None) -> Layout:
        """Number `i`, without shapes and edges; arguments as for `lay_out`."""
        sized = [
            replace(f, mesh=replace(f.mesh, data=d))
            for f, d in zip(self.forms, self.data[i].tolist(), strict=True)
        ]
        return lay_out(sized, self.first[i].tolist(), n_layers, costs)

    def rows(self, keep: np.ndarray) -> Family:
        return replace(self, data=self.data[keep], first=self.first[keep])


def separate(extent: Extent) -> Iterator[Family]:
    """DFLOP: modules in two blocks at least, each with its own (stage, data, model); a model of
    one module has all devices for it.

    Beyond two blocks the devices are divided in coarser steps and one module at most is a pipeline.
    """
    n_layers, n_devices = extent.n_layers, extent.n_devices
    for blocks in _partitions(len(n_layers)):
        n_blocks = max(blocks) + 1
        if n_blocks < min(2, len(n_layers)) or n_blocks > n_devices:
            continue
        forms = [
            _forms(extent, m, extent.config.max_stage if blocks.count(b) == 1 else 1)
            for m, b in zip(n_layers, blocks, strict=True)
        ]
        sizes = _splits(n_devices, n_blocks)
        most_pipelines = len(n_layers) if n_blocks <= _FINELY_SPLIT_BLOCKS else 1
        for chosen in product(*forms):
            if sum(f.n_segments * f.mesh.stage > 1 for f in chosen) <= most_pipelines:
                yield from _family(chosen, blocks, sizes)


def shared(extent: Extent) -> Iterator[Family]:
    """OrchMLLM: every module on all devices, each with its own parallelism, one after the other;
    the last module may be a loop of stages. Each module is balanced over its own data ranks."""
    *others, last = extent.n_layers
    forms = [_forms(extent, m, 1) for m in others]
    loops = _forms(extent, last, extent.config.max_stage)
    forms.append([f for f in loops if f.n_segments == 1])
    for chosen in product(*forms):
        yield from _family(chosen, (0,) * len(forms), np.array([[extent.n_devices]]))


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
    power of two of which the devices hold `_LEAST_GRAINS`."""
    grain = 1
    while n_blocks > _FINELY_SPLIT_BLOCKS and 2 * grain * _LEAST_GRAINS <= n_devices:
        grain *= 2
    cuts = combinations(range(grain, n_devices, grain), n_blocks - 1)
    ends = np.array([(0, *c, n_devices) for c in cuts]).reshape(-1, n_blocks + 1)
    return np.diff(ends, axis=1)


def _forms(extent: Extent, module: str, max_stage: int) -> list[Form]:
    """Forms of a module on one data rank. A pipeline of depth s comes as s segments, and as one
    segment with stage=s for each number of rounds in which they divide its patterns of layers; a
    module that is `unstaged` comes as segments only."""
    n_devices, n_layers = extent.n_devices, extent.n_layers[module]
    pattern = extent.patterns[module]
    fixed = extent.config.rounds
    rounds = () if module in extent.unstaged else (fixed,) if fixed else ROUNDS
    models = sorted(k for k in extent.degrees[module] if k <= extent.max_model)
    forms = []
    for depth in range(1, min(max_stage, n_layers, n_devices) + 1):
        for model in (m for m in models if depth * m <= n_devices):
            mesh = MeshShape(stage=depth, model=model)
            if depth == 1:
                forms.append(Form(mesh))
                continue
            forms += [Form(mesh, rounds=r) for r in rounds if n_layers % (depth * r * pattern) == 0]
            forms.append(Form(MeshShape(model=model), depth))
    return forms


def _family(forms: Sequence[Form], blocks: tuple[int, ...], sizes: np.ndarray) -> Iterator[Family]:
    """The family of these forms on the splits that they divide, unless it is empty or no group of
    microbatches can be one of every segment's."""
    stages = max(f.mesh.stage for f in forms)
    if any(stages % f.mesh.stage for f in forms):
        return
    n_devices = sizes[:, list(blocks)]
    unit = np.array([f.n_devices for f in forms])
    fits = (n_devices % unit == 0).all(axis=1)
    if fits.any():
        firsts = (np.cumsum(sizes, axis=1) - sizes)[:, list(blocks)]
        yield Family(tuple(forms), blocks, (n_devices // unit)[fits], firsts[fits])


def in_nodes(first: Array, n_devices: Array, model: int, node: int) -> Array:
    """Whether tensor-parallel groups of `model` devices, one after the other on `n_devices` from
    `first` on, all lie inside a node."""
    to_next = node - first % node  # devices up to the next node
    whole = (n_devices <= to_next + node) | (node % model == 0)
    return (n_devices <= to_next) | ((to_next % model == 0) & whole)


def families(extent: Extent) -> dict[str, list[Family]]:
    """The configured space, by searched policy, as far as its tensor-parallel degrees are known and
    stay inside a node; none for a baseline.

    Raises:
      ValueError: nothing is left.
    """
    configured = extent.config.policy
    searched = ("dflop", "orch") if configured == "auto" else (configured,)
    spaces: dict[str, list[Family]] = {}
    for policy in searched:
        if policy not in SPACES:
            continue
        of_policy = spaces.setdefault(policy, [])
        for family in SPACES[policy](extent):
            inside = [
                in_nodes(first, data * form.n_devices, form.mesh.model, extent.node)
                for form, data, first in zip(family.forms, family.data.T, family.first.T)
            ]
            if (keep := np.all(inside, axis=0)).any():
                of_policy.append(family.rows(keep))
    if spaces and not any(spaces.values()):
        raise ValueError(_none(extent))
    return spaces


def _deals(policy: str, n_layers: Mapping[str, int], stages: int) -> Iterator[Stages]:
    """Ways to deal layers to pipeline stages.

    `pytorch`: the layers of the whole model, module by module, evenly by count. `megatron`: the
    modules before the last on the first `e` stages, the last module's layers evenly over the rest;
    with e = 0 all share the first stage with its part of the last module. `blind`: the same with
    one stage for the modules before the last, where there are two stages.
    """
    *names, last = n_layers
    before = {m: n_layers[m] for m in names}
    if policy == "pytorch":
        if stages <= sum(n_layers.values()):
            yield _dealt(n_layers, stages)
        return
    most = min(stages - 1, sum(before.values()))
    for e in range(most + 1) if policy == "megatron" else [min(1, most)]:
        if stages - e <= n_layers[last]:
            rest = [[(last, a, b)] for a, b in split_layers(n_layers[last], stages - e)]
            if not e:
                rest[0] = [*((m, 0, n) for m, n in before.items()), *rest[0]]
            yield [*(_dealt(before, e) if e else []), *rest]


def _dealt(n_layers: Mapping[str, int], stages: int) -> Stages:
    """Layers of modules in a row, cut into stages of even count."""
    start = dict(zip(n_layers, np.cumsum([0, *n_layers.values()]).tolist()))
    return [
        [
            (m, max(a - start[m], 0), min(b - start[m], n))
            for m, n in n_layers.items()
            if a < start[m] + n and b > start[m]
        ]
        for a, b in split_layers(sum(n_layers.values()), stages)
    ]


def baseline_layouts(
    policy: str, n_devices: int, n_layers: Mapping[str, int], *, max_model: int, max_stage: int
) -> Iterator[Layout]:
    """The layouts of a baseline: every way to deal the layers to stages on consecutive blocks of
    devices."""
    order = list(n_layers)
    for n_stages in factors(n_devices, max_stage):
        size = n_devices // n_stages
        for tp in factors(size, max_model):
            for stages in _deals(policy, n_layers, n_stages):
                submeshes, segments = [], []
                for i, runs in enumerate(stages):
                    name = "+".join(m for m, _, _ in runs) + str(i)
                    submeshes.append(SubmeshPlan(name, i * size, data=size // tp, model=tp))
                    segments += [
                        SegmentPlan(f"{m}{a}", m, a, b, name, a == 0, b == n_layers[m])
                        for m, a, b in runs
                    ]
                segments.sort(key=lambda s: order.index(s.module))
                yield Layout(tuple(submeshes), tuple(segments))


def baseline(extent: Extent) -> list[Layout]:
    """Layouts of a baseline policy, as far as `families` would take them; none for others.

    Raises:
      ValueError: nothing is left.
    """
    config = extent.config
    if config.policy not in BASELINES:
        return []

    def lies_well(layout: Layout) -> bool:
        meshes = [(s.module, layout.submesh(s.submesh)) for s in layout.segments]
        return all(
            m.model in extent.degrees[module]
            and in_nodes(m.first, m.n_devices, m.model, extent.node)
            for module, m in meshes
        )

    limits = {"max_model": extent.max_model, "max_stage": config.max_stage}
    every = baseline_layouts(config.policy, extent.n_devices, extent.n_layers, **limits)
    layouts = [p for p in every if lies_well(p)]
    if not layouts:
        raise ValueError(_none(extent))
    return layouts


def _none(extent: Extent) -> str:
    return (
        f"policy {extent.config.policy} has no placement on {extent.n_devices} devices: modules on "
        "devices of their own need one each; raise plan.devices or use plan.policy auto"
    )
