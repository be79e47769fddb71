"""Whether programs fit, and what the verdict says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflop_jax.aot.reports import ProgramReport, SegmentMemory, describe_fit, device_memory
from dflop_jax.hardware import GIB


def state(segment: str, resource: int, **gib: float) -> SegmentMemory:
    sizes = {"state": 4.0, "input": 0.5, "shard": 1.0} | gib
    return SegmentMemory(
        segment=segment,
        submesh=segment,
        resource=resource,
        state_bytes=sizes["state"] * GIB,
        input_bytes=sizes["input"] * GIB,
        in_flight=2,
        shard_bytes=sizes["shard"] * GIB,
        remat="none",
    )


def program(
    segment: str, kind: str, temp: float, out: float = 0.0, alias: float = 0.0, handed: float = 0.0
):
    return ProgramReport(
        name=f"{segment} {kind}",
        segment=segment,
        submesh=segment,
        kind=kind,
        mesh=(1, 1, 1),
        temp_bytes=temp * GIB,
        output_bytes=out * GIB,
        aliased_bytes=alias * GIB,
        handed_bytes=handed * GIB,
    )


def test_the_peak_is_state_inputs_and_the_largest_program():
    states = [state("a", 0), state("b", 1, state=8.0, input=0.25)]
    programs = [
        program("a", "forward", 1.0, out=0.75, handed=0.5),
        program("a", "backward", 6.0, out=3.0, alias=2.0),
        program("b", "backward", 2.0),
    ]
    a, b = device_memory(states, programs)
    assert a.peak_bytes == (4 + 2 * (0.5 + 0.5) + 7.0) * GIB
    assert a.program == "a backward"
    assert b.peak_bytes == (8 + 2 * 0.25 + 2.0) * GIB


@pytest.mark.parametrize("kind, work", [("update", 2.0 + 2.0), ("reduce", 2.0 + 2.0)])
def test_step_end_has_reduced_gradients_of_all_segments(kind, work):
    states = [state("a", 0), state("b", 0)]
    # What a reduction gives are its gradients' shards and the zeroed gradients.
    out = 1.0 + 3.0 if kind == "reduce" else 3.0
    (both,) = device_memory(states, [program("a", kind, 2.0, out=out, alias=3.0)])
    assert both.work_bytes == work * GIB


def test_verdict_of_a_fitting_plan_has_spare_bytes():
    states, programs = [state("a", 0)], [program("a", "backward", 3.0)]
    memory = device_memory(states, programs)
    fits, words = describe_fit("h100", 10 * GIB, memory, programs, states)
    assert fits
    assert "8.0 of 10.0 GiB on a" in words
    assert "2.0 GiB to spare" in words
    assert "planned" not in words
    memory = device_memory(states, programs, {"a": 7.0 * GIB, "b": 9.0 * GIB})
    _, words = describe_fit("h100", 10 * GIB, memory, programs, states)
    assert "3.0 a backward; planned 7.0" in words


@pytest.mark.parametrize("sizes, remat, temp, helps", [
    ({}, "none", 30.0, "train.remat layers, smaller rows"),
    ({}, "layers", 30.0, "GiB too much; smaller rows"),
    ({"state": 40.0}, "none", 3.0, "plan.zero 3, a larger tensor degree (plan.max_model), more"),
])  # fmt: skip
def test_verdict_of_a_too_large_plan_has_program_and_remedy(sizes, remat, temp, helps):
    states = [state("b", 1), replace(state("a", 0, **sizes), remat=remat)]
    programs = [program("a", "backward", temp), program("b", "backward", 1.0)]
    memory = device_memory(states, programs)
    fits, words = describe_fit("h100", 20 * GIB, memory, programs, states)
    assert not fits
    too_much = sizes.get("state", 4.0) + 1.0 + temp - 20
    assert f"{too_much:.1f} GiB too much" in words
    assert f"{temp:.1f} a backward" in words
    assert helps in words


def test_verdict_reports_compile_errors_first():
    states = [state("a", 0)]
    bad = replace(program("a", "backward", 0.0), error="sm_80 has no such kernel")
    programs = [bad, replace(bad, name="a forward"), program("a", "update", 99.0)]
    memory = device_memory(states, programs)
    fits, words = describe_fit("a100-40", GIB, memory, programs, states)
    assert not fits
    assert words == (
        "a backward (and 1 more) cannot be compiled for a100-40: sm_80 has no such kernel"
    )
