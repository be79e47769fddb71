"""`dflop check`: look at the machine, the model and the data, without training."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from dflop_jax.cli.derive_config import MODEL_FIELDS, derive_config
from dflop_jax.cli.terminal import make_table, positive_int, print_note, show
from dflop_jax.distributed.process_exit import BAD_INPUT
from dflop_jax.folders import make_folder, writable_path

if TYPE_CHECKING:
    from dflop_jax.config import Config
    from dflop_jax.contract import MultimodalModel
    from dflop_jax.preflight.data_check import DataReport
    from dflop_jax.preflight.derived_fields import Setting
    from dflop_jax.preflight.environment_check import Fact

MAX_SECONDS = 14.0  # of a whole check; the data check gets the remaining time
SAMPLE_TIMEOUT_S = 4.0  # of decoding one sample; also the minimum time for the data check
MAX_EXAMPLES = 3  # examples shown per reason for bad records
# Fields of a `DataReport` that `--json` prints unchanged.
_JSON_FIELDS = (
    "listed",
    "decoded",
    "bad_by_reason",
    "unread",
    "compared",
    "left_out",
    "cut_text",
    "cut_media",
    "too_long",
)
# Factory and size of the model for a check without a model; it takes all kinds of media.
DEFAULT_MODEL = ("models.omni:build", "omni-tiny")
OTHER_PAGE = "choose another --page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code 0, or 2 if training would refuse the data or the model. Without a model, pieces "
        "are counted for a small model that takes all media, and text in bytes unless "
        "--data.tokenizer is given."
    )
    records_help = "maximum records to read (default: 2000)"
    parser.add_argument(
        "--records", type=positive_int, default=2000, metavar="N", help=records_help
    )
    page_help = "file for the results (default: runs/MODEL-DATA-check.txt)"
    parser.add_argument("--page", metavar="TXT", help=page_help)


@dataclass
class _Check:
    """Results of a check: facts, and a report on the data or the reason why there is none."""

    config: Config
    file: Path
    facts: list[Fact]
    settings: tuple[Setting, ...]
    model: MultimodalModel | None = None
    data: DataReport | None = None
    reason: str = ""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print facts and problems of machine, model and data, and write them with samples to a file.

    Returns the result for `--json`: the facts, those that would make a run fail, and fields of the
    `DataReport`, with tokens and pieces per sample as [minimum, median, maximum] by module.
    """
    from dflop_jax.preflight.data_check import DataReport

    started_s = time.monotonic()
    check = _run_checks(args, started_s)
    data_lines = _data_lines(check.data) if check.data else list(filter(None, [check.reason]))
    lines = [f"{f.name}: {f.value}" for f in check.facts] + data_lines
    lines += _sample_lines(check.data) if check.data else ()
    with writable_path(check.file, OTHER_PAGE):
        check.file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if not args.json:
        _show(check, data_lines)
    reasons = {check.reason: 1} if check.reason else {}
    report = check.data or DataReport(check.config.data.path, bad_by_reason=reasons)
    if refusal := check.reason or _why_refused(check, report):
        print_note(f"dflop check: {refusal}")
    return {
        "records": report.read,
        **{name: getattr(report, name) for name in _JSON_FIELDS},
        "tokens": _count_ranges(report.tokens),
        "pieces": _count_ranges(report.pieces),
        "facts": {f.name: f.value for f in check.facts},
        "wrong": {f.name: f.value for f in check.facts if f.wrong},
        "page": str(check.file),
        "seconds": round(time.monotonic() - started_s, 2),
        "exit_code": BAD_INPUT if refusal or check.model is None else 0,
    }


def _why_refused(check: _Check, report: DataReport) -> str:
    """Return why training would refuse the data, or ""."""
    n_bad, max_fraction = sum(report.bad_by_reason.values()), check.config.data.max_bad_fraction
    if check.data is not None and report.read == n_bad:
        return f"no record of {report.source} can be used; {check.file} says why"
    if n_bad <= max_fraction * report.read:
        return ""
    return (
        f"{n_bad} of {report.read} records are unusable, which training refuses; repair them, "
        f"or raise data.max_bad_fraction={max_fraction}"
    )


def _run_checks(args: argparse.Namespace, started_s: float) -> _Check:
    """Check the machine, the model and the data, within `MAX_SECONDS` of `started_s`."""
    from dflop_jax.preflight.environment_check import Fact, environment_facts, model_facts
    from dflop_jax.preflight.huggingface import fetch_datasets
    from dflop_jax.preflight.model_folder import file_name
    from dflop_jax.report.run_folder import check_answer_file

    derived = derive_config(args, needs_data=False)
    config = derived.config
    fetch_datasets(config.data, print_note)
    is_model_named = any(s.name == "model.size" for s in derived.settings) or any(
        vars(args)[name] for name in MODEL_FIELDS
    )
    has_model = bool(args.experiment or is_model_named)
    if not has_model:
        factory, size = DEFAULT_MODEL
        config = replace(config, model=replace(config.model, factory=factory, size=size))
    size = config.model.size if is_model_named else args.experiment or ""
    file = Path(args.page or f"runs/{file_name(size, config.data.path, 'check')}.txt")
    check_answer_file(file)
    make_folder(file.parent, OTHER_PAGE)
    check = _Check(config, file, environment_facts(config), derived.settings)
    check.model, facts = model_facts(config)
    check.facts += facts if has_model or check.model is None else [_no_model_fact(config)]
    if config.data.path and check.model is not None:
        left_s = max(SAMPLE_TIMEOUT_S, MAX_SECONDS - (time.monotonic() - started_s))
        check.data, check.reason = _check_data(config, check.model, args.records, left_s)
        data = check.data if has_model else None
        if reason := _why_too_large(check.model, data, config) if data else "":
            check.facts.append(Fact("largest sample", reason, wrong=True))
    return check


