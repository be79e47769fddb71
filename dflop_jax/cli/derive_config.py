"""A model and data that are named in the place of an experiment file, and what a run of them starts
from."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop_jax.cli.experiment import (
    experiment_arguments,
    given_record,
    load_experiment,
    out_folder,
    overrides,
)
from dflop_jax.cli.terminal import HeldNotes, Parser, note, ticker
from dflop_jax.config import Config, fields, override
from dflop_jax.preflight.derived_fields import Setting, with_settings
from dflop_jax.records import Plan, Profile

if TYPE_CHECKING:
    from dflop_jax.data import Source
    from dflop_jax.train.run_context import RunContext

MODEL_FIELDS = ("model.factory", "model.size")  # that name a model, too


@dataclass(frozen=True)
class Asked:
    """What a command line amounts to.

    Attributes:
      settings: of the front door that stand in `config`, with where each is from.
    """

    config: Config
    settings: tuple[Setting, ...]


def front_door_arguments() -> Parser:
    """A parent parser with EXPERIMENT, a model and data by name, and the overrides."""
    parser = experiment_arguments(optional=True)
    names = parser.add_argument_group(
        "model and data by name", "In the place of an experiment file, or in that of its own."
    )
    names.add_argument(
        "--model",
        metavar="FOLDER_OR_NAME",
        help="folder of a published model, or OWNER/NAME[@REVISION] on the hub: its factory, size, "
        "weights, tokenizer, template and limits of pictures",
    )
    names.add_argument(
        "--data", metavar="PATH_OR_NAME", help="the data, as --data.path: file, folder or name"
    )
    return parser


def asked(args: argparse.Namespace, *, whole: bool = True) -> Asked:
    """The configuration of a command line, and what of it the front door chose.

    Args:
      whole: model and data have to be named.

    Raises:
      ValueError: a model or data that cannot be found or are named twice, or none where `whole`.
    """
    given = overrides(args)
    if init := getattr(args, "init_from", None):
        if "model.weights" in given:
            raise ValueError("--init-from and --model.weights say the same; give one of them")
        given["model.weights"] = init
    if args.data is not None and "data.path" in given:
        raise ValueError("--data and --data.path say the same; give one of them")
    by_file = load_experiment(args.experiment) if args.experiment else None
    if whole and by_file is None:
        _check_named(args, given)
    settings = _settings(args, given, by_file is not None)
    config = override(with_settings(by_file or Config(), settings), given)
    by_epochs = any(s.name == "train.epochs" for s in settings)
    if by_epochs and "train.epochs" in given and not config.train.epochs:
        raise ValueError(
            "--train.epochs 0 shows no sample; give --train.steps N, or epochs above 0"
        )
    if whole:
        from dflop_jax.data.build import check_paths
        from dflop_jax.preflight.huggingface import fetch_datasets

        check_paths(config.data)  # before jax starts, which takes seconds
        fetch_datasets(config.data, note)
    standing = {s.name: s for s in settings if s.name not in given}
    # What the user gives in another way is out of force.
    chosen = with_settings(config, standing.values())
    in_force = {f.name for f in fields() if f.value(chosen) == f.value(config)}
    return Asked(config, tuple(s for name, s in standing.items() if name in in_force))


def _check_named(args: argparse.Namespace, given: dict[str, str]) -> None:
    if not args.model and not any(name in given for name in MODEL_FIELDS):
        raise ValueError(
            "no model: give --model FOLDER_OR_NAME --data PATH_OR_NAME, or an experiment file such "
            "as experiments/demo.py first"
        )
    if args.model and not args.data and not (given.get("data.path") or given.get("data.factory")):
        raise ValueError("no data: give --data PATH_OR_NAME (a JSON file or folder, Parquet, ...)")


def _settings(args: argparse.Namespace, given: dict[str, str], by_file: bool) -> list[Setting]:
    from dflop_jax.preflight.huggingface import model_folder
    from dflop_jax.preflight.model_folder import folder_settings, model_defaults, run_dir
    from dflop_jax.weights import read_config

    settings: list[Setting] = []
    name = given.get("model.size", "")
    if args.model is not None:
        folder = model_folder(args.model, note)
        name = str(folder)
        settings += folder_settings(folder, given)
        if not by_file:
            from dflop_jax.distributed.devices import uses_cpu  # with jax, which takes seconds

            hardware = given.get("plan.hardware", "")
            gpus = hardware != "cpu" if hardware else not uses_cpu()
            lora = given.get("train.lora_rank", "0") != "0"
            settings += model_defaults(read_config(folder), gpus=gpus, lora=lora)
    if args.data is not None:
        settings.append(Setting("data.path", args.data, "--data"))
    if not by_file:
        settings.append(run_dir(name, args.data or given.get("data.path", "")))
    return settings


@contextmanager
def said(ask: Asked) -> Iterator[HeldNotes]:
    """Notes that begin with what the front door chose and where each is from, on the first process
    of a run; dropped where an error comes before they are shown."""
    from dflop_jax.distributed.processes import find_processes

    first = find_processes(ask.config.distributed).index == 0
    notes = HeldNotes()
    for s in ask.settings if first else ():
        notes.add(f"  {s.name} {s.text}  ({s.origin})")
    try:
        yield notes
    finally:
        notes.drop()


def open_place(
    args: argparse.Namespace, refuse: Callable[[RunContext], object] = lambda place: None
) -> tuple[RunContext, Profile]:
    """The workplace of a command line, and the profile: that of --profile-file, else a new one of
    the data. Says what workplace and data are, but with a profile only where no experiment file
    does: the answer comes at once then, and a mistake stands alone.

    Args:
      refuse: raises ValueError for what no measurement would change.
    """
    from dflop_jax.train.choose_plan import describe_context, describe_data
    from dflop_jax.train.profiling import check_not_empty
    from dflop_jax.train.run_context import make_run_context, with_step_count

    ask = asked(args)
    profile = given_record(args, Profile)  # refused now rather than when it is used
    with said(ask) as notes:
        place = make_run_context(ask.config)
        says = place.peers.is_primary and (profile is None or ask.settings)
        if says:
            notes.add(describe_context(place))
        refuse(place)
        if profile is None:
            source = place.source()
            check_not_empty(source)
            place = with_step_count(place, len(source))
            if says:
                asked_batch = ask.config.train.global_batch
                notes.add(describe_data(source, place.config.train, asked_batch))
        notes.show()
    return place, profile or _new_profile(place, source)


def _new_profile(place: RunContext, source: Source) -> Profile:
    """The profile of data, measured here or predicted for `plan.hardware`."""
    from dflop_jax.aot.chip_profile import predict_profile
    from dflop_jax.train import profiling

    if place.hardware:
        tick = ticker("predicting prices", "programs", at_once=True)
        return predict_profile(place, source, tick, note)
    tick = ticker("profiling model and data", "shapes", at_once=True)
    return profiling.make_profile(place, source, tick)


def refuse_early(
    args: argparse.Namespace, plan: Plan | None = None
) -> Callable[[RunContext], None]:
    """What refuses, before anything is measured, a folder that the answer cannot go to, and a plan
    that does not fit the model or, without plan and profile, what cannot be planned."""

    def refuse(place: RunContext) -> None:
        from dflop_jax.runtime.layout import check_model
        from dflop_jax.train import planning

        out_folder(args, place.config, keep=False)
        if plan:
            check_model(plan.layout, place.model)
        elif not args.profile_file:
            planning.check_plannable(place)

    return refuse
