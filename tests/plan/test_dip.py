"""The partitioner of DIP and its search, against counting and simulating every candidate."""

import dataclasses
import itertools
import math

import pytest

from dflop_jax.plan.best_first import sorted_candidates
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import (
    MIN_EFFICIENCY,
    choose_rounds,
    dip_layouts,
    dip_spaces,
    efficient_rows,
)
from dflop_jax.plan.search import search_plan
from dflop_jax.records import BACKWARD, FORWARD, Load, MeshShape, SegmentPlan
from dflop_jax.schedule import schedule_batch
from tests.plans import group_s

from . import cases
from .cases import BATCH, CONFIG, TILE, data_profile, mean_makespan_s, model_profile, random_case

DIP = dataclasses.replace(CONFIG, policy="dip", max_stage=4, effort="quick")


def prepared(profile, data=None, n_devices=4, **asked):
    return cases.prepared(n_devices, profile, data, DIP, **asked)


def run(n_devices, profile=None, data=None, **kwargs):
    inputs = profile or model_profile(), data or data_profile()
    return search_plan(*inputs, n_devices=n_devices, global_batch=BATCH, config=DIP, **kwargs)


def deep_profile(overhead_s=1e-4, **weights):
    """Layers enough for four ranks and several rounds."""
    layers = {"vision": 5, "llm": 13}
    profile = model_profile(**weights)
    return dataclasses.replace(profile, n_layers=layers, task_overhead_s=overhead_s)


@pytest.mark.parametrize("overhead_s", [0.0, 1e-4, 3e-3])
def test_efficient_rows_are_the_smallest_at_that_rate(overhead_s):
    """By the cost model's own segments, up to twice the largest that was timed."""
    context = prepared(deep_profile(overhead_s)).context
    segment, rates = SegmentPlan("vision", "vision", 0, 5, "vision", True, True), {}
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        tasks = (FORWARD, BACKWARD)
        seconds = (group_s(context.costs, segment, MeshShape(), 1, n, TILE, d) for d in tasks)
        rates[n] = n / float(sum(seconds))
    efficient = min(n for n, r in rates.items() if r >= MIN_EFFICIENCY * max(rates.values()))
    assert efficient_rows(context, "vision", 1, TILE) == efficient


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
    for (count, _, model), placed in zip(ranks_of, layouts, strict=True):
        assert [d for m in placed.submeshes for d in m.devices] == list(range(n_devices))
        rounds = {m: len(placed.segments_of(m)) // count for m in placed.modules}
        assert rounds in [choose_rounds(context, count, model, most) for most in (1, 2, 3)]
        assert rounds["vision"] == 1  # whose microbatch is the fastest
        for m in placed.modules:
            chunks = placed.segments_of(m)
            assert [s.submesh for s in chunks] == rounds[m] * [m.name for m in placed.submeshes]
            layers = [layer for s in chunks for layer in range(s.start, s.stop)]
            assert layers == list(range(context.n_layers[m]))


def every_candidate_s(evaluator):
    """(ranks, cut) -> mean makespan of the ranked batches, each counted by the scheduler and run
    group by group."""
    context, makespan_by_candidate = evaluator.context, {}
    for bound_s, *index in sorted_candidates(list(dip_spaces(context)), "lower_bound_s"):
        if math.isinf(bound_s):
            break
        expanded = [Candidate.from_space(*index)]
        while expanded[0].has_open_options:
            expanded = expanded[0].expand(evaluator)
        for ranked in expanded:
            layout, steps = ranked.plan.layout, ranked.simulator
            counted = (evaluator.count_groups(layout, b) for b in range(len(evaluator.batches)))
            n_groups = list(map(max, ranked.groups_by_batch, counted))
            found_s = mean_makespan_s(
                ranked.plan, context.price_layout(layout), context.trainable(layout),
                steps.content, n_groups, steps.sub_microbatches,
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
    every = every_candidate_s(prepared(profile, data, n_devices, remat="none", zero=1))
    result = run(n_devices, profile, data, remat="none", zero=1, refine=False)
    assert result.candidates[0].makespan_s == pytest.approx(min(every.values()), rel=1e-6)
    assert result.n_fit == len(every)


def test_schedules_feed_groups_with_sub_microbatches():
    """Data of many tiles: the chosen plan cuts them up, and fits where memory is short."""
    profile = deep_profile(1e-5, llm=0.3)
    loads = tuple(Load({"vision": (TILE,) * n, "llm": (4 * n + 20,)}) for n in (2, 9, 30, 60) * 5)
    data = dataclasses.replace(data_profile(), loads=loads, n_total=20)
    plan = run(4, profile, data).plan
    assert plan.policy == "dip"
    assert len(plan.layout.shapes("vision")) == 1
    assert plan.layout.fan_in > 1
    evaluator, fed = prepared(profile, data), []
    priced = evaluator.context.price_layout(plan.layout), evaluator.context.trainable(plan.layout)
    for batch in evaluator.batches:
        schedule = schedule_batch(batch, plan, *priced)
        fed += [len(schedule.feeders(i, "vision")) for i, g in enumerate(schedule.groups)
                if g.module == "llm"]  # fmt: skip
    assert max(fed) > 1
    limit = 0.8 * max(plan.predicted.peak_bytes.values())
    assert evaluator.max_peak_bytes(run(4, profile, data, memory_bytes=limit).plan) <= limit


def test_missing_placements_are_explained():
    shallow = dataclasses.replace(model_profile(), n_layers={"vision": 1, "llm": 4})
    with pytest.raises(ValueError, match=r"dip has no placement on 4 devices.*'vision' has 1;"):
        run(4, shallow)
    with pytest.raises(ValueError, match=r"dip has no placement on 7 devices"):
        run(7)
    with pytest.raises(ValueError, match=r"no plan fits into .* the smallest \(vision=2\*1x1x2@0"):
        run(4, memory_bytes=1000.0)