def _show(check: _Check, data_lines: Sequence[str]) -> None:
    rows = [
        (f.name, f"[red]{escape(f.value)}[/red]" if f.wrong else escape(f.value))
        for f in check.facts
    ]
    rows += [(s.name, escape(f"{s.text} ({s.origin})")) for s in check.settings]
    show(make_table("", ("fact", ""), rows, show_header=False))
    for line in data_lines if check.data else ():
        show(escape(line))
    samples = ", with samples as the model gets them" if check.data else ""
    show(f"wrote {check.file}{samples}")


def _no_model_fact(config: Config) -> Fact:
    from dflop_jax.data.text.tokenize import BYTE_TOKENIZER
    from dflop_jax.preflight.environment_check import Fact

    tokenizer = config.data.tokenizer or BYTE_TOKENIZER
    text = "bytes" if tokenizer == BYTE_TOKENIZER else f"tokens of {tokenizer}"
    counts = f"media are counted as by {' '.join(DEFAULT_MODEL)}, text in {text}, and " * bool(
        config.data.path
    )
    return Fact(
        "model",
        f"none given: {counts}weights and memory are not checked; give a model by "
        "--model FOLDER_OR_NAME, or by --model.size NAME",
    )


def _why_too_large(model: MultimodalModel, data: DataReport, config: Config) -> str:
    """Return why the largest samples do not fit into this host's memory, or "". GPU memory is
    checked when a plan is made."""
    import jax

    from dflop_jax.distributed.devices import available_host_bytes
    from dflop_jax.profile.measure import shapes_within
    from dflop_jax.profile.traced_parts import timed_program_bytes
    from dflop_jax.records import Shape

    free = available_host_bytes()
    if config.plan.hardware or jax.default_backend() != "cpu" or free is None:
        return ""
    longest = {
        m: max((n for load in data.loads for n in load.lengths(m)), default=0)
        for m in model.modules
    }
    shapes = {m: [Shape(1, n)] for m, n in longest.items() if n}
    try:
        shapes_within(shapes, free, lambda m, shape: timed_program_bytes(model.modules[m], shape))
    except ValueError as e:
        return str(e)
    return ""


def _check_data(
    config: Config, model: MultimodalModel, max_records: int, seconds: float
) -> tuple[DataReport | None, str]:
    """Return a report on the data and "", or None and why no record can be read."""
    from dflop_jax.data import MediaSpec
    from dflop_jax.preflight.data_check import inspect_dataset

    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    timeout_s = min(SAMPLE_TIMEOUT_S, config.data.sample_timeout_s)
    data, size = replace(config.data, sample_timeout_s=timeout_s), model.vocab_size
    try:
        folder = config.model.size
        return inspect_dataset(data, spec, size, max_records, seconds, folder), ""
    except ValueError as e:
        return None, " ".join(str(e).split())


def _data_lines(data: DataReport) -> list[str]:
    from dflop_jax.data.datasets.index_build import find_remedies
    from dflop_jax.data.datasets.record_table import format_key_counts

    unread = data.unread and f"not read: {format_key_counts(data.unread)}"
    examples = {reason: "; ".join(named[:MAX_EXAMPLES]) for reason, named in data.examples.items()}
    details = [
        *(f"{n:,} {reason}: {examples[reason]}" for reason, n in data.bad_by_reason.items()),
        *filter(None, (data.compared, unread, find_remedies(data.bad_by_reason), data.beginnings)),
    ]
    for name, (minimum, median, maximum) in _count_ranges(data.tokens).items():
        details.append(f"{name}: {minimum:,} to {maximum:,} tokens, median {median:,}")
    return [
        f"{data.source}: {data.summary}; text cut in {data.cut_text:,}, media cut from "
        f"{data.cut_media:,}, {data.too_long:,} too long",
        *(f"  {line}" for line in details),
    ]


def _sample_lines(data: DataReport) -> list[str]:
    longest = (f"  {n:,} tokens: {name}: {media}" for name, n, media in data.longest)
    texts = (f"\n== {name}, {n:,} tokens\n{text}" for name, n, text in data.samples)
    return [
        "longest samples:",
        *longest,
        "\nsamples, with [[supervised text]] and [media] marked:",
        *texts,
        f"\n== chat template\n{data.template}",
    ]


def _count_ranges(values: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Return [minimum, median, maximum] of each array."""
    present = {name: v for name, v in values.items() if len(v)}
    return {n: [int(v.min()), int(np.median(v)), int(v.max())] for n, v in present.items()}
