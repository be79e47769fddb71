"""Plans of which every rank holds chunks of every module: gradients equal the plain computation."""

import dataclasses
import itertools

import optax
import pytest

from dflop_jax.contract import edges_of
from dflop_jax.plan.placement import split_layers
from dflop_jax.records import Bucket, Layout, Plan, Prices, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.runtime.compiling import representatives
from dflop_jax.runtime.executor import Executor
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.order_search import with_searched_order
from dflop_jax.simulate.steps import simulate_step, with_list_order
from tests.plans import programs
from tests.small import Eye, Small, Text

from . import plain
from .test_gradients import check_step, oracle

ROW = Shape(1, 240)


@dataclasses.dataclass(frozen=True)
class Deep(Small):
    """Enough layers for several rounds."""

    n_layers: int = 12

    @property
    def modules(self):
        return {"vision": Eye(4), "llm": Text(self.n_layers, self.tied)}


def chunked(m, ranks, rounds, parts, *, data=1, model=1, remats=("none",)):
    """Chunks of both modules on every rank, `rounds` of each, policies of recomputing in turn."""
    size = data * model
    submeshes = tuple(SubmeshPlan(f"rank{r}", r * size, 1, data, model) for r in range(ranks))
    remat = itertools.cycle(remats)
    segments = []
    for module, k in rounds.items():
        runs = split_layers(m.modules[module].n_layers, ranks * k)
        for i, (a, b) in enumerate(runs):
            ends = i == 0, i == len(runs) - 1
            rank = f"rank{i % ranks}"
            segments.append(SegmentPlan(f"{module}{i}", module, a, b, rank, *ends, next(remat)))
    tiles = Shape(-(-36 // parts), m.piece_tokens["vision"])
    buckets = (Bucket.of({"vision": tiles, "llm": ROW}), Bucket.of({"llm": ROW}))
    tied = ("llm",) if m.tied else ()
    return Plan(
        "dip",
        Layout(submeshes, tuple(segments), buckets, edges=edges_of(m), fan_in=parts, tied=tied),
    )


def keeping_more(plan, schedule):
    """The plan with a second policy that keeps all, and the schedule with every other group under
    it, in segments by turns."""
    segments = tuple(
        dataclasses.replace(s, remat_less=None if s.remat == "none" else "none")
        for s in plan.layout.segments
    )
    second = [s.name for s in segments if s.remat_less]
    groups = tuple(
        dataclasses.replace(g, remat_less=tuple(second[i % 2 :: 2]) if i % 3 else tuple(second))
        for i, g in enumerate(schedule.groups)
    )
    plan = plan.with_layout(segments=segments)
    return plan, dataclasses.replace(schedule, groups=groups)


def ran(trace, rank):
    """What a rank ran, in its order."""
    events = sorted(trace.events, key=lambda e: e.start_s)
    return [(e.segment, e.group, e.direction) for e in events if e.submesh == rank]


# name -> (model, ranks, rounds, sub-microbatches, options, what is frozen)
CASES = {
    "2 ranks, 1 and 2 rounds, 2 parts": (Small(), 2, {"vision": 1, "llm": 2}, 2, {}, ()),
    "2 ranks of tp 2, 4 parts, mixed policies": (
        Deep(False, 6), 2, {"vision": 2, "llm": 3}, 4,
        {"model": 2, "remats": ("none", "layers", "segment", "dots", "named")}, (),
    ),
    "4 ranks of dp 2, 3 rounds, frozen encoder": (
        Deep(), 4, {"vision": 1, "llm": 3}, 3,
        {"data": 2, "remats": ("none", "segment")}, ("vision",),
    ),
    "2 ranks of dp 2, one part": (Small(), 2, {"vision": 1, "llm": 1}, 1, {"data": 2}, ()),
}  # fmt: skip


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", CASES)
def test_step_in_a_searched_order_equals_plain_computation(name):
    m, ranks, rounds, parts, options, freeze = CASES[name]
    plan = chunked(m, ranks, rounds, parts, **options)
    assert all({s.module for s in plan.layout.segments if s.submesh == r.name} == {"vision", "llm"}
               for r in plan.layout.submeshes)  # fmt: skip
    schedule = plain.random_schedule(plan, oracle(m)[0], 2, seed=3, text_only=(0,))
    plan, schedule = keeping_more(plan, schedule)
    trainable = [s.name for s in plan.layout.segments if not (s.module in freeze and not s.last)]
    prices = Prices(programs(plan))
    listed = with_list_order(plan, schedule, prices, trainable)
    ordered = with_searched_order(plan, listed, prices, trainable, Budget(3000), 0)
    assert ordered.makespan_s <= listed.makespan_s
    grads, result = check_step(m, plan, schedule=ordered, freeze=freeze)
    assert set(grads["vision"]) == ({"exit"} if freeze else {"entry", "layers", "exit"})
    # The simulated trace has the same tasks in the same order on every rank.
    trace = simulate_step(plan, ordered, prices, trainable)
    for rank in plan.layout.submeshes:
        assert ran(result.trace, rank.name) == ran(trace, rank.name)


def test_equal_chunks_on_a_rank_share_their_programs():
    """Those inside a module, of as many layers; not where they recompute differently."""
    m = Deep()
    plan = chunked(m, 4, {"vision": 1, "llm": 3}, 1)
    first = shared(m, plan)
    assert {n: f for n, f in first.items() if n != f} == {
        "llm8": "llm4", "llm5": "llm1", "llm9": "llm1", "llm6": "llm2", "llm10": "llm2",
        "llm7": "llm3",
    }  # fmt: skip
    plan = chunked(m, 4, {"vision": 1, "llm": 3}, 1, remats=("none", *["layers"] * 8))
    assert {n for n, f in shared(m, plan).items() if n != f} == {
        "llm8", "llm9", "llm6", "llm10", "llm7"
    }  # fmt: skip


def shared(m, plan):
    """Segment -> the one whose programs it runs."""
    ex = Executor(m, plan, optax.sgd(1.0))
    ex.close()
    return representatives(ex.programs)
