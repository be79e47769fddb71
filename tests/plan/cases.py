"""Profiles, data and the exhaustive search that the planner is compared with.

Long because the oracle of the search shares nothing with it.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import find_hardware
from dflop_jax.plan import refine_buckets
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.plan.placement import LayerCosts, SpaceLimits, layout_name
from dflop_jax.plan.search import SearchResult, build_evaluator, search_plan
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.plan.space import FAMILIES_BY_POLICY
from dflop_jax.plan.volume import GROUPS_PER_BATCH
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    DataProfile,
    Edge,
    Group,
    LayerTiming,
    Layout,
    Load,
    ModelProfile,
    Plan,
    Price,
    Prices,
    ProgramId,
    Recompute,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule import BucketChoice, capacity_of, schedule_batch
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bucket_search import pack_into
from dflop_jax.schedule.groups import PackingSpace
from dflop_jax.schedule.sampled_batches import sample_batches
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import in_flight_limit
from tests.plans import params, profile_of

LINKS = dataclasses.replace(
    find_hardware("cpu"), link_bandwidth=4e6, network_bandwidth=1e6, devices_per_node=4
)
TILE = 16  # tokens of a piece of "vision", which takes one a row

BATCH = 8
CONFIG = PlanConfig(
    policy="dflop",
    buckets=2,
    max_model=2,
    max_stage=2,
    max_microbatches=8,
    sampled_batches=2,
    devices=0,
)
# Graphs of modules: name -> (layers of each module, edges).
GRAPHS = {
    "one": ({"llm": 4}, ()),
    "two": ({"vision": 2, "llm": 4}, (Edge("vision", "llm", "v"),)),
    "apart": (
        {"vision": 2, "audio": 1, "llm": 3},
        (Edge("vision", "llm", "v"), Edge("audio", "llm", "a")),
    ),
    "chain": (
        {"vision": 2, "llm": 3, "generator": 2},
        (Edge("vision", "llm", "v"), Edge("llm", "generator", "h")),
    ),
    "taps": (
        {"vision": 3, "llm": 3, "generator": 2},
        (
            Edge("vision", "llm", "v"),
            Edge("vision", "llm", "deep", tap="middle", leaves=1, enters=1),
            Edge("llm", "generator", "h"),
            Edge("vision", "generator", "w"),
        ),
    ),
}


def recompute(layer_s, ends_s, kept, less, pair_s=0.0):
    """Policies from what all of a forward takes and keeps: "dots" repeats a third of it and keeps
    half, "layers" repeats all and keeps the share `less`, with the rest among the temporaries."""
    content_s = {"pair": pair_s}
    return {
        "none": Recompute(0.0, 0.0, {}, kept, kept, kept),
        "dots": Recompute(layer_s / 3, ends_s / 3, content_s, kept / 2, kept / 2, 1.2 * kept),
        "layers": Recompute(layer_s, ends_s, content_s, less * kept, 0.0, 2 * kept),
    }


def shapes_timed(module):
    """A module of tiles varies in rows only."""
    return (
        [(1, TILE), (4, TILE), (16, TILE)] if module == "vision" else [(1, 32), (1, 128), (4, 64)]
    )


def model_profile(vision=1.0, llm=1.0, *, degrees=(1, 2), concurrency=8.0, graph="two", tied=()):
    """Times from a formula; `vision` and `llm` weigh the modules, tensor parallelism is 80 %."""
    layers, edges = GRAPHS[graph]
    weights = {"vision": vision, "llm": llm}
    timings = []
    for module in layers:
        for tp, (rows, tokens) in itertools.product(degrees, shapes_timed(module)):
            f = 1e-4 + 2e-6 * rows * tokens + 1e-8 * rows * tokens**2
            f *= weights.get(module, 1.0) / tp**0.7
            temp = 100.0 * rows * tokens / tp
            timings.append(
                LayerTiming(
                    module, tp, Shape(rows, tokens), f, 2 * f, f, 2 * f, temp / 4,
                    recompute=recompute(f, f, temp, 0.25),
                )
            )  # fmt: skip
    return profile_of(
        timings, layers, layer_bytes=10_000, ends_bytes=5_000, share=0.3,
        piece_tokens={"vision": TILE} if "vision" in layers else {}, concurrency=concurrency,
        task_overhead_s=1e-4, edges=edges, tied=tied, priced_by="a formula",
    )  # fmt: skip


@functools.cache
def data_profile(tiles=True):
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.pareto(1.2, 60) * 2, 9).astype(int) * tiles
    loads = [
        Load({"vision": (TILE,) * int(t), "llm": (int(4 * t + rng.integers(10, 60)),)})
        for t in counts
    ]
    return DataProfile("made up", 60, tuple(loads))


def capacity(module, loads, problem):
    """Rows and tokens that hold what the largest sample or an even share of the batch needs."""
    tile = problem.piece_tokens.get(module)
    totals = [len(n.lengths(module)) if tile else n.tokens(module) for n in loads]
    if not max(totals):
        return None
    share = problem.global_batch * np.mean(totals) / problem.max_microbatches
    need = math.ceil(max(max(totals), 1.3 * share) / problem.ranks[module])
    if tile:
        return Shape(need, tile)
    longest = max(n for load in loads for n in load.lengths(module))
    return Shape(1, -(-max(need, longest) // problem.token_multiple) * problem.token_multiple)


def simple_buckets(loads, problem, *, effort, **options):
    """A rule in place of the bucket search, which has tests of its own and takes seconds: one
    bucket for all, and one without tiles."""
    both = Bucket.from_shapes({m: capacity(m, loads, problem) for m in problem.ranks})
    without = [(m, s) for m, s in both.shapes if m != "vision"]
    return BucketChoice(tuple(dict.fromkeys([both, Bucket(tuple(without))])), 0.0, {})


def shape_of(module, microbatches, data, profile, ranks, model):
    """The shape that cuts a mean batch into so many microbatches: 5 % above the even share, enough
    for the largest sample; of several row counts the cheapest per token."""
    loads = data.loads

    def up(x):
        return int(np.ceil(x - 1e-9))

    n = microbatches * ranks
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
    submeshes, segments, first, programs = [], [], 0, {}
    for m, n in profile.n_layers.items():
        submeshes.append(SubmeshPlan(m, first, 1, ranks[m], 1))
        segments.append(SegmentPlan(m, m, 0, n, m, True, True))
        first += ranks[m]
        for d, price in ((FORWARD, 1.0), (BACKWARD, 2.0)):
            if bucket.shape(m):
                programs[ProgramId(m, bucket.shape(m), d)] = Price(price)
    layout = Layout(tuple(submeshes), tuple(segments), (bucket,), profile.edges, group_size)
    plan = Plan("t", layout)
    greedy, better = (schedule_batch(batch, plan, Prices(programs), (), work=w) for w in (0, 200))
    n = min(max(sum(g.module == m for g in s.groups) for m in ranks) for s in (greedy, better))
    smaller, share = smaller_than(bucket, profile, longest)
    if smaller == bucket:
        return n
    room = PackingSpace(Batch(batch, list(ranks)), (bucket, smaller), capacity_of(layout), None)
    into = [0] * (n - 1) + [1]
    saved = packs(room, into, Budget(100), np.random.default_rng(0)) * (1 - share)
    return n - saved


def packs(room, into, budget, rng):
    """Whether a batch packs into these groups; each sample is in one of them and none is overfull,
    if so."""
    answer = pack_into(room, into, budget, rng)
    if answer is None:
        return False
    held = [i for t in answer for rows in t.microbatches for row in rows for i in row]
    assert sorted(held) == list(range(room.batch.n_samples))
    assert len(answer) <= len(into)
    for t in answer:
        for m, places in t.placements.items():
            shape, tokens = room.buckets[t.bucket].shape(m), Counter()
            for piece, *at in places.columns.T.tolist():
                tokens[tuple(at)] += room.batch.lengths[m][piece]
            assert max(tokens.values()) <= shape.tokens
            assert places.row.max() < shape.rows
    return True


def by_volume(batch, bucket, ranks, group_size, profile):
    """Groups that hold a batch if nothing is left over, the last of them as small as need be."""
    least = [SMALLER]
    for m, shape in bucket.shapes:
        tile = m in profile.piece_tokens
        amount = sum(len(x.lengths(m)) if tile else x.tokens(m) for x in batch)
        room = (shape.rows if tile else shape.size) * ranks[m] * group_size
        least.append(amount / room)
    return max(least)


def full_groups(plan, contents, n, together=None):
    """`n` times the groups that go `together` (one of each module that has a shape): each feeds all
    of its modules' readers of that time."""
    (bucket,) = plan.layout.buckets
    counts = {m: (together or {}).get(m, 1) for m, _ in bucket.shapes}
    first, size = {}, 0
    for m, count in counts.items():
        first[m], size = size, size + count
    groups = []
    for start in range(0, n * size, max(size, 1)):
        for m, shape in bucket.shapes:
            readers = [t for t in plan.layout.targets(m) if t in counts]
            feeds = tuple(start + first[t] + k for t in readers for k in range(counts[t]))
            group = Group(m, shape, feeds, contents[m], microbatches=plan.layout.group_size)
            groups += [group] * counts[m]
    return tuple(groups)


