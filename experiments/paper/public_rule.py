"""The public DFLOP optimizer's own rule, a variant: `pipelined` is what it enumerates,
`public_rule` how it chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflop_jax.plan.placement import Form, Outline, Placement, factors, lay_out
from dflop_jax.records import Load, SubmeshPlan
from experiments.paper.exact import ExactCosts, peak_bytes


def pipelined(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
) -> Iterator[Placement]:
    """The public DFLOP optimizer's space: one encoder and the LLM on disjoint devices, each with
    its own tensor, pipeline and data parallelism, in the order in which it is enumerated there."""
    encoders = list(n_layers)[:-1]
    if len(encoders) != 1:
        raise ValueError(f"the public optimizer knows one encoder, the model has {encoders}")
    for below in range(1, n_devices):
        for v in _forms(below, n_layers[encoders[0]], max_model, max_stage):
            for l in _forms(n_devices - below, n_layers["llm"], max_model, max_stage):
                yield lay_out(Outline((v, l), (0, below)), n_layers)


def public_rule(
    placements: Iterator[Placement] | Sequence[Placement],
    costs: ExactCosts,
    samples: Sequence[Load],
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
        loads = {m: np.array([costs.amount(s, m) for s in samples], float) for m in (item, llm)}
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
            # Attention is counted as if a row's samples were one.
            tile = costs.profile.piece_tokens.get(module)
            pairs = mean * tile**2 if tile else mean * mean
            spent = costs.module_s(module, _mesh(placement, module), mean, pairs)
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


def _forms(n_devices: int, n_layers: int, max_model: int, max_stage: int) -> list[Form]:
    """Tensor and pipeline degrees of a module, in the public optimizer's order."""
    return [
        Form((1, n_devices // tp // pp, tp), pp)
        for tp in factors(n_devices, max_model)
        for pp in factors(n_devices // tp, min(max_stage, n_layers))
    ]
