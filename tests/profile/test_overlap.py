"""Overlap factors from timings that follow a known factor, and the timed loops on CPU devices."""

import dataclasses

import jax
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.profile import links, overlap
from dflop_jax.profile.collectives import overlapped_s
from dflop_jax.profile.overlap import LOOPS, OverlapTiming, overlap_factors, time_overlaps


def timings(across, gather, scatter):
    """From (products, collectives, both) seconds of each collective's loops."""
    each = (("all_gather", gather), ("reduce_scatter", scatter))
    return [
        OverlapTiming(collective, across, loop, s)
        for collective, seconds in each
        for loop, s in zip(LOOPS, seconds, strict=True)
    ]


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0])
def test_a_factor_is_found_again(factor):
    gather, scatter = (
        (products_s, s, float(overlapped_s(products_s, s, factor)))
        for products_s, s in ((3.0, 2.0), (1.0, 4.0))
    )
    found = overlap_factors(timings(False, gather, scatter) + timings(True, scatter, gather))
    assert found == {False: pytest.approx(factor), True: pytest.approx(factor)}


def test_noise_leaves_a_factor_between_0_and_1():
    assert overlap_factors(timings(False, (1.0, 1.0, 2.5), (1.0, 1.0, 2.1))) == {False: 0.0}
    assert overlap_factors(timings(True, (1.0, 1.0, 0.9), (1.0, 1.0, 1.0))) == {True: 1.0}
    assert overlap_factors([]) == {}


def test_every_loop_runs_in_and_across_nodes(monkeypatch):
    monkeypatch.setattr(overlap, "_WIDTH", 1)
    monkeypatch.setattr(overlap, "_MULTIPLE", 8)
    monkeypatch.setattr(overlap, "_MAX_TOKENS", 8)
    monkeypatch.setattr(links, "_N_TIMINGS", 1)
    cpu = find_hardware("cpu")
    node = dataclasses.replace(cpu, devices_per_node=2)
    got = time_overlaps(jax.devices()[:4], node, lambda: None)
    names = [(t.across, t.collective, t.loop) for t in got]
    assert names == [
        (across, collective, loop)
        for across in (False, True)
        for collective in overlap.ZERO_COLLECTIVES
        for loop in LOOPS
    ]
    assert all(t.seconds > 0 for t in got)
    one = dataclasses.replace(cpu, devices_per_node=1)
    assert time_overlaps(jax.devices()[:1], one, lambda: None) == []


@pytest.mark.parametrize("collective", overlap.ZERO_COLLECTIVES)
def test_only_the_named_work_is_in_a_loop(collective):
    (mesh,) = links.local_meshes([jax.devices()[:2]], False)
    name = collective.replace("_", "-")
    for loop, has in (("products", (True, False)), ("collectives", (False, True)),
                      ("both", (True, True))):  # fmt: skip
        text = overlap._loop_call(collective, loop, mesh, 8, 16).func.as_text()
        assert ("dot" in text, f"{name}(" in text or f"{name}-start(" in text) == has
