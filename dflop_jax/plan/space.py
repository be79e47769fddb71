"""The search space: families of layouts, whose data-parallel degrees and first devices are arrays.

A placement puts modules into blocks of consecutive devices. Modules of a block share its devices,
each with its own (data, model) mesh. A module that is alone in its block may be a pipeline.

Baselines, as in DFLOP (arXiv 2603.25120), use one (data, model) mesh per pipeline stage of the
whole model and take samples in order of arrival; they differ in how layers are split into stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from dflop_jax.plan.placement import (
    LayerCostsByDegree,
    Parallelism,
    SpaceLimits,
    build_layout,
    divisors,
    fits_structure,
    split_layers,
)
from dflop_jax.profile.state import Array
from dflop_jax.records import Layout, MeshShape, SegmentPlan, SubmeshPlan

BASELINES = ("blind", "megatron", "pytorch")
# (module, first layer, last layer + 1) of each pipeline stage, in order.
Stages = list[list[tuple[str, int, int]]]
# Devices are divided into blocks in units of at most 1/256, or 1/16 with more than two blocks. Half
# the unit gives twice as many splits into two blocks and four times as many into three. The unit of
# two blocks is 3% of a block that has 1/8 of the devices.
_UNITS_OF_TWO_BLOCKS, _UNITS_OF_MORE_BLOCKS = 256, 16
# Rounds through the stages of a looped pipeline. With R rounds, fill and drain take S - 1 ticks of
# 1/R of a stage's layers each.
ROUNDS = (1, 2)
_USE_AUTO = "use plan.policy auto"


@dataclass(frozen=True)
class LayoutFamily:
    """Layouts that differ only in data-parallel degrees and devices."""

    parallelisms: tuple[Parallelism, ...]  # by module, with data-parallel degree 1
    blocks: tuple[int, ...]  # number of the block, by module
    data: np.ndarray  # data-parallel degree, [n_layouts, n_modules]
    first_device: np.ndarray  # [n_layouts, n_modules]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def max_stages(self) -> int:
        """Maximum number of stages of a looped pipeline."""
        return max(f.mesh.stage for f in self.parallelisms)

    def layout(
        self, index: int, n_layers: Mapping[str, int], costs: LayerCostsByDegree | None = None
    ) -> Layout:
        """Return layout number `index`; see `build_layout`."""
        sized = [
            replace(f, mesh=replace(f.mesh, data=d))
            for f, d in zip(self.parallelisms, self.data[index].tolist(), strict=True)
        ]
        return build_layout(sized, self.first_device[index].tolist(), n_layers, costs)

    def subset(self, is_kept: np.ndarray) -> LayoutFamily:
        return replace(self, data=self.data[is_kept], first_device=self.first_device[is_kept])


def separate_families(limits: SpaceLimits) -> Iterator[LayoutFamily]:
    """Yield DFLOP's families: modules in at least two blocks, each with its own mesh; a single
    module gets all devices. With more than two blocks, at most one module is a pipeline."""
    n_layers, n_devices = limits.n_layers, limits.n_devices
    for blocks in _block_partitions(len(n_layers)):
        n_blocks = max(blocks) + 1
        if n_blocks < min(2, len(n_layers)) or n_blocks > n_devices:
            continue
        parallelisms = [
            _parallelisms(limits, m, limits.config.max_stage if blocks.count(b) == 1 else 1)
            for m, b in zip(n_layers, blocks, strict=True)
        ]
        block_sizes = _device_splits(n_devices, n_blocks)
        max_pipelines = len(n_layers) if n_blocks <= 2 else 1
        for chosen in product(*parallelisms):
            if sum(f.n_segments * f.mesh.stage > 1 for f in chosen) <= max_pipelines:
                yield from _family(chosen, blocks, block_sizes)


def shared_families(limits: SpaceLimits) -> Iterator[LayoutFamily]:
    """Yield OrchMLLM's families: modules run on all devices, one after the other, each with its own
    parallelism and balanced over its data ranks. The last module may be a looped pipeline."""
    *source_modules, last = limits.n_layers
    loops = _parallelisms(limits, last, limits.config.max_stage)
    parallelisms = [_parallelisms(limits, m, 1) for m in source_modules]
    for chosen in product(*parallelisms, [f for f in loops if f.n_segments == 1]):
        yield from _family(chosen, (0,) * len(chosen), np.array([[limits.n_devices]]))


FAMILIES_BY_POLICY = {"dflop": separate_families, "orch": shared_families}


def _block_partitions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield the block number of each module for every partition of `n` modules into blocks."""
    if n == 0:
        yield ()
        return
    for partition in _block_partitions(n - 1):
        for block in range(max(partition, default=-1) + 2):
            yield (*partition, block)


