"""Steps for `benchmarks/pipeline_search.py`: plans whose modules span all ranks in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Bucket,
    Edge,
    Group,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    Schedule,
    SegmentPlan,
    SendId,
    Shape,
    SubmeshPlan,
    Task,
)
from dflop_jax.tasks.graph import StepGraph, links, step_graph


@dataclass(frozen=True)
class Case:
    """One step to order."""

    name: str
    plan: Plan
    schedule: Schedule
    prices: Prices

    @property
    def graph(self) -> StepGraph:
        return step_graph(self.plan.layout, self.schedule.groups, self.trainable)

    @property
    def trainable(self) -> list[str]:
        return [s.name for s in self.plan.layout.segments]


def chunked_plan(ranks: int, chunks: dict[str, int], n_shapes: int, fan_in: int) -> Plan:
    """Modules in `chunks[m]` segments each, dealt round the ranks; each but the last feeds the
    last."""
    submeshes = tuple(SubmeshPlan(f"rank{r}", r, 1, 1, 1) for r in range(ranks))
    place = count()
    segments = tuple(
        SegmentPlan(f"{m}{i}", m, i, i + 1, f"rank{next(place) % ranks}", i == 0, i == n - 1)
        for m, n in chunks.items()
        for i in range(n)
    )
    *sources, last = chunks
    edges = tuple(Edge(m, last, f"from_{m}") for m in sources)
    buckets = tuple(Bucket.of({m: Shape(i + 1, 1) for m in chunks}) for i in range(n_shapes))
    return Plan("dip", Layout(submeshes, segments, buckets, edges=edges, fan_in=fan_in))


def groups_of(plan: Plan, feeding: list[dict[str, int]], shapes: np.random.Generator) -> Schedule:
    """One group of the last module for each entry, fed by so many groups of the others; shapes are
    drawn."""
    groups: list[Group] = []
    *sources, last = plan.layout.modules
    for counts in feeding:
        consumer = len(groups) + sum(counts.get(m, 0) for m in sources)
        for m in (*sources, last):
            for _ in range(counts.get(m, 0) if m != last else 1):
                known = plan.layout.shapes(m)
                shape = known[int(shapes.integers(len(known)))]
                groups.append(Group(m, shape, () if m == last else (consumer,)))
    return Schedule(0, tuple(groups))


def prices_of(
    plan: Plan,
    forward_s: dict[tuple[str, Shape], float],
    send_s: float,
    uneven: np.random.Generator | None = None,
    end_s: float = 0.0,
) -> Prices:
    """`forward_s` of a chunk; a backward takes two, the last chunk's three."""
    read = {link.source for link in links(plan.layout)}
    programs = {}
    for s in plan.layout.segments:
        factor = 1.0 if uneven is None else float(uneven.uniform(0.8, 1.25))
        for shape in plan.layout.shapes(s.module):
            one_s = forward_s[s.module, shape] * factor
            programs[ProgramId(s.name, shape, FORWARD)] = Price(one_s)
            programs[ProgramId(s.name, shape, BACKWARD)] = Price(
                one_s * (2 if s.name in read else 3)
            )
    sends = {
        SendId(link.source, link.target, shape, d): send_s
        for link in links(plan.layout)
        for shape in plan.layout.shapes(plan.layout.segment(link.target).module)
        for d in (FORWARD, BACKWARD)
    }
    ends = {
        Task(s.name, NO_GROUP, d): end_s for s in plan.layout.segments for d in (REDUCE, UPDATE)
    }
    return Prices(programs, ends if end_s else {}, sends if send_s else {})


def small_case(seed: int) -> Case:
    """A few groups of unlike times on two or three ranks, so few that every order can be tried:
    two modules in chunks on all ranks, one in two chunks a rank, or one before another's chain."""
    rng = np.random.default_rng([1, seed])
    kind = seed % 3
    ranks = (2, 2, 3)[kind]
    chunks = [{"media": 2, "text": 2}, {"text": 4}, {"media": 1, "text": 2}][kind]
    plan = chunked_plan(ranks, chunks, 2, 2)
    feeding = [{"media": int(rng.integers(0, 3))} for _ in range((2, 3, 3)[kind])]
    schedule = groups_of(plan, feeding if kind != 1 else [{}] * 3, rng)
    forward_s = {
        (m, shape): float(rng.lognormal(0, 0.6)) for m in chunks for shape in plan.layout.shapes(m)
    }
    prices = prices_of(plan, forward_s, float(rng.choice([0.0, 0.1])), rng)
    return Case(f"small {seed}", plan, schedule, prices)


def large_case(seed: int, ranks: int = 8, n_groups: int = 128) -> Case:
    """The scale of ViT-22B and Qwen2-72B on 8 ranks: an encoder in one segment of 8 chunks, an LLM
    in two, 128 sub-microbatches; packed sequences of 8,192 tokens hold unlike numbers of pictures.

    A sequence takes 2 x 72e9 x 8,192 operations, a rank of 8 devices does 3.2e15 a second; a
    sub-microbatch of four pictures of 2,704 patches takes 2 x 22e9 x 10,816.
    """
    rng = np.random.default_rng([2, seed])
    plan = chunked_plan(ranks, {"media": ranks, "text": 2 * ranks}, 2, 12)
    feeding: list[dict[str, int]] = []
    left = n_groups
    while left:
        media = min(int(rng.integers(0, 13)), left - 1)
        feeding.append({"media": media})
        left -= media + 1
    schedule = groups_of(plan, feeding, rng)
    rate = 3.2e15
    chunk_s = {
        "text": 2 * 72e9 * 8192 / rate / (2 * ranks),
        "media": 2 * 22e9 * 10816 / rate / ranks,
    }
    forward_s = {
        (m, shape): share * chunk_s[m]
        for m in chunk_s
        for shape, share in zip(plan.layout.shapes(m), (0.75, 1.0))
    }
    return Case(f"large {seed}", plan, schedule, prices_of(plan, forward_s, 1e-3, end_s=0.02))
