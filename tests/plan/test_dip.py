"""The partitioner of DIP and its search, against counting and simulating every candidate."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from dflop_jax.plan.best_first import sorted_candidates
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import (
    MAX_ROUNDS,
    MAX_SUB_MICROBATCHES,
    MIN_EFFICIENCY,
    choose_rounds,
    chunked_layout,
    dip_layouts,
    dip_spaces,
    efficient_rows,
    with_sub_microbatches,
)
from dflop_jax.plan.search import search_plan
from dflop_jax.profile.cost_model import layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Load,
    MeshShape,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import schedule_batch
from tests.plans import group_s

from . import cases
from .cases import BATCH, CONFIG, TILE, data_profile, mean_makespan_s, model_profile, random_case

DIP = dataclasses.replace(CONFIG, policy="dip", max_stage=4, effort="quick")


# Two ranks of two devices.
RANKS = tuple(SubmeshPlan(f"rank{r}", 2 * r, data=2) for r in range(2))


def prepared(profile=None, data=None, n_devices=4, **asked):
    return cases.prepared(n_devices, profile, data, DIP, **asked)


def run(n_devices, profile=None, data=None, **kwargs):
    return search_plan(
        profile or model_profile(), data or data_profile(), n_devices=n_devices,
        global_batch=BATCH, config=DIP, **kwargs,
    )  # fmt: skip


def deep_profile(**weights):
    """Layers enough for four ranks and several rounds."""
    return dataclasses.replace(model_profile(**weights), n_layers={"vision": 5, "llm": 13})


def module_s(context, module, rows, tokens):
    """Seconds of a whole module, by the cost model's own segments."""
    n = context.n_layers[module]
    segment = SegmentPlan(module, module, 0, n, module, True, True)
    tasks = (FORWARD, BACKWARD) if module == "vision" else (BACKWARD,)
    seconds = (group_s(context.costs, segment, MeshShape(), 1, rows, tokens, d) for d in tasks)
    return float(sum(seconds))


@pytest.mark.parametrize("overhead_s", [0.0, 1e-4, 3e-3])
def test_efficient_rows_are_the_smallest_at_that_rate(overhead_s):
    profile = dataclasses.replace(model_profile(), task_overhead_s=overhead_s)
    context = prepared(profile).context
    got = efficient_rows(context, "vision", 1, TILE)
    most = 2 * 16  # twice the largest that was timed
    rates = {
        n: n / module_s(context, "vision", n, TILE) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    }
    assert max(rates) == most
    assert got == min(n for n, r in rates.items() if r >= MIN_EFFICIENCY * max(rates.values()))


