"""The systems that DFLOP (arXiv 2603.25120) is compared with, as spaces of layouts.

All give the whole model one (data, model) per pipeline stage and take samples in the order in which
they arrive; they differ in how layers are dealt to stages. `pytorch` and `megatron` put a pipeline
stage on consecutive devices, with tensor parallelism inside, and a stage that holds layers of
several modules on one submesh. `blind` keeps the last module on submeshes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflop_jax.plan.placement import Form, factors, lay_out, split_layers
from dflop_jax.records import Layout, MeshShape, SegmentPlan, SubmeshPlan

# (module, first layer, last layer + 1) of each pipeline stage, in order.
Stages = Sequence[Sequence[tuple[str, int, int]]]


def blind(
    n_devices: int, n_layers: Mapping[str, int], *, max_model: int, max_stage: int
) -> Iterator[Layout]:
    """The modules before the last share the first pipeline stage and the last module's layers fill
    the others evenly; with one stage everything shares all devices."""
    *before, last = n_layers
    for stages in factors(n_devices, max_stage):
        last_stages = stages - bool(before) if stages > 1 else 1
        if last_stages < 1 or last_stages > n_layers[last]:
            continue
        for tp in factors(n_devices // stages, max_model):
            mesh = MeshShape(data=n_devices // stages // tp, model=tp)
            first = n_devices // stages if before and stages > 1 else 0
            forms = (*(Form(mesh) for _ in before), Form(mesh, last_stages))
            yield lay_out(forms, (*(0 for _ in before), first), n_layers)


def pytorch(
    n_devices: int, n_layers: Mapping[str, int], *, max_model: int, max_stage: int
) -> Iterator[Layout]:
    """PyTorch-like: the layers of the whole model, module by module, dealt evenly by count over
    pipeline stages of one (data, model)."""
    for stages, tp in _degrees(n_devices, max_model, max_stage):
        if stages <= sum(n_layers.values()):
            yield _placed(_dealt(n_layers, stages), n_devices, tp, n_layers)


def megatron(
    n_devices: int, n_layers: Mapping[str, int], *, max_model: int, max_stage: int
) -> Iterator[Layout]:
    """Megatron-LM-like: the modules before the last on the first `e` pipeline stages, the last
    module's layers evenly over the rest; with e = 0 all share the first stage with its part of the
    last module."""
    *names, last = n_layers
    before = {m: n_layers[m] for m in names}
    for stages, tp in _degrees(n_devices, max_model, max_stage):
        for e in range(min(stages - 1, sum(before.values())) + 1):
            if stages - e > n_layers[last]:
                continue
            front = _dealt(before, e) if e else []
            rest = [[(last, a, b)] for a, b in split_layers(n_layers[last], stages - e)]
            if not e:
                rest[0] = [*((m, 0, n) for m, n in before.items()), *rest[0]]
            yield _placed([*front, *rest], n_devices, tp, n_layers)


def _degrees(n_devices: int, max_model: int, max_stage: int) -> list[tuple[int, int]]:
    """(pipeline, tensor) degrees whose product divides the devices."""
    return [
        (stages, tp)
        for stages in factors(n_devices, max_stage)
        for tp in factors(n_devices // stages, max_model)
    ]


def _dealt(n_layers: Mapping[str, int], stages: int) -> list[list[tuple[str, int, int]]]:
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


def _placed(stages: Stages, n_devices: int, tp: int, n_layers: Mapping[str, int]) -> Layout:
    """Stages on consecutive blocks of devices."""
    size = n_devices // len(stages)
    submeshes, segments = [], []
    for i, runs in enumerate(stages):
        name = "+".join(m for m, _, _ in runs) + str(i)
        submeshes.append(SubmeshPlan(name, i * size, data=size // tp, model=tp))
        segments += [
            SegmentPlan(f"{m}{a}", m, a, b, name, a == 0, b == n_layers[m]) for m, a, b in runs
        ]
    in_order = sorted(segments, key=lambda s: list(n_layers).index(s.module))
    return Layout(tuple(submeshes), tuple(in_order))


BASELINES = {"blind": blind, "megatron": megatron, "pytorch": pytorch}
