"""`dflop report`: write a page, a table and a picture of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflop_jax.cli.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is the base")
    help_text = (
        "write the page FILE.html and the picture FILE.png (default: report.html and report.png in "
        "the first run's folder; for several runs the picture is compare.png here)"
    )
    parser.add_argument("--out", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> Any:
    from dflop_jax.report.compare import compare, compare_json, summary_table
    from dflop_jax.report.html import write_page
    from dflop_jax.report.reader import read_runs
    from dflop_jax.report.run_folder import PAGE, PICTURE, check_answer_file

    folders = [Path(f) for f in args.runs]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such run folder; check the path, or train it first")
    page, picture = folders[0] / PAGE, folders[0] / PICTURE
    if args.out:
        page, picture = (Path(args.out).with_suffix(s) for s in (".html", ".png"))
    elif len(folders) > 1:
        picture = Path("compare.png")
    for file in (page, picture):
        check_answer_file(file)
    runs = read_runs(folders)
    wrote = [write_page(runs, page, trace_memory)]
    stepped = [r for r in runs if r.rows.n_steps]  # other runs have only a simulated trace
    if stepped:
        table = compare(stepped, picture)
        wrote.append(picture)
        if not args.json:
            show(summary_table(stepped[0]) if len(folders) == 1 else table)
    if not args.json:
        show(f"wrote {' and '.join(map(str, wrote))}")
    return compare_json(stepped) if stepped else {"runs": []}


def trace_memory(folder: Path, plan: Any, trace: Any, labels: Any) -> Any:
    from dflop_jax.plan.memory import memory_of_trace
    from dflop_jax.records import Profile
    from dflop_jax.records.files import load

    profile = load(Profile, folder / "profile.json").model
    return memory_of_trace(plan.layout, profile, trace, labels)
