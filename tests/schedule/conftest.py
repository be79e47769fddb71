"""Small plans, prices and heavy-tailed batches for the scheduler's tests."""

import itertools

import numpy as np
import pytest

from dflop_jax.records import (
    FORWARD,
    Bucket,
    Edge,
    Layout,
    Load,
    Plan,
    Price,
    Prices,
    ProgramId,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.schedule.count_program import canonicalize, program_sizes
from tests.rows import rows_of

TILE = 16  # tokens of a piece of module "a" where it takes one a row


def bucket(a=None, b=None):
    """A bucket of modules "a" and "b" by (rows, tokens); `a` may be a number of tiles."""
    if isinstance(a, int):
        a = (a, TILE) if a else None
    return Bucket.from_shapes({"a": Shape(*a) if a else None, "b": Shape(*b) if b else None})


def make_plan(buckets, ranks=None, group_size=1, grouping="balanced", edges=None, shared=()):
    """One segment for each module of `ranks` ({"a": 2, "b": 2}), on devices of its own but for
    those that are `shared`; every module feeds the last one if `edges` do not say otherwise."""
    ranks = {"a": 2, "b": 2} if ranks is None else ranks
    *sources, last = ranks
    edges = [(m, last) for m in sources] if edges is None else edges
    width, own = max(ranks.values()), [m for m in ranks if m not in shared[1:]]
    place = {m: width * own.index(m if m in own else shared[0]) for m in ranks}
    submeshes = [SubmeshPlan(m, place[m], 1, n, 1) for m, n in ranks.items()]
    return Plan(
        "dflop" if grouping == "balanced" else "blind",
        Layout(
            tuple(submeshes),
            tuple(SegmentPlan(m, m, 0, 4, m, True, True) for m in ranks),
            tuple(buckets),
            edges=tuple(Edge(s, t, s) for s, t in edges),
            group_size=group_size,
        ),
        Scheduling(grouping=grouping),
    )


def make_prices(plan, pair_s=0.0, trainable=None, factor=lambda program: 1.0):
    """Seconds in proportion to capacity, with a constant per call; backward takes two forwards."""
    tasks = segment_directions(plan.layout, plan.layout.modules if trainable is None else trainable)
    programs = {}
    for s in plan.layout.segments:
        for shape, d in itertools.product(plan.layout.shapes(s.module), tasks[s.name]):
            times = 1 if d == FORWARD else 2 if FORWARD in tasks[s.name] else 3
            one_s = (2e-4 * shape.size + 0.004) * plan.layout.group_size
            program = ProgramId(s.name, shape, d)
            scale = factor(program)
            programs[program] = Price(scale * times * one_s, (scale * times * pair_s,))
    return Prices(programs)


def make_batch(rng, n, most_tiles=12, most_tokens=120):
    tiles = np.minimum(rng.pareto(1.2, n) * 2, most_tiles).astype(int) * (rng.random(n) < 0.8)
    text = np.minimum(5 + rng.lognormal(2.5, 0.6, n), most_tokens).astype(int)
    return [
        Load({"a": (TILE,) * int(t), "b": (int(min(most_tokens, 4 * t + k)),)})
        for t, k in zip(tiles, text)
    ]


def check(schedule, loads, plan):
    """The invariants of any schedule of a plan whose modules read each other in one group each."""
    seen = {m: set() for m in plan.layout.modules}
    home = {}  # (module, sample) -> places of its groups and microbatches
    for place, g in enumerate(schedule.groups):
        assert g.shape in plan.layout.shapes(g.module)
        assert g.microbatches == plan.layout.group_size
        lengths = [n for load in loads for n in load.lengths(g.module)]
        owner = [i for i, load in enumerate(loads) for _ in load.lengths(g.module)]
        content = np.zeros(plan.layout.data_ranks(g.module), int)
        for m, microbatch in enumerate(rows_of(g, plan.layout.data_ranks(g.module))):
            for d, rank in enumerate(microbatch):
                for row in rank:
                    assert sum(lengths[p] for p in row) <= g.shape.tokens
                    content[d] += sum(lengths[p] ** 2 for p in row)
                    for p in row:
                        assert p not in seen[g.module]
                        seen[g.module].add(p)
                        home.setdefault((g.module, owner[p]), set()).add((place, m))
        assert g.content[0] == content.max()
        assert len(g.pieces)
    for m in plan.layout.modules:
        assert len(seen[m]) == sum(len(load.lengths(m)) for load in loads)
    for e in plan.layout.edges:
        for i, load in enumerate(loads):
            if not (load.lengths(e.source) and load.lengths(e.target)):
                continue
            targets = home[e.target, i]
            for place, m in home[e.source, i]:
                fed = [f for f in schedule.groups[place].feeds if (f, m) in targets]
                assert len(fed) == len(targets) == 1
                assert place < fed[0]
    assert schedule.lower_bound_s <= schedule.makespan_s * (1 + 1e-9)


def program_of(plan):
    """The integer program of a plan's counts."""
    return canonicalize(program_sizes(plan.layout))


def solve(loads, plan, prices=None, **options):
    """A checked schedule."""
    prices = make_prices(plan) if prices is None else prices
    schedule = schedule_batch(loads, plan, prices, plan.layout.modules, **options)
    check(schedule, loads, plan)
    return schedule


@pytest.fixture
def small_plan():
    return make_plan(
        [bucket(16, (1, 256)), bucket(8, (1, 256)), bucket(8, (1, 128)), bucket(0, (1, 128))]
    )
