"""DIP's partitioner and its search, against counting and simulating everything."""

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
from dflop_jax.profile.prices import layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Group,
    Load,
    MeshShape,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.simulate.steps import simulate_step
from tests.plans import group_s

from . import cases
from .cases import BATCH, CONFIG, TILE, data_profile, model_profile, random_case

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


def whole_s(rules, module, rows, tokens):
    """Seconds of a whole module, by the cost model's own segments."""
    n = rules.n_layers[module]
    segment = SegmentPlan(module, module, 0, n, module, True, True)
    tasks = (FORWARD, BACKWARD) if module == "vision" else (BACKWARD,)
    seconds = (group_s(rules.costs, segment, MeshShape(), 1, rows, tokens, d) for d in tasks)
    return float(sum(seconds))


@pytest.mark.parametrize("overhead_s", [0.0, 1e-4, 3e-3])
def test_the_smallest_sub_microbatch_that_is_efficient(overhead_s):
    profile = dataclasses.replace(model_profile(), task_overhead_s=overhead_s)
    rules = prepared(profile).context
    got = efficient_rows(rules, "vision", 1, TILE)
    most = 2 * 16  # twice the largest that was timed
    rates = {n: n / whole_s(rules, "vision", n, TILE) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    assert max(rates) == most
    assert got == min(n for n, r in rates.items() if r >= MIN_EFFICIENCY * max(rates.values()))


def test_rounds_go_by_the_time_of_a_microbatch():
    """Up to the rounds that are asked for, and to what the layers allow."""
    rules = prepared(deep_profile(llm=40.0)).context
    tokens = {"vision": TILE, "llm": rules.row_tokens("llm")}
    took_s = {m: whole_s(rules, m, efficient_rows(rules, m, 1, n), n) for m, n in tokens.items()}
    ratio = {m: int(s / min(took_s.values()) + 1e-6) for m, s in took_s.items()}
    assert ratio["llm"] > MAX_ROUNDS
    for count, rounds in itertools.product((2, 4), (1, 2, 3)):
        got = choose_rounds(rules, count, 1, rounds)
        assert got["llm"] == min(rounds, 13 // count)
        assert got["vision"] == 1


@pytest.mark.parametrize("n_devices, tp", [(2, 1), (4, 1), (8, 2), (12, 1)])
def test_every_rank_holds_chunks_of_every_module(n_devices, tp):
    rules = prepared(deep_profile(llm=40.0), n_devices=n_devices).context
    found = list(dip_layouts(rules))
    ranks_of = [(len(p.submeshes), p.submeshes[0].data, p.submeshes[0].model) for p in found]
    assert set(ranks_of) == {
        (p, n_devices // p // t, t)
        for p, t in itertools.product((2, 3, 4), (1, 2))
        if n_devices % p == 0 and (n_devices // p) % t == 0
    }
    for (count, data, model), placed in zip(ranks_of, found, strict=True):
        meshes = {m.name: m for m in placed.submeshes}
        assert [d for m in placed.submeshes for d in m.devices] == list(range(n_devices))
        assert {m.shape.sizes for m in placed.submeshes} == {(1, data, model)}
        rounds_up_to = [choose_rounds(rules, count, model, most) for most in (1, 2, 3)]
        rounds = {m: len(placed.segments_of(m)) // count for m in placed.modules}
        assert rounds in rounds_up_to
        for m in placed.modules:
            chunks = placed.segments_of(m)
            assert len(chunks) == rounds[m] * count
            assert [s.submesh for s in chunks] == rounds[m] * list(meshes)
            layers = [layer for s in chunks for layer in range(s.start, s.stop)]
            assert layers == list(range(rules.n_layers[m]))
            entry, leave, _ = rules.layer_costs(m, model)
            dearest = max(s.n_layers + entry * s.first + leave * s.last for s in chunks)
            least = least_dearest(rules.n_layers[m], len(chunks), entry, leave)
            assert dearest == pytest.approx(least)


def least_dearest(n, parts, entry, leave):
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
def test_groups_that_feed_are_cut_into_efficient_ones(tiles, parts):
    rules = prepared(dataclasses.replace(deep_profile(), task_overhead_s=1e-3)).context
    placed = chunked_layout(rules, RANKS, {"vision": 1, "llm": 1})
    buckets = (Bucket.from_shapes({"vision": Shape(tiles, TILE), "llm": Shape(1, 256)}),
               Bucket.from_shapes({"vision": Shape(1, TILE), "llm": Shape(1, 128)}))  # fmt: skip
    layout = with_sub_microbatches(dataclasses.replace(placed, buckets=buckets), rules)
    efficient = efficient_rows(rules, "vision", 1, TILE)
    assert layout.fan_in == min(MAX_SUB_MICROBATCHES, -(-tiles // efficient))
    if layout.fan_in == 1:
        assert layout.buckets == buckets
        return
    (shape,) = layout.shapes("vision")
    assert shape.rows * layout.fan_in >= tiles
    assert shape.rows >= efficient
    assert layout.shapes("llm") == (Shape(1, 256), Shape(1, 128))


def counted_out(begun, evaluator):
    """The candidates that what was begun comes to."""
    while begun and begun[0].has_open_options:
        begun = begun[0].expand(evaluator)
    return begun


def every_candidate_s(evaluator):
    """(ranks, cut) -> mean makespan of the ranked batches, each counted by the scheduler and run
    group by group."""
    rules, found = evaluator.context, {}
    for bound_s, *place in sorted_candidates(list(dip_spaces(rules)), "lower_bound_s"):
        if math.isinf(bound_s):
            break
        for ranked in counted_out([Candidate.from_space(*place)], evaluator):
            plan, costs = ranked.plan, rules.costs
            names = rules.trainable(plan.layout)
            spans = []
            for b in range(len(evaluator.batches)):
                n_groups = max(ranked.groups_by_batch[b], evaluator.count_groups(plan.layout, b))
                around, took_s = (math.floor(n_groups), math.ceil(n_groups)), []
                for whole in around:
                    groups = []
                    for _ in range(whole):
                        (bucket,) = plan.layout.buckets
                        counts = [ranked.simulator.groups_together[m] for m, _ in bucket.shapes]
                        stop = len(groups) + sum(counts)
                        read = tuple(range(stop - counts[-1], stop))
                        for (m, shape), n in zip(bucket.shapes, counts, strict=True):
                            feeds = () if m == "llm" else read
                            groups += [Group(m, shape, feeds, ranked.simulator.content[m])] * n
                    prices = layout_prices(plan.layout, costs)
                    trace = simulate_step(plan, Schedule(0, tuple(groups)), prices, names)
                    took_s.append(trace.makespan_s)
                spans.append(np.interp(n_groups, around, took_s))
            assert bound_s <= np.mean(spans) * (1 + 1e-9)
            found[ranked.name, ranked.groups_per_batch] = float(np.mean(spans))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_everything(seed):
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


def test_a_plan_feeds_with_sub_microbatches_and_is_scheduled():
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


def test_what_cannot_be_is_said():
    shallow = dataclasses.replace(model_profile(), n_layers={"vision": 1, "llm": 4})
    with pytest.raises(ValueError, match=r"dip has no placement on 4 devices.*'vision' has 1;"):
        run(4, shallow)
    with pytest.raises(ValueError, match=r"dip has no placement on 7 devices"):
        run(7)
    with pytest.raises(ValueError, match=r"no plan fits into .* the smallest \(vision=2\*1x1x2@0"):
        run(4, memory_bytes=1000.0)
