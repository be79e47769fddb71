"""Every placement of the spaces, against counting by brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from dflop_jax.plan.placement import (
    LayerCosts,
    layout_name,
    relative_layer_costs,
    shortest_pattern,
    split_layers,
)
from dflop_jax.plan.space import BASELINES, baseline_layouts, separate_families, shared_families
from dflop_jax.records import Bucket, LayerTiming, ModelProfile, Shape
from tests.plans import params

from .cases import extent, layouts

LAYERS = {"vision": 3, "llm": 4}
THREE = {"vision": 2, "audio": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 4}


def triples(n, max_stage, max_model):
    """(stage, data, model) of product n, from all triples of numbers."""
    for s, d, m in itertools.product(range(1, n + 1), repeat=3):
        if s * d * m == n and s <= max_stage and m <= max_model:
            yield s, d, m


def brute_parallelisms(n, layers, max_stage, max_model, cut, staged=True):
    """(mesh, segments, rounds) of a module on n devices."""
    for stage, data, model in triples(n, max_stage, max_model):
        if layers % stage == 0 and (staged or stage == 1):
            yield (stage, data, model), 1, 1
        if layers % (2 * stage) == 0 and staged and stage > 1:
            yield (stage, data, model), 1, 2
        if cut and 1 < stage <= layers:
            yield (1, data, model), stage, 1


def partitions(names):
    """All ways to put names into blocks, as lists of lists in the order of first names."""
    if not names:
        yield []
        return
    *before, last = names
    for blocks in partitions(before):
        for i in range(len(blocks)):
            yield [b + [last] * (i == k) for k, b in enumerate(blocks)]
        yield [*blocks, [last]]


def brute_separate(n, layers, *, max_model, max_stage, unstaged=()):
    """(first device, mesh, segments, rounds) of every module of every placement."""
    found = set()
    for blocks in partitions(list(layers)):
        if len(blocks) < min(2, len(layers)):
            continue
        for sizes in itertools.product(range(1, n + 1), repeat=len(blocks)):
            if sum(sizes) != n:
                continue
            forms = {}
            for i, m in ((i, m) for i, block in enumerate(blocks) for m in block):
                alone = len(blocks[i]) == 1
                depth, staged = max_stage if alone else 1, m not in unstaged
                each = brute_parallelisms(sizes[i], layers[m], depth, max_model, alone, staged)
                forms[m] = [(sum(sizes[:i]), *form) for form in each]
            for chosen in itertools.product(*(forms[m] for m in layers)):
                stages = [mesh[0] for _, mesh, _, _ in chosen]
                pipelines = sum(mesh[0] * k > 1 for _, mesh, k, _ in chosen)
                # A group of as many microbatches as the deepest loop has stages must suit all.
                if any(max(stages) % s for s in stages):
                    continue
                if len(blocks) <= 2 or pipelines <= 1:
                    found.add(chosen)
    return found


def parallelisms_of(placement):
    """(first device, mesh, segments, rounds) of every module."""
    found = []
    for module in placement.modules:
        segments = placement.segments_of(module)
        parts = [placement.submesh(s.submesh) for s in segments]
        (alike,) = {(m.shape.sizes, s.rounds) for m, s in zip(parts, segments, strict=True)}
        found.append((parts[0].first, alike[0], len(parts), alike[1]))
    return tuple(found)


def check_layout(placement, n_devices, layers, disjoint=True):
    """A placement is a valid plan that covers every device and layer."""
    bucket = Bucket.from_shapes({m: Shape(1, 8) for m in layers})
    layout = dataclasses.replace(placement, buckets=(bucket,))
    used = [d for m in layout.submeshes for d in m.devices]
    assert set(used) == set(range(n_devices))
    assert not disjoint or len(used) == n_devices
    for module, n in layers.items():
        assert sum(s.n_layers for s in layout.segments_of(module)) == n
        layout.data_ranks(module)
    assert layout.group_size == max(m.stage for m in layout.submeshes)


def check_families(space, n, layers, want, disjoint, **limits):
    found = layouts(space, n, layers, **limits)
    assert {parallelisms_of(p) for p in found} == want
    assert len(found) == len(want) == len({layout_name(p) for p in found})
    for p in found:
        check_layout(p, n, layers, disjoint)


@pytest.mark.parametrize("llm_layers", [1, 4, 6])
@pytest.mark.parametrize("n", range(1, 9))
def test_separate_families_equal_brute_force(n, llm_layers):
    layers = {"vision": 3, "llm": llm_layers}
    want = brute_separate(n, layers, **SPACE)
    check_families(separate_families, n, layers, want, True, **SPACE)


@pytest.mark.parametrize("unstaged", [(), ("audio", "llm")])
@pytest.mark.parametrize("n", range(1, 6))
def test_separate_families_of_three_modules_have_every_partition(n, unstaged):
    limits = {"max_model": 2, "max_stage": 2, "unstaged": unstaged}
    want = brute_separate(n, THREE, **limits)
    check_families(separate_families, n, THREE, want, False, **limits)


@pytest.mark.parametrize("n", range(1, 9))
def test_shared_families_give_every_module_all_devices(n):
    vision = brute_parallelisms(n, LAYERS["vision"], 1, 4, False)
    llm = [(0, *form) for form in brute_parallelisms(n, LAYERS["llm"], 4, 4, False)]
    want = {((0, *form), other) for form in vision for other in llm}
    check_families(shared_families, n, LAYERS, want, False, **SPACE)


def test_more_than_two_blocks_split_devices_in_coarse_steps():
    for n in (16, 64, 100, 1024):
        found = layouts(separate_families, n, THREE, max_model=1, max_stage=1)
        firsts = [[f for f, *_ in parallelisms_of(p)] for p in found]
        cuts = {f for row in firsts if len(set(row)) > 2 for f in row[1:]}
        assert cuts == set(range(min(cuts), n, min(cuts)))
        assert 16 <= n / min(cuts) < 32
        unit = max(1, n // 256)  # two blocks
        assert {max(row) for row in firsts if len(set(row)) == 2} == set(range(unit, n, unit))


def stage_of(placement):
    """Layer -> (first device of its stage, data, model)."""
    found = {}
    for s in placement.segments:
        m = placement.submesh(s.submesh)
        found |= {(s.module, i): (m.first, m.data, m.model) for i in range(s.start, s.stop)}
    return found


def brute_baseline(policy, n, layers):
    """`stage_of` every layout of a baseline, whose stages have layers of even number."""
    every = [(m, i) for m, k in layers.items() for i in range(k)]
    *sources, last = layers
    n_sources = sum(layers[m] for m in sources)
    for stages, data, tp in triples(n, 8, 4):
        splits = []
        if policy == "pytorch" and stages <= len(every):
            splits.append(np.array_split(np.arange(len(every)), stages))
        elif policy != "pytorch":
            most = min(stages - 1, n_sources)
            for e in range(most + 1) if policy == "megatron" else [min(1, most)]:
                if stages - e <= layers[last]:
                    rest = np.array_split(np.arange(n_sources, len(every)), stages - e)
                    before = np.array_split(np.arange(n_sources), max(e, 1))
                    if e == 0:
                        before, rest[0] = [], np.concatenate([*before, rest[0]])
                    splits.append([*before, *rest])
        for split in splits:
            at = [(i, k * data * tp) for k, part in enumerate(split) for i in part]
            yield {every[i]: (first, data, tp) for i, first in at}


@pytest.mark.parametrize("layers", [LAYERS, {"llm": 4}], ids=len)
@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize("n", range(1, 9))
def test_baseline_layouts_equal_brute_force(policy, n, layers):
    found = list(baseline_layouts(policy, n, layers, max_model=4, max_stage=8))
    got, want = map(stage_of, found), brute_baseline(policy, n, layers)
    assert sorted(repr(sorted(x.items())) for x in got) == sorted(
        repr(sorted(x.items())) for x in want
    )
    for p in found:
        check_layout(p, n, layers)


def test_split_layers_has_the_lowest_maximum_cost():
    rng = np.random.default_rng(0)
    for _ in range(90):
        n = int(rng.integers(1, 10))
        parts = int(rng.integers(1, n + 1))
        entry, leave, *layers = rng.integers(0, 9, n + 2).tolist()
        layers = [1] * n if rng.random() < 0.3 else layers  # alike, which need not be said
        costs = LayerCosts(entry, leave, () if layers == [1] * n else tuple(layers))

        def dearest(cuts, costs=costs, layers=layers):
            each = [sum(layers[a:b]) for a, b in itertools.pairwise(cuts)]
            each[0] += costs.entry
            each[-1] += costs.exit
            return max(each)

        got = split_layers(n, parts, costs)
        cuts = [0, *(b for _, b in got)]
        assert cuts == [*(a for a, _ in got), n]
        every = itertools.combinations(range(1, n), parts - 1)
        assert dearest(cuts) == min(dearest((0, *inner, n)) for inner in every)
        sizes = [b - a for a, b in split_layers(n, parts)]
        assert sizes == sorted((n // parts + (i < n % parts) for i in range(parts)), reverse=True)


def test_layer_costs_come_from_the_timings_of_their_kinds():
    def timing(kind, rows, layer_s, ends_s):
        shape = Shape(rows, 8)
        return LayerTiming("llm", 1, shape, layer_s, 2 * layer_s, ends_s, ends_s, kind=kind)

    timings = (
        timing("full", 1, 7.0, 7.0), timing("full", 4, 3.0, 6.0), timing("delta", 4, 1.0, 6.0)
    )  # fmt: skip
    kinds = ("delta", "delta", "full")
    profile = ModelProfile(
        "k", "x", timings, params({"llm.full": 4, "llm.delta": 4}), params({"llm": 4}),
        {"llm": 3}, {"llm": 0.25}, 1.0, kinds={"llm": kinds},
    )  # fmt: skip
    mean_s = (3 + 3 + 9) / 3
    entry, leave, layers = relative_layer_costs(profile)["llm", 1]
    assert (entry, leave) == pytest.approx((0.25 * 12 / mean_s, 0.75 * 12 / mean_s))
    assert layers == pytest.approx((0.6, 0.6, 1.8))
    with pytest.raises(ValueError, match="'llm' has 3 layers but 2 layer kinds"):
        dataclasses.replace(profile, kinds={"llm": kinds[:2]})


@pytest.mark.parametrize("kinds, want", [
    ("a", 1), ("aaaa", 1), ("aab" * 4, 3), ("abab", 2), ("aaba", 4), ("aabaabaa", 8),
])  # fmt: skip
def test_loops_hold_whole_patterns(kinds, want):
    assert shortest_pattern(kinds) == want
    n, limits = len(kinds), {"max_model": 1, "max_stage": 4, "patterns": {"llm": want}}
    families = separate_families(extent(8, {"llm": n}, **limits))
    loops = {(f.parallelisms[0].mesh.stage, f.parallelisms[0].rounds) for f in families}
    for stages, rounds in itertools.product((2, 3, 4), (1, 2)):
        size = n // (stages * rounds)
        alike = size > 0 and kinds == kinds[:size] * (stages * rounds)
        assert ((stages, rounds) in loops) == (alike and 8 % stages == 0)
