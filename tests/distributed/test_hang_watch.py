"""A run that hangs is ended, with the process named that all wait for; one that is slow is not."""

from __future__ import annotations

import sys
import threading
import time
from itertools import product
from pathlib import Path

import msgspec
import pytest

from dflop_jax.distributed import hang_watch
from dflop_jax.distributed.hang_watch import (
    MEASUREMENT_WINDOW,
    UNMEASURED_FACTOR,
    HangWatch,
    ProcessStatus,
    Sections,
    TaskProgress,
    find_hung_processes,
)
from dflop_jax.distributed.messages import ProcessGroup
from tests.distributed.service import job, wait_for  # noqa: F401


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def is_overdue(sections: Sections) -> bool:
    return sections.status(0, "").is_overdue


@pytest.fixture
def clock():
    return Clock()


# ---- deadlines ----


def test_a_deadline_is_a_multiple_of_the_longest_that_was_measured(clock):
    sections = Sections(10.0, 3.0, ("step", "save"), clock)
    unmeasured_s = UNMEASURED_FACTOR * 3.0
    assert sections.deadline_s("step") == unmeasured_s
    for name, seconds in (("step", 0.1), ("end", 0.1), ("step", 0.5), ("step", 0.2)):
        sections.begin(name, 0)
        clock.s += seconds
    sections.begin("save")
    assert sections.deadline_s("step") == pytest.approx(5.0)
    assert sections.deadline_s("save") == unmeasured_s
    assert sections.deadline_s("end") == unmeasured_s  # which a run has once
    clock.s += 0.01
    sections.begin("step", 1)
    assert sections.deadline_s("save") == 3.0  # never less
    for _ in range(MEASUREMENT_WINDOW):  # and what was slow once is forgotten
        sections.begin("step", 1)
        clock.s += 0.4
    sections.begin("step", 2)
    assert sections.deadline_s("step") == pytest.approx(4.0)


@pytest.mark.parametrize("factor", [10.0, 0.0])
def test_a_section_is_late_once_its_deadline_is_over_and_again_if_it_gets_on(clock, factor):
    sections = Sections(factor, 3.0, ("step", "save"), clock)
    sections.begin("step", 0)
    clock.s = 90.0
    assert not is_overdue(sections)
    clock.s = 90.5
    assert is_overdue(sections) == bool(factor)
    decoded = msgspec.json.decode(msgspec.json.encode(sections.status(0, "a")))
    assert decoded["deadline_s"] == (90.0 if factor else sys.float_info.max)
    sections.renew()
    assert not is_overdue(sections)
    sections.begin("")
    clock.s = 1e9
    assert not is_overdue(sections)  # between two runs


def test_a_section_inside_of_another_has_its_own_deadline(clock):
    sections = Sections(10.0, 3.0, ("step", "save"), clock)
    for _ in range(2):
        sections.begin("step", 0)
        clock.s += 0.1
    moves = sections.n_sections
    with sections.within("save"):
        clock.s += 4.0
        assert (sections.name, sections.is_step, is_overdue(sections)) == ("save", False, False)
    assert (sections.name, sections.is_step, sections.n_sections) == ("step", True, moves)
    clock.s += 2.9
    assert not is_overdue(sections)  # the wait for the save was none of its time


# ---- who hangs ----


def at(process: int, moves: int, ended: int = 0, begun: int = 0, *, late: bool = False):
    tasks = TaskProgress(1, ended, begun, ("begun, not ended: forward of llm (task 3 of 9)",))
    seconds = 9.0 if late else 1.0
    return ProcessStatus(process, f"h{process}, pid 7", "step", 4, seconds, 5.0, moves, tasks, "f")


def test_who_is_behind_hangs_if_it_is_late_itself():
    for behind_late, others_late in product((False, True), repeat=2):
        everywhere = [at(0, 7, 3, 4, late=others_late), at(1, 7, 3, 3, late=behind_late)]
        everywhere.append(at(2, 8, late=others_late))
        hangs = find_hung_processes(everywhere)
        assert [w.process for w in hangs] == ([1] if behind_late else [])
    assert [w.process for w in find_hung_processes([at(0, 0, late=True)])] == [0]


