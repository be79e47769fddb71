"""Padding of pictures and clips at native resolution, through what a run plans and schedules with.

Command:  python benchmarks/native_padding.py --json native_padding.json
Minutes:  about 4 on 2 cores; --train 200 takes 6 more
Expected: with clips, about 2% of patches and 4% of LLM tokens padded with four shapes; 9% and 12%
          without, where few large samples set the sizes; no sample without room; no compile after
          warm-up in the steps of --train

Sizes are those of real samples (../shared/data/shapes), prepared as Qwen3-VL does: pictures of up
to 8,192 patches, samples of up to 8,192 LLM tokens, frames of clips (whose sizes are not known) of
640 x 360 pixels. Buckets are chosen by 2,000 of them, as a run's profile has, and one more for the
largest of all; then every step's batch, in a run's own order, goes through the schedule worker.
Encoder and LLM have four data ranks each, on devices of their own, and take as long as each other.
The baseline takes samples as they come, each in a row as long as the longest.

--train N runs the small Qwen3-VL of experiments/qwen3vl.py for N steps and counts compiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows, write_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from schedule_data import TRACES  # noqa: E402
from shape_problems import even_seconds, problem_of, whole_modules  # noqa: E402

from dflop_jax.data.datasets.shape_index import table_of  # noqa: E402
from dflop_jax.data.media.counts import fit, load_of, most_demanding  # noqa: E402
from dflop_jax.data.media.limits import Limits  # noqa: E402
from dflop_jax.data.media.native import MAX_RATIO  # noqa: E402
from dflop_jax.data.media.spec import MediaSpec  # noqa: E402
from dflop_jax.data.shuffle import shuffled  # noqa: E402
from dflop_jax.data.text.pieces import ANSWER_TOKENS, ByteTokenizer  # noqa: E402
from dflop_jax.records import Edge, Load, Plan, Prices, Shape  # noqa: E402
from dflop_jax.records.plan import Grouping  # noqa: E402
from dflop_jax.schedule import (  # noqa: E402
    ScheduleWorker,
    arrival_buckets,
    choose_buckets,
)
from dflop_jax.schedule.counts.program import canonical, sizes_of  # noqa: E402
from dflop_jax.schedule.shapes.spare import beyond, spare_bucket  # noqa: E402
from dflop_jax.schedule.worker_main import SolverSetup  # noqa: E402

GLOBAL_BATCH, RANKS, BUCKETS, PROFILED, MAX_TAIL = 128, 4, 4, 2000, 64
ROW_TOKENS, ROW_PATCHES, PATCH_PX = 8192, 8192, 16
MAX_FRAMES = 192  # of a clip, whose times of frames leave room for its pixels in a row
FRAME, RATE = (640, 360), (30, 1)
CHARS_PER_TOKEN, TEMPLATE_TOKENS = 4, 20
SPEC = MediaSpec.of(
    {"vision": {"form": "native", "patch_px": PATCH_PX, "merge": 2, "frames": 2}}, {}
)
GROUPINGS: tuple[Grouping, ...] = ("balanced", "arrival")
KINDS = {"pictures and text": False, "clips too": True}


@dataclass(frozen=True)
class Row:
    """One kind of data under one way of grouping; paddings are shares, means over steps."""

    data: str
    grouping: str
    samples: int
    steps: int
    shapes: list[str]
    patches_padded: float
    tokens_padded: float
    makespan_s: float
    without_room: int
    shapes_run: int


def trace_rows(folder: Path, clips: bool) -> list[dict]:
    files = sorted(folder.glob("*.jsonl"))
    rows = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    return [r for r in rows if not r["audio_s"] and (clips or not r["video_s"])]


def headers_of(row: Mapping) -> list[dict[str, int]]:
    """What an index would hold of the media of a sample, without or with a clip."""
    if not row["video_s"]:
        return [
            {"kind": 0, "tokens_before": k, "width": width, "height": height}
            for k, (width, height) in enumerate(row["images"])
        ]
    facts = {"width": FRAME[0], "height": FRAME[1], "rate_num": RATE[0], "rate_den": RATE[1]}
    return [{"kind": 1, "total": max(2, int(row["video_s"] * RATE[0])), **facts}]


def loads_of(folder: Path, clips: bool) -> list[Load]:
    """Loads as the data room makes them: media first, and what is too long is cut."""
    rows, limits = trace_rows(folder, clips), Limits(
        max_tokens=ROW_TOKENS, max_frames=MAX_FRAMES, max_pixels=ROW_PATCHES * PATCH_PX**2,
        max_clip_pixels=ROW_PATCHES * PATCH_PX**2 * 6,
    )  # fmt: skip
    how = SPEC.prepared(limits, ByteTokenizer())
    rows = [r for r in rows if all(max(s) <= MAX_RATIO * min(s) for s in r["images"])]
    records = []
    for row in rows:
        prompt = row["prompt_chars"] // CHARS_PER_TOKEN + TEMPLATE_TOKENS
        answer = row["answer_chars"] // CHARS_PER_TOKEN
        needed = prompt + min(answer, ANSWER_TOKENS)
        records.append({"text_tokens": prompt + answer, "needed_tokens": needed})
    table = table_of(records, [headers_of(r) for r in rows])
    counts, fits = fit(table, how, limits)
    return [
        load_of(table, i, how, counts.taken(slice(i, i + 1))) for i in np.flatnonzero(fits).tolist()
    ]


def profiled(loads: Sequence[Load]) -> tuple[list[Load], list[Load]]:
    """What a run knows of its data before it plans: an even share, and the tail of all."""
    some = [loads[i * len(loads) // PROFILED] for i in range(PROFILED)]
    asks = [(s.tokens("llm"), len(s.lengths("vision")), s.tokens("vision"),
             max(s.lengths("vision"), default=0)) for s in loads]  # fmt: skip
    return some, [loads[i] for i in most_demanding(np.array(asks), MAX_TAIL)]


def planned(some: Sequence[Load], tail: Sequence[Load], grouping: Grouping) -> tuple[Plan, Prices]:
    ranks = {"vision": RANKS, "llm": RANKS}
    layout = whole_modules(ranks, (Edge("vision", "llm", "vision"),))
    problem = problem_of(
        layout, even_seconds(some, ranks, GLOBAL_BATCH), GLOBAL_BATCH, n_buckets=BUCKETS
    )
    if grouping == "arrival":
        buckets = arrival_buckets([*some, *tail], ranks, per_rank=4, n_buckets=BUCKETS)
    else:
        buckets = choose_buckets(some, problem).buckets
    plan = problem.with_buckets(buckets).with_scheduling(grouping=grouping)
    large = [tail[i] for i in beyond(tail, plan)]
    if large:
        spare = spare_bucket(large, problem.capacity, {}, problem.token_multiple)
        plan = plan.with_layout(buckets=(*plan.layout.buckets, spare))
    return plan, problem.prices(plan.layout)


def run(data: str, loads: Sequence[Load], grouping: Grouping, steps: int) -> Row:
    """Schedule the batches of so many steps as a run does."""
    plan, prices = planned(*profiled(loads), grouping)
    without_room = set(beyond(loads, plan))

    def batch(step: int) -> list[Load]:
        places = np.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH
        drawn = shuffled(places, len(loads), 0).tolist()
        return [loads[i] for i in drawn if i not in without_room]

    padded: dict[str, list[float]] = {m: [] for m in plan.layout.modules}
    spans: list[float] = []
    shapes: set[tuple[str, Shape]] = set()
    program = canonical(sizes_of(plan.layout))
    setup = SolverSetup(plan, plan.layout.modules, program=program)
    with ScheduleWorker(batch, setup, prices, stop_step=steps, grace_s=300) as worker:
        for step in range(steps):
            schedule, _ = worker.get(step)
            spans.append(schedule.makespan_s)
            shapes |= {(g.module, g.shape) for g in schedule.groups}
            for m in plan.layout.modules:
                sizes = [
                    g.microbatches * RANKS * g.shape.size for g in schedule.groups if g.module == m
                ]
                used = sum(load.tokens(m) for load in batch(step))
                padded[m].append(1 - used / sum(sizes) if sizes else 0.0)
        assert worker.solved_here == 0
    return Row(
        data,
        grouping,
        len(loads),
        steps,
        [b.name for b in plan.layout.buckets],
        float(np.mean(padded["vision"])),
        float(np.mean(padded["llm"])),
        float(np.mean(spans)),
        len(without_room),
        len(shapes),
    )


def compiles_of_a_run(steps: int) -> int:
    """Compiles after warm-up of a real run on pictures, clips and text of many sizes."""
    from dflop_jax import Trainer
    from experiments.qwen3vl import config

    with tempfile.TemporaryDirectory() as made:
        given = config()
        run_of = replace(
            given,
            train=replace(given.train, steps=steps),
            run_dir=f"{made}/run",
            cache_dir=f"{made}/cache",
        )
        return Trainer(run_of).fit().compiles_after_warmup


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", type=Path, default=TRACES, help="folder of traces (*.jsonl)")
    parser.add_argument("--steps", type=int, default=200, help="batches scheduled of each kind")
    parser.add_argument("--data", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--train", type=int, default=0, help="steps of a real run; 0: none")
    add_json(parser)
    args = parser.parse_args()
    rows = Rows(args.json, as_rows)
    for data in args.data:
        loads = loads_of(args.shapes, KINDS[data])
        for grouping in GROUPINGS:
            rows.append(run(data, loads, grouping, args.steps))
    table = Table("data", "grouping", "samples", "patches padded", "tokens padded", "step",
                  "without room", "shapes run")  # fmt: skip
    for r in rows:
        table.add_row(r.data, r.grouping, f"{r.samples:,}", f"{r.patches_padded:.1%}",
                      f"{r.tokens_padded:.1%}", f"{r.makespan_s:.3f}", str(r.without_room),
                      str(r.shapes_run))  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for r in rows:
        console.print(f"{r.data}, {r.grouping}: {'; '.join(r.shapes)}")
    if args.train:
        compiles = compiles_of_a_run(args.train)
        console.print(f"compiles after warm-up in {args.train} steps: {compiles}")
        write_json(args.json, as_rows(rows) | {"compiles_after_warmup": compiles})


if __name__ == "__main__":
    main()
