"""Arguments of commands that take an experiment: its file and a flag for every field; and reading
the configuration of an experiment file or a run folder."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from dflop_jax.cli.terminal import Options, Parser
from dflop_jax.config import Config, Field, check_effective, fields
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import CONFIG, answer_folder, holds_run
from dflop_jax.train.run_dir import read_run_config

if TYPE_CHECKING:
    from dflop_jax.distributed.messages import ProcessGroup

T = TypeVar("T")
MAX_NAME_LENGTH = 120  # characters of a folder's name
# Arguments that do not change a command's result.
UNNAMED_ARGUMENTS = (
    "command",
    "run",
    "experiment",
    "json",
    "verbose",
    "explain",
    "out",
    "run_dir",
    "cache_dir",
)


def experiment_arguments(*, is_optional: bool = False) -> Parser:
    """Return a parent parser with EXPERIMENT and the overrides."""
    parser = Parser(add_help=False)
    parser.add_argument(
        "experiment",
        nargs="?" if is_optional else None,
        help="Python file whose config() returns a dflop_jax.Config" + "; optional" * is_optional,
    )
    groups: dict[str, Any] = {}
    for leaf in fields():
        section = leaf.name.split(".")[0] if "." in leaf.name else "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(
                section, "Each flag overrides the experiment file; defaults apply without a file."
            )
        default = leaf.value(Config())
        default_text = f" (default: {default})" if default not in ("", ()) else ""
        groups[section].add_argument(
            f"--{leaf.name}",
            dest=leaf.name,
            metavar=_metavar(leaf),
            help=(leaf.help + default_text).replace("%", "%%"),
        )
    return parser


# Metavars of text fields in the help; for fields with several entries, that of one entry.
_METAVARS = {
    "model.weights": "[MODULE=]FOLDER",
    "data.root": "FOLDER",
    "data.columns": "FIELD=COLUMN",
    "data.tokenizer": "PATH",
    "data.frames_per_s": "NUMBER",
    "train.weight_decays": "NAME=NUMBER",
    "train.learning_rates": "NAME=RATE",
    "train.lora_targets": "PATTERN",
    "train.lora_ranks": "PATTERN=RANK",
    "train.profile_steps": "FIRST:LAST",
    "distributed.coordinator": "HOST:PORT",
}
_METAVAR_BY_ENDING = {
    "factory": "MODULE:FUNCTION",
    "path": "PATH",
    "dir": "FOLDER",
    "file": "FILE",
    "bytes": "SIZE",
    "_s": "SECONDS",
}
_METAVAR_BY_TYPE = {bool: "true|false", int: "N", float: "NUMBER"}


def _metavar(leaf: Field) -> str:
    by_ending = (
        metavar for suffix, metavar in _METAVAR_BY_ENDING.items() if leaf.name.endswith(suffix)
    )
    entry = _METAVARS.get(leaf.name) or next(by_ending, _METAVAR_BY_TYPE.get(leaf.kind, "NAME"))
    several = f"{entry}[,{entry}...]" if get_origin(leaf.kind) is tuple else entry
    return "|".join(leaf.choices) or several


def overrides(args: argparse.Namespace) -> dict[str, str]:
    """Return the configuration fields given on a command line, as text by name."""
    return {f.name: v for f in fields() if (v := getattr(args, f.name)) is not None}


def add_cwd_to_path() -> None:
    sys.path[:0] = [p for p in (str(Path.cwd()),) if p not in sys.path]


def load_experiment(path: str) -> Config:
    """Return the configuration from the `config()` of an experiment file; ValueError if the file
    has none."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path}: {_describe_folder(path)}")
    if not file.is_file():
        raise ValueError(
            f"{path}: no such experiment file; give a path such as experiments/demo.py"
        )
    add_cwd_to_path()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"experiment {file}"] = module  # keeps the module loaded
    with _experiment_errors(file, path):
        spec.loader.exec_module(module)
        config = module.config() if hasattr(module, "config") else None
        if isinstance(config, Config):
            changed = {f.name for f in fields() if f.value(config) != f.value(Config())}
            check_effective(config, changed)
            return config
    raise ValueError(f"{path}: defines no config() that returns a dflop_jax.Config; add one")


def _describe_folder(path: str) -> str:
    from dflop_jax.generate.generate import is_published

    if is_published(path):
        return f"is a model's folder, not an experiment file; give it as --model {path}"
    if holds_run(path):
        return (
            f"is a run's folder, not an experiment file; dflop report {path} shows the run; to "
            "continue it, repeat its command with --resume auto"
        )
    return "is a folder, not an experiment file; give a model by --model, data by --data"


