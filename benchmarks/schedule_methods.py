"""Methods that `schedule_run.py` compares: a global batch of an LLM under a plan to its schedule.

Costs are those of Qwen2.5 7B: a group takes what its static shape takes and, on each rank, what
attention adds for its pieces.

`run` is `schedule_batch` with its integer program, as the worker calls it, within the work that a
step of 1 s hides;
`greedy` is its answer without work; `previous` packs as before 2026-11-22 (greedy and local search
for the cheapest buckets, content not looked at); LPT deals the samples, longest first, to the rank
of least content; `first fit` takes them as they arrive. `loongforge`, `bridge` and `entrain` are
the rules of these frameworks (`peer_rules.py`), given the true seconds of samples (`bridge`, whose
costs are linear: their tokens) and executed on the same shapes: a rank's samples of a microbatch
go, longest first, to the first row with room. As their users would tune it, the batch is cut into
1, 2, 4, ... microbatches of equal counts as samples arrive, and the shortest step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import peer_rules
from shape_problems import whole_modules

from dflop_jax.records import (
    BACKWARD,
    Bucket,
    Group,
    Load,
    PiecePlaces,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    Scheduling,
    Shape,
    pairs,
)
from dflop_jax.schedule import WORK_PER_S, schedule_batch
from dflop_jax.schedule.counts.program import canonical, sizes_of
from dflop_jax.sim.fastest_order import with_order

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
# Of a token of the encoder, whose forward and backward Entrain's rule evens out first: SigLIP 400M.
ENCODER_TOKEN_S = 3 * 2 * 4e8 / FLOPS_PER_S


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

    @property
    def sample_s(self) -> np.ndarray:
        """[N]: seconds of every sample on its rank, without padding."""
        tokens_N = np.array(self.tokens, float)
        return TOKEN_S * tokens_N + PAIR_S * pairs(tokens_N)


Rows_D = list[list[list[int]]]  # of each rank, samples by row
Dealt = tuple[np.ndarray, np.ndarray]  # [N] each: ranks and microbatches of the samples


def by_run(case: Case) -> Schedule:
    program = canonical(sizes_of(case.plan.layout))
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"], program=program)


def by_greedy(case: Case) -> Schedule:
    return schedule_batch(case.loads, case.plan, case.prices, ["llm"], work=0)


def by_previous(case: Case) -> Schedule:
    """The cheapest buckets that hold the samples, without a look at their content."""
    blind = Prices({k: Price(p.static_s) for k, p in case.prices.programs.items()})
    return schedule_batch(case.loads, case.plan, blind, ["llm"])


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
        content_D[d] += pairs(tokens[i])
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
        pieces = PiecePlaces(np.array(places, np.int64).reshape(-1, 4).T)
        content = max(sum(pairs(tokens[i]) for row in rank for i in row) for rank in part)
        groups.append(Group("llm", shape, (), (content,), pieces))
    return groups


def scheduled(case: Case, groups: Sequence[Group]) -> Schedule:
    return with_order(case.plan, Schedule(0, tuple(groups)), case.prices, ["llm"])


def by_loongforge(case: Case) -> Schedule:
    def dealt(n_microbatches: int) -> Dealt:
        tokens, held_D = np.array(case.tokens, float), np.zeros(case.ranks)
        ranks = np.zeros(len(tokens), np.int64)
        microbatches = peer_rules.as_read(len(tokens), n_microbatches)
        for m in range(n_microbatches):
            part = np.flatnonzero(microbatches == m)
            load_N = case.sample_s[part]
            ranks[part] = peer_rules.loongforge(load_N, tokens[part], case.ranks, held_D)
            held_D += np.bincount(ranks[part], load_N, case.ranks)
        return ranks, microbatches

    return tuned(case, dealt)


def by_bridge(case: Case) -> Schedule:
    def dealt(n_microbatches: int) -> Dealt:
        tokens = np.array(case.tokens, float)
        ranks = np.zeros(len(tokens), np.int64)
        microbatches = peer_rules.as_read(len(tokens), n_microbatches)
        for m in range(n_microbatches):
            part = np.flatnonzero(microbatches == m)
            ranks[part] = peer_rules.bridge(tokens[part], case.ranks)
        return ranks, microbatches

    return tuned(case, dealt)


def by_entrain(case: Case) -> Schedule:
    encoder_s = ENCODER_TOKEN_S * np.array([load.tokens("vision") for load in case.loads])
    return tuned(case, lambda n: peer_rules.entrain(encoder_s, case.sample_s, case.ranks, n))


def tuned(case: Case, dealt: Callable[[int], Dealt]) -> Schedule:
    """What a rule deals (rank and microbatch of every sample) to the number of microbatches that
    makes the shortest step."""
    n, counts = len(case.tokens), [1]
    while 2 * counts[-1] * case.ranks <= n:
        counts.append(2 * counts[-1])
    each = [in_microbatches(case, *dealt(count)) for count in counts]
    return scheduled(case, min(each, key=step_seconds))


def in_microbatches(case: Case, rank_N: np.ndarray, microbatch_N: np.ndarray) -> list[Group]:
    """Groups of every microbatch: of each rank's samples, longest first, to the first row with
    room."""
    tokens, most, groups = case.tokens, longest_shape(case).tokens, []
    longest_first = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    for m in range(int(microbatch_N.max()) + 1):
        rows: Rows_D = [[] for _ in range(case.ranks)]
        fill: list[list[int]] = [[] for _ in range(case.ranks)]
        for i in longest_first:
            if microbatch_N[i] != m:
                continue
            d = int(rank_N[i])
            r = next((r for r, n in enumerate(fill[d]) if n + tokens[i] <= most), len(fill[d]))
            if r == len(fill[d]):
                rows[d].append([])
                fill[d].append(0)
            rows[d][r].append(i)
            fill[d][r] += tokens[i]
        groups += groups_of(case, rows)
    return groups


def step_seconds(groups: Sequence[Group]) -> float:
    """Of the LLM alone on its ranks: its groups one after the other."""
    return sum(seconds_of(g.shape) + PAIR_S * g.content[0] for g in groups)


METHODS: dict[str, Callable[[Case], Schedule]] = {
    "run": by_run,
    "greedy": by_greedy,
    "previous": by_previous,
    "LPT": by_lpt,
    "first fit": by_first_fit,
    "loongforge": by_loongforge,
    "bridge": by_bridge,
    "entrain": by_entrain,
}
