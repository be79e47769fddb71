"""One table of what processes saw of tasks run alone: by hand."""

from dataclasses import replace

import msgspec

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, Price, ProgramId, SendId, Task
from dflop_jax.runtime.calibration import Calibration, TaskRun, merge_calibrations
from tests.plans import chain

PLAN = chain(2, vision=1)  # v0 -> l0, a submesh each
(TILES,), (ROWS,) = PLAN.layout.shapes("vision"), PLAN.layout.shapes("llm")
THERE, BACK = ProgramId("v0", TILES, FORWARD), ProgramId("v0", TILES, BACKWARD)
LLM, END = ProgramId("l0", ROWS, BACKWARD), Task("l0", NO_GROUP, REDUCE)


def merged(*parts, layout=PLAN.layout, one_at_a_time=False, **options):
    """(seconds of programs, of the step's end, of sends)."""
    found = merge_calibrations(layout, parts, one_at_a_time=one_at_a_time, **options)
    return {k: p.static_s for k, p in found.programs.items()}, found.step_end, found.sends


def test_medians_of_the_slowest_process():
    a = [TaskRun(LLM, 3.0, 4.0), TaskRun(END, 0.5, 0.6), TaskRun(LLM, 1.0, 2.0),
         TaskRun(LLM, 9.0, 9.0)]  # fmt: skip
    b = [TaskRun(LLM, 2.0, 2.0), TaskRun(END, None, 0.4), TaskRun(LLM, 5.0, 6.0),
         TaskRun(LLM, 8.0, 8.0)]  # fmt: skip
    assert merged(a, b) == ({LLM: 5.0}, {END: 0.5}, {})  # of 3, 5 and 9
    assert merged(a, b, one_at_a_time=True) == ({LLM: 6.0}, {END: 0.6}, {})
    assert merged() == merged([]) == ({}, {}, {})


def test_host_work_of_all_programs_is_shared_by_those_that_run_here():
    """Process 0 runs THERE and BACK and does something for LLM, which process 1 runs."""
    below = [
        *(TaskRun(THERE, s, max(s, 2.5), *host)
          for s, host in ((2.0, (0.5, 0.125)), (2.5, (0.5, 0.125)), (9.0, (1.0, 4.0)))),
        TaskRun(BACK, 3.0, 3.0, 0.25), TaskRun(LLM, None, 6.0, 0.125), TaskRun(END, 0.5, 0.5, 9, 9),
    ]  # fmt: skip
    above = [*[TaskRun(THERE, None, 2.5)] * 3, TaskRun(BACK, None, 1.0, 0.5),
             TaskRun(LLM, 5.0, 5.0, 1.0), TaskRun(END, None, 0.5)]  # fmt: skip
    host_s = (0.5 + 0.25 + 0.125 + 0.125 + 0.0 + 0.5 + 1.0) / 3
    found = merge_calibrations(PLAN.layout, [below, above], one_at_a_time=False, shares_cores=True)
    device_s = {THERE: 2.0, BACK: 2.75, LLM: 4.0}  # of 1.5, 2 and 8
    assert found.programs == {k: Price(s + host_s) for k, s in device_s.items()}
    assert (found.host_s, found.shares_cores, found.step_end) == (host_s, True, {END: 0.5})
    programs, _, sends = merged(below, above)
    assert programs == {THERE: 2.5, BACK: 3.0, LLM: 5.0}
    assert sends == found.sends
    busy = [replace(run, host_s=30.0, host_ahead_s=0.125) for run in below[3:4]]
    assert merged(busy)[0] == {BACK: 30.125}  # none takes less than the host


def test_sends_are_what_arrives_after_its_task_has_ended():
    below = [TaskRun(THERE, 1.0, 1.0), TaskRun(BACK, 2.0, 2.0), TaskRun(LLM, None, 4.25)]
    above = [TaskRun(THERE, None, 1.5), TaskRun(BACK, None, 0.0), TaskRun(LLM, 4.0, 4.0)]
    sends = {SendId("v0", "l0", ROWS, FORWARD): 0.5, SendId("v0", "l0", ROWS, BACKWARD): 0.25}
    assert merged(below, above) == ({THERE: 1.0, BACK: 2.0, LLM: 4.0}, {}, sends)
    awaited = {THERE: 1.5, BACK: 2.0, LLM: 4.25}
    assert merged(below, above, one_at_a_time=True) == (awaited, {}, {})
    shared = chain(1, vision=0).layout  # on one submesh nothing is sent
    assert merged([TaskRun(THERE, 1.0, 1.5), TaskRun(LLM, 2.0, 2.5)], layout=shared)[2] == {}


def test_a_part_reaches_another_process_as_it_was():
    part = [TaskRun(THERE, None, 0.25, 1e-7), TaskRun(END, 1.0, 2.0)]
    sent = msgspec.msgpack.encode(part)
    assert msgspec.msgpack.decode(sent, type=Calibration) == part
