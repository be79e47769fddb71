"""`dflop check`: look at the machine, the model and the data, without training."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from dflop_jax.cli.derive_config import MODEL_FIELDS, derive_config
from dflop_jax.cli.terminal import make_table, print_note, show
from dflop_jax.distributed.process_exit import BAD_INPUT
from dflop_jax.folders import make_folder, writable_path

if TYPE_CHECKING:
    from dflop_jax.config import Config
    from dflop_jax.contract import MultimodalModel
    from dflop_jax.preflight.data_check import DataReport
    from dflop_jax.preflight.environment_check import Fact

MAX_SECONDS = 14.0  # for all, of which the data have what the rest leaves
MIN_DATA_S = 4.0  # for the data
# Of a `DataReport`, what `--json` prints as it is.
_JSON_FIELDS = ("listed", "decoded", "bad_by_reason", "unread", "compared", "left_out", "cut_text",
         "cut_media", "too_long")  # fmt: skip
MAX_EXAMPLES = 3  # of what is wrong with records
SAMPLE_TIMEOUT_S = 4.0  # for a sample that hurts its decoder
DEFAULT_MODEL = (
    "models.omni:build",
    "omni-tiny",
)  # takes every kind of media, where no model is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code 0, or 2 where training would refuse the data or the model. Without a model, "
        "pieces are those of a small one that takes all media, and text is counted in bytes unless "
        "--data.tokenizer is given."
    )
    parser.add_argument(
        "--records", type=int, default=2000, metavar="N", help="records read at most (2000)"
    )
    parser.add_argument(
        "--page", metavar="TXT", help="write it there (default: runs/MODEL-DATA-check.txt)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print what there is and what is wrong with it, and write it with samples to a file.

    Returns what `--json` prints: facts and, of these, what a run would fail by; of the data what
    `DataReport` says, its tokens and pieces as [least, median, greatest] of a sample, by module.
    """
    from dflop_jax.preflight.data_check import DataReport
    from dflop_jax.preflight.environment_check import Fact, environment_facts, model_facts
    from dflop_jax.preflight.huggingface import fetch_datasets
    from dflop_jax.preflight.model_folder import file_name
    from dflop_jax.report.run_folder import check_answer_file

    begun_s = time.monotonic()
    if args.records < 1:
        raise ValueError(f"--records {args.records} must be at least 1")
    ask = derive_config(args, needs_data=False)
    config = ask.config
    fetch_datasets(config.data, print_note)
    names_model = any(s.name == "model.size" for s in ask.settings) or any(
        vars(args)[name] for name in MODEL_FIELDS
    )
    is_named = bool(args.experiment or names_model)
    if not is_named:
        factory, size = DEFAULT_MODEL
        config = replace(config, model=replace(config.model, factory=factory, size=size))
    size = config.model.size if names_model else args.experiment or ""
    file = Path(args.page or f"runs/{file_name(size, config.data.path, 'check')}.txt")
    check_answer_file(file)
    another = "choose another --page"
    make_folder(file.parent, another)
    facts = environment_facts(config)
    model, of_model = model_facts(config)
    facts += of_model if is_named or model is None else [_no_model_fact(config)]
    data, why = None, ""
    if config.data.path and model is not None:
        left_s = max(MIN_DATA_S, MAX_SECONDS - (time.monotonic() - begun_s))
        data, why = _check_data(config, model, args.records, left_s)
    if (
        data
        and model is not None
        and is_named
        and (too_large := _why_too_large(model, data, config))
    ):
        facts.append(Fact("largest sample", too_large, wrong=True))
    lines = _data_lines(data) if data else [why] if why else []
    written = [
        *(f"{f.name}: {f.value}" for f in facts),
        *lines,
        *(_sample_lines(data) if data else ()),
    ]
    with writable_path(file, another):
        file.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    seen = data or DataReport(config.data.path, bad_by_reason={why: 1} if why else {})
    n_bad = sum(seen.bad_by_reason.values())
    unreadable = why or (data is not None and seen.read == n_bad)
    too_many = n_bad > config.data.max_bad_fraction * seen.read
    if not args.json:
        shown = [(f.name, f"[red]{escape(f.value)}[/red]" if f.wrong else escape(f.value))
                 for f in facts]  # fmt: skip
        shown += [(s.name, escape(f"{s.text} ({s.origin})")) for s in ask.settings]
        show(make_table("", ("here", ""), shown, show_header=False))
        for line in lines if data else ():
            show(escape(line))
        show(f"wrote {file}, with samples as the model is given them" if data else f"wrote {file}")
    if unreadable:
        print_note(
            f"dflop check: {why or f'no record of {seen.source} can be used; {file} says why'}"
        )
    elif too_many:
        print_note(
            f"dflop check: {n_bad} of {seen.read} records are unusable, which training refuses; "
            f"repair them, or raise data.max_bad_fraction={config.data.max_bad_fraction}"
        )
    return {
        "records": seen.read,
        **{name: getattr(seen, name) for name in _JSON_FIELDS},
        "tokens": _count_ranges(seen.tokens),
        "pieces": _count_ranges(seen.pieces),
        "facts": {f.name: f.value for f in facts},
        "wrong": {f.name: f.value for f in facts if f.wrong},
        "page": str(file),
        "seconds": round(time.monotonic() - begun_s, 2),
        "exit_code": BAD_INPUT if unreadable or too_many or model is None else 0,
    }


