"""The search against exhaustive evaluation of every placement, granularity and option."""

import dataclasses
import itertools
import math
from functools import cache

import numpy as np
import pytest

import dflop_jax.plan.space as space_module
from dflop_jax.plan.bounds import bound_families
from dflop_jax.plan.candidate import CLOSE_RATIO, Candidate
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.plan.placement import LayerCosts, layout_name
from dflop_jax.plan.search import search_plan
from dflop_jax.plan.search_spec import GROUPS_PER_BATCH, SearchSpec
from dflop_jax.plan.space import FAMILIES_BY_POLICY, search_families
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    ZERO,
    Bucket,
    Layout,
    Plan,
    Price,
    Prices,
    ProgramId,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import capacity_of, schedule_batch
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch, sample_batches
from dflop_jax.schedule.bucket_search import pack_into
from dflop_jax.schedule.groups import PackingSpace
from dflop_jax.simulate.task_graph import in_flight_limit

from .cases import (
    BATCH,
    CONFIG,
    data_profile,
    layouts,
    mean_makespan_s,
    model_profile,
    prepared,
    random_case,
    shapes_timed,
)


def shape_of(module, microbatches, data, profile, ranks, model):
    """The shape that cuts a mean batch into so many microbatches: 5% above the even share, enough
    for the largest sample; of several row counts the cheapest per token."""
    loads, n = data.loads, microbatches * ranks
    tile = profile.piece_tokens.get(module)
    totals = [len(x.lengths(module)) if tile else x.tokens(module) for x in loads]
    if not max(totals):
        return None
    share = BATCH * np.mean(totals) * 1.05 / n
    if tile:
        return Shape(max(up(share), up(max(totals) / ranks)), tile)
    longest = max(x for load in loads for x in load.lengths(module))
    costs, choices = CostModel(profile), []
    for rows in (1, 2, 4, 8):
        least = longest
        if any(len(load.lengths(module)) > 1 for load in loads):
            least = min(max(totals), max(totals) / rows / ranks + longest)
        least = 32 * up(least / 32)
        tokens = max(least, 32 * up(share / rows / 32))
        layer_s = float(costs.predict(module, model, rows, tokens)["layer_backward"])
        price = layer_s / rows / tokens
        fills = share > (rows - 0.5) * least
        if rows == 1 or (fills and price < choices[-1][0] * (1 - 1e-9)):
            choices.append((price, rows, tokens))
    _, rows, tokens = choices[-1]
    return Shape(rows, tokens)


def up(x):
    return int(np.ceil(x - 1e-9))


