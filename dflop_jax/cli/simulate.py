"""`dflop simulate`: run a plan on measured times, without training."""

from __future__ import annotations

import argparse
from typing import Any

from dflop_jax.cli.derive_config import early_checks, open_run_context
from dflop_jax.cli.experiment import add_options, finish_run, load_record, output_folder
from dflop_jax.cli.terminal import make_ticker, show
from dflop_jax.records import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--profile-file", "--plan-file", "--out")
    parser.add_argument("--batches", type=int, default=4, help="global batches (default: 4)")


def run(args: argparse.Namespace) -> Any:
    """Write the simulated trace and its picture; returns the step's times."""
    from dflop_jax.profile.cost_model import CostModel, layout_prices
    from dflop_jax.records.files import save
    from dflop_jax.report.panels import panel_of
    from dflop_jax.report.run_folder import PLAN, PROFILE, SIMULATED, SIMULATED_PICTURE
    from dflop_jax.report.timeline import draw
    from dflop_jax.report.trace import group_labels, write_trace
    from dflop_jax.schedule import schedule_batch
    from dflop_jax.schedule.sampled_batches import sample_batches
    from dflop_jax.simulate.steps import simulate_schedules
    from dflop_jax.train import planning

    if args.batches < 1:
        raise ValueError(f"--batches {args.batches} must be at least 1")
    given_plan = load_record(args, Plan)
    context, profile = open_run_context(args, early_checks(args, given_plan))
    config = context.config
    tick = make_ticker(
        "planning", "placements", starts_shown=not given_plan and not args.profile_file
    )
    plan = given_plan or planning.make_plan(context, profile, tick).plan
    batches = sample_batches(profile.data.loads, config.train.global_batch, args.batches)
    prices = layout_prices(plan.layout, CostModel(profile.model))
    names = [s.name for s in plan.layout.segments]
    schedules = [schedule_batch(b, plan, prices, names, step=i) for i, b in enumerate(batches)]
    trace = simulate_schedules(plan, schedules, prices, names)
    folder = output_folder(args, config)
    save(plan, folder / PLAN)
    save(profile, folder / PROFILE)
    write_trace(folder / SIMULATED, [trace], group_labels(schedules))
    draw(
        [panel_of(plan.layout, trace, f"{plan.policy}, simulated")], {}, folder / SIMULATED_PICTURE
    )
    summary = {
        "makespan_s": trace.makespan_s,
        "step_s": trace.makespan_s / args.batches,
        "busy_fraction": trace.busy_fraction(),
    }
    if not args.json:
        busy = ", ".join(f"{k} {v:.0%}" for k, v in summary["busy_fraction"].items())
        show(
            f"{args.batches} steps: {1e3 * trace.makespan_s / args.batches:.1f} ms a step, busy "
            f"{busy}; wrote {folder / SIMULATED_PICTURE} and {SIMULATED}"
        )
    finish_run(context.peers)
    return summary
