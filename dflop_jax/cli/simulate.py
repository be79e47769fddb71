"""`dflop simulate`: run a plan on measured times, without training."""

from __future__ import annotations

import argparse
from typing import Any

from dflop_jax.cli.experiment import (
    add_plan_file,
    add_profile_file,
    experiment_config,
    given_profile,
    run_folder,
)
from dflop_jax.cli.terminal import show, ticker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile_file(parser)
    add_plan_file(parser)
    parser.add_argument("--batches", type=int, default=4, help="global batches (default: 4)")


def run(args: argparse.Namespace) -> Any:
    """Write the simulated trace and its picture; returns the step's times."""
    from dflop_jax.plan.evaluate import sample_batches
    from dflop_jax.plan.links import send_seconds, step_end_seconds
    from dflop_jax.profile.fit import CostModel
    from dflop_jax.record_files import load, save
    from dflop_jax.records import Plan
    from dflop_jax.report.run_folder import PLAN, PROFILE, SIMULATED
    from dflop_jax.report.timeline import Panel, draw_timeline, segment_modules
    from dflop_jax.report.trace import write_trace
    from dflop_jax.sim.predict import schedule_batches, simulate_scheduled
    from dflop_jax.train import planning, prepare

    config = experiment_config(args)
    setup = prepare.set_up(config)
    profile = given_profile(args) or prepare.make_profile(
        setup, setup.source(), ticker("profiling")
    )
    if args.plan_file:
        plan = load(Plan, args.plan_file)
    else:
        plan = planning.make_plan(setup, profile, ticker("planning")).plan
    batches = sample_batches(profile.data.shapes, config.train.global_batch, args.batches)
    schedules = schedule_batches(plan, batches, profile.model)
    trace = simulate_scheduled(
        plan,
        schedules,
        profile.model,
        collectives=step_end_seconds(plan, profile.model, setup.hardware),
        sends=send_seconds(plan, CostModel(profile.model), setup.hardware),
    )
    folder = run_folder(config)
    used = [plan.buckets[group[0].bucket].name for s in schedules for group in s.groups]
    write_trace(folder / SIMULATED, [trace], dict(enumerate(used)))
    if not (folder / PLAN).exists():  # that of a run stays
        save(plan, folder / PLAN)
        save(profile, folder / PROFILE)
    names = tuple(m.name for m in plan.submeshes)
    panel = Panel(f"{plan.policy}, simulated", trace, segment_modules(plan), names)
    draw_timeline([panel], folder / "simulated.png")
    summary = {
        "makespan_s": trace.makespan_s,
        "step_s": trace.makespan_s / args.batches,
        "busy_fraction": trace.busy_fraction(),
    }
    if not args.json:
        busy = ", ".join(f"{k} {v:.0%}" for k, v in summary["busy_fraction"].items())
        show(
            f"{args.batches} steps: {1e3 * trace.makespan_s / args.batches:.1f} ms a step, busy "
            f"{busy}; wrote {folder / 'simulated.png'} and {SIMULATED}"
        )
    return summary
