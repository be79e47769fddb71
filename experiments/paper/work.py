"""FLOPs that a step needs, and what share of the devices' peak it reaches (MFU)."""

from __future__ import annotations

from functools import cache

from dflop_jax.profile.needed import needed_flops
from experiments.paper.cases import Case, reported
from experiments.paper.costs import DTYPE

ROW = 8192  # tokens of an LLM row of which needed FLOPs are counted


@cache
def step_flops(case: Case) -> dict[str, float]:
    """By module what the reported batches need on average, padding and recomputation not
    counted."""
    model = case.model()
    rows = {m: model.piece_tokens.get(m, ROW) for m in model.modules}
    needed = needed_flops(model, rows)
    samples = [x for batch in reported(case) for x in batch]
    return {
        m: sum(sum(map(needed[m], x.lengths(m), x.content_of(m))) for x in samples)
        / len(reported(case))
        for m in rows
    }


def mfu(case: Case, step_s: float) -> float:
    """Share of the devices' peak FLOP/s that the reported batches need on average."""
    peak = case.n_devices * case.hardware.peak_flops(DTYPE)
    return sum(step_flops(case).values()) / step_s / peak