def mean_makespan_s(plan, prices, names, contents, n_groups, together=None):
    """Mean seconds of steps of so many groups; part of a group takes that part of what a group more
    takes."""
    took = {}
    for n in sorted({f(n) for n in n_groups for f in (math.floor, math.ceil)}):
        schedule = Schedule(0, full_groups(plan, contents, n, together))
        took[n] = simulate_step(plan, schedule, prices, names).makespan_s
    return float(np.mean(np.interp(n_groups, list(took), list(took.values()))))


def extent(n_devices, n_layers, *, max_model, max_stage, unstaged=(), patterns=None):
    """A space of modules with every tensor-parallel degree."""
    degrees = dict.fromkeys(n_layers, range(1, max_model + 1))
    patterns = patterns or dict.fromkeys(n_layers, 1)
    config = PlanConfig(max_model=max_model, max_stage=max_stage)
    return SpaceLimits(n_layers, degrees, unstaged, patterns, n_devices, n_devices, config)


def layouts(space, n_devices, n_layers, ends=None, **limits):
    families = space(extent(n_devices, n_layers, **limits))
    return [f.layout(i, n_layers, ends) for f in families for i in range(len(f))]


def every_candidate(policy, n_devices, profile, data, config):
    """(placement, (groups, microbatches of a group), plan, content of groups, groups of each batch)
    of everything."""
    ends = {}
    for t in sorted(profile.timings, key=lambda t: t.shape.size):
        both = (t.ends_forward_s + t.ends_backward_s) / (t.layer_forward_s + t.layer_backward_s)
        share = profile.entry_share[t.module]
        ends[t.module, t.model] = LayerCosts(round(both * share, 6), round(both * (1 - share), 6))
    # Candidates are ranked by twice as many.
    batches = sample_batches(data.loads, BATCH, 2 * config.sampled_batches)
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
        if config.microbatches_per_stage and stages > 1:
            sizes = [config.microbatches_per_stage * stages]
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
    """([(placement, cut, makespan, peak bytes)] of everything that memory holds, memory):
    with these recompute policies and ZeRO degrees of every module, and, if `tight`, with memory for
    half of all, else (0) for everything."""
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


