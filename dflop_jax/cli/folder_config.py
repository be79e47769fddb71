"""The configuration that a run folder keeps. The folder may be anybody's, and a configuration names
code, so of what it names only functions of this program's package `models` are called."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
from dataclasses import replace
from pathlib import Path

from dflop_jax.cli.experiment import import_from_here
from dflop_jax.config import Config
from dflop_jax.report.run_folder import CONFIG
from dflop_jax.train.run_dir import run_config

FACTORY = "model.factory"
OURS = Path(__file__).parents[2] / "models"
# Of a module below `models`, in ASCII, so that no letter stands for one that looks like it.
_BELOW_MODELS = re.compile(r"(models(?:\.[A-Za-z]\w*)+):([A-Za-z]\w*)", re.ASCII)


def add_factory(parser: argparse.ArgumentParser) -> None:
    """The flag of commands that take no others of the configuration."""
    parser.add_argument(
        f"--{FACTORY}",
        dest=FACTORY,
        metavar="MODULE:FUNCTION",
        help="build the model by this function; of a run folder only those below models. are "
        "called unless they are named here",
    )


def folder_config(folder: str | Path, args: argparse.Namespace) -> Config:
    """The configuration of a run folder, with the factory of the flag `--model.factory` if that is
    given.

    Its cache_dir is not taken from there: compiled programs are code, too.

    Raises:
      ValueError: a folder without a readable config.json, or one whose factory is neither a
        function of this program's `models` nor named by the flag.
    """
    config = replace(run_config(folder), cache_dir=Config().cache_dir)
    if named := getattr(args, FACTORY):
        import_from_here()
        return replace(config, model=replace(config.model, factory=named))
    why = _not_ours(config.model.factory)
    if why is not None:
        raise ValueError(
            f"{Path(folder, CONFIG)}: {FACTORY}={config.model.factory!r} is no function of this "
            f"program's package models{why}, and the folder may be anybody's; if you trust that "
            f"code, name it: --{FACTORY} MODULE:FUNCTION"
        )
    return config


def _not_ours(factory: str) -> str | None:
    """Why a factory is not to be called, perhaps in no words; None for a function that a module of
    this program's `models` defines."""
    match = _BELOW_MODELS.fullmatch(factory)
    if match is None:
        return ""
    package = importlib.util.find_spec("models")  # which imports nothing of it
    places = [Path(p) for p in (package.submodule_search_locations or ())] if package else []
    if [p.resolve() for p in places] != [OURS.resolve()]:
        return f" (Python finds models in {', '.join(map(str, places)) or 'no folder'})"
    name, function = match.groups()
    try:
        value = getattr(importlib.import_module(name), function, None)
    except ImportError as e:
        return f" ({e})"
    # An imported function, a class or a module might do anything.
    return None if inspect.isfunction(value) and value.__module__ == name else ""