def _device_splits(n_devices: int, n_blocks: int) -> np.ndarray:
    """Return numbers of devices by block, [n_splits, n_blocks], in powers of two of devices."""
    step, n_units = 1, _UNITS_OF_TWO_BLOCKS if n_blocks <= 2 else _UNITS_OF_MORE_BLOCKS
    while 2 * step * n_units <= n_devices:
        step *= 2
    boundaries = combinations(range(step, n_devices, step), n_blocks - 1)
    ends = np.array([(0, *c, n_devices) for c in boundaries]).reshape(-1, n_blocks + 1)
    return np.diff(ends, axis=1)


def _parallelisms(limits: SpaceLimits, module: str, max_stage: int) -> list[Parallelism]:
    """Return a module's parallelisms on one data rank. A pipeline of depth s is either s segments,
    or one segment with stage=s for each number of rounds that divides its layer patterns evenly;
    `unstaged` modules are segments only."""
    n_devices, n_layers = limits.n_devices, limits.n_layers[module]
    rounds = (limits.config.rounds,) if limits.config.rounds else ROUNDS
    tensor_degrees = sorted(k for k in limits.degrees[module] if k <= limits.max_model)
    parallelisms = []
    for depth in range(1, min(max_stage, n_layers, n_devices) + 1):
        for model in (m for m in tensor_degrees if depth * m <= n_devices):
            for r in rounds if depth > 1 and module not in limits.unstaged else ():
                if n_layers % (depth * r * limits.patterns[module]) == 0:
                    mesh = MeshShape(stage=depth, model=model)
                    parallelisms.append(Parallelism(mesh, rounds=r))
            parallelisms.append(Parallelism(MeshShape(model=model), depth))
    return parallelisms


