"""What processes saw of tasks run alone, made one table: by hand."""

from dataclasses import replace

import pytest

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    Price,
    Prices,
    ProgramId,
    SendId,
    Task,
)
from dflop_jax.runtime.calibration import Calibration, merge_calibrations
from tests.plans import chain

PLAN = chain(2, vision=1)  # v0 -> l0, a submesh each
(TILES,), (ROWS,) = PLAN.layout.shapes("vision"), PLAN.layout.shapes("llm")
THERE, BACK = ProgramId("v0", TILES, FORWARD), ProgramId("v0", TILES, BACKWARD)
LLM, END = ProgramId("l0", ROWS, BACKWARD), Task("l0", NO_GROUP, REDUCE)


def prices(programs, step_end=None, sends=None):
    return Prices({k: Price(v) for k, v in programs.items()}, step_end or {}, sends or {})


def test_medians_of_the_slowest_process():
    parts = [
        Calibration({LLM: [3.0, 1.0, 9.0], END: [0.5]}, {LLM: [4.0, 2.0, 9.0], END: [0.6]}),
        Calibration({LLM: [2.0, 5.0, 8.0]}, {LLM: [2.0, 6.0, 8.0], END: [0.4]}),
    ]
    # of 3, 5 and 9; the transfers of the reduction are nobody's send
    assert merge_calibrations(PLAN.layout, parts, one_at_a_time=False) == prices(
        {LLM: 5.0}, {END: 0.5}
    )
    assert merge_calibrations(PLAN.layout, parts, one_at_a_time=True) == prices(
        {LLM: 6.0}, {END: 0.6}
    )


def test_host_work_of_all_programs_is_shared_by_those_that_run_here():
    """Process 0 runs THERE and BACK and does something for LLM, which process 1 runs."""
    below = Calibration(
        {THERE: [2.0, 2.5, 9.0], BACK: [3.0] * 3, END: [0.5]},
        {THERE: [2.5, 2.5, 9.0], BACK: [3.0] * 3, LLM: [6.0] * 3, END: [0.5]},
        host_s={THERE: [0.5, 0.5, 1.0], BACK: [0.25] * 3, LLM: [0.125] * 3, END: [9.0]},
        host_ahead_s={THERE: [0.125, 0.125, 4.0], LLM: [0.0] * 3, END: [9.0]},
    )
    above = Calibration(
        {LLM: [5.0] * 3},
        {THERE: [2.5] * 3, BACK: [1.0] * 3, LLM: [5.0] * 3},
        host_s={THERE: [0.0] * 3, BACK: [0.5] * 3, LLM: [1.0] * 3},
    )
    host_s = (0.5 + 0.25 + 0.125 + 0.125 + 0.0 + 0.5 + 1.0) / 3
    found = merge_calibrations(PLAN.layout, [below, above], one_at_a_time=False, shares_cores=True)
    device_s = {THERE: 2.0, BACK: 2.75, LLM: 4.0}  # of 1.5, 2 and 8
    assert found.programs == {k: Price(s + host_s) for k, s in device_s.items()}
    assert (found.host_s, found.shares_cores) == (host_s, True)
    assert found.step_end == {END: 0.5}
    apart = merge_calibrations(PLAN.layout, [below, above], one_at_a_time=False)
    assert apart.programs == {k: Price(s) for k, s in {THERE: 2.5, BACK: 3.0, LLM: 5.0}.items()}
    assert apart.sends == found.sends
    few = merge_calibrations(
        PLAN.layout, [replace(below, host_s={THERE: [30.0]})], one_at_a_time=False
    )
    assert few.programs[BACK] == Price((30.0 + 0.125) / 2)  # none takes less than the host


def test_sends_are_what_arrives_after_its_task_has_ended():
    below = Calibration({THERE: [1.0], BACK: [2.0]}, {THERE: [1.0], BACK: [2.0], LLM: [4.25]})
    above = Calibration({LLM: [4.0]}, {THERE: [1.5], BACK: [0.0], LLM: [4.0]})
    found = merge_calibrations(PLAN.layout, [below, above], one_at_a_time=False)
    sends = {SendId("v0", "l0", ROWS, FORWARD): 0.5, SendId("v0", "l0", ROWS, BACKWARD): 0.25}
    assert found == prices({THERE: 1.0, BACK: 2.0, LLM: 4.0}, {}, sends)
    awaited = merge_calibrations(PLAN.layout, [below, above], one_at_a_time=True)
    assert awaited == prices({THERE: 1.5, BACK: 2.0, LLM: 4.25})


def test_on_one_submesh_nothing_is_sent():
    part = Calibration({THERE: [1.0], LLM: [2.0]}, {THERE: [1.5], LLM: [2.5]})
    shared = chain(1, vision=0)
    assert merge_calibrations(shared.layout, [part], one_at_a_time=False).sends == {}


def test_no_process_saw_anything():
    assert merge_calibrations(PLAN.layout, [], one_at_a_time=False) == prices({})
    assert merge_calibrations(PLAN.layout, [Calibration()], one_at_a_time=True) == prices({})


@pytest.mark.parametrize("runs", [[], [1.0], [0.25, 1e-7]])
def test_a_part_reaches_another_process_as_it_was(runs):
    part = Calibration({THERE: runs}, {THERE: runs, END: runs}, {LLM: runs}, {BACK: runs})
    assert Calibration.decode(part.encode()) == part