@contextmanager
def _experiment_errors(file: Path, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # the user's code may raise anything
        frames = traceback.extract_tb(e.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).absolute() == file.absolute()]
        if isinstance(e, SyntaxError):
            lines = [e.lineno]
        location = f"{path}, line {lines[-1]}" if lines and lines[-1] else path
        kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
        raise ValueError(f"{location}: {kind}{e}; repair the file") from None


PROFILE_FILE: Options = {"--profile-file": ("JSON", "use this profile")}
PLAN_FILE: Options = {"--plan-file": ("JSON", "use this plan")}
OUT_FOLDER: Options = {
    "--out": (
        "FOLDER",
        "output folder (default: run_dir, or if it has a run, a folder in it that "
        "is named after the command and its options)",
    ),
}


def output_folder(args: argparse.Namespace, config: Config, *, is_kept: bool = True) -> Path:
    return answer_folder(config.run_dir, answer_name(args), args.out, is_kept=is_kept)


def answer_name(args: argparse.Namespace) -> str:
    """Return a file name for a command's result: the command, the experiment, and every option that
    changes the result."""
    options = {k: v for k, v in vars(args).items() if k not in UNNAMED_ARGUMENTS and v is not None}
    experiment_stem = [Path(args.experiment).stem] if args.experiment else []
    name_parts = [args.command, *experiment_stem, *(f"{k}-{v}" for k, v in options.items())]
    name = re.sub(r"[^\w.]+", "-", "-".join(name_parts))[:MAX_NAME_LENGTH]
    named_values = [*experiment_stem, *map(str, options.values())]
    if len(name) == MAX_NAME_LENGTH or any(re.search(r"[^\w.]", text) for text in named_values):
        # Other options could give the same name, since it is shortened or has signs replaced.
        name += f"-{hashlib.sha256(','.join(name_parts).encode()).hexdigest()[:8]}"
    return name


def load_record(args: argparse.Namespace, kind: type[T]) -> T | None:
    """Return the Plan of --plan-file or the Profile of --profile-file; None without that option."""
    file = getattr(args, f"{kind.__name__.lower()}_file", None)
    return load(kind, file) if file else None


def finish_run(peers: ProcessGroup, exit_code: int = 0) -> None:
    """End a command together with the other processes of its run, or this process alone."""
    from dflop_jax.distributed.initialize import SHUTDOWN_TIMEOUT_S, shutdown
    from dflop_jax.distributed.process_exit import TRANSIENT_FAILURE, exit_with_message

    peers.close()
    if not shutdown():
        reason = "the run is over, but not all of its processes ended within"
        exit_with_message(f"{reason} {SHUTDOWN_TIMEOUT_S:g} s", exit_code or TRANSIENT_FAILURE)


FACTORY = "model.factory"
MODELS_FOLDER = Path(__file__).parents[2] / "models"
# A function of a module below `models`; ASCII only, so that no look-alike letters pass.
_MODELS_FUNCTION = re.compile(r"(models(?:\.[A-Za-z]\w*)+):([A-Za-z]\w*)", re.ASCII)


def folder_config(folder: str | Path, args: argparse.Namespace) -> Config:
    """Return the configuration of a run folder, except its cache_dir, since compiled programs are
    code. ValueError without a readable config.json, or if its factory is neither a function of this
    program's `models` nor given by the flag `--model.factory`."""
    config = replace(read_run_config(folder), cache_dir=Config().cache_dir)
    if requested_factory := getattr(args, FACTORY):
        add_cwd_to_path()
        return replace(config, model=replace(config.model, factory=requested_factory))
    reason = _why_untrusted(config.model.factory)
    if reason is not None:
        raise ValueError(
            f"{Path(folder, CONFIG)}: {FACTORY}={config.model.factory!r} is not a function of this "
            f"program's package models{reason}, and the folder may be anybody's; if you trust that "
            f"code, name it: --{FACTORY} MODULE:FUNCTION"
        )
    return config


def _why_untrusted(factory: str) -> str | None:
    """Return why a factory is not trusted ("": no further reason); None for a trusted one, which is
    a function defined in a module of this program's `models`."""
    match = _MODELS_FUNCTION.fullmatch(factory)
    if match is None:
        return ""
    package = importlib.util.find_spec("models")  # imports no module of it
    locations = [Path(p) for p in (package.submodule_search_locations or ())] if package else []
    if [p.resolve() for p in locations] != [MODELS_FOLDER.resolve()]:
        return f" (Python finds models in {', '.join(map(str, locations)) or 'no folder'})"
    name, function = match.groups()
    try:
        value = getattr(importlib.import_module(name), function, None)
    except ImportError as e:
        return f" ({e})"
    # An imported function, a class or a module might do anything.
    return None if inspect.isfunction(value) and value.__module__ == name else ""
