"""DFLOP's overheads: initialisation, and the schedule of each batch.

Command:  python -m experiments.paper --only overheads
Paper:    initialisation 7 to 10 minutes, at most 2.1% of the run; training hides scheduling
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from experiments.paper.cases import Case
from experiments.paper.costs import get_cost_model, get_profile
from experiments.paper.dflop import ABLATION_CASES, epoch_hours
from experiments.paper.dynamic_shapes import assign_bins, sum_amounts
from experiments.paper.evaluation import DFLOP, evaluate
from experiments.paper.results import Result

KEYS = [(case, system) for case in ABLATION_CASES for system in (DFLOP, "auto")]
TIMED_RUNS = 10  # timed runs of each program in a measured profile
COMPILE_S = 20.0  # assumed for a program; each node compiles one at a time
SAMPLES = 10_000  # samples of the data profile


def estimate_profiling_s(case: Case) -> float:
    """Estimate the seconds to compile and time all programs on the cluster: forward and backward of
    each shape, at two depths."""
    timings, n_nodes = get_profile(case).timings, case.n_devices // case.hardware.devices_per_node
    compile_s = COMPILE_S * 2 * 2 * len(timings) / n_nodes
    run_s = sum(
        4 * (t.layer_forward_s + t.layer_backward_s) + 2 * (t.ends_forward_s + t.ends_backward_s)
        for t in timings
    )
    return compile_s + TIMED_RUNS * run_s / n_nodes


def compare_overheads(cases: Sequence[Case] = ABLATION_CASES) -> Result:
    result = Result(
        "overheads",
        "Initialisation as a share of an epoch, and scheduling time beside step time",
        "initialisation 7 to 10 minutes, at most 2.1% of the run; scheduling hidden",
        "model | profiling, min | data, s | planning, s | share of an epoch | schedule, s | "
        "balance, s | step, s",
        unit="% of an epoch",
    )
    for case in cases:
        dflop, auto, costs = evaluate(case, DFLOP), evaluate(case, "auto"), get_cost_model(case)
        assert auto.plan is not None, auto.description
        assert dflop.plan is not None, dflop.description
        start_s = time.perf_counter()
        case.draw_loads(SAMPLES, 0)
        data_s = time.perf_counter() - start_s
        profiling_s = estimate_profiling_s(case)
        initialisation_s = profiling_s + data_s + auto.search_s
        share = initialisation_s / 3600 / epoch_hours(dflop.step_s, case.global_batch)
        balance_s = []
        for step in auto.steps:
            start_s = time.perf_counter()
            samples = sum_amounts(costs.profile, step.loads)
            assign_bins(costs, dflop.plan, samples, dflop.n_microbatches, "balanced")
            balance_s.append(time.perf_counter() - start_s)
        cells = [
            f"{profiling_s / 60:.1f}",
            f"{data_s:.2f}",
            f"{auto.search_s:.1f}",
            f"{share:.0%}" if share > 0.1 else f"{100 * share:.1f}%",
            f"{np.mean([s.schedule.elapsed_s for s in auto.steps]):.2f}",
            f"{np.mean(balance_s):.2f}",
            f"{dflop.step_s:.1f}",
        ]
        result.add(case.name, cells, initialisation=100 * share)
    result.notes = [
        "data, planning, schedule and balance are wall seconds of this machine; profiling is "
        f"estimated from {TIMED_RUNS} timed runs and an assumed {COMPILE_S:.0f} s of compilation "
        "per program, in parallel on all nodes",
        "schedule uses static buckets; balance uses dynamic shapes, longest first, where the paper "
        "uses an ILP. Both run during the preceding step, which waits only if it is shorter",
    ]
    result.differences = [
        "the data profile is drawn from tables; reading headers of real media takes minutes, once",
        "the simulated epoch is shorter than the paper's",
    ]
    return result
