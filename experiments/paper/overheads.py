"""What DFLOP costs beside training: initialisation, and the schedule of each batch.

Command:  python -m experiments.paper.overheads
Minutes:  about 1 alone; under 1 after `throughput` in the same process
Paper:    initialisation 7 to 10 minutes, at most 2.1% of the run; scheduling is hidden entirely
"""

from __future__ import annotations

import time

import numpy as np

from dflop_jax.schedule import schedule_batch
from experiments.paper import data
from experiments.paper.cases import answer, prices_of
from experiments.paper.common import Result, main, outcome, percent, seen_batches
from experiments.paper.dealing import bins_of
from experiments.paper.static import case_of
from experiments.paper.systems import INTERNVL_72B, LLAVA, Setup
from experiments.paper.throughput import hours

SETUPS = (LLAVA["siglip-6b", "qwen2.5-7b"], LLAVA["siglip-6b", "qwen2.5-32b"], INTERNVL_72B)
RUNS = 10  # timed runs of each program when a profile is measured
COMPILE_S = 20.0  # assumed, of a program; as many are compiled at once as there are nodes
PROGRAMS = 4  # of a shape: forward and backward, at two depths
NODES = 8


def profiling_s(setup: Setup) -> float:
    """What measuring the profile would take on the cluster: compiling and timed runs."""
    timings = outcome(setup, "dflop").costs.profile.timings
    compile_s = COMPILE_S * PROGRAMS * len(timings) / NODES
    runs = sum(
        4 * (t.layer_forward_s + t.layer_backward_s) + 2 * (t.ends_forward_s + t.ends_backward_s)
        for t in timings
    )
    return compile_s + RUNS * runs / NODES


def run(setups: tuple[Setup, ...] = SETUPS) -> Result:
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
    for setup in setups:
        found, chosen = outcome(setup, "dflop"), answer(case_of(setup), "auto")
        plan = chosen.plan
        assert plan is not None, chosen.words
        start_s = time.perf_counter()
        data.profile(setup.mixture, setup.layout, 10_000)
        data_s = time.perf_counter() - start_s
        first_s = profiling_s(setup)
        share = (
            (first_s + data_s + chosen.search_s) / 3600 / hours(found.step_s, found.global_batch)
        )
        names = [s.name for s in plan.segments]
        prices = prices_of(case_of(setup), plan)
        schedule_s, balance_s = [], []
        for batch in seen_batches(setup, found.global_batch, 2, 1):
            schedule_s.append(schedule_batch(batch, plan, prices, names).elapsed_s)
            start_s = time.perf_counter()
            bins_of(
                found.costs, found.tuned.placement, batch, found.tuned.n_microbatches, "balanced"
            )
            balance_s.append(time.perf_counter() - start_s)
        result.rows.append(
            [
                setup.name,
                f"{first_s / 60:.1f}",
                f"{data_s:.2f}",
                f"{chosen.search_s:.1f}",
                percent(share) if share > 0.1 else f"{100 * share:.1f}%",
                f"{np.mean(schedule_s):.2f}",
                f"{np.mean(balance_s):.2f}",
                f"{found.step_s:.1f}",
            ]
        )
        result.labels.append(setup.name)
        result.bars.setdefault("initialisation", []).append(100 * share)
    result.notes = [
        "data, planning, schedule and balance are wall seconds of this machine; profiling is "
        f"computed: {RUNS} timed runs of every program and an assumed {COMPILE_S:.0f} s to compile "
        f"each, on {NODES} nodes at once",
        "schedule: of this runtime's buckets; balance: of true shapes, as the paper's ILP. Either "
        "is solved while the batch before trains, so a step waits only if it is shorter",
    ]
    result.why = [
        "the data profile is drawn from tables; reading headers of real media takes minutes, once",
        "the share is of an epoch as simulated here, which is shorter than the paper's",
    ]
    return result


if __name__ == "__main__":
    main(run)
