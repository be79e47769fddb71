"""The `dflop` command, with a subcommand for each stage of a run; `EXIT_CODES` describes its exit
codes.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from dflop_jax.checkpoint.format import StorageError
from dflop_jax.cli.derive_config import model_data_arguments
from dflop_jax.cli.experiment import experiment_arguments
from dflop_jax.cli.terminal import Parser
from dflop_jax.distributed import process_exit
from dflop_jax.folders import DISK_FULL_ERRNOS


class Command(NamedTuple):
    name: str  # also of the module in this folder with its `add_arguments` and `run`
    help: str
    # "": none; "experiment": from an experiment; "model": also from --model and --data
    configuration: Literal["", "experiment", "model"] = "model"


COMMANDS = (
    Command("launch", "start local processes that train together", ""),
    Command("check", "check machine, model and data without training, in 20 s"),
    Command("profile", "measure the data's shapes and the model's times"),
    Command("plan", "choose devices, parallelism and buckets for a policy"),
    Command("compile", "compile a plan's programs for an absent GPU, and check that they fit"),
    Command("simulate", "simulate a plan with measured times, without training"),
    Command("train", "profile and plan if needed, then train"),
    Command("init", "write an experiment file that is equivalent to a command line"),
    Command("generate", "show a trained model's answer to a prompt", "experiment"),
    Command("export", "write a run's weights for transformers", ""),
    Command("verify", "check published weights: round trip, and results beside transformers", ""),
    Command("report", "show one run, or compare several runs, in a table and a page", ""),
)


# Flags of other trainers -> flags here.
OTHER_TRAINERS_FLAGS = {
    "lr": "--train.learning_rate",
    "batch_size": "--train.global_batch",
    "train_batch_size": "--train.global_batch",
    "per_device_train_batch_size": "--train.global_batch",
    "num_train_epochs": "--train.epochs",
    "max_steps": "--train.steps",
    "output_dir": "--run_dir",
    "gradient_checkpointing": "--train.remat",
    "max_length": "--data.max_tokens",
    "lora_r": "--train.lora_rank",
    "hang_least_s": "--distributed.hang_min_s",  # our own former names
    "finalists": "--plan.trials",
}
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad input (one line has the mistake and the remedy), "
    f"{process_exit.PREEMPTED} preempted: a signal ended the run, and its progress is saved, "
    f"{process_exit.TRANSIENT_FAILURE} try again: a process is lost or did not connect, a port is "
    "in use, a lock is held, a disk is full."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    try:
        return process_exit.exit_if_joined(_run(argv))
    except Exception:
        if not process_exit.has_joined_run.is_set():
            raise
        traceback.print_exc()
        process_exit.exit_process(process_exit.FAILED)


def _run(argv: Sequence[str] | None) -> int:
    # Tracing makes millions of long-lived objects. Garbage collection of them would take a tenth of
    # the time until the first step, and would pause one process while the others wait.
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
    )
    try:
        if unknown:
            _reject_arguments(unknown, parser, args.command)
        result = args.run(args)
    except (ValueError, process_exit.RunFailed, OSError) as e:
        message = " ".join(str(e).split())
        if isinstance(e, OSError) and not isinstance(e, StorageError):
            if e.errno not in DISK_FULL_ERRNOS:
                raise
            is_train = args.command == "train"
            remedy = "go on with --resume auto" if is_train else "give the command again"
            file_text = f"{e.filename}: " if e.filename else ""
            message = f"{file_text}{e.strerror}; make room, then {remedy}"
        print(f"dflop {args.command}: {message}", file=sys.stderr)
        return process_exit.exit_code_of(e)
    except KeyboardInterrupt:
        print(f"dflop {args.command}: interrupted", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(msgspec.to_builtins(result), indent=1))
    dict_exit_code = result.get("exit_code", 0) if isinstance(result, dict) else 0
    return getattr(result, "exit_code", dict_exit_code)


def _reject_arguments(unknown: list[str], parser: Parser, command: str) -> None:
    """Raise ValueError for unknown arguments, with the nearest known flag. Flags come first, since
    the value of a misspelt flag may have been parsed as the experiment."""
    flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        raise ValueError(f"unexpected argument {unknown[0]!r}; see dflop {command} --help")
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    known_flags = list(commands.choices[command]._option_string_actions)
    field = flags[0].removeprefix("--")
    equivalent = OTHER_TRAINERS_FLAGS.get(field.rpartition(".")[2].replace("-", "_"))
    nearest = difflib.get_close_matches(flags[0], known_flags, 1, cutoff=0.5)
    nearest = [equivalent] if equivalent in known_flags else nearest
    argument_text = f"override {field}" if "." in field else f"option {flags[0]}"
    suggestion = nearest[0].removeprefix("--") if "." in field and nearest else "".join(nearest[:1])
    hint = f"did you mean {suggestion}?" if nearest else f"see dflop {command} --help for the names"
    raise ValueError(f"unknown {argument_text}; {hint}")


class _ShowVersion(argparse.Action):
    """Prints versions; looked up only on demand, since the package may not be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"dflop_jax {metadata.version('dflop_jax')}, jax {metadata.version('jax')}")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="dflop",
        description="Data-aware training of multimodal LLMs on JAX device meshes.",
        epilog="To begin: dflop train experiments/demo.py; then dflop report runs/demo/dflop. With "
        "your own model and data: dflop train --model FOLDER_OR_NAME --data PATH. "
        f"{EXIT_CODES}",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("--verbose", action="store_true", help="show log messages of level INFO")
    experiment, front_door = experiment_arguments(), model_data_arguments()
    named = "--model FOLDER_OR_NAME --data PATH_OR_NAME"
    fields = "[--section.field VALUE ...]"
    parents_by_configuration = {
        "": ("RUN [RUN ...]", [common]),
        "experiment": (f"EXPERIMENT {fields}", [common, experiment]),
        "model": (f"(EXPERIMENT | {named}) {fields}", [common, front_door]),
    }
    for command in COMMANDS:
        usage, parents = parents_by_configuration[command.configuration]
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            usage=f"dflop {command.name} {usage} [options]",
            parents=parents,
            allow_abbrev=False,
        )
        module = importlib.import_module(f"dflop_jax.cli.{command.name}")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
