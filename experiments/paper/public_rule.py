"""The public DFLOP optimizer's own rule, a variant: `pipelined` is what it enumerates,
`public_rule` how it chooses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from dflop_jax.plan.placement import Form, factors, lay_out
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import Layout, MeshShape, Plan, pairs, with_remat
from experiments.paper.cases import Case, seen
from experiments.paper.costs import cost_model
from experiments.paper.true_shapes import Amounts, amounts_of, peak_bytes, segment_s
from experiments.paper.tune import MAX_MODEL, MAX_STAGE, is_timed, plan_of


def public_plan(case: Case) -> tuple[Plan, int]:
    """The public optimizer's choice, with layers recomputed only if nothing fits without:
    (plan, microbatches).

    Raises:
      ValueError: nothing fits.
    """
    costs = cost_model(case)
    space = pipelined(
        case.n_devices, costs.profile.n_layers, max_model=MAX_MODEL, max_stage=MAX_STAGE
    )
    plans = [
        plan_of(case, "dflop", p)
        for p in space
        if is_timed(costs, p) and all(m.first % m.model == 0 for m in p.submeshes)
    ]
    samples = amounts_of(costs.profile, seen(case).loads)
    args = {"global_batch": case.global_batch, "memory_bytes": case.memory_bytes}
    try:
        plan, n, _ = public_rule(plans, costs, samples, **args)
    except ValueError:
        again = (with_remat(p, "layers") for p in plans)
        plan, n, _ = public_rule(again, costs, samples, **args)
    return plan, n


def pipelined(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
) -> Iterator[Layout]:
    """The public DFLOP optimizer's space: one encoder and the LLM on disjoint devices, each with
    its own tensor, pipeline and data parallelism, in the order in which it is enumerated there."""
    encoders = list(n_layers)[:-1]
    if len(encoders) != 1:
        raise ValueError(f"the public optimizer knows one encoder, the model has {encoders}")
    for below in range(1, n_devices):
        for v in _forms(below, n_layers[encoders[0]], max_model, max_stage):
            for l in _forms(n_devices - below, n_layers["llm"], max_model, max_stage):
                yield lay_out((v, l), (0, below), n_layers)


def public_rule(
    plans: Iterable[Plan],
    costs: CostModel,
    samples: Amounts,
    *,
    global_batch: int,
    memory_bytes: float,
) -> tuple[Plan, int, float]:
    """What the public DFLOP optimizer chooses: (plan, microbatches, the T that it predicts).

    T = (m + encoder stages + LLM stages - 1) * max(encoder, LLM duration of a mean microbatch on a
    stage), with the least m whose mean microbatch does not exceed the largest sample. As there, a
    placement is accepted when T is below 1.1 times the last accepted one's *and* m is smaller than
    its m, so the answer depends on the order of the placements and can end slower than it began.
    Memory is checked at the largest sample, by this project's own estimate.

    Raises:
      ValueError: no placement fits.
    """
    best: tuple[Plan, int, float] | None = None
    loads = {m: sums[0] for m, sums in samples.items()}
    for plan in plans:
        ranks = {m: plan.layout.data_ranks(m) for m in plan.layout.modules}
        if peak_bytes(costs, plan, _largest(loads, ranks)) > memory_bytes:
            continue
        m = _public_microbatches(loads, ranks, global_batch)
        if m is None:
            continue
        # Attention is counted as if a row's samples were one.
        mean = {}
        for k, n in loads.items():
            amount = np.array([n.mean() * global_batch / (m * ranks[k])])
            tile = costs.profile.piece_tokens.get(k)
            mean[k] = np.vstack([amount, amount * pairs(tile) if tile else pairs(amount)])
        seconds = segment_s(costs, plan, mean)
        slowest = 0.0
        for k in plan.layout.modules:
            names = [s.name for s in plan.layout.segments_of(k)]
            slowest = max(slowest, sum(float(seconds[s][0]) for s in names) / len(names))
        t = (m + len(plan.layout.segments) - 1) * slowest
        if best is None or (t < 1.1 * best[2] and m < best[1]):
            best = plan, m, t
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
    count = None
    for m in range(1, global_batch // ranks["llm"] + 1):
        each = {module: global_batch / (m * r) for module, r in ranks.items()}
        if min(each.values()) < 1:
            continue
        count = m
        if all(n.mean() * each[k] <= n.max() for k, n in loads.items()):
            break
    return count


def _forms(n_devices: int, n_layers: int, max_model: int, max_stage: int) -> list[Form]:
    """Tensor and pipeline degrees of a module, in the public optimizer's order."""
    return [
        Form(MeshShape(data=n_devices // tp // pp, model=tp), pp)
        for tp in factors(n_devices, max_model)
        for pp in factors(n_devices // tp, min(max_stage, n_layers))
    ]
