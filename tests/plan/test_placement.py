"""Every placement of the spaces, against counting by brute force."""

import itertools

import pytest

from dflop_jax.plan.baselines import blind
from dflop_jax.plan.placement import Form, Outline, factors, lay_out, split_layers
from dflop_jax.plan.space import separate, shared
from dflop_jax.records import Bucket, Plan

LAYERS = {"vision": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 4}


def triples(n, max_stage, max_model):
    """(stage, data, model) of product n, from all triples of numbers."""
    for s, d, m in itertools.product(range(1, n + 1), repeat=3):
        if s * d * m == n and s <= max_stage and m <= max_model:
            yield s, d, m


def brute_forms(n, layers, max_stage, max_model, cut):
    """(mesh, segments) of a module on n devices."""
    for stage, data, model in triples(n, max_stage, max_model):
        if layers % stage == 0:
            yield (stage, data, model), 1
        if cut and 1 < stage <= layers:
            yield (1, data, model), stage


def brute_separate(n, layers, *, max_model, max_stage, tied):
    limits = (max_stage, max_model)
    return {
        (vision, llm)
        for k in range(1, n)
        for vision in brute_forms(k, layers["vision"], *limits, True)
        for llm in brute_forms(n - k, layers["llm"], *limits, not tied)
        # A group of as many microbatches as the deeper loop has stages must suit the other too.
        if max(vision[0][0], llm[0][0]) % min(vision[0][0], llm[0][0]) == 0
    }


def described(placement):
    mesh = {m.name: m.shape for m in placement.submeshes}
    found = []
    for module in dict.fromkeys(s.module for s in placement.segments):
        parts = [s for s in placement.segments if s.module == module]
        assert len({mesh[s.submesh] for s in parts}) == 1
        found.append((mesh[parts[0].submesh], len(parts)))
    return tuple(found)


def laid_out(outlines, layers):
    return [lay_out(o, layers) for o in outlines]


def check(placement, n_devices, layers, disjoint):
    """A placement is a valid plan that covers every device and layer."""
    plan = Plan("t", placement.submeshes, placement.segments, (Bucket(1, 8),), placement.group_size)
    used = [d for m in plan.submeshes for d in m.devices]
    assert set(used) == set(range(n_devices))
    if disjoint:
        assert len(used) == n_devices
    for module, n in layers.items():
        assert sum(s.n_layers for s in plan.segments_of(module)) == n
        plan.data_ranks(module)
    stages = {plan.submesh(s.submesh).stage for s in plan.segments}
    assert placement.group_size == max(stages)  # a segment's loop needs as many microbatches


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("llm_layers", [1, 4, 6])
@pytest.mark.parametrize("n", range(1, 9))
def test_separate_is_the_whole_space(n, llm_layers, tied):
    layers = {"vision": 3, "llm": llm_layers}
    found = laid_out(separate(n, layers, tied=tied, **SPACE), layers)
    want = brute_separate(n, layers, tied=tied, **SPACE)
    assert len(found) == len(want)
    assert {described(p) for p in found} == want
    assert len({p.name for p in found}) == len(found)
    for p in found:
        check(p, n, layers, disjoint=True)


