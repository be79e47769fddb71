"""What commands share that answer: whose parameters, and how tokens are drawn."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflop_jax.cli.experiment import experiment_config, overrides
from dflop_jax.cli.folder_config import folder_config
from dflop_jax.config import Config

if TYPE_CHECKING:
    from dflop_jax.generate.sampling import Sampling


def add_ways(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ways",
        type=int,
        default=0,
        help="devices that share one copy of the parameters (default: 0, as few as hold them)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw among this share of the likeliest tokens"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw among so many likeliest tokens (default: 0, all)"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: tokens that prompt and answer have are less likely (default: 1)",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        nargs="+",
        action="extend",
        default=[],
        help="the answer ends before this text",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """What `add_sampling` adds; ValueError: a number out of range."""
    from dflop_jax.generate.sampling import Sampling

    return Sampling(
        args.max_tokens,
        args.temperature,
        args.top_p,
        args.seed,
        args.top_k,
        tuple(args.stop),
        args.repetition_penalty,
    )


def answering_config(args: argparse.Namespace) -> tuple[Config, str]:
    """The configuration of a command line, on all devices unless it says how many, and the folder
    of the parameters: EXPERIMENT is a file, a run folder or a folder of published weights.

    Raises:
      ValueError: none of these.
    """
    from dflop_jax.generate.published import is_published

    if not Path(args.experiment).exists():
        raise ValueError(
            f"{args.experiment}: no such run folder, folder of weights or experiment file; check "
            "the path, or train it first"
        )
    is_folder = Path(args.experiment).is_dir()
    base = None
    if is_folder:
        base = (
            _published(args)
            if is_published(args.experiment)
            else folder_config(args.experiment, args)
        )
    config = experiment_config(args, base)
    if "plan.devices" not in overrides(args):
        config = replace(config, plan=replace(config.plan, devices=0))
    folder = args.experiment if is_folder else config.run_dir
    return config, getattr(args, "checkpoint", None) or folder


def _published(args: argparse.Namespace) -> Config:
    from dflop_jax.cluster.devices import on_cpu
    from dflop_jax.front.model_folder import folder_settings
    from dflop_jax.front.setting import with_settings

    config = with_settings(Config(), folder_settings(Path(args.experiment), overrides(args)))
    model = config.model if on_cpu() else replace(config.model, dtype="bfloat16")
    return replace(config, model=model)
