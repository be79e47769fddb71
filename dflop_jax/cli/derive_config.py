"""The configuration of a command line: an experiment file's, or derived from --model and --data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop_jax.cli.experiment import (
    experiment_arguments,
    load_experiment,
    load_record,
    output_folder,
    overrides,
)
from dflop_jax.cli.terminal import DelayedNotes, Parser, make_ticker, print_note
from dflop_jax.config import Config, fields, override
from dflop_jax.preflight.derived_fields import Setting, with_settings
from dflop_jax.records import Plan, Profile

if TYPE_CHECKING:
    from dflop_jax.train.run_context import RunContext

MODEL_FIELDS = ("model.factory", "model.size")  # flags that can name a model instead of --model


@dataclass(frozen=True)
class DerivedConfig:
    config: Config
    settings: tuple[Setting, ...]  # fields derived from --model and --data


def model_data_arguments() -> Parser:
    """Return a parent parser with EXPERIMENT, --model, --data and the overrides."""
    parser = experiment_arguments(is_optional=True)
    names = parser.add_argument_group(
        "model and data by name", "Instead of an experiment file, or of its model and data."
    )
    names.add_argument(
        "--model",
        metavar="FOLDER_OR_NAME",
        help="folder of a published model, or OWNER/NAME[@REVISION] on the hub; sets the factory, "
        "size, weights, tokenizer, chat template and picture limits",
    )
    names.add_argument(
        "--data", metavar="PATH_OR_NAME", help="training data, as --data.path: file, folder or name"
    )
    return parser


def derive_config(args: argparse.Namespace, *, needs_data: bool = True) -> DerivedConfig:
    """Return the configuration of a command line, and the settings derived for it; ValueError if a
    model or data are not found or, with `needs_data`, not given."""
    requested = overrides(args)
    if init := getattr(args, "init_from", None):
        if "model.weights" in requested:
            raise ValueError("--init-from and --model.weights set the same; give one of them")
        requested["model.weights"] = init
    if args.data is not None and "data.path" in requested:
        raise ValueError("--data and --data.path set the same; give one of them")
    experiment_config = load_experiment(args.experiment) if args.experiment else None
    if needs_data and experiment_config is None:
        _check_model_and_data(args, requested)
    settings = _collect_settings(args, requested, experiment_config is not None)
    config = override(with_settings(experiment_config or Config(), settings), requested)
    trains_by_epochs = any(s.name == "train.epochs" for s in settings)
    if trains_by_epochs and "train.epochs" in requested and not config.train.epochs:
        raise ValueError("--train.epochs 0 trains no step; give --train.steps N, or epochs above 0")
    if needs_data:
        from dflop_jax.data.build import check_paths
        from dflop_jax.preflight.huggingface import fetch_datasets

        check_paths(config.data)  # before jax starts, which takes seconds
        fetch_datasets(config.data, print_note)
    derived_settings = {s.name: s for s in settings if s.name not in requested}
    # Drop derived settings whose alternative the user gave.
    with_derived = with_settings(config, derived_settings.values())
    effective_names = {f.name for f in fields() if f.value(with_derived) == f.value(config)}
    return DerivedConfig(
        config, tuple(s for name, s in derived_settings.items() if name in effective_names)
    )


def _check_model_and_data(args: argparse.Namespace, requested: dict[str, str]) -> None:
    if not (args.model or requested.keys() & {*MODEL_FIELDS}):
        raise ValueError(
            "no model: give --model FOLDER_OR_NAME --data PATH_OR_NAME, or an experiment file such "
            "as experiments/demo.py first"
        )
    has_data = args.data or requested.get("data.path") or requested.get("data.factory")
    if args.model and not has_data:
        raise ValueError("no data: give --data PATH_OR_NAME (a JSON file or folder, Parquet, ...)")


def _collect_settings(
    args: argparse.Namespace, requested: dict[str, str], has_experiment: bool
) -> list[Setting]:
    from dflop_jax.preflight.huggingface import model_folder
    from dflop_jax.preflight.model_folder import folder_settings, model_defaults, run_dir_setting
    from dflop_jax.weights import read_config

    settings: list[Setting] = []
    name = requested.get("model.size", "")
    if args.model is not None:
        folder = model_folder(args.model, print_note)
        name = str(folder)
        settings += folder_settings(folder, requested)
        if not has_experiment:
            from dflop_jax.distributed.devices import uses_cpu  # with jax, which takes seconds

            hardware = requested.get("plan.hardware", "")
            gpus = hardware != "cpu" if hardware else not uses_cpu()
            lora = requested.get("train.lora_rank", "0") != "0"
            settings += model_defaults(read_config(folder), gpus=gpus, lora=lora)
    if args.data is not None:
        settings.append(Setting("data.path", args.data, "--data"))
    if not has_experiment:
        settings.append(run_dir_setting(name, args.data or requested.get("data.path", "")))
    return settings


def settings_notes(derived: DerivedConfig) -> DelayedNotes:
    """Return notes which, on the first process of a run, begin with the derived settings."""
    from dflop_jax.distributed.processes import find_processes

    is_first_process = find_processes(derived.config.distributed).index == 0
    notes = DelayedNotes()
    for s in derived.settings if is_first_process else ():
        notes.add(f"  {s.name} {s.text}  ({s.origin})")
    return notes


def open_run_context(
    args: argparse.Namespace, check: Callable[[RunContext], object] = lambda context: None
) -> tuple[RunContext, Profile]:
    """Return the run context of a command line, and the profile of --profile-file or, without it, a
    new one. `check` runs before the profile is measured, to find mistakes early. Prints notes about
    devices and data unless a profile is given."""
    from dflop_jax.aot import chip_profile
    from dflop_jax.train import profiling
    from dflop_jax.train.choose_plan import describe_context, describe_data
    from dflop_jax.train.run_context import make_run_context, with_step_count

    derived = derive_config(args)
    profile = load_record(args, Profile)  # now, so that a wrong file fails early
    notes = settings_notes(derived)
    context = make_run_context(derived.config)
    shows_notes = context.peers.is_primary and (profile is None or derived.settings)
    if shows_notes:
        notes.add(describe_context(context))
    check(context)
    if profile is None:
        source = context.source()
        profiling.check_not_empty(source)
        context = with_step_count(context, len(source))
        if shows_notes:
            requested_batch = derived.config.train.global_batch
            notes.add(describe_data(source, context.config.train, requested_batch))
    notes.show()
    if profile is not None:
        return context, profile
    if context.hardware:
        tick = make_ticker("predicting times", "programs", starts_shown=True)
        return context, chip_profile.predict_profile(context, source, tick, print_note)
    tick = make_ticker("profiling model and data", "shapes", starts_shown=True)
    return context, profiling.make_profile(context, source, tick)


def check_early(args: argparse.Namespace, plan: Plan | None, context: RunContext) -> None:
    """Check before measuring that the output folder can be written, that the plan fits the model
    and, without plan and profile, that some plan is possible."""
    from dflop_jax.runtime.layout import check_model
    from dflop_jax.train import planning

    output_folder(args, context.config, is_kept=False)
    if plan:
        check_model(plan.layout, context.model)
    elif not args.profile_file:
        planning.check_plannable(context)
