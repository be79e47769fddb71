"""Sends and the step's end by hand, from the collectives that have tests of their own."""

import dataclasses

import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.plan.links import send_seconds, step_end_seconds
from dflop_jax.plan.placement import Form, Outline, lay_out
from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s, send_s
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Bucket, Plan, Task

from .cases import model_profile

HARDWARE = dataclasses.replace(find_hardware("a100-80"), devices_per_node=4)
PROFILE = model_profile()


def plan(outline):
    place = lay_out(outline, PROFILE.n_layers)
    buckets = (Bucket(2, 64), Bucket(0, 32, 2))
    return Plan("t", place.submeshes, place.segments, buckets, place.group_size)


def test_nothing_takes_time_without_hardware():
    p = plan(Outline((Form((1, 2, 1)),), Form((1, 1, 2)), 2))
    assert send_seconds(p, CostModel(PROFILE), None) == {}
    assert set(step_end_seconds(p, PROFILE, None).values()) == {0.0}


@pytest.mark.parametrize("llm_first, across", [(2, False), (3, True), (4, True)])
def test_what_an_encoder_sends(llm_first, across):
    """The LLM's input of a group, to each of its devices; nothing for a bucket without tiles."""
    p = plan(Outline((Form((1, llm_first, 1)),), Form((2, 1, 1)), llm_first))
    hidden = float(CostModel(PROFILE).predict("llm", 1, 1, 64, "hidden")) * p.group_size
    took = send_s(hidden, HARDWARE, across=across)
    want = {Task("vision", 0, FORWARD): took, Task("vision", 0, BACKWARD): took}
    assert send_seconds(p, CostModel(PROFILE), HARDWARE) == pytest.approx(want)


def test_what_passes_between_segments_of_the_llm():
    p = plan(Outline((Form((1, 1, 1)),), Form((1, 1, 1), 2), 1))
    got = send_seconds(p, CostModel(PROFILE), HARDWARE)
    assert set(got) == {
        *(Task("vision", 0, d) for d in (FORWARD, BACKWARD)),
        *(Task("llm0", b, d) for b in (0, 1) for d in (FORWARD, BACKWARD)),
    }


def test_the_step_ends_with_reduction_and_update():
    p = plan(Outline((Form((1, 3, 2)),), Form((1, 8, 1)), 6))
    got = step_end_seconds(p, PROFILE, HARDWARE)
    for name, ways, ranks, params in (("vision", 2, 3, 25_000), ("llm", 1, 8, 45_000)):
        own = params / ways
        assert got[Task(name, -1, REDUCE)] == pytest.approx(
            reduce_scatter_s(own, ranks, HARDWARE, stride=ways)
        )
        update = all_gather_s(own, ranks, HARDWARE, stride=ways)
        update += 7 * own / ranks / HARDWARE.memory_bandwidth
        assert got[Task(name, -1, UPDATE)] == pytest.approx(update)
