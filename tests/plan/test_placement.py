"""Every placement of the space, against counting by brute force."""

import itertools

import pytest

from dflop_jax.plan.placement import factors, separate, split_layers, uniform
from dflop_jax.records import Bucket, Plan

LAYERS = {"vision": 3, "llm": 4}
SPACE = {"max_model": 4, "max_stage": 4}


def triples(n, max_stage, max_model):
    """(stage, data, model) of product n, from all triples of numbers."""
    for s, d, m in itertools.product(range(1, n + 1), repeat=3):
        if s * d * m == n and s <= max_stage and m <= max_model:
            yield s, d, m


def brute_separate(n, layers, *, max_model, max_stage, tied):
    found = set()
    for k in range(1, n):
        for vision in triples(k, 1, max_model):
            for stage, data, model in triples(n - k, max_stage, max_model):
                if layers % stage == 0:
                    found.add((vision, 1, (stage, data, model)))
                if 1 < stage <= layers and not tied:
                    found.add((vision, stage, (1, data, model)))
    return found


def described(placement):
    mesh = {m.name: m.shape for m in placement.submeshes}
    vision, *llm = placement.segments
    assert len({mesh[s.submesh] for s in llm}) == 1
    return mesh[vision.submesh], len(llm), mesh[llm[0].submesh]


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
    found = list(separate(n, layers, tied=tied, **SPACE))
    want = brute_separate(n, llm_layers, tied=tied, **SPACE)
    assert len(found) == len(want)
    assert {described(p) for p in found} == want
    assert len({p.name for p in found}) == len(found)
    for p in found:
        check(p, n, layers, disjoint=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", range(1, 9))
def test_uniform_gives_the_whole_model_one_parallelism(n, tied):
    found = list(uniform(n, LAYERS, tied=tied, **SPACE))
    want = set()
    for s, d, m in triples(n, 4, 4):
        llm = max(s - 1, 1)  # the encoder is the first of s stages
        if llm == 1 or not tied:
            want.add(((1, d, m), llm, (1, d, m)))
            assert llm <= LAYERS["llm"]
    assert {described(p) for p in found} == want
    assert len({p.name for p in found}) == len(found)
    for p in found:
        shared = p.submeshes[0].first == p.submeshes[-1].first
        assert len(p.segments) == (2 if shared else n // p.submeshes[0].n_devices)
        check(p, n, LAYERS, disjoint=not shared)


@pytest.mark.parametrize("space", [separate, uniform])
def test_limits_are_kept(space):
    for p in space(8, LAYERS, max_model=2, max_stage=2, tied=False):
        assert all(m.model <= 2 and m.stage <= 2 for m in p.submeshes)
        assert sum(s.module == "llm" for s in p.segments) <= 2


@pytest.mark.parametrize("space", [separate, uniform])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_model_without_encoder_gives_all_devices_to_the_llm(space, n):
    found = list(space(n, {"llm": 4}, tied=False, **SPACE))
    assert found
    for p in found:
        assert {s.module for s in p.segments} == {"llm"}
        check(p, n, {"llm": 4}, disjoint=True)


def test_one_device_cannot_be_shared_out():
    assert list(separate(1, LAYERS, tied=False, **SPACE)) == []
    assert [described(p) for p in uniform(1, LAYERS, tied=False, **SPACE)] == [
        ((1, 1, 1), 1, (1, 1, 1))
    ]


@pytest.mark.parametrize("n, parts", [(1, 1), (4, 1), (4, 4), (5, 2), (7, 3), (8, 3)])
def test_layers_split_evenly(n, parts):
    cuts = split_layers(n, parts)
    sizes = [b - a for a, b in cuts]
    assert [i for a, b in cuts for i in range(a, b)] == list(range(n))
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == parts
    assert sizes == sorted(sizes, reverse=True)


def test_factors():
    assert factors(12, 4) == [1, 2, 3, 4]
    assert factors(1, 8) == [1]
    assert factors(7, 100) == [1, 7]
