"""Whether programs fit, and what the verdict says."""

from __future__ import annotations

import pytest

from dflop_jax.aot.reports import ProgramReport, SegmentMemory, describe_fit, device_memory
from dflop_jax.hardware import GIB


def state(segment, resource, *, state=4.0, inputs=0.5, remat="none") -> SegmentMemory:
    gib = [n * GIB for n in (state, inputs, 1.0)]
    return SegmentMemory(segment, segment, resource, gib[0], gib[1], 2, gib[2], remat)


def program(segment, kind, temp, out=0.0, alias=0.0, handed=0.0, **more) -> ProgramReport:
    return ProgramReport(
        f"{segment} {kind}", segment, segment, kind, (1, 1, 1), temp_bytes=temp * GIB,
        output_bytes=out * GIB, aliased_bytes=alias * GIB, handed_bytes=handed * GIB, **more,
    )  # fmt: skip


def described(states, programs, gib, chip="h100", peaks=None):
    memory = device_memory(states, programs, peaks or {})
    return describe_fit(chip, gib * GIB, memory, programs, states)


def test_the_peak_is_state_inputs_and_the_largest_program():
    states = [state("a", 0), state("b", 1, state=8.0, inputs=0.25)]
    programs = [
        program("a", "forward", 1.0, out=0.75, handed=0.5),
        program("a", "backward", 6.0, out=3.0, alias=2.0),
        program("b", "backward", 2.0),
    ]
    a, b = device_memory(states, programs, {})
    assert a.peak_bytes == (4 + 2 * (0.5 + 0.5) + 7.0) * GIB
    assert a.program == "a backward"
    assert b.peak_bytes == (8 + 2 * 0.25 + 2.0) * GIB


@pytest.mark.parametrize("kind, work", [("update", 2.0 + 2.0), ("reduce", 2.0 + 2.0)])
def test_step_end_has_reduced_gradients_of_all_segments(kind, work):
    states = [state("a", 0), state("b", 0)]
    # What a reduction gives are its gradients' shards and the zeroed gradients.
    out = 1.0 + 3.0 if kind == "reduce" else 3.0
    (both,) = device_memory(states, [program("a", kind, 2.0, out=out, alias=3.0)], {})
    assert both.work_bytes == work * GIB


def test_verdict_of_a_fitting_plan_has_spare_bytes():
    states, programs = [state("a", 0)], [program("a", "backward", 3.0)]
    fits, words = described(states, programs, 10)
    assert fits
    assert "8.0 of 10.0 GiB on a" in words
    assert "2.0 GiB to spare" in words
    assert "planned" not in words
    _, words = described(states, programs, 10, peaks={"a": 7.0 * GIB, "b": 9.0 * GIB})
    assert "3.0 a backward; planned 7.0" in words


@pytest.mark.parametrize("sizes, remat, temp, helps", [
    ({}, "none", 30.0, "train.remat layers, smaller rows"),
    ({}, "layers", 30.0, "GiB too much; smaller rows"),
    ({"state": 40.0}, "none", 3.0, "plan.zero 3, a larger tensor degree (plan.max_model), more"),
])  # fmt: skip
def test_verdict_of_a_too_large_plan_has_program_and_remedy(sizes, remat, temp, helps):
    states = [state("b", 1), state("a", 0, remat=remat, **sizes)]
    programs = [program("a", "backward", temp), program("b", "backward", 1.0)]
    fits, words = described(states, programs, 20)
    assert not fits
    too_much = sizes.get("state", 4.0) + 1.0 + temp - 20
    for part in (f"{too_much:.1f} GiB too much", f"{temp:.1f} a backward", helps):
        assert part in words


def test_verdict_reports_compile_errors_first():
    programs = [
        program("a", kind, 0.0, error="sm_80 has no such kernel")
        for kind in ("backward", "forward")
    ]
    fits, words = described(
        [state("a", 0)], [*programs, program("a", "update", 99.0)], 1, "a100-40"
    )
    assert not fits
    assert words == (
        "a backward (and 1 more) cannot be compiled for a100-40: sm_80 has no such kernel"
    )