def _family(
    parallelisms: Sequence[Parallelism], blocks: tuple[int, ...], block_sizes: np.ndarray
) -> Iterator[LayoutFamily]:
    """Yield the family of splits that the parallelisms divide evenly, if one group size fits."""
    max_stages = max(f.mesh.stage for f in parallelisms)
    if any(max_stages % f.mesh.stage for f in parallelisms):
        return
    n_devices = block_sizes[:, list(blocks)]
    replica_devices = np.array([f.n_devices for f in parallelisms])
    is_divisible = (n_devices % replica_devices == 0).all(axis=1)
    if is_divisible.any():
        first_devices = (np.cumsum(block_sizes, axis=1) - block_sizes)[:, list(blocks)]
        yield LayoutFamily(
            tuple(parallelisms),
            blocks,
            (n_devices // replica_devices)[is_divisible],
            first_devices[is_divisible],
        )


def tensor_groups_in_nodes(first_device: Array, n_devices: Array, model: int, node: int) -> Array:
    """Return whether consecutive groups of `model` devices all lie inside a node."""
    to_next_node = node - first_device % node
    fills_whole_nodes = (n_devices <= to_next_node + node) | (node % model == 0)
    return (n_devices <= to_next_node) | ((to_next_node % model == 0) & fills_whole_nodes)


def search_families(limits: SpaceLimits) -> dict[str, list[LayoutFamily]]:
    """Return families by policy with tensor parallelism within nodes; ValueError: none."""
    config, by_policy = limits.config, dict[str, list[LayoutFamily]]()
    is_required = {config.submeshes, config.loop} != {"any"}
    for policy, make_families in FAMILIES_BY_POLICY.items():
        if config.policy not in ("auto", policy):
            continue
        families = by_policy.setdefault(policy, [])
        for family in make_families(limits):
            # All layouts of a family have one structure.
            if is_required and not fits_structure(family.layout(0, limits.n_layers), config):
                continue
            columns = zip(family.parallelisms, family.data.T, family.first_device.T, strict=True)
            in_nodes = [
                tensor_groups_in_nodes(first, data * f.n_devices, f.mesh.model, limits.node)
                for f, data, first in columns
            ]
            if (is_allowed := np.all(in_nodes, axis=0)).any():
                families.append(family.subset(is_allowed))
    if by_policy and not any(by_policy.values()):
        raise ValueError(explain_no_placement(limits))
    return by_policy


def _stage_splits(policy: str, n_layers: Mapping[str, int], stages: int) -> Iterator[Stages]:
    """Yield splits of the layers into pipeline stages.

    `pytorch`: all layers, module by module, in equal numbers. `megatron`: modules before the last
    on the first `n` stages (n = 0: on the last module's first stage), the last module's layers
    evenly on the other stages. `blind`: the same with n = 1 if there are at least two stages.
    """
    *names, last = n_layers
    sources = {m: n_layers[m] for m in names}
    if policy == "pytorch":
        if stages <= sum(n_layers.values()):
            yield _split_evenly(n_layers, stages)
        return
    max_stages = min(stages - 1, sum(sources.values()))
    for n in range(max_stages + 1) if policy == "megatron" else [min(1, max_stages)]:
        if stages - n <= n_layers[last]:
            rest = [[(last, a, b)] for a, b in split_layers(n_layers[last], stages - n)]
            if not n:
                rest[0] = [*((m, 0, k) for m, k in sources.items()), *rest[0]]
            yield [*(_split_evenly(sources, n) if n else []), *rest]


def _split_evenly(n_layers: Mapping[str, int], stages: int) -> Stages:
    """Split the modules' consecutive layers into stages of equal numbers of layers."""
    first = dict(zip(n_layers, np.cumsum([0, *n_layers.values()]).tolist()))
    return [
        [
            (m, max(a - first[m], 0), min(b - first[m], n))
            for m, n in n_layers.items()
            if a < first[m] + n and b > first[m]
        ]
        for a, b in split_layers(sum(n_layers.values()), stages)
    ]


def baseline_layouts(
    policy: str, n_devices: int, n_layers: Mapping[str, int], *, max_model: int, max_stage: int
) -> Iterator[Layout]:
    """Yield each split of the layers into stages on consecutive blocks of devices."""
    for n_stages in divisors(n_devices, max_stage):
        size = n_devices // n_stages
        for tp in divisors(size, max_model):
            for stages in _stage_splits(policy, n_layers, n_stages):
                submeshes, segments = [], []
                for i, runs in enumerate(stages):
                    name = "+".join(m for m, _, _ in runs) + str(i)
                    submeshes.append(SubmeshPlan(name, i * size, data=size // tp, model=tp))
                    segments += [
                        SegmentPlan(f"{m}{a}", m, a, b, name, a == 0, b == n_layers[m])
                        for m, a, b in runs
                    ]
                segments.sort(key=lambda s: [*n_layers].index(s.module))
                yield Layout(tuple(submeshes), tuple(segments))


def allowed_baselines(limits: SpaceLimits) -> list[Layout]:
    """Return a baseline's layouts with tensor parallelism within nodes; ValueError: none."""
    config, layouts = limits.config, []
    if config.policy not in BASELINES:
        return []
    sizes = {"max_model": limits.max_model, "max_stage": config.max_stage}
    for layout in baseline_layouts(config.policy, limits.n_devices, limits.n_layers, **sizes):
        meshes = [(limits.degrees[s.module], layout.submesh(s.submesh)) for s in layout.segments]
        if fits_structure(layout, config) and all(
            m.model in degrees
            and tensor_groups_in_nodes(m.first, m.n_devices, m.model, limits.node)
            for degrees, m in meshes
        ):
            layouts.append(layout)
    if not layouts:
        raise ValueError(explain_no_placement(limits))
    return layouts


def explain_no_placement(limits: SpaceLimits) -> str:
    """Return why the policy has no placement as `fits_structure` requires, with a remedy."""
    config, n_devices = limits.config, limits.n_devices
    required = {"plan.submeshes": config.submeshes, "plan.loop": config.loop}
    name = " ".join(f"{k}={v}" for k, v in required.items() if v != "any")
    separate, loop = config.submeshes == "separate", config.loop == "require"
    if separate and config.policy in ("orch", "dip"):
        return f"{name}: policy {config.policy} runs all modules on all devices; {_USE_AUTO}"
    if config.submeshes == "shared" and config.policy == "dflop":
        return f"{name}: policy dflop puts modules on separate devices; {_USE_AUTO}"
    if loop and config.policy not in (*FAMILIES_BY_POLICY, "auto"):
        return f"{name}: stages of policy {config.policy} are segments without a loop; {_USE_AUTO}"
    if separate and len(limits.n_layers) == 1:
        return f"{name}: the model has a single module; omit plan.submeshes"
    is_split = separate or (config.policy == "dflop" and len(limits.n_layers) > 1)
    needed = is_split + (2 if loop else 1)
    if name and n_devices < needed:
        return f"{name}: needs {needed} devices, the plan has {n_devices}; raise plan.devices"
    modules = list(limits.n_layers)
    if config.submeshes == "shared" or config.policy == "orch" or n_devices < 3:
        modules = modules[-1:]  # of modules that share devices, only the last may be a loop
    if loop and not any(_can_loop(limits, m) for m in modules):
        each = ", ".join(
            f"{m} has an edge at an inner layer"
            if m in limits.unstaged
            else f"{m} has {limits.n_layers[m]} layers"
            + f" in patterns of {limits.patterns[m]}" * (limits.patterns[m] > 1)
            for m in modules
        )
        return (
            f"{name}: on {n_devices} devices no layers divide into 2 to "
            f"plan.max_stage={config.max_stage} equal stages ({each}); change plan.devices or "
            "plan.max_stage, or omit plan.loop"
        )
    if name:
        return (
            f"{name}: policy {config.policy} has no such placement on {n_devices} devices; change "
            "plan.devices, plan.max_stage or plan.max_model, or omit the flag"
        )
    return (
        f"policy {config.policy} has no placement on {n_devices} devices: modules on "
        f"separate submeshes need a device each; raise plan.devices or {_USE_AUTO}"
    )


def _can_loop(limits: SpaceLimits, module: str) -> bool:
    each = _parallelisms(limits, module, limits.config.max_stage)
    return any(f.mesh.stage > 1 for f in each)
