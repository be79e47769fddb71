"""What the integer program that chooses shapes brings, under both efforts of planning.

Command:  python benchmarks/shape_choice.py --json shape_choice.json
Minutes:  about 6 on 2 cores with nothing else running
Expected: steps that are shorter by 2% and more in some cases, and none longer by more than the
          noise of held-out batches (3%); with effort "quick" a second of a core more for it

Shapes are chosen on half of a data set, by search alone and as plans get them: search, then the
integer program, which begins with what that found. Then batches of the other half are scheduled
and simulated with each. Data have
several modes: questions of 100 tokens, pages of 8,000 and more, pictures, clips of up to 32 frames.
Attention is computed over whole rows, so a row of 8,000 tokens costs twice as much per token.
`native` pictures are pieces of 16 to 2,048 patches that share rows. Modules that are `shared` run
on the same devices. Work is counted, so the table depends on no clock but in the last column.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from schedule_data import FRAME_TOKENS, TILE_TOKENS, TRACES, tiles_of  # noqa: E402
from shape_problems import problem_of, whole_modules  # noqa: E402

from dflop_jax.records import Bucket, Edge, Load  # noqa: E402
from dflop_jax.schedule import ShapeProblem, choose_buckets, evaluate_buckets  # noqa: E402

HELD_OUT, EVALUATE_WORK = 8, 300
EFFORTS = ("quick", "full")
PATCH_PX, MOST_PATCHES = 28, 2048
ATTENTION = {"llm": 8000, "vision": 4000}  # tokens of a row at which attention costs as much again
IMAGES = ("coco", "opencqa", "cxc", "drivelm", "doc", "gsm8k")
FILES = {
    "images": IMAGES,
    "clips": (*IMAGES, "activity", "tvr", "nextqa"),
    "documents": ("gsm8k", "doc_pages_text"),
    "text and clips": ("gsm8k", "doc_pages_text", "nextqa"),
}


@dataclass(frozen=True)
class Case:
    """Data, mesh and number of shapes; `vision` ranks of 0: the LLM alone."""

    data: str
    shapes: int
    batch: int
    llm: int
    vision: int = 0
    most_tokens: int = 8192
    native: bool = False
    shared: bool = False

    @property
    def name(self) -> str:
        vision = f"{self.vision} {'shared with' if self.shared else '+'} " if self.vision else ""
        data = f"{self.data}, native" if self.native else self.data
        return f"{data}, rows of {self.most_tokens} | {vision}{self.llm} | {self.batch}"


CASES = (
    Case("images", 2, 256, 8),
    Case("images", 4, 512, 8),
    Case("clips", 3, 512, 16),
    Case("documents", 4, 512, 8),
    Case("documents", 3, 512, 8, most_tokens=32768),
    Case("text and clips", 3, 256, 16),
    Case("images", 4, 256, 6, vision=2),
    Case("clips", 3, 256, 4, vision=4),
    Case("clips", 4, 256, 8, vision=8, shared=True),
    Case("images", 4, 256, 6, vision=2, native=True),
    Case("images", 3, 256, 8, vision=8, native=True, shared=True),
    Case("clips", 3, 256, 6, vision=2, native=True),
)


@dataclass(frozen=True)
class Row:
    """A choice: the seconds of a step on held-out batches and on those that it was made by, and
    processor seconds. `search_s` is the held-out step by search alone; made_by, gain and gap are
    `BucketChoice`'s."""

    case: str
    shapes: int
    seed: int
    effort: str
    search_s: float
    chosen_s: float
    seen_s: float
    search_cpu_s: float
    cpu_s: float
    made_by: str
    gain: float
    gap: float