def _no_model_fact(config: Config) -> Fact:
    """What stands in for a model where none is named."""
    from dflop_jax.data.text.tokenize import BYTE_TOKENIZER
    from dflop_jax.preflight.environment_check import Fact

    tokenizer = config.data.tokenizer or BYTE_TOKENIZER
    text = "bytes" if tokenizer == BYTE_TOKENIZER else f"tokens of {tokenizer}"
    counts = f"media are counted as by {' '.join(DEFAULT_MODEL)}, text in {text}, and " * bool(
        config.data.path
    )
    return Fact("model", f"none named: {counts}weights and memory are not looked at; give yours by "
                "--model FOLDER_OR_NAME, or by --model.size NAME")  # fmt: skip


def _why_too_large(model: MultimodalModel, data: DataReport, config: Config) -> str:
    """Why the largest samples do not fit into the memory of this host's CPU devices, "" where they
    do; of GPUs memory is looked at when a plan is made."""
    import jax

    from dflop_jax.distributed.devices import available_host_bytes
    from dflop_jax.profile.shapes import shapes_within
    from dflop_jax.profile.traced_parts import probe_bytes
    from dflop_jax.records import Shape

    free = available_host_bytes()
    if config.plan.hardware or jax.default_backend() != "cpu" or free is None:
        return ""
    longest = {m: max((n for load in data.loads for n in load.lengths(m)), default=0)
               for m in model.modules}  # fmt: skip
    shapes = {m: [Shape(1, n)] for m, n in longest.items() if n}
    try:
        shapes_within(shapes, free, lambda m, shape: probe_bytes(model.modules[m], shape))
    except ValueError as e:
        return str(e)
    return ""


def _check_data(
    config: Config, model: MultimodalModel, max_records: int, seconds: float
) -> tuple[DataReport | None, str]:
    """What a look at the data saw, or why nothing of them can be read."""
    from dflop_jax.data import MediaSpec
    from dflop_jax.preflight.data_check import inspect_dataset

    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    data = replace(
        config.data, sample_timeout_s=min(SAMPLE_TIMEOUT_S, config.data.sample_timeout_s)
    )
    try:
        size, folder = model.vocab_size, config.model.size
        return inspect_dataset(data, spec, size, max_records, seconds, model=folder), ""
    except ValueError as e:
        return None, " ".join(str(e).split())


def _data_lines(data: DataReport) -> list[str]:
    """What is said of the data."""
    from dflop_jax.data.datasets.index_build import find_remedies
    from dflop_jax.data.datasets.record_table import format_key_counts

    unread = data.unread and f"not read: {format_key_counts(data.unread)}"
    examples = {reason: "; ".join(named[:MAX_EXAMPLES]) for reason, named in data.examples.items()}
    details = [
        *(f"{n:,} {reason}: {examples[reason]}" for reason, n in data.bad_by_reason.items()),
        *filter(None, (data.compared, unread, find_remedies(data.bad_by_reason), data.beginnings)),
        *(
            f"{name}: {minimum:,} to {maximum:,} tokens, median {median:,}"
            for name, (minimum, median, maximum) in _count_ranges(data.tokens).items()
        ),
    ]
    return [
        f"{data.source}: {data.summary}; text cut of {data.cut_text:,}, media gone from "
        f"{data.cut_media:,}, {data.too_long:,} too long",
        *(f"  {line}" for line in details),
    ]


def _sample_lines(data: DataReport) -> list[str]:
    """The longest samples and some as the model is given them, with the chat template."""
    longest = (f"  {n:,} tokens: {name}: {media}" for name, n, media in data.longest)
    texts = (f"\n== {name}, {n:,} tokens\n{text}" for name, n, text in data.samples)
    return [
        "longest samples:", *longest,
        "\nsamples, [[what is trained on]] and [media] marked:", *texts,
        f"\n== chat template\n{data.template}",
    ]  # fmt: skip


def _count_ranges(values: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Least, median and greatest of each."""
    return {
        name: [int(v.min()), int(np.median(v)), int(v.max())]
        for name, v in values.items()
        if len(v)
    }
