"""`dflop evaluate`: a trained model's answers to records, and how good they are."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflop_jax.cli.answering import add_sampling, add_ways, answering_config, sampling_of
from dflop_jax.cli.experiment import end_together, overrides
from dflop_jax.cli.terminal import show
from dflop_jax.folders import made

if TYPE_CHECKING:
    from dflop_jax.evaluate.run import Evaluated

ANSWERS, RESULT, PAGE = "answers.jsonl", "evaluation.json", "answers.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: dflop evaluate runs/mine --data docvqa.parquet --metrics anls --samples 500. "
        "EXPERIMENT may be a run folder or a folder of published weights. Records are those that "
        "training takes, and tables of questions: question or query, answers, answer or label, "
        "choices or options, image or image_1 and on; --data.columns names others. Without --data "
        "the held-out samples of the run's embedded scenes. Of several processes (dflop launch) "
        "each answers its share."
    )
    parser.add_argument(
        "--checkpoint",
        metavar="RUN",
        help="run folder, for its newest checkpoint, or one of its checkpoints (default: the "
        "experiment's run_dir)",
    )
    parser.add_argument("--data", metavar="PATH", help="the records, as --data.path")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=["exact"],
        metavar="NAME",
        help="exact, relaxed (numbers within 5%%), anls, choice, wer (default: exact)",
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="records drawn (default: 0, all)"
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="answers of a process at once (default: 16)"
    )
    parser.add_argument("--out", metavar="FOLDER", help="default: RUN/evaluated")
    add_sampling(parser)
    add_ways(parser)


def run(args: argparse.Namespace) -> Evaluated:
    """Answer and score; process 0 writes and shows the table."""
    from dflop_jax.evaluate import questions
    from dflop_jax.evaluate.metrics import check_metrics
    from dflop_jax.evaluate.page import page
    from dflop_jax.evaluate.run import evaluate
    from dflop_jax.generate.generate import Generator
    from dflop_jax.train.prepare import set_up

    check_metrics(args.metrics)
    if args.samples < 0 or args.batch < 1:
        raise ValueError("--samples is at least 0 (all), --batch at least 1")
    how = sampling_of(args)
    config, source = answering_config(args)
    if args.data is not None:
        if "data.path" in overrides(args):
            raise ValueError("--data and --data.path say the same; give one of them")
        data = replace(config.data, path=args.data, factory="", columns=config.data.columns)
        config = replace(config, data=data)
    if not config.data.path and config.data.factory:
        raise ValueError("--data: say which records; a run's own data.factory has none")
    folder = Path(args.out or Path(source) / "evaluated")
    place = set_up(config)
    generator = Generator(config, source, place.devices, rows=args.batch, ways=args.ways)
    tokenizer = generator.tokenizer
    if config.data.path:
        asked = questions.of_records(config.data, generator.model, tokenizer, args.samples)
    else:
        scenes = place.source("eval")
        asked = questions.of_source(scenes, tokenizer, args.samples, config.data.seed)
    made(folder, "choose another --out")  # before what takes its time
    result = evaluate(generator, asked, how, args.metrics, place.peers)
    if place.peers.is_hub:
        lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in result.answers)
        (folder / ANSWERS).write_text("".join(lines), encoding="utf-8")
        facts = {"samples": result.samples, "metrics": result.metrics, "checkpoint": str(source),
                 "step": generator.loaded.step, "data": config.data.path}  # fmt: skip
        (folder / RESULT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        title = f"dflop evaluate {source} {config.data.path}".strip()
        (folder / PAGE).write_text(page(result, title), encoding="utf-8")
        if not args.json:
            for name, value in result.metrics.items():
                show(f"{name}: {'no references' if value is None else f'{value:.4f}'}")
            show(f"{result.samples:,} answers; wrote {folder}: {PAGE}, {ANSWERS}, {RESULT}")
    end_together(place.peers)
    return result
