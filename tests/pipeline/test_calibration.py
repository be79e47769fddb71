"""What processes saw of tasks run alone, made one table: by hand."""

import pytest

from dflop_jax.pipeline.calibration import Calibration, TaskSeconds, merged
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, Task
from tests.plans import chain

PLAN = chain(2, vision=1)  # v0 -> l0, a submesh each
THERE, BACK, LLM = Task("v0", 0, FORWARD), Task("v0", 0, BACKWARD), Task("l0", 0, BACKWARD)
END = Task("l0", -1, REDUCE)


def test_medians_of_the_slowest_process():
    parts = [
        Calibration({LLM: [3.0, 1.0, 9.0], END: [0.5]}, {LLM: [4.0, 2.0, 9.0], END: [0.6]}),
        Calibration({LLM: [2.0, 5.0, 8.0]}, {LLM: [2.0, 6.0, 8.0], END: [0.4]}),
    ]
    # of 3, 5 and 9; the transfers of the reduction are nobody's send
    assert merged(PLAN, parts, one_at_a_time=False) == TaskSeconds({LLM: 5.0, END: 0.5}, {})
    assert merged(PLAN, parts, one_at_a_time=True) == TaskSeconds({LLM: 6.0, END: 0.6}, {})


def test_sends_are_what_arrives_after_its_task_has_ended():
    below = Calibration({THERE: [1.0], BACK: [2.0]}, {THERE: [1.0], BACK: [2.0], LLM: [4.25]})
    above = Calibration({LLM: [4.0]}, {THERE: [1.5], BACK: [0.0], LLM: [4.0]})
    found = merged(PLAN, [below, above], one_at_a_time=False)
    assert found.seconds == {THERE: 1.0, BACK: 2.0, LLM: 4.0}
    assert found.sends == {THERE: 0.5, BACK: 0.25}
    awaited = merged(PLAN, [below, above], one_at_a_time=True)
    assert awaited == TaskSeconds({THERE: 1.5, BACK: 2.0, LLM: 4.25}, {})


def test_on_one_submesh_nothing_is_sent():
    part = Calibration({THERE: [1.0], LLM: [2.0]}, {THERE: [1.5], LLM: [2.5]})
    shared = chain(1, vision=0)
    assert merged(shared, [part], one_at_a_time=False).sends == {}


def test_no_process_saw_anything():
    assert merged(PLAN, [], one_at_a_time=False) == TaskSeconds({}, {})
    assert merged(PLAN, [Calibration()], one_at_a_time=True) == TaskSeconds({}, {})


@pytest.mark.parametrize("runs", [[], [1.0], [0.25, 1e-7]])
def test_a_part_reaches_another_process_as_it_was(runs):
    part = Calibration({THERE: runs}, {THERE: runs, END: runs})
    assert Calibration.decode(part.encode()) == part
