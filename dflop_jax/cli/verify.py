"""`dflop verify`: check a round trip of published weights, and compare with transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from dflop_jax.cli.experiment import load_record
from dflop_jax.cli.terminal import make_table, make_ticker, show
from dflop_jax.records import Plan

if TYPE_CHECKING:
    from dflop_jax.verify.verify import VerifyResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dflop verify FOLDER [--plan-file FILE] [--json]"
    parser.epilog = (
        "Every tensor must survive the round trip bit by bit. If torch and transformers are "
        "installed, logits and gradients of samples must equal theirs. Exit code 1 if not."
    )
    parser.add_argument("folder", metavar="FOLDER", help="published weights and their config.json")
    help_text = "plan whose shards are used (default: one that cuts modules and splits tensors)"
    parser.add_argument("--plan-file", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> VerifyResult:
    from dflop_jax.verify.verify import verify

    result = verify(Path(args.folder), load_record(args, Plan), make_ticker("reading", "segments"))
    if not args.json:
        show(_groups_table(result))
        show(_describe_result(result))
    return result


def _groups_table(result: VerifyResult) -> Table:
    rows = []
    for g in result.groups:
        identical = "all" if g.identical == g.tensors else f"{g.identical} of {g.tensors}"
        error = "" if g.max_grad_error is None else f"{g.max_grad_error:.1e}"
        rows.append((g.name, str(g.tensors), f"{g.n_bytes / 1e6:.2f}", identical, error))
    columns = ("tensors", "number", "MB", "bit-identical", "largest gradient error")
    return make_table(f"{result.folder} ({result.model_type})", columns, rows)


def _describe_result(result: VerifyResult) -> str:
    verdict = "verified" if result.exit_code == 0 else "NOT verified"
    if result.not_compared:
        return f"{verdict}; logits and gradients were not compared: {result.not_compared}"
    reference = "transformers'" if result.rounding is None else "those of transformers in float64"
    sentence = (
        f"{verdict}; logits differ from {reference} by {result.max_logit_error:.1e} of the largest "
        f"({result.largest_logit:.1f}; of 1 at least), gradients by {result.max_grad_error:.1e} of "
        "their tensor's largest entry"
    )
    if result.rounding is None:
        return sentence
    (logit, gradient), (max_logit, max_gradient) = result.rounding, result.limits
    return (
        f"{sentence}; its own float32 by {logit:.1e} and {gradient:.1e}, so errors up to "
        f"{max_logit:.1e} and {max_gradient:.1e} count as equal"
    )