# ---- together ----


class Jobs:
    """Processes played by threads, each with sections of its own, all in step 5."""

    def __init__(self, job, folder: Path):
        self.folder, self.failures, self.peers = folder, job.failures, job.groups
        self.sections = [Sections(10.0, 0.2, ("step", "save")) for _ in self.peers]
        for s in self.sections:
            for step in (3, 4, 5):
                s.begin("step", step)

    def watching(self, p: int):
        return HangWatch(self.sections[p], self.peers[p], self.folder)


@pytest.fixture
def jobs(job, tmp_path):
    return Jobs(job(3), tmp_path / "hung")


@pytest.mark.parametrize("stuck", [0, 2])
def test_all_end_by_the_one_that_hangs(jobs, stuck, tmp_path, caplog):
    done, begun = "ended: forward of a (task 1 of 2)", "begun, not ended: backward of a"
    for p, s in enumerate(jobs.sections):
        place = TaskProgress(6, 1, 1 if p == stuck else 2, (done, begun))
        s.tasks = lambda place=place: place
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        wait_for(lambda: all(jobs.failures))
    for ((reason, code),) in jobs.failures:
        assert f"process {stuck} (" in reason
        assert f"hangs in step 5, step ({begun}), and all" in reason
        assert "test_all_end_by_the_one_that_hangs" in reason  # its main thread's stack
        assert code == 4
    said = [r.getMessage() for r in caplog.records]
    for p in range(3):
        text = (tmp_path / "hung" / f"process-{p:05d}.txt").read_text()
        assert done in text
        assert "Current thread" in text
        assert "test_hang_watch.py" in text  # the stacks of all threads
        assert [line for line in said if line.startswith(f"process {p} (") and line in text]


def test_who_waits_for_one_that_is_in_time_is_patient(jobs):
    """As for a process that compiles, or saves, for longer than a step may take."""
    for s in jobs.sections[:2]:
        s.begin("step", 6)
    jobs.sections[2].begin("save")  # whose deadline is UNMEASURED_FACTOR times as long
    jobs.sections[2].n_sections -= 1
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        time.sleep(1.0)
        assert all(map(is_overdue, jobs.sections[:2]))
        assert not any(jobs.failures)


@pytest.mark.parametrize("is_step", [False, True])
def test_an_evaluation_gets_on_by_its_tasks_and_a_step_does_not(is_step):
    peers, sections, said, begun = ProcessGroup(), Sections(10.0, 0.3, ("some",)), [], [0]
    sections.tasks = lambda: TaskProgress(0, 0, begun[0])
    for _ in range(2):
        sections.begin("some", 1 if is_step else None)
    with HangWatch(sections, peers, Path("/dev/null/none"), said.append):
        for _ in range(12):
            begun[0] += 1
            time.sleep(0.1)
    assert bool(said) == is_step
    assert (sections.name, peers.status()) == ("", b"")  # afterwards nothing is watched
    assert not [t for t in threading.enumerate() if t.name == "hang-watch"]


def test_a_disk_that_hangs_holds_up_no_end(jobs, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(hang_watch, "END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(hang_watch, "write_stacks", lambda *_: released.wait())
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        wait_for(lambda: all(jobs.failures))
    assert all(jobs.failures)
    released.set()


def test_a_process_that_was_stopped_as_a_whole_does_not_hang(monkeypatch, tmp_path, clock):
    said = []
    monkeypatch.setattr(hang_watch.time, "monotonic", clock)
    sections = Sections(10.0, 0.5, ("step",), clock)
    for _ in range(2):
        sections.begin("step", 1)
    with HangWatch(sections, ProcessGroup(), tmp_path, said.append):
        clock.s += 600.0  # between two checks
        wait_for(lambda: not is_overdue(sections))
        assert not said
        while not said:
            clock.s += 0.01
            threading.Event().wait(0.01)