@pytest.mark.parametrize("n", range(1, 9))
def test_shared_gives_every_module_all_devices(n):
    found = laid_out(shared(n, LAYERS, tied=True, **SPACE), LAYERS)
    want = {
        (vision, llm)
        for vision in brute_forms(n, LAYERS["vision"], 1, 4, False)
        for llm in brute_forms(n, LAYERS["llm"], 4, 4, False)
    }
    assert len(found) == len(want)
    assert {described(p) for p in found} == want
    for p in found:
        check(p, n, LAYERS, disjoint=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", range(1, 9))
def test_blind_gives_the_whole_model_one_parallelism(n, tied):
    found = list(blind(n, LAYERS, tied=tied, **SPACE))
    want = set()
    for s, d, m in triples(n, 4, 4):
        llm = max(s - 1, 1)  # the encoder is the first of s stages
        if llm == 1 or not tied:
            want.add((((1, d, m), 1), ((1, d, m), llm)))
            assert llm <= LAYERS["llm"]
    assert {described(p) for p in found} == want
    assert len({p.name for p in found}) == len(found)
    for p in found:
        one = p.submeshes[0].first == p.submeshes[-1].first
        assert len(p.segments) == (2 if one else n // p.submeshes[0].n_devices)
        check(p, n, LAYERS, disjoint=not one)


@pytest.mark.parametrize("space", [separate, shared])
def test_encoders_share_devices_with_degrees_of_their_own(space):
    layers = {"vision": 2, "audio": 3, "llm": 4}
    found = laid_out(space(4, layers, tied=True, max_model=2, max_stage=1), layers)
    degrees = {tuple(mesh[2] for mesh, _ in described(p)) for p in found}
    assert degrees == set(itertools.product((1, 2), repeat=3))
    for p in found:
        vision, audio, llm = p.submeshes
        assert vision.devices == audio.devices
        assert llm.devices == (range(4) if space is shared else range(vision.devices.stop, 4))
        check(p, 4, layers, disjoint=False)


def laid(space, n, layers, **limits):
    """Placements of a space, of which searched ones give outlines."""
    found = list(space(n, layers, tied=False, **limits))
    return found if space is blind else laid_out(found, layers)


@pytest.mark.parametrize("space", [separate, shared, blind])
def test_limits_are_kept(space):
    for p in laid(space, 8, LAYERS, max_model=2, max_stage=2):
        assert all(m.model <= 2 and m.stage <= 2 for m in p.submeshes)
        assert sum(s.module == "llm" for s in p.segments) <= 2


@pytest.mark.parametrize("space", [separate, shared, blind])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_model_without_encoder_gives_all_devices_to_the_llm(space, n):
    found = laid(space, n, {"llm": 4}, **SPACE)
    assert found
    for p in found:
        assert {s.module for s in p.segments} == {"llm"}
        check(p, n, {"llm": 4}, disjoint=True)


def test_one_device_cannot_be_shared_out():
    assert list(separate(1, LAYERS, tied=False, **SPACE)) == []
    one = Form((1, 1, 1))
    assert laid(blind, 1, LAYERS, **SPACE) == [lay_out(Outline((one,), one, 0), LAYERS)]


@pytest.mark.parametrize("n, parts", [(1, 1), (4, 1), (4, 4), (5, 2), (7, 3), (8, 3)])
def test_layers_split_evenly(n, parts):
    cuts = split_layers(n, parts)
    sizes = [b - a for a, b in cuts]
    assert [i for a, b in cuts for i in range(a, b)] == list(range(n))
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == parts
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.4, 2.5), (3.0, 0.2), (0.0, 20.0), (1.5, 1.5)])
@pytest.mark.parametrize("n, parts", [(1, 1), (2, 2), (6, 2), (7, 3), (9, 4)])
def test_layers_split_so_that_the_dearest_run_is_cheapest(n, parts, ends):
    def dearest(sizes):
        costs = list(map(float, sizes))
        costs[0] += ends[0]
        costs[-1] += ends[1]
        return max(costs)

    got = [b - a for a, b in split_layers(n, parts, ends)]
    every = (s for s in itertools.product(range(1, n + 1), repeat=parts) if sum(s) == n)
    assert sum(got) == n
    assert min(got) >= 1
    assert dearest(got) == min(map(dearest, every))


def test_the_ends_of_a_model_shift_layers_to_the_others():
    o = Outline((Form((1, 1, 1)),), Form((1, 1, 1), 2), 1)
    ends = {("llm", 1): (0.0, 2.0)}
    assert [s.n_layers for s in lay_out(o, LAYERS, ends).segments] == [3, 3, 1]
    assert [s.n_layers for s in lay_out(o, LAYERS).segments] == [3, 2, 2]


def test_factors():
    assert factors(12, 4) == [1, 2, 3, 4]
    assert factors(1, 8) == [1]
    assert factors(7, 100) == [1, 7]
