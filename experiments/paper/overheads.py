"""What DFLOP costs beside training: initialisation, and the schedule of each batch.

Command:  python -m experiments.paper --only overheads
Paper:    initialisation 7 to 10 minutes, at most 2.1% of the run; scheduling is hidden entirely
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from dflop_jax.schedule import schedule_batch
from experiments.paper.answers import DFLOP, answer
from experiments.paper.cases import Case, reported
from experiments.paper.costs import cost_model, prices_of, profile_of
from experiments.paper.dflop import ABLATED
from experiments.paper.results import Result, percent
from experiments.paper.throughput import hours
from experiments.paper.true_shapes import amounts_of, bins_of

KEYS = [(case, system) for case in ABLATED for system in (DFLOP, "auto")]
RUNS = 10  # timed runs of each program when a profile is measured
COMPILE_S = 20.0  # assumed, of a program; as many are compiled at once as there are nodes
PROGRAMS = 4  # of a shape: forward and backward, at two depths
NODES = 8
SAMPLES, BATCHES = 10_000, 2  # that the data profile holds, that are scheduled


def profiling_s(case: Case) -> float:
    """What measuring the profile would take on the cluster: compiling and timed runs."""
    timings = profile_of(case).timings
    compile_s = COMPILE_S * PROGRAMS * len(timings) / NODES
    runs = sum(
        4 * (t.layer_forward_s + t.layer_backward_s) + 2 * (t.ends_forward_s + t.ends_backward_s)
        for t in timings
    )
    return compile_s + RUNS * runs / NODES


def run(cases: Sequence[Case] = ABLATED) -> Result:
    result = Result(
        "overheads",
        "Initialisation against an epoch, and scheduling against a step",
        "initialisation 7 to 10 minutes, at most 2.1% of the run; scheduling hidden",
        (
            "model",
            "profiling, min",
            "data, s",
            "planning, s",
            "of an epoch",
            "schedule, s",
            "balance, s",
            "step, s",
        ),
        unit="% of an epoch",
    )
    for case in cases:
        dflop, chosen, costs = answer(case, DFLOP), answer(case, "auto"), cost_model(case)
        plan = chosen.plan
        assert plan is not None, chosen.words
        assert dflop.plan is not None, dflop.words
        start_s = time.perf_counter()
        case.loads(SAMPLES, 0)
        data_s = time.perf_counter() - start_s
        first_s = profiling_s(case)
        begun_s = first_s + data_s + chosen.search_s
        share = begun_s / 3600 / hours(dflop.step_s, case.global_batch)
        names, prices = [s.name for s in plan.layout.segments], prices_of(case, plan)
        schedule_s, balance_s = [], []
        for batch in reported(case)[:BATCHES]:
            schedule_s.append(schedule_batch(batch, plan, prices, names).elapsed_s)
            start_s = time.perf_counter()
            samples = amounts_of(costs.profile, batch)
            bins_of(costs, dflop.plan, samples, dflop.n_microbatches, "balanced")
            balance_s.append(time.perf_counter() - start_s)
        cells = [
            f"{first_s / 60:.1f}",
            f"{data_s:.2f}",
            f"{chosen.search_s:.1f}",
            percent(share) if share > 0.1 else f"{100 * share:.1f}%",
            f"{np.mean(schedule_s):.2f}",
            f"{np.mean(balance_s):.2f}",
            f"{dflop.step_s:.1f}",
        ]
        result.add(case.name, cells, initialisation=100 * share)
    result.notes = [
        "data, planning, schedule and balance are wall seconds of this machine; profiling is "
        f"computed: {RUNS} timed runs of every program and an assumed {COMPILE_S:.0f} s to compile "
        f"each, on {NODES} nodes at once",
        "schedule: of this runtime's buckets; balance: of true shapes, the largest sample "
        "first, where the paper has an ILP. Either is solved while the batch before trains, "
        "so a step waits only if it is shorter",
    ]
    result.why = [
        "the data profile is drawn from tables; reading headers of real media takes minutes, once",
        "the share is of an epoch as simulated here, which is shorter than the paper's",
    ]
    return result
