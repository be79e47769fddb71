"""`dflop simulate`: simulate a plan with measured times, without training."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from dflop_jax.cli.derive_config import check_early, open_run_context
from dflop_jax.cli.experiment import (
    OUT_FOLDER,
    PLAN_FILE,
    PROFILE_FILE,
    finish_run,
    load_record,
    output_folder,
)
from dflop_jax.cli.terminal import add_options, make_ticker, positive_int, show
from dflop_jax.records import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, PROFILE_FILE | PLAN_FILE | OUT_FOLDER)
    help_text = "number of global batches (default: 4)"
    parser.add_argument("--batches", type=positive_int, default=4, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> Any:
    from dflop_jax.profile.cost_model import CostModel, layout_prices
    from dflop_jax.records.files import save
    from dflop_jax.report.panels import panel_of
    from dflop_jax.report.run_folder import PLAN, PROFILE, SIMULATED, SIMULATED_PICTURE
    from dflop_jax.report.timeline import draw
    from dflop_jax.report.trace import group_labels, write_trace
    from dflop_jax.schedule import schedule_batch
    from dflop_jax.schedule.batch import sample_batches
    from dflop_jax.simulate.steps import simulate_schedules
    from dflop_jax.train import planning

    given_plan = load_record(args, Plan)
    context, profile = open_run_context(args, partial(check_early, args, given_plan))
    config = context.config
    starts_shown = not (given_plan or args.profile_file)
    tick = make_ticker("planning", "placements", starts_shown=starts_shown)
    plan = given_plan or planning.make_plan(context, profile, tick).plan
    batches = sample_batches(profile.data.loads, config.train.global_batch, args.batches)
    costs = CostModel(profile.model)
    prices = layout_prices(plan.layout, costs, plan.scheduling.grouping)
    names = [s.name for s in plan.layout.segments]
    schedules = [schedule_batch(b, plan, prices, names, step=i) for i, b in enumerate(batches)]
    trace = simulate_schedules(plan, schedules, prices, names)
    folder = output_folder(args, config)
    save(plan, folder / PLAN)
    save(profile, folder / PROFILE)
    write_trace(folder / SIMULATED, [trace], group_labels(schedules))
    picture = folder / SIMULATED_PICTURE
    draw([panel_of(plan.layout, trace, f"{plan.policy}, simulated")], {}, picture)
    step_s, busy = trace.makespan_s / args.batches, trace.busy_fraction()
    if not args.json:
        text = ", ".join(f"{k} {v:.0%}" for k, v in busy.items())
        written = f"wrote {picture} and {SIMULATED}"
        show(f"{args.batches} steps: {1e3 * step_s:.1f} ms a step, busy {text}; {written}")
    finish_run(context.peers)
    return {"makespan_s": trace.makespan_s, "step_s": step_s, "busy_fraction": busy}
