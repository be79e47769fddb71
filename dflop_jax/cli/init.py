"""`dflop init`: write an experiment file that is equivalent to a command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflop_jax.cli.derive_config import derive_config
from dflop_jax.cli.terminal import show
from dflop_jax.preflight.derived_fields import experiment_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dflop init FILE --model FOLDER_OR_NAME --data PATH_OR_NAME [--section.field VALUE ...]"
    )
    parser.epilog = (
        "Example: dflop init my_run.py --model FOLDER --data d.json; dflop train my_run.py"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write a new experiment FILE, and return it and the number of its fields that differ from the
    defaults of `Config`."""
    if args.experiment is None:
        raise ValueError("no file to write: give one first, as in dflop init my_run.py ...")
    file = Path(args.experiment)
    if file.suffix != ".py":
        raise ValueError(f"{file}: an experiment is a Python file; give a name that ends in .py")
    if file.exists():
        raise ValueError(f"{file}: already exists; give another name or remove it")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file.parent}: no such folder; make it first")
    args.experiment = None  # do not read the file, which does not exist yet
    derived = derive_config(args)
    text, n_changed = experiment_source(derived.config, derived.settings, str(file))
    file.write_text(text, encoding="utf-8")
    if not args.json:
        show(f"wrote {file}: dflop train {file}")
    return {"file": str(file), "fields": n_changed}