def loads_of(case: Case, folder: Path) -> list[Load]:
    loads = []
    for path in sorted(folder.glob("*.jsonl")):
        if not path.name.startswith(FILES[case.data]):
            continue
        for row in map(json.loads, path.read_text().splitlines()):
            frames = int(np.clip(row["video_s"], 4, 32)) if row["video_s"] else 0
            tiles = sum(tiles_of(w, h) for w, h in row["images"]) + frames
            pieces, tokens = (TILE_TOKENS,) * tiles, tiles * FRAME_TOKENS
            if case.native:
                patches = [w * h // PATCH_PX**2 for w, h in row["images"]]
                sizes = np.clip([*patches, *[FRAME_TOKENS] * frames], 16, MOST_PATCHES)
                pieces = tuple(sizes.astype(int).tolist())
                tokens = sum(pieces)
            tokens += (row["prompt_chars"] + row["answer_chars"]) // 4 + 20
            lengths: dict[str, tuple[int, ...]] = {"llm": (min(case.most_tokens, tokens),)}
            if case.vision and pieces:
                lengths = {"vision": pieces, **lengths}
            loads.append(Load(lengths))
    return loads


def problem(case: Case, loads: Sequence[Load]) -> ShapeProblem:
    """Modules are equally busy where no row is long; attention comes on top."""
    ranks = {"vision": case.vision, "llm": case.llm} if case.vision else {"llm": case.llm}
    tiles = {"vision": TILE_TOKENS} if case.vision and not case.native else {}
    scale = case.batch / len(loads)
    volume = {m: sum(s.tokens(m) for s in loads) * scale / n for m, n in ranks.items()}

    def seconds(bucket: Bucket) -> Mapping[str, float]:
        return {
            m: s.size * (1 + (0 if m in tiles else s.tokens / ATTENTION[m])) / volume[m] + 0.00125
            for m, s in bucket.shapes
        }

    edges = (Edge("vision", "llm", "vision"),) if case.vision else ()
    return problem_of(
        whole_modules(ranks, edges, shared=case.shared),
        seconds,
        case.batch,
        piece_tokens=tiles,
        n_buckets=case.shapes,
    )


def measured(case: Case, folder: Path, seed: int) -> Iterator[Row]:
    """A row for each effort."""
    every = loads_of(case, folder)
    order = np.random.default_rng(seed).permutation(len(every))
    seen = [every[i] for i in order[: len(every) // 2]]
    # a profile knows the limits that data loading enforces
    seen.append(max(every, key=lambda s: (s.tokens("llm"), s.tokens("vision"))))
    seen.append(max(every, key=lambda s: (s.tokens("vision"), s.tokens("llm"))))
    rest = [every[i] for i in order[len(every) // 2 :]]
    rng = np.random.default_rng(99 + seed)
    batches = [[rest[i] for i in rng.choice(len(rest), case.batch)] for _ in range(HELD_OUT)]
    wanted = problem(case, seen)

    def held_out_s(buckets: Sequence[Bucket]) -> float:
        return evaluate_buckets(buckets, batches, wanted, work=EVALUATE_WORK).expected_s

    for effort in EFFORTS:
        start_s = time.process_time()
        search = choose_buckets(seen, wanted, effort=effort, seed=seed, with_milp=False)
        middle_s = time.process_time()
        choice = choose_buckets(seen, wanted, effort=effort, seed=seed, start=search)
        both_s = time.process_time() - start_s
        yield Row(
            case.name, case.shapes, seed, effort,
            held_out_s(search.buckets), held_out_s(choice.buckets), choice.expected_s,
            middle_s - start_s, both_s, choice.made_by, choice.gain, choice.gap,
        )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    out = Table("data | ranks | batch", "K", "effort", "search", "both", "change", "seen",
                "program wins", "its gap", "CPU s")  # fmt: skip
    for key in dict.fromkeys((r.case, r.shapes, r.effort) for r in rows):
        some = [r for r in rows if (r.case, r.shapes, r.effort) == key]
        wins = [r for r in some if r.made_by == "integer"]
        seen = sum(r.gain for r in wins) / len(some)

        def mean(field: str, some: Sequence[Row] = some) -> float:
            return float(np.mean([getattr(r, field) for r in some]))

        out.add_row(
            key[0],
            str(key[1]),
            key[2],
            f"{mean('search_s'):.3f}",
            f"{mean('chosen_s'):.3f}",
            f"{100 * (mean('chosen_s') / mean('search_s') - 1):+.1f}%",
            f"{-100 * seen:+.1f}%",
            f"{len(wins)} of {len(some)}",
            f"{100 * mean('gap'):.1f}%",
            f"{mean('search_cpu_s'):.1f} / {mean('cpu_s'):.1f}",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", type=Path, default=TRACES, help="folder of traces (*.jsonl)")
    add_json(parser)
    parser.add_argument("--seeds", type=int, default=2, help="halves of the data (default 2)")
    parser.add_argument("--cases", type=int, nargs="+", help="places of cases to run, from 0")
    args = parser.parse_args()
    cases = [CASES[i] for i in args.cases] if args.cases is not None else CASES
    rows = Rows(args.json, as_rows)
    for case in cases:
        for seed in range(args.seeds):
            for row in measured(case, args.shapes, seed):
                rows.append(row)
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))


if __name__ == "__main__":
    main()
