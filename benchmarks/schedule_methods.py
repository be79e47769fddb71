"""Methods that `schedule_run.py` compares: a global batch of an LLM under a plan to its schedule;
and what they start from: traces of samples, modules whole on their ranks, what groups take.

Costs are those of Qwen2.5 7B: a group takes what its static shape takes and, on each rank, what
attention adds for its pieces.

`run` is `schedule_batch` with its integer program, as the worker calls it, within the work that a
step of 1 s hides; `greedy` is its answer without work; LPT deals the samples, longest first, to the
rank of least content; `first fit` takes them as they arrive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Edge,
    Group,
    Layout,
    Load,
    PackedPieces,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    token_pairs,
)
from dflop_jax.schedule import WORK_PER_S, BucketProblem, schedule_batch
from dflop_jax.schedule.count_program import canonicalize, program_sizes
from dflop_jax.simulate.steps import with_list_order

STEP_S = 1.0
# Qwen2.5 7B: forward FLOPs of a token and of a pair of tokens of one piece (causal).
HIDDEN, LAYERS, KV_WIDTH, MLP, VOCABULARY = 3584, 28, 512, 18944, 152064
TOKEN_FLOPS = 2 * LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP)
TOKEN_FLOPS += 2 * HIDDEN * VOCABULARY
PAIR_FLOPS = 2 * LAYERS * HIDDEN
FLOPS_PER_S = 8 * 4e14  # of the tensor-parallel devices of a rank
CALL_S = 1e-3  # launching a group


PAIR_S = 3.5 * PAIR_FLOPS / FLOPS_PER_S  # backward of a flash kernel takes 2.5 forwards
TOKEN_S = 3 * TOKEN_FLOPS / FLOPS_PER_S  # of a token in a sequence of any length


def seconds_of(shape: Shape) -> float:
    """Static seconds of a group, forward and backward."""
    return TOKEN_S * shape.size + CALL_S


def plan_of(buckets: Sequence[Bucket], ranks: int) -> Plan:
    """The LLM alone on its data ranks, with the work that a step of 1 s hides."""
    layout = replace(whole_modules({"llm": ranks}), buckets=tuple(buckets))
    return Plan("dflop", layout, Scheduling(work_budget=int(STEP_S * WORK_PER_S)))


def prices_of(plan: Plan) -> Prices:
    return Prices(
        {
            ProgramId("llm", s, BACKWARD): Price(seconds_of(s), (PAIR_S,))
            for s in plan.layout.shapes("llm")
        }
    )


@dataclass(frozen=True)
class Case:
    """A global batch under a plan."""

    loads: tuple[Load, ...]
    plan: Plan

    @property
    def prices(self) -> Prices:
        return prices_of(self.plan)

    @property
    def ranks(self) -> int:
        return self.plan.layout.data_ranks("llm")

    @property
    def tokens(self) -> list[int]:
        return [load.tokens("llm") for load in self.loads]


Rows_D = list[list[list[int]]]  # of each rank, samples by row


def by_run(case: Case) -> Schedule:
    program = canonicalize(program_sizes(case.plan.layout))
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"], program=program)


def by_greedy(case: Case) -> Schedule:
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"], work=0)


def by_lpt(case: Case) -> Schedule:
    """Longest first to the rank of least content with room in one of its rows; a row of every rank
    is opened where none has."""
    return in_rows(case, np.argsort(-np.array(case.tokens), kind="stable").tolist(), lightest)


def by_first_fit(case: Case) -> Schedule:
    """Samples as they arrive to the first row with room."""
    return in_rows(case, range(len(case.loads)), lambda content_D: np.zeros_like(content_D))


def lightest(content_D: np.ndarray) -> np.ndarray:
    return content_D


def in_rows(case: Case, order: Iterable[int], key: Callable[[np.ndarray], np.ndarray]) -> Schedule:
    """Samples to rows of the longest bucket, the rank of least `key` first; every group then in the
    cheapest bucket that holds it."""
    tokens, ranks, most = case.tokens, case.ranks, longest_shape(case).tokens
    rows: Rows_D = [[] for _ in range(ranks)]
    fill_DR = np.zeros((ranks, 0), np.int64)
    content_D = np.zeros(ranks)
    for i in order:
        if not (fill_DR + tokens[i] <= most).any():
            fill_DR = np.pad(fill_DR, ((0, 0), (0, 1)))
            for rank in rows:
                rank.append([])
        has_room_DR = fill_DR + tokens[i] <= most
        key_D = np.where(has_room_DR.any(axis=1), key(content_D), np.inf)
        # Of ranks with equal keys the one whose first row with room is the earliest.
        tied_D = key_D == key_D.min()
        row_D = np.where(tied_D, has_room_DR.argmax(axis=1), fill_DR.shape[1])
        d = int(row_D.argmin())
        r = int(row_D[d])
        rows[d][r].append(i)
        fill_DR[d, r] += tokens[i]
        content_D[d] += token_pairs(tokens[i])
    return scheduled(case, groups_of(case, rows))


def longest_shape(case: Case) -> Shape:
    return max(case.plan.layout.shapes("llm"), key=lambda s: (s.tokens, s.rows))


def groups_of(case: Case, rows: Rows_D) -> list[Group]:
    """As many rows of every rank as the longest shape has, one after the other, each time in the
    cheapest shape that holds them."""
    tokens, main = case.tokens, longest_shape(case)
    groups = []
    for lo in range(0, max(map(len, rows)), main.rows):
        part = [[tuple(row) for row in rank[lo : lo + main.rows]] for rank in rows]
        longest = max(sum(tokens[i] for i in row) for rank in part for row in rank)
        n_rows = max(len(rank) for rank in part)
        able = [
            s for s in case.plan.layout.shapes("llm") if s.tokens >= longest and s.rows >= n_rows
        ]
        shape = min(able, key=lambda s: (s.size, s))
        places = [
            (i, 0, d, r) for d, rank in enumerate(part) for r, row in enumerate(rank) for i in row
        ]
        pieces = PackedPieces(np.array(places, np.int64).reshape(-1, 4).T)
        content = max(sum(token_pairs(tokens[i]) for row in rank for i in row) for rank in part)
        groups.append(Group("llm", shape, (), (content,), pieces))
    return groups


def scheduled(case: Case, groups: Sequence[Group]) -> Schedule:
    return with_list_order(case.plan, Schedule(0, tuple(groups)), case.prices, ["llm"])


def step_seconds(groups: Sequence[Group]) -> float:
    """Of the LLM alone on its ranks: its groups one after the other."""
    return sum(seconds_of(g.shape) + PAIR_S * g.content[0] for g in groups)


METHODS: dict[str, Callable[[Case], Schedule]] = {
    "run": by_run,
    "greedy": by_greedy,
    "LPT": by_lpt,
    "first fit": by_first_fit,
}


# ---- samples ----

TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "shapes"
TILE_PX, TILE_TOKENS, MAX_GRID, MAX_FRAMES = 384, 729, 9, 32
FRAME_TOKENS = 196  # of a tile or frame, as the LLM sees it
CHARS_PER_TOKEN, TEMPLATE_TOKENS = 4, 20


@lru_cache(maxsize=4)
def trace_loads(folder: Path, *, clips: bool = True, most_tokens: int = 4096) -> tuple[Load, ...]:
    """Loads of a folder of traces (*.jsonl), without audio: images by AnyRes, one frame a second of
    `clips`, and the sequence of tokens of the LLM, cut at `most_tokens`.

    Raises:
      ValueError: no usable row.
    """
    loads = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["audio_s"] or (row["video_s"] and not clips):
                continue
            tiles = sum(tiles_of(w, h) for w, h in row["images"])
            frames = int(np.clip(row["video_s"], 4, MAX_FRAMES)) if row["video_s"] else 0
            chars = row["prompt_chars"] + row["answer_chars"]
            tokens = (tiles + frames) * FRAME_TOKENS + chars // CHARS_PER_TOKEN + TEMPLATE_TOKENS
            pieces: dict[str, tuple[int, ...]] = {"llm": (min(most_tokens, tokens),)}
            if tiles + frames:
                pieces["vision"] = (TILE_TOKENS,) * (tiles + frames)
            loads.append(Load(pieces))
    if not loads:
        raise ValueError(f"{folder}: no *.jsonl with rows without audio; give a folder of traces")
    return tuple(loads)


def tiles_of(width: int, height: int) -> int:
    """Tiles of an AnyRes grid of at most `MAX_GRID` that wastes least of the picture, and one of
    the whole."""

    def lost(columns: int, rows: int) -> tuple[float, int]:
        scale = min(columns * TILE_PX / width, rows * TILE_PX / height)
        shown = min(width * height, width * height * scale**2)
        return -shown, columns * rows

    grids = [
        (c, r) for c in range(1, MAX_GRID + 1) for r in range(1, MAX_GRID + 1) if c * r <= MAX_GRID
    ]
    columns, rows = min(grids, key=lambda g: lost(*g))
    return columns * rows + (columns * rows > 1)


# ---- modules whole on their ranks ----

Seconds = Callable[[Bucket], Mapping[str, float]]  # of a group of every module
_FORWARD_SHARE = 1 / 3  # of forward and backward


def whole_modules(
    ranks: Mapping[str, int],
    edges: tuple[Edge, ...] = (),
    *,
    shared: bool = False,
    group_size: int = 1,
) -> Layout:
    """Every module whole on so many data ranks: on devices of its own, or on `shared` ones."""
    submeshes, first = [], 0
    for m, n in ranks.items():
        submeshes.append(SubmeshPlan(m, 0 if shared else first, 1, n, 1))
        first += n
    segments = tuple(SegmentPlan(m, m, 0, 1, m, True, True) for m in ranks)
    return Layout(tuple(submeshes), segments, edges=edges, group_size=group_size)


def prices_by(seconds: Seconds) -> Callable[[Layout], Prices]:
    """Prices of layouts of whole modules; what others read has a forward and a backward."""

    def prices(layout: Layout) -> Prices:
        senders = {e.source for e in layout.edges}
        programs: dict[ProgramId, Price] = {}
        for bucket in layout.buckets:
            took_s = seconds(bucket)
            for m, shape in bucket.shapes:
                shares: dict[Direction, float] = {BACKWARD: 1.0}
                if m in senders:
                    shares = {FORWARD: _FORWARD_SHARE, BACKWARD: 1 - _FORWARD_SHARE}
                for direction, share in shares.items():
                    price = Price(took_s.get(m, 0.0) * share)
                    programs.setdefault(ProgramId(m, shape, direction), price)
        return Prices(programs)

    return prices


def problem_of(
    layout: Layout, seconds: Seconds, global_batch: int, **options: Any
) -> BucketProblem:
    """What shapes are chosen for on such a layout; `options` are fields of it."""
    return BucketProblem(layout, prices_by(seconds), global_batch, **options)