# Devices of a random case by graph: three modules have many more placements.
DEVICES = {
    "two": [1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 13, 6, 4, 5, 16, 3],
    "apart": [3, 4, 2, 4],
    "chain": [3, 4, 2, 4],
    "taps": [3, 4, 2, 3],
}


def random_case(seed, graph="two"):
    """A profile, batch data, memory and links of a seed; sizes so small that all can be tried."""
    rng = np.random.default_rng(seed)
    n_devices = DEVICES[graph][seed % len(DEVICES[graph])]
    layers, edges = GRAPHS[graph]
    timings = []
    for module in layers:
        a, b, c = 10 ** rng.uniform([-5, -6.5, -9], [-4, -5, -8])
        temp, kept = rng.uniform(20, 200, 2)
        pair_s = 10 ** rng.uniform(-9, -8) if seed % 3 == 0 and module != "vision" else 0.0
        for tp in (1, 2):
            for rows, tokens in shapes_timed(module):
                f = (a + b * rows * tokens + c * rows * tokens**2) / tp ** rng.uniform(0.4, 1)
                ends = f * rng.uniform(0, 3)
                size = rows * tokens / tp
                timings.append(
                    LayerTiming(
                        module, tp, Shape(rows, tokens), f, f * rng.uniform(1, 3), ends, 2 * ends,
                        kept * size, {"pair": pair_s / tp}, {"pair": 2 * pair_s / tp},
                        recompute(f, ends, temp * size, 0.2, pair_s / tp),
                    )
                )  # fmt: skip
    if graph == "two":
        layers = {"vision": int(rng.integers(1, 5)), "llm": int(rng.integers(1, 6))}
    profile = ModelProfile(
        key=f"random {seed}",
        device="cpu" if seed % 2 else "gpu",
        timings=tuple(timings),
        layer_dims=params({m: int(rng.integers(1_000, 20_000)) for m in layers}),
        ends_dims=params({m: int(rng.integers(0, 20_000)) for m in layers}),
        n_layers=layers,
        entry_share={m: float(rng.uniform()) for m in layers},
        piece_tokens={"vision": TILE},
        concurrency=float(rng.choice([1.5, n_devices])),
        task_overhead_s=float(10 ** rng.uniform(-6, -4)),
        edges=edges,
        tied=("llm",) if seed % 4 == 3 else (),
        host_s=(0.0, 2e-4, 3e-3)[seed % 3],
    )
    counts = rng.integers(0, rng.integers(1, 9), 30)
    loads = []
    for t in counts.tolist():
        pieces = {"vision": (TILE,) * t, "llm": (int(4 * t + rng.integers(10, 80)),)}
        if "audio" in layers:  # of any length, several of a sample
            pieces["audio"] = tuple(rng.integers(5, 40, rng.integers(0, 3)).tolist())
        if "generator" in layers:
            pieces["generator"] = tuple(rng.integers(10, 60, rng.integers(0, 2)).tolist())
        loads.append(Load(pieces))
    profile = on(LINKS if seed % 2 else None, profile)
    return profile, DataProfile("random", 30, tuple(loads)), n_devices, rng


