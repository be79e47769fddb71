"""`dflop train`: profile and plan if needed, then train."""

from __future__ import annotations

import argparse
from typing import Any

from dflop_jax.cli.derive_config import derive_config, settings_notes
from dflop_jax.cli.experiment import (
    PLAN_FILE,
    PROFILE_FILE,
    add_cwd_to_path,
    finish_run,
    load_record,
)
from dflop_jax.cli.terminal import Options, add_options, show
from dflop_jax.config import Config
from dflop_jax.distributed import process_exit
from dflop_jax.distributed.process_exit import PREEMPTED
from dflop_jax.folders import tolerate_lost_log_lines
from dflop_jax.records import Plan, Profile

_OPTIONS: Options = (
    PROFILE_FILE
    | PLAN_FILE
    | {
        "--dry-run": "profile, plan and predict the run's time, then end before the first step, "
        "without a run folder (dflop plan writes the plan)",
        "--reset-optimizer": "with --resume: restore only the parameters, and start with a new "
        "optimizer state",
        "--init-from": (
            "RUN[@STEP]",
            "start from the parameters of another run's newest checkpoint, "
            "or of its checkpoint STEP: the same as --model.weights RUN[@STEP]",
        ),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "On SIGINT, SIGTERM or SIGHUP the run saves a checkpoint and ends with exit code "
        f"{PREEMPTED} (1 without checkpoints); continue it with --resume auto. A second signal "
        "ends it at once. A dry run saves nothing and ends with 1."
    )
    add_options(parser, _OPTIONS)
    callbacks_help = (
        "your own code that is called at steps, evaluations and saves (a dflop_jax.Callback, or a "
        "function that returns one); may be repeated"
    )
    repeated: dict[str, Any] = {"action": "append", "default": [], "metavar": "MODULE:NAME"}
    parser.add_argument("--callbacks", **repeated, help=callbacks_help)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
    resume_help = (
        "continue the run in the folder: from its newest intact checkpoint, if there is one, "
        "or from that of STEP, setting newer ones aside"
    )
    existing.add_argument("--resume", type=_parse_resume, metavar="auto|STEP", help=resume_help)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the fields of `train.callbacks.FitResult` with the first and last loss and
    the exit code; process 0 shows the summary."""
    trainers: list[Any] = []  # the trainer of this run, once it exists

    def stop(signum: int) -> None:
        """End the run between steps; there is nothing to save that is not saved already."""
        reason = f"{process_exit.signal_name(signum)} came while no step ran"
        exit_code = process_exit.FAILED if args.dry_run else PREEMPTED
        for trainer in trainers:
            if not args.dry_run:
                exit_code = _preempted_code(trainer.config)
            trainer.peers.fail(f"process {trainer.peers.process_index} ended: {reason}", exit_code)
        unsaved = "a dry run" if args.dry_run else "a run without checkpoints"
        remedy = f"{unsaved} saves nothing, give the command again"
        remedy = "--resume auto goes on" if exit_code == PREEMPTED else remedy
        process_exit.exit_with_message(f"ended: {reason}; {remedy}", exit_code)

    tolerate_lost_log_lines()
    process_exit.is_cli_process.set()
    try:
        with process_exit.on_signal(stop):
            return _train(args, trainers)
    finally:
        trainers.clear()


def _train(args: argparse.Namespace, trainers: list[Any]) -> dict[str, Any]:
    if args.reset_optimizer and not args.resume:
        raise ValueError(
            "--reset-optimizer needs --resume; leave it out: a new run has a new optimizer state"
        )
    derived = derive_config(args)  # reports wrong arguments before jax is imported
    from dflop_jax.report.run_folder import check_run_dir

    check_run_dir(derived.config.run_dir)
    from dflop_jax.train.callbacks import import_callbacks
    from dflop_jax.train.trainer import Trainer

    plan = load_record(args, Plan)
    if args.callbacks:
        add_cwd_to_path()
    callbacks, profile = import_callbacks(args.callbacks), load_record(args, Profile)
    options = {"existing": _existing_run_policy(args), "callbacks": callbacks, "dry": args.dry_run}
    add_note = settings_notes(derived).add
    trainer = Trainer(derived.config, plan=plan, profile=profile, on_line=add_note, **options)
    trainers.append(trainer)
    result = trainer.fit()
    exit_code = _preempted_code(trainer.config) if result.preempted else 0
    finish_run(trainer.peers, exit_code)
    if trainer.peers.is_primary and not args.json and result.losses:
        from dflop_jax.report.compare import summary_table
        from dflop_jax.report.reader import read_run

        show(summary_table(read_run(result.run_dir)))
        show(f"wrote {result.run_dir}: summary.md, timeline.png, loss.png, trace.json")
    first, last = result.losses[:1] or (None,), result.losses[-1:] or (None,)
    answer = vars(result) | {"run_dir": str(result.run_dir), "exit_code": exit_code}
    del answer["losses"]
    return answer | {"first_loss": first[0], "last_loss": last[0]}


def _existing_run_policy(args: argparse.Namespace) -> Any:
    from dflop_jax.train.resume import Resume

    if args.resume:
        return Resume(None if args.resume == "auto" else int(args.resume), args.reset_optimizer)
    return "overwrite" if args.overwrite else "error"


def _parse_resume(text: str) -> str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: give auto, or the step of a checkpoint")
    return text


def _preempted_code(config: Config) -> int:
    """Return the exit code of a run that a signal ended: 1 if it saves no checkpoints."""
    return PREEMPTED if config.checkpoint.saves else 1
