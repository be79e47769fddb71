"""`dflop train`: profile and plan where needed, then train."""

from __future__ import annotations

import argparse
from typing import Any

from dflop_jax.cli.experiment import (
    add_plan_file,
    add_profile_file,
    experiment_config,
    given_profile,
)
from dflop_jax.cli.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile_file(parser)
    add_plan_file(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
    parser.add_argument(
        "--resume",
        choices=["auto"],
        help="continue the run in the folder from its newest whole checkpoint, if there is one",
    )


def run(args: argparse.Namespace) -> Any:
    """Train; process 0 shows the summary, every process returns what the run came to."""
    from dflop_jax.cluster.distributed import leave, shutdown
    from dflop_jax.record_files import load
    from dflop_jax.records import Plan
    from dflop_jax.report.summary import summarise, summary_table
    from dflop_jax.train.trainer import Trainer

    if args.overwrite and args.resume:
        raise ValueError("--overwrite and --resume exclude each other; give one of them")
    plan = load(Plan, args.plan_file) if args.plan_file else None
    existing: Any = "overwrite" if args.overwrite else "resume" if args.resume else "error"
    config = experiment_config(args)
    trainer = Trainer(config, plan=plan, profile=given_profile(args), existing=existing)
    result = trainer.fit()
    trainer.peers.close()  # from here on a process that ends is no failure
    if not shutdown():
        leave(1)
    if not args.json and trainer.peers.is_hub and result.losses:
        show(summary_table(summarise(result.run_dir)))
        show(f"wrote {result.run_dir}: summary.md, timeline.png, loss.png, trace.json")
    return {
        "run_dir": str(result.run_dir),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "steps_done": result.steps_done,
        "preempted": result.preempted,
        "evaluation": result.evaluation,
        "compiles_after_warmup": result.compiles_after_warmup,
    }
