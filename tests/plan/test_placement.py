"""Every placement of the spaces, against counting by brute force."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest

from dflop_jax.plan.placement import (
    LayerCosts,
    Parallelism,
    build_layout,
    layout_name,
    relative_layer_costs,
    shortest_pattern,
    split_layers,
)
from dflop_jax.plan.space import baseline_layouts, separate_families, shared_families
from dflop_jax.records import (
    Bucket,
    LayerTiming,
    Layout,
    MeshShape,
    ModelProfile,
    Plan,
    Shape,
)
from tests.plans import params

from .cases import extent, layouts

LAYERS = {"vision": 3, "llm": 4}
THREE = {"vision": 2, "audio": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 4}
blind = partial(baseline_layouts, "blind")


def triples(n, max_stage, max_model):
    """(stage, data, model) of product n, from all triples of numbers."""
    for s, d, m in itertools.product(range(1, n + 1), repeat=3):
        if s * d * m == n and s <= max_stage and m <= max_model:
            yield s, d, m


def brute_forms(n, layers, max_stage, max_model, cut, staged=True):
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
            for i, block in enumerate(blocks):
                for m in block:
                    alone = len(block) == 1
                    forms[m] = [
                        (sum(sizes[:i]), *form)
                        for form in brute_forms(
                            sizes[i], layers[m], max_stage if alone else 1, max_model, alone,
                            m not in unstaged,
                        )
                    ]  # fmt: skip
            for chosen in itertools.product(*(forms[m] for m in layers)):
                stages = [mesh[0] for _, mesh, _, _ in chosen]
                pipelines = sum(mesh[0] * k > 1 for _, mesh, k, _ in chosen)
                # A group of as many microbatches as the deepest loop has stages must suit all.
                if any(max(stages) % s for s in stages):
                    continue
                if len(blocks) <= 2 or pipelines <= 1:
                    found.add(chosen)
    return found


def described(placement):
    """(first device, mesh, segments, rounds) of every module."""
    mesh = {m.name: m for m in placement.submeshes}
    found = []
    for module in dict.fromkeys(s.module for s in placement.segments):
        segments = [s for s in placement.segments if s.module == module]
        parts = [mesh[s.submesh] for s in segments]
        (alike,) = {(m.shape.sizes, s.rounds) for m, s in zip(parts, segments, strict=True)}
        found.append((parts[0].first, alike[0], len(parts), alike[1]))
    return tuple(found)


def firsts_of(placement):
    return [first for first, *_ in described(placement)]


def laid_out(space, n, layers, **limits):
    """Layouts of a space, of which searched ones give families."""
    if space is blind:
        return list(space(n, layers, **limits))
    return layouts(space, n, layers, **limits)


def check(placement, n_devices, layers, disjoint):
    """A placement is a valid plan that covers every device and layer."""
    bucket = Bucket.from_shapes({m: Shape(1, 8) for m in layers})
    plan = Plan(
        "t",
        Layout(
            placement.submeshes,
            placement.segments,
            (bucket,),
            edges=(),
            group_size=placement.group_size,
        ),
    )
    used = [d for m in plan.layout.submeshes for d in m.devices]
    assert set(used) == set(range(n_devices))
    if disjoint:
        assert len(used) == n_devices
    for module, n in layers.items():
        assert sum(s.n_layers for s in plan.layout.segments_of(module)) == n
        plan.layout.data_ranks(module)
    stages = {plan.layout.submesh(s.submesh).stage for s in plan.layout.segments}
    assert placement.group_size == max(stages)  # a segment's loop needs as many microbatches


@pytest.mark.parametrize("llm_layers", [1, 4, 6])
@pytest.mark.parametrize("n", range(1, 9))
def test_separate_is_the_whole_space(n, llm_layers):
    layers = {"vision": 3, "llm": llm_layers}
    found = laid_out(separate_families, n, layers, **SPACE)
    want = brute_separate(n, layers, **SPACE)
    assert len(found) == len(want)
    assert {described(p) for p in found} == want
    assert len({layout_name(p) for p in found}) == len(found)
    for p in found:
        check(p, n, layers, disjoint=True)


@pytest.mark.parametrize("unstaged", [(), ("audio", "llm")])
@pytest.mark.parametrize("n", range(1, 6))
def test_separate_of_three_modules_has_every_partition(n, unstaged):
    limits = {"max_model": 2, "max_stage": 2, "unstaged": unstaged}
    found = laid_out(separate_families, n, THREE, **limits)
    assert len(found) == len({described(p) for p in found}) == len({layout_name(p) for p in found})
    assert {described(p) for p in found} == brute_separate(n, THREE, **limits)
    blocks = {tuple(firsts_of(p)) for p in found}
    for p in found:
        check(p, n, THREE, disjoint=False)
        firsts = firsts_of(p)
        assert len(set(firsts)) >= 2
    if n >= 3:  # two share, in all ways, or none do
        equal = {(a == b, a == c, b == c) for a, b, c in blocks}
        assert equal == {
            (True, False, False), (False, True, False), (False, False, True),
            (False, False, False),
        }  # fmt: skip


def test_many_devices_are_split_among_many_blocks_in_coarse_steps():
    small = {"max_model": 1, "max_stage": 1}
    for n in (16, 64, 100, 1024):
        firsts = [firsts_of(p) for p in layouts(separate_families, n, THREE, **small)]
        cuts = {f for row in firsts if len(set(row)) > 2 for f in row[1:]}
        step = min(cuts)
        assert cuts == set(range(step, n, step))
        assert 16 <= n / step < 32
    # Two blocks are split everywhere.
    firsts = {max(firsts_of(p)) for p in layouts(separate_families, 100, LAYERS, **small)}
    assert firsts == set(range(1, 100))


@pytest.mark.parametrize("n", range(1, 9))
def test_shared_gives_every_module_all_devices(n):
    found = laid_out(shared_families, n, LAYERS, **SPACE)
    want = {
        ((0, *vision), (0, *llm))
        for vision in brute_forms(n, LAYERS["vision"], 1, 4, False)
        for llm in brute_forms(n, LAYERS["llm"], 4, 4, False)
    }
    assert len(found) == len(want)
    assert {described(p) for p in found} == want
    for p in found:
        check(p, n, LAYERS, disjoint=False)
    assert all(
        p.group_size == 1 for p in laid_out(shared_families, n, LAYERS, unstaged=("llm",), **SPACE)
    )


@pytest.mark.parametrize("n", range(1, 9))
def test_blind_gives_the_whole_model_one_parallelism(n):
    found = list(blind(n, LAYERS, **SPACE))
    want = set()
    for s, d, m in triples(n, 4, 4):
        llm = max(s - 1, 1)  # the module before the last is the first of s stages
        first = n // s if s > 1 else 0
        want.add(((0, (1, d, m), 1, 1), (first, (1, d, m), llm, 1)))
        assert llm <= LAYERS["llm"]
    assert {described(p) for p in found} == want
    assert len({layout_name(p) for p in found}) == len(found)
    for p in found:
        one = p.submeshes[0].first == p.submeshes[-1].first
        assert len(p.segments) == (2 if one else n // p.submeshes[0].n_devices)
        check(p, n, LAYERS, disjoint=not one)


@pytest.mark.parametrize("space", [separate_families, shared_families, blind])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_model_of_one_module_gives_it_all_devices(space, n):
    found = laid_out(space, n, {"llm": 4}, **SPACE)
    assert found
    for p in found:
        assert {s.module for s in p.segments} == {"llm"}
        check(p, n, {"llm": 4}, disjoint=True)


def test_one_device_cannot_be_shared_out():
    assert list(separate_families(extent(1, LAYERS, **SPACE))) == []
    (layout,) = laid_out(blind, 1, LAYERS, **SPACE)
    assert [s.module for s in layout.segments] == ["vision", "llm"]


def test_the_ends_of_a_model_shift_layers_to_the_others():
    where = (Parallelism(MeshShape()), Parallelism(MeshShape(), 2)), (0, 1)
    ends = {("llm", 1): LayerCosts(0.0, 2.0)}
    assert [s.n_layers for s in build_layout(*where, LAYERS, ends).segments] == [3, 3, 1]
    assert [s.n_layers for s in build_layout(*where, LAYERS).segments] == [3, 2, 2]


def test_layers_that_differ_are_cut_by_what_they_cost():
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


def test_what_layers_cost_comes_from_the_timings_of_their_kinds():
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
    with pytest.raises(ValueError, match="'llm' has 3 layers and kinds of 2"):
        dataclasses.replace(profile, kinds={"llm": kinds[:2]})


@pytest.mark.parametrize("kinds, want", [
    ("a", 1), ("aaaa", 1), ("aab" * 4, 3), ("abab", 2), ("aaba", 4), ("aabaabaa", 8),
])  # fmt: skip
def test_loops_hold_whole_patterns(kinds, want):
    assert shortest_pattern(kinds) == want
    n = len(kinds)
    families = separate_families(
        extent(8, {"llm": n}, max_model=1, max_stage=4, patterns={"llm": want})
    )
    loops = {(f.parallelisms[0].mesh.stage, f.parallelisms[0].rounds) for f in families}
    for stages, rounds in itertools.product((2, 3, 4), (1, 2)):
        size = n // (stages * rounds)
        alike = size > 0 and kinds == kinds[:size] * (stages * rounds)
        assert ((stages, rounds) in loops) == (alike and 8 % stages == 0)
