"""What balancing every phase apart brings: the slowest data rank of each module's phase, by who is
balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Load,
    Plan,
    Prices,
    ProgramId,
    piece_content,
)
from dflop_jax.schedule.solver.balance import balance
from experiments.paper.answers import answer
from experiments.paper.cases import Case, reported
from experiments.paper.costs import prices_of
from experiments.paper.orch import CASES
from experiments.paper.results import Result

Array = np.ndarray
DEALT = ARRIVING, BY_LLM, EVERY = ("as they arrive", "by the LLM", "every phase")
_WORK = 20_000  # units of the solver's


def device_seconds(plan: Plan, prices: Prices, module: str, loads: Sequence[Load]) -> Array:
    """[samples]: what each sample's forward and backward through a module take of devices' time, no
    padding."""
    shape, token_s, unit_s = max(plan.layout.shapes(module)), 0.0, np.zeros(1)
    for s in plan.layout.segments_of(module):
        mesh = plan.layout.submesh(s.submesh)
        for direction in (FORWARD, BACKWARD):
            price = prices.programs.get(ProgramId(s.name, shape, direction))
            if price is None:
                continue
            token_s += (
                price.static_s / shape.size / plan.layout.group_size * mesh.n_devices / mesh.data
            )
            unit_s += np.array(price.content_s) * mesh.n_devices / mesh.data
    content = (piece_content([load], module).sum(axis=1) for load in loads)
    return np.array(
        [token_s * x.tokens(module) + unit_s @ c for x, c in zip(loads, content, strict=True)]
    )


def slowest(seconds: Mapping[str, Array], ranks: Mapping[str, int], how: str) -> dict[str, float]:
    """Of each module the slowest data rank's work over the mean one's; samples are dealt in one of
    the ways `DEALT`. Who is not balanced has them where the LLM has."""
    last = list(seconds)[-1]
    at = np.arange(len(seconds[last])) * ranks[last] // len(seconds[last])
    if how != ARRIVING:
        at = _balanced(seconds[last], ranks[last])
    found = {}
    for m, own_s in seconds.items():
        n = ranks[m] if how == EVERY else ranks[last]
        bins = _balanced(own_s, n) if how == EVERY else at
        mean_s = own_s.sum() / n
        found[m] = float(np.bincount(bins, own_s, n).max() / mean_s) if mean_s else 1.0
    return found


def _balanced(costs: Array, n_ranks: int) -> Array:
    return balance(costs, n_ranks, work=_WORK)


def run(cases: Sequence[Case] = CASES) -> Result:
    modules = ("vision", "audio", "llm")
    result = Result(
        "phases",
        "OrchMLLM's dispatcher: the slowest data rank over the mean one, by who is balanced",
        "every phase balanced is fastest (a figure without numbers here)",
        (
            "model",
            *(f"{m}, {how}" for m in modules for how in DEALT),
            *(f"all phases, {how}" for how in DEALT),
        ),
        unit="slowest rank over the mean one, all phases",
    )
    for case in cases:
        plan = answer(case, "orch").plan
        assert plan is not None, case.name
        prices, loads = prices_of(case, plan), reported(case)[0]
        seconds = {m: device_seconds(plan, prices, m, loads) for m in plan.layout.modules}
        total_s = {m: s.sum() for m, s in seconds.items()}
        ranks = {m: plan.layout.data_ranks(m) for m in plan.layout.modules}
        each = {how: slowest(seconds, ranks, how) for how in DEALT}
        whole = {
            how: sum(over[m] * s for m, s in total_s.items()) / sum(total_s.values())
            for how, over in each.items()
        }
        cells = [f"{each[how][m]:.2f}" if m in seconds else "-" for m in modules for how in DEALT]
        result.add(case.name, [*cells, *(f"{over:.2f}" for over in whole.values())], **whole)
    result.notes += [
        "a phase lasts as long as its slowest rank, phases follow each other; ranks are those of "
        "OrchMLLM's plan above, whose devices share their work evenly; nothing is padded",
    ]
    return result