def on(hardware, profile):
    """The profile as if it were computed for some hardware."""
    return dataclasses.replace(profile, hardware=hardware, computed=hardware is not None)


def prepared(n_devices, profile=None, data=None, config=CONFIG, **asked):
    """What judges plans in a search; `asked` are fields of its spec."""
    spec = SearchSpec(n_devices, BATCH, config, **asked)
    return build_evaluator(profile or model_profile(), data or data_profile(), spec)


_SEARCHED: dict[str, SearchResult] = {}


def run(
    policy="dflop", n_devices=3, profile=None, data=None, effort="quick", finalists=3,
    shard_devices=0, **options,
):  # fmt: skip
    """A search, of the usual profiles where none are given; equal ones, with the same choice of
    buckets, are searched once."""
    config = dataclasses.replace(
        CONFIG, policy=policy, effort=effort, finalists=finalists, shard_devices=shard_devices
    )
    inputs = profile or model_profile(), data or data_profile()
    key = repr((refine_buckets.choose_buckets, inputs, n_devices, config, sorted(options.items())))
    if any(map(callable, options.values())) or key not in _SEARCHED:
        _SEARCHED[key] = search_plan(
            *inputs, n_devices=n_devices, global_batch=BATCH, config=config, **options
        )
    return _SEARCHED[key]