def in_nodes(place, size):
    """Whether every group of tensor-parallel devices lies in one node."""
    starts = [(m, d) for m in place.submeshes for d in m.devices[:: m.model]]
    return all(d // size == (d + m.model - 1) // size for m, d in starts)


SMALLER = 0.6  # what the smaller of two buckets has of the other


def smaller_than(bucket, profile, longest):
    """So much of the rows of every module, or of the tokens of one packed row, which still holds
    the longest piece; and the largest share that is left of what is cut."""
    shapes, shares = {}, []
    for m, s in bucket.shapes:
        rows, tokens = math.ceil(s.rows * SMALLER), s.tokens
        if s.rows == 1 and m not in profile.piece_tokens:
            tokens = min(tokens, 32 * math.ceil(max(tokens * SMALLER, longest[m]) / 32))
        shapes[m] = Shape(rows, tokens)
        shares += [rows * tokens / s.size] * (shapes[m] != s)
    return Bucket.from_shapes(shapes), max(shares, default=1.0)


def counted(batch, bucket, ranks, group_size, profile, longest):
    """Groups that the scheduler makes of a batch on whole modules at textbook prices; the last is
    a part of one where the batch packs into a smaller bucket in its place."""
    modules, programs = profile.n_layers.items(), {}
    firsts = itertools.accumulate(ranks.values(), initial=0)
    submeshes = tuple(SubmeshPlan(m, first, 1, ranks[m], 1) for first, m in zip(firsts, ranks))
    segments = tuple(SegmentPlan(m, m, 0, n, m, True, True) for m, n in modules)
    for (m, shape), (d, s) in itertools.product(bucket.shapes, ((FORWARD, 1.0), (BACKWARD, 2.0))):
        programs[ProgramId(m, shape, d)] = Price(s)
    layout = Layout(submeshes, segments, (bucket,), profile.edges, group_size)
    plan = Plan("t", layout)
    both = [schedule_batch(batch, plan, Prices(programs), (), work=w) for w in (0, 200)]
    n = min(max(sum(g.module == m for g in s.groups) for m in ranks) for s in both)
    smaller, share = smaller_than(bucket, profile, longest)
    if smaller == bucket:
        return n
    room = PackingSpace(Batch(batch, capacity_of(layout)), (bucket, smaller), None)
    into = [0] * (n - 1) + [1]
    packed = pack_into(room, into, Budget(100), np.random.default_rng(0))
    return n - (1 - share) * (packed is not None)


def by_volume(batch, bucket, ranks, group_size, profile):
    """Groups that hold a batch if nothing is left over, the last of them as small as need be."""
    least = [SMALLER]
    for m, shape in bucket.shapes:
        tile = m in profile.piece_tokens
        amount = sum(len(x.lengths(m)) if tile else x.tokens(m) for x in batch)
        least.append(amount / ((shape.rows if tile else shape.size) * ranks[m] * group_size))
    return max(least)


def every_candidate(policy, n_devices, profile, data, config):
    """(placement, (groups, microbatches of a group), plan, content of groups, groups of each
    batch) of everything."""
    ends = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        both = (t.ends_forward_s + t.ends_backward_s) / (t.layer_forward_s + t.layer_backward_s)
        share = profile.entry_share[t.module]
        ends[t.module, t.model] = LayerCosts(round(both * share, 6), round(both * (1 - share), 6))
    # Candidates are ranked by twice as many.
    batches = sample_batches(data.loads, BATCH, config.sampled_batches)
    hardware = profile.hardware
    n_groups = {}  # it does not depend on seconds
    limits = {"max_model": config.max_model, "max_stage": config.max_stage}
    unstaged = {e.source for e in profile.edges if e.tap}
    unstaged |= {e.target for e in profile.edges if e.enters >= 0}
    for place in layouts(
        FAMILIES_BY_POLICY[policy], n_devices, profile.n_layers, ends, unstaged=unstaged, **limits
    ):
        if hardware and not in_nodes(place, hardware.devices_per_node):
            continue
        stages, finest = place.group_size, config.max_microbatches
        sizes = [
            k * stages for k in (1, 2, 4, 8) if k == 1 or (stages > 1 and k * stages <= finest)
        ]
        ranks = {s.module: place.submesh(s.submesh).data for s in place.segments}
        model = {s.module: place.submesh(s.submesh).model for s in place.segments}

        def bucket_of(microbatches, ranks=ranks, model=model):
            return Bucket.from_shapes(
                {m: shape_of(m, microbatches, data, profile, r, model[m]) for m, r in ranks.items()}
            )

        tops = {size: max(1, finest // size) for size in sizes}
        smallest = bucket_of(max(size * top for size, top in tops.items()))
        timed = {m: max(r * t for r, t in shapes_timed(m)) for m in ranks}
        each = (
            (size, c) for size, top in tops.items() for c in {*GROUPS_PER_BATCH, top} if c <= top
        )
        before = None
        for size, cut in sorted(each):
            bucket = bucket_of(cut * size)
            if (size, bucket) == before:
                continue  # the same groups
            before = size, bucket
            if not profile.computed and any(
                s.size > max(2 * timed[m], smallest.tokens(m)) for m, s in bucket.shapes
            ):
                continue  # far beyond what was timed
            volumes = [by_volume(b, bucket, ranks, size, profile) for b in batches]
            n = min(cut, np.mean(volumes))
            squares = {m: sum(n**2 for load in data.loads for n in load.lengths(m)) for m in ranks}
            scale = BATCH / len(data.loads) * 1.05 / n
            contents = {m: (math.ceil(squares[m] * scale / r - 1e-9),) for m, r in ranks.items()}
            key = (size, bucket, *ranks.values())
            if key not in n_groups:
                lengths = {m: [n for x in data.loads for n in x.lengths(m)] for m in ranks}
                longest = {m: max(each, default=0) for m, each in lengths.items()}
                groups = (counted(b, bucket, ranks, size, profile, longest) for b in batches)
                n_groups[key] = list(map(max, volumes, groups))
            layout = Layout(
                place.submeshes, place.segments, (bucket,), profile.edges, size, tied=profile.tied
            )
            plan = Plan(policy, layout)
            yield layout_name(place), (cut, size), plan, contents, n_groups[key]


def every_option(plan, remats, degrees):
    """The plan with each recompute policy and ZeRO degree of each module."""
    kinds = itertools.product(remats, degrees)
    for chosen in itertools.product(list(kinds), repeat=len(plan.layout.modules)):
        of = dict(zip(plan.layout.modules, chosen, strict=True))
        segments = (
            dataclasses.replace(s, remat=of[s.module][0], zero=of[s.module][1])
            for s in plan.layout.segments
        )
        yield plan.with_layout(segments=tuple(segments))


def exhaustive(
    policy, n_devices, profile, data, config, trains=None, remats=("none",),
    degrees=(1,), tight=False,
):  # fmt: skip
    """([(placement, cut, makespan, peak bytes)] of everything that memory holds, memory), with
    these policies and ZeRO degrees; memory is for half of all if `tight`, else (0) for all."""
    trains = trains or (lambda s: True)
    costs = CostModel(profile)
    found = []
    for name, m, plan, contents, n_groups in every_candidate(
        policy, n_devices, profile, data, config
    ):
        names = [s.name for s in plan.layout.segments if trains(s)]
        for with_option in every_option(plan, remats, degrees):
            flying = in_flight_limit(with_option)
            peak = max(peak_bytes(with_option.layout, costs, flying, names).values())
            found.append((name, m, with_option, names, contents, n_groups, peak))
    peaks = sorted(peak for *_, peak in found)
    memory_bytes = peaks[len(peaks) // 2] if tight else 0.0
    rows, known = [], {}
    for name, m, plan, names, contents, n_groups, peak in found:
        if memory_bytes and peak > memory_bytes:
            continue
        prices = layout_prices(plan.layout, costs)
        key = name, m, repr((prices.programs, prices.step_end, prices.sends))
        if key not in known:
            known[key] = mean_makespan_s(plan, prices, names, contents, n_groups)
        rows.append((name, m, known[key], peak))
    return rows, memory_bytes


# Every other case gets memory for half of the candidates, so that recompute policies and ZeRO
# degrees have something to do.
SEEDS = {"two": (0, 1, 4, 2, 3, 5, 7, 12), "apart": (2, 3), "chain": (0, 2), "taps": (2, 3)}
CASES = [(graph, seed) for graph, seeds in SEEDS.items() for seed in seeds]


@cache  # cases of one graph and seed ask for the same
def exhaustive_case(graph, seed, policy, config, **more):
    profile, data, n_devices, _ = random_case(seed, graph)
    return exhaustive(policy, n_devices, profile, data, config, **more)


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("graph, seed", CASES)
def test_ranking_equals_exhaustive_evaluation(monkeypatch, graph, seed):
    profile, data, n_devices, rng = random_case(seed, graph)
    policy = "orch" if n_devices == 1 or seed % 5 == 2 else "dflop"
    config = dataclasses.replace(CONFIG, policy=policy, max_microbatches=3)
    tight = seed % 4 < 2
    # Degrees of ZeRO cost something where links do; both together are many.
    zero = "auto" if tight and seed % 2 else 1
    remat = "auto" if tight and seed in (0, 1, 4, 8, 12) else "none"
    known = CostModel(profile).priced_policies("llm")
    remats, degrees = known if remat == "auto" else (remat,), ZERO if zero == "auto" else (zero,)
    more = {"tight": tight, "remats": remats, "degrees": degrees}
    fit, memory_bytes = exhaustive_case(graph, seed, policy, config, **more)

    quick = dataclasses.replace(config, effort="quick")
    spec = SearchSpec(n_devices, BATCH, quick, memory_bytes, remat, zero, n_shown=5)
    result = search_plan(profile, data, spec)
    best = {}
    for name, _, took, _ in fit:
        best[name] = min(best.get(name, np.inf), took)
    ranked = sorted((took, name) for name, took in best.items())
    got = [(c.makespan_s, c.name) for c in result.candidates]
    assert [t for t, _ in got] == pytest.approx([t for t, _ in ranked[: len(got)]], rel=2e-6)
    # More than are shown only where these are close to the first.
    assert len(got) >= min(5, len(ranked))
    assert all(t <= CLOSE_RATIO * got[0][0] for t, _ in got[5:])
    for c in result.candidates:
        assert c.makespan_s == pytest.approx(best[c.name], rel=1e-9)
        peaks = [p for name, _, took, p in fit if (name, took) == (c.name, best[c.name])]
        assert min(abs(p / c.peak_bytes - 1) for p in peaks) < 1e-9
    assert result.n_fit == len({(name, m) for name, m, *_ in fit})

    space = FAMILIES_BY_POLICY[policy]

    def shuffled(*args, **kwargs):
        found = list(space(*args, **kwargs))
        for i in rng.permutation(len(found)):
            yield found[i].subset(rng.permutation(len(found[i])))

    monkeypatch.setitem(space_module.FAMILIES_BY_POLICY, policy, shuffled)
    assert search_plan(profile, data, spec) == result


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("graph, seed", [("two", 3), ("apart", 3), ("chain", 3), ("taps", 3)])
def test_no_lower_bound_exceeds_the_makespan(graph, seed):
    profile, data, n_devices, _ = random_case(seed, graph)
    config = dataclasses.replace(CONFIG, policy="dflop", max_microbatches=3)
    plain = {"tight": False, "remats": ("none",), "degrees": (1,)}
    every, _ = exhaustive_case(graph, seed, "dflop", config, **plain)
    took = {(name, m): seconds for name, m, seconds, _ in every}
    evaluator = prepared(n_devices, profile, data, config)
    rules, shares = evaluator.context, []
    for space in bound_families("dflop", search_families(rules.space_limits)["dflop"], rules):
        for p, c in np.ndindex(space.lower_bound_s.shape):
            if space.is_repeated[p, c]:
                continue
            layout = space.layout_at(p, c)
            exact_s = took[layout_name(layout), (int(space.groups_per_batch[c]), layout.group_size)]
            assert space.lower_bound_s[p, c] <= exact_s * (1 + 1e-9)
            counted = Candidate.from_space(space, p, c)
            bounds_s = [space.lower_bound_s[p, c], counted.lower_bound_s]
            for _ in evaluator.batches:
                (counted,) = counted.expand(evaluator)
                bounds_s.append(counted.lower_bound_s)
            assert (np.diff([*bounds_s, exact_s]) >= -1e-9 * exact_s).all()
            shares.append(space.lower_bound_s[p, c] / exact_s)
    assert len(shares) == len(took)
    # A bound of nothing would leave everything to be simulated.
    assert np.mean(shares) > 0.5


@pytest.mark.parametrize("graph, frozen", [
    ("two", {"vision"}),
    ("taps", {"vision"}), ("taps", {"vision", "llm"}), ("taps", {"llm"}),
])  # fmt: skip
def test_frozen_modules_have_no_backward_and_no_optimizer(graph, frozen):
    """Also where a tap reads what is frozen, or that stands between trained parts."""

    def trains(s):
        return s.module not in frozen

    profile, data, config = model_profile(vision=4.0), data_profile(), CONFIG
    if graph == "taps":
        profile, data, *_ = random_case(2, graph)
        config = dataclasses.replace(config, max_microbatches=2)
    every, _ = exhaustive("dflop", 3, profile, data, config, trains=trains)
    least = min(took for _, _, took, _ in every)
    spec = SearchSpec(3, BATCH, config, refine=False)
    result = search_plan(profile, data, spec, trains=trains)
    assert result.candidates[0].makespan_s == pytest.approx(least, rel=1e-9)
    # A frozen LLM still runs backward, for the encoder below it; a frozen encoder does not.
    if graph == "two":
        whole_s = search_plan(profile, data, spec).candidates[0].makespan_s
        assert least <= whole_s * (0.8 if "vision" in frozen else 1.0)