def test_rounds_follow_the_time_of_a_microbatch():
    """Up to the rounds that are asked for, and to what the layers allow."""
    context = prepared(deep_profile(llm=40.0)).context
    tokens = {"vision": TILE, "llm": context.row_tokens("llm")}
    took_s = {
        m: module_s(context, m, efficient_rows(context, m, 1, n), n) for m, n in tokens.items()
    }
    ratio = {m: int(s / min(took_s.values()) + 1e-6) for m, s in took_s.items()}
    assert ratio["llm"] > MAX_ROUNDS
    for count, rounds in itertools.product((2, 4), (1, 2, 3)):
        got = choose_rounds(context, count, 1, rounds)
        assert got["llm"] == min(rounds, 13 // count)
        assert got["vision"] == 1


@pytest.mark.parametrize("n_devices, tp", [(2, 1), (4, 1), (8, 2), (12, 1)])
def test_every_rank_holds_chunks_of_every_module(n_devices, tp):
    context = prepared(deep_profile(llm=40.0), n_devices=n_devices).context
    layouts = list(dip_layouts(context))
    ranks_of = [(len(p.submeshes), p.submeshes[0].data, p.submeshes[0].model) for p in layouts]
    assert set(ranks_of) == {
        (p, n_devices // p // t, t)
        for p, t in itertools.product((2, 3, 4), (1, 2))
        if n_devices % p == 0 and (n_devices // p) % t == 0
    }
    for (count, data, model), placed in zip(ranks_of, layouts, strict=True):
        meshes = {m.name: m for m in placed.submeshes}
        assert [d for m in placed.submeshes for d in m.devices] == list(range(n_devices))
        assert {m.shape.sizes for m in placed.submeshes} == {(1, data, model)}
        rounds_up_to = [choose_rounds(context, count, model, most) for most in (1, 2, 3)]
        rounds = {m: len(placed.segments_of(m)) // count for m in placed.modules}
        assert rounds in rounds_up_to
        for m in placed.modules:
            chunks = placed.segments_of(m)
            assert len(chunks) == rounds[m] * count
            assert [s.submesh for s in chunks] == rounds[m] * list(meshes)
            layers = [layer for s in chunks for layer in range(s.start, s.stop)]
            assert layers == list(range(context.n_layers[m]))
            entry, leave, _ = context.layer_costs(m, model)
            dearest = max(s.n_layers + entry * s.first + leave * s.last for s in chunks)
            least = min_chunk_cost(context.n_layers[m], len(chunks), entry, leave)
            assert dearest == pytest.approx(least)


def min_chunk_cost(n, parts, entry, leave):
    """Cost of the dearest chunk of the best cut of layers, from all numbers of layers at the
    ends."""
    best = np.inf
    for a, b in itertools.product(range(1, n), repeat=2):
        inner, left = parts - 2, n - a - b
        if left < inner or (inner == 0) != (left == 0):
            continue
        middle = -(-left // inner) if inner else 0
        best = min(best, max(a + entry, b + leave, middle))
    return best


@pytest.mark.parametrize(
    "tiles, parts", [(1, 1), (8, 1), (9, 2), (24, 3), (200, MAX_SUB_MICROBATCHES)]
)
def test_encoders_run_in_efficient_sub_microbatches(tiles, parts):
    context = prepared(dataclasses.replace(deep_profile(), task_overhead_s=1e-3)).context
    placed = chunked_layout(context, RANKS, {"vision": 1, "llm": 1})
    buckets = (Bucket.from_shapes({"vision": Shape(tiles, TILE), "llm": Shape(1, 256)}),
               Bucket.from_shapes({"vision": Shape(1, TILE), "llm": Shape(1, 128)}))  # fmt: skip
    layout = with_sub_microbatches(dataclasses.replace(placed, buckets=buckets), context)
    efficient = efficient_rows(context, "vision", 1, TILE)
    assert layout.fan_in == min(MAX_SUB_MICROBATCHES, -(-tiles // efficient))
    if layout.fan_in == 1:
        assert layout.buckets == buckets
        return
    (shape,) = layout.shapes("vision")
    assert shape.rows * layout.fan_in >= tiles
    assert shape.rows >= efficient
    assert layout.shapes("llm") == (Shape(1, 256), Shape(1, 128))


def expand_options(candidates, evaluator):
    """The candidates that what was begun comes to."""
    while candidates and candidates[0].has_open_options:
        candidates = candidates[0].expand(evaluator)
    return candidates


def every_candidate_s(evaluator):
    """(ranks, cut) -> mean makespan of the ranked batches, each counted by the scheduler and run
    group by group."""
    context, makespan_by_candidate = evaluator.context, {}
    for bound_s, *index in sorted_candidates(list(dip_spaces(context)), "lower_bound_s"):
        if math.isinf(bound_s):
            break
        for ranked in expand_options([Candidate.from_space(*index)], evaluator):
            plan, costs = ranked.plan, context.costs
            names = context.trainable(plan.layout)
            n_groups = [
                max(ranked.groups_by_batch[b], evaluator.count_groups(plan.layout, b))
                for b in range(len(evaluator.batches))
            ]
            steps = ranked.simulator
            found_s = mean_makespan_s(
                plan, layout_prices(plan.layout, costs), names, steps.content, n_groups,
                steps.sub_microbatches,
            )  # fmt: skip
            assert bound_s <= found_s * (1 + 1e-9)
            makespan_by_candidate[ranked.name, ranked.groups_per_batch] = found_s
    return makespan_by_candidate


@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_best_of_exhaustive_evaluation(seed):
    profile, data, _, rng = random_case(seed)
    layers = {"vision": int(rng.integers(2, 5)), "llm": int(rng.integers(4, 9))}
    profile = dataclasses.replace(profile, n_layers=layers, task_overhead_s=3e-3)
    n_devices = int(rng.choice([2, 4, 6]))
    evaluator = prepared(profile, data, n_devices, remat="none", zero=1)
    every = every_candidate_s(evaluator)
    result = run(n_devices, profile, data, remat="none", zero=1,
                 refine=False, n_shown=3)  # fmt: skip
    least = sorted(min(s for (n, _), s in every.items() if n == name) for name, _ in every)
    best = result.candidates[0]
    assert best.makespan_s == pytest.approx(min(every.values()), rel=1e-6)
    assert best.makespan_s <= least[0] * (1 + 1e-6)
    assert result.n_fit == len(every)


def test_schedules_feed_groups_with_sub_microbatches():
    """Data of many tiles: the chosen plan cuts them up, and fits where memory is short."""
    profile = dataclasses.replace(deep_profile(llm=0.3), task_overhead_s=1e-5)
    loads = tuple(Load({"vision": (TILE,) * n, "llm": (4 * n + 20,)}) for n in (2, 9, 30, 60) * 5)
    data = dataclasses.replace(data_profile(), loads=loads, n_total=20)
    result = run(4, profile, data)
    plan = result.plan
    assert plan.policy == "dip"
    assert len(plan.layout.shapes("vision")) == 1
    assert plan.layout.fan_in > 1
    assert len(plan.layout.submeshes) >= 2
    fed = []
    evaluator = prepared(profile, data)
    for batch in evaluator.batches:
        schedule = schedule_batch(
            batch, plan, evaluator.prices(plan.layout), evaluator.context.trainable(plan.layout)
        )
        fed += [len(schedule.fed_by(i, "vision")) for i, g in enumerate(schedule.groups)
                if g.module == "llm"]  # fmt: skip
    assert max(fed) > 1
    limit = 0.8 * max(plan.predicted.peak_bytes.values())
    tight = run(4, profile, data, memory_bytes=limit)
    assert evaluator.max_peak_bytes(tight.plan) <= limit


def test_missing_placements_are_explained():
    shallow = dataclasses.replace(model_profile(), n_layers={"vision": 1, "llm": 4})
    with pytest.raises(ValueError, match=r"dip has no placement on 4 devices.*'vision' has 1;"):
        run(4, shallow)
    with pytest.raises(ValueError, match=r"dip has no placement on 7 devices"):
        run(7)
    with pytest.raises(ValueError, match=r"no plan fits into .* the smallest \(vision=2\*1x1x2@0"):
        run(4, memory_bytes=1000.0)
