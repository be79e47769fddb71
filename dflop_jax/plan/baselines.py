"""The systems that DFLOP (arXiv 2603.25120) is compared with: spaces of placements, and its own
public rule of choosing one.

`pytorch` and `megatron` give the whole model one (data, model) per pipeline stage; they differ in
how layers are dealt to stages. Both put a pipeline stage on consecutive devices, with tensor
parallelism inside, and a stage that holds layers of two modules on one submesh. `pipelined` is what
the public DFLOP optimizer enumerates, `public_rule` how it chooses. What these choices cost at the
true shapes of random microbatches is `plan.exact`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflop_jax.plan.exact_costs import ExactCosts, peak_bytes
from dflop_jax.plan.placement import Placement, split_layers
from dflop_jax.plan.space import factors
from dflop_jax.records import SampleShape, SegmentPlan, SubmeshPlan

# (module, first layer, last layer + 1) of each pipeline stage, in order.
Stages = Sequence[Sequence[tuple[str, int, int]]]


def pytorch(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """PyTorch-like: the layers of the whole model, encoders first, dealt evenly by count over
    pipeline stages of one (data, model)."""
    for stages, tp in _degrees(n_devices, max_model, max_stage):
        if stages <= sum(n_layers.values()):
            found = _placed(_dealt(n_layers, stages), n_devices, tp, n_layers)
            if _allowed(found, tied):
                yield found


def megatron(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """Megatron-LM-like: encoders on the first `e` pipeline stages, the LLM's layers evenly over the
    rest; with e = 0 the encoders share the first stage with its part of the LLM."""
    encoders = {m: n for m, n in n_layers.items() if m != "llm"}
    for stages, tp in _degrees(n_devices, max_model, max_stage):
        for e in range(min(stages - 1, sum(encoders.values())) + 1):
            if stages - e > n_layers["llm"] or (e and not encoders):
                continue
            front = _dealt(encoders, e) if e else []
            runs = split_layers(n_layers["llm"], stages - e)
            llm = [[("llm", a, b)] for a, b in runs]
            if not e:
                llm[0] = [*((m, 0, n) for m, n in encoders.items()), *llm[0]]
            found = _placed([*front, *llm], n_devices, tp, n_layers)
            if _allowed(found, tied):
                yield found


def pipelined(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Placement]:
    """The public DFLOP optimizer's space: one encoder and the LLM on disjoint devices, each with
    its own tensor, pipeline and data parallelism, in the order in which it is enumerated there."""
    encoders = [m for m in n_layers if m != "llm"]
    if len(encoders) != 1:
        raise ValueError(f"the public optimizer knows one encoder, the model has {encoders}")
    name = encoders[0]
    for below in range(1, n_devices):
        for v_tp, v_pp in _splits(below, max_model, max_stage):
            for l_tp, l_pp in _splits(n_devices - below, max_model, max_stage):
                if v_pp > n_layers[name] or l_pp > n_layers["llm"] or (tied and l_pp > 1):
                    continue
                low = [[(name, a, b)] for a, b in split_layers(n_layers[name], v_pp)]
                high = [[("llm", a, b)] for a, b in split_layers(n_layers["llm"], l_pp)]
                one = _placed(low, below, v_tp, n_layers)
                two = _placed(high, n_devices - below, l_tp, n_layers, below)
                yield Placement(one.submeshes + two.submeshes, one.segments + two.segments, 1)


def public_rule(
    placements: Iterator[Placement] | Sequence[Placement],
    costs: ExactCosts,
    shapes: Sequence[SampleShape],
    *,
    global_batch: int,
    memory_bytes: float,
) -> tuple[Placement, int, float]:
    """What the public DFLOP optimizer chooses: (placement, microbatches, the T that it predicts).

    T = (m + encoder stages + LLM stages - 1) * max(encoder, LLM duration of a mean microbatch on a
    stage), with the least m whose mean microbatch does not exceed the largest sample. As there, a
    placement is accepted when T is below 1.1 times the last accepted one's *and* m is smaller than
    its m, so the answer depends on the order of the placements and can end slower than it began.
    Memory is checked at the largest sample, by this project's own estimate.

    Raises:
      ValueError: no placement fits.
    """
    best: tuple[Placement, int, float] | None = None
    for placement in placements:
        item, llm = placement.segments[0].module, "llm"
        loads = {m: np.array([s.load(m) for s in shapes], float) for m in (item, llm)}
        stages = {m: sum(s.module == m for s in placement.segments) for m in (item, llm)}
        ranks = {m: _mesh(placement, m).data for m in (item, llm)}
        if peak_bytes(costs, placement, _largest(loads, ranks)) > memory_bytes:
            continue
        m = _public_microbatches(loads, ranks, global_batch)
        if m is None:
            continue
        slowest = 0.0
        for module in (item, llm):
            mean = float(loads[module].mean()) * global_batch / (m * ranks[module])
            squares = mean * mean  # one row: it counts attention as if the samples were one
            spent = costs.module_s(module, _mesh(placement, module), mean, squares)
            slowest = max(slowest, spent / stages[module])
        t = (m + sum(stages.values()) - 1) * slowest
        if best is None or (t < 1.1 * best[2] and m < best[1]):
            best = placement, m, t
    if best is None:
        raise ValueError(
            f"no placement fits into {memory_bytes / 2**30:.1f} GiB a device; use more devices"
        )
    return best


def _largest(loads: Mapping[str, np.ndarray], ranks: Mapping[str, int]) -> dict[str, float]:
    """What a rank holds when every LLM rank has the largest sample."""
    return {
        m: math.ceil(n.max() * (ranks["llm"] / ranks[m] if m != "llm" else 1))
        for m, n in loads.items()
    }


def _public_microbatches(
    loads: Mapping[str, np.ndarray], ranks: Mapping[str, int], global_batch: int
) -> int | None:
    found = None
    for m in range(1, global_batch // ranks["llm"] + 1):
        each = {module: global_batch / (m * r) for module, r in ranks.items()}
        if min(each.values()) < 1:
            continue
        found = m
        if all(n.mean() * each[k] <= n.max() for k, n in loads.items()):
            break
    return found


def _mesh(placement: Placement, module: str) -> SubmeshPlan:
    return placement.mesh_of(next(s for s in placement.segments if s.module == module))


def _degrees(n_devices: int, max_model: int, max_stage: int) -> list[tuple[int, int]]:
    """(pipeline, tensor) degrees whose product divides the devices."""
    return [
        (stages, tp)
        for stages in factors(n_devices, max_stage)
        for tp in factors(n_devices // stages, max_model)
    ]


def _splits(n_devices: int, max_model: int, max_stage: int) -> list[tuple[int, int]]:
    """(tensor, pipeline) degrees, in the public optimizer's order."""
    return [
        (tp, pp)
        for tp in factors(n_devices, max_model)
        for pp in factors(n_devices // tp, max_stage)
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


def _placed(
    stages: Stages, n_devices: int, tp: int, n_layers: Mapping[str, int], first: int = 0
) -> Placement:
    """Stages on consecutive blocks of devices from `first` on."""
    each = n_devices // len(stages)
    submeshes, segments = [], []
    for i, runs in enumerate(stages):
        name = "+".join(m for m, _, _ in runs) + str(first + i * each)
        submeshes.append(SubmeshPlan(name, first + i * each, 1, each // tp, tp))
        segments += [
            SegmentPlan(f"{m}{a}", m, a, b, name, a == 0, b == n_layers[m]) for m, a, b in runs
        ]
    in_order = sorted(segments, key=lambda s: list(n_layers).index(s.module))
    return Placement(tuple(submeshes), tuple(in_order), 1)


def _allowed(placement: Placement, tied: bool) -> bool:
    return not tied or sum(s.module == "llm" for s in placement.segments) == 1
