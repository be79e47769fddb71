"""A run that hangs is ended, with the process named that all wait for; one that is slow is not."""

from __future__ import annotations

import threading
import time
from itertools import product
from pathlib import Path

import msgspec
import pytest

from dflop_jax.distributed import hang_watch, messages
from dflop_jax.distributed.hang_watch import (
    MEASUREMENT_WINDOW,
    UNMEASURED_FACTOR,
    HangWatch,
    ProcessStatus,
    Sections,
    TaskProgress,
    describe_hang,
    find_hung_processes,
    main_thread_stack,
)
from dflop_jax.distributed.messages import ProcessGroup
from tests.distributed.launched import wait_for
from tests.distributed.service import LIMIT_S, make_job


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


# ---- deadlines ----


def test_a_deadline_is_a_multiple_of_the_longest_that_was_measured():
    clock = Clock()
    sections = Sections(10.0, 3.0, ("step", "save"), clock)
    assert sections.deadline_s("step") == UNMEASURED_FACTOR * 3.0
    for seconds in (0.1, 0.5, 0.2):
        sections.begin("step", 0)
        clock.s += seconds
    sections.begin("save")
    assert sections.deadline_s("step") == pytest.approx(5.0)
    assert (
        sections.deadline_s("save") == UNMEASURED_FACTOR * 3.0
    )  # nobody knows yet how long one takes
    clock.s += 0.01
    sections.begin("step", 1)
    assert sections.deadline_s("save") == 3.0  # never less
    for _ in range(MEASUREMENT_WINDOW):  # and what was slow once is forgotten
        sections.begin("step", 1)
        clock.s += 0.4
    sections.begin("step", 2)
    assert sections.deadline_s("step") == pytest.approx(4.0)


def test_what_a_run_has_once_foretells_nothing():
    clock = Clock()
    sections = Sections(10.0, 3.0, ("step",), clock)
    for _ in range(3):
        sections.begin("end")
        clock.s += 0.1
    assert sections.deadline_s("end") == UNMEASURED_FACTOR * 3.0


def test_a_section_is_late_once_its_deadline_is_over_and_again_if_it_gets_on():
    clock = Clock()
    sections = Sections(10.0, 3.0, ("step", "save"), clock)
    sections.begin("step", 0)
    clock.s = 90.0
    assert not sections.is_overdue
    clock.s = 90.5
    assert sections.is_overdue
    sections.renew()
    assert not sections.is_overdue
    sections.begin("")
    clock.s = 1e9
    assert not sections.is_overdue  # between two runs


def test_off_is_off():
    clock = Clock()
    sections = Sections(0.0, 3.0, ("step",), clock)
    sections.begin("step", 0)
    clock.s = 1e9
    assert not sections.is_overdue
    assert msgspec.json.decode(msgspec.json.encode(sections.status(0, "a")))["deadline_s"] > 1e300


def test_a_section_inside_of_another_has_its_own_deadline():
    clock = Clock()
    sections = Sections(10.0, 3.0, ("step", "save"), clock)
    for _ in range(2):
        sections.begin("step", 0)
        clock.s += 0.1
    moves = sections.n_sections
    with sections.within("save"):
        clock.s += 4.0
        assert (sections.name, sections.is_step, sections.is_overdue) == ("save", False, False)
    assert (sections.name, sections.is_step, sections.n_sections) == ("step", True, moves)
    clock.s += 2.9
    assert not sections.is_overdue  # the wait for the save was none of its time


# ---- who hangs ----


def at(process: int, moves: int, ended: int = 0, begun: int = 0, *, late: bool = False):
    tasks = TaskProgress(1, ended, begun, ("begun, not ended: forward of llm (task 3 of 9)",))
    seconds = 9.0 if late else 1.0
    return ProcessStatus(process, f"h{process}, pid 7", "step", 4, seconds, 5.0, moves, tasks)


def test_who_is_behind_hangs_if_it_is_late_itself():
    for behind_late, others_late in product((False, True), repeat=2):
        everywhere = [at(0, 7, 3, 4, late=others_late), at(1, 7, 3, 3, late=behind_late)]
        everywhere.append(at(2, 8, late=others_late))
        hangs = find_hung_processes(everywhere)
        assert [w.process for w in hangs] == ([1] if behind_late else [])
    assert [w.process for w in find_hung_processes([at(0, 0, late=True)])] == [0]


def test_it_is_named_with_its_task():
    where = msgspec.structs.replace(at(1, 7, late=True), stack="wait (a.py:7) < run (b.py:9)")
    line = describe_hang([where], 3)
    assert line.endswith("its main thread: wait (a.py:7) < run (b.py:9)")
    assert line.startswith("process 1 (h1, pid 7) hangs in step 4, step (begun, not ended: forw")
    assert "all others wait for it" in line
    assert "more than the 5 s" in line
    both = [at(0, 7, late=True), at(1, 7)]
    assert "all 2 processes hang" in describe_hang(both, 2)
    assert "process 0 (h0, pid 7), process 1 (h1, pid 7) hang in" in describe_hang(both, 3)


def test_the_main_thread_is_found_from_another():
    stacks: list[str] = []
    thread = threading.Thread(target=lambda: stacks.append(main_thread_stack()))
    thread.start()
    thread.join()
    assert "test_the_main_thread_is_found_from_another" in stacks[0]


# ---- together ----


class Jobs:
    """Processes played by threads, each with sections of its own."""

    def __init__(self, n: int, folder: Path, least_s: float = 0.2):
        self.folder = folder
        self.job = make_job(n)
        self.failures, self.peers = self.job.failures, self.job.groups
        self.sections = [Sections(10.0, least_s, ("step", "save")) for _ in range(n)]
        self._least_s = least_s

    def measured(self) -> None:
        """Every process has done steps, and all are in step 5."""
        for s in self.sections:
            for step in (3, 4, 5):
                s.begin("step", step)

    def watching(self, p: int):
        return HangWatch(self.sections[p], self.peers[p], self.folder, min_deadline_s=self._least_s)


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(messages, "POLL_S", 0.1)
    made = Jobs(3, tmp_path / "hung")
    yield made
    made.job.stop()


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_all_end_by_the_one_that_hangs(jobs, stuck, tmp_path, caplog):
    jobs.measured()
    for p, s in enumerate(jobs.sections):
        lines = (
            "ended: forward of a (task 1 of 2)",
            "begun, not ended: backward of a (task 2 of 2)",
        )
        place = TaskProgress(6, 1, 1 if p == stuck else 2, lines)
        s.tasks = lambda place=place: place
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        wait_for(lambda: all(jobs.failures))
    for (failure,) in jobs.failures:
        assert f"process {stuck} (" in failure[0]
        assert "hangs in step 5, step (begun, not ended: backward of a" in failure[0]
        assert failure[1] == 4
    for p in range(3):
        text = (tmp_path / "hung" / f"process-{p:05d}.txt").read_text()
        assert "ended: forward of a (task 1 of 2)" in text
        assert "Current thread" in text
        assert "test_hang_watch.py" in text  # the stacks of all threads
        said = [r.getMessage() for r in caplog.records if r.getMessage() in text]
        assert any(line.startswith(f"process {p} (") for line in said)
        assert "ended: forward of a (task 1 of 2)" in said


def test_who_waits_for_one_that_is_in_time_is_patient(jobs):
    """As for a process that compiles, or saves, for longer than a step may take."""
    jobs.measured()
    for s in jobs.sections[:2]:
        s.begin("step", 6)
    jobs.sections[2].begin("save")  # whose deadline is UNMEASURED_FACTOR times as long
    jobs.sections[2].n_sections -= 1
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        time.sleep(1.0)
        assert jobs.sections[0].is_overdue
        assert jobs.sections[1].is_overdue
        assert not any(jobs.failures)


def test_an_evaluation_gets_on_by_its_tasks_and_a_step_does_not():
    for is_step in (False, True):
        peers, sections, said = ProcessGroup(), Sections(10.0, 0.3, ("some",)), []
        begun = [0]
        sections.tasks = lambda begun=begun: TaskProgress(0, 0, begun[0])
        for _ in range(2):
            sections.begin("some", 1 if is_step else None)
        with HangWatch(
            sections, peers, Path("/dev/null/none"), min_deadline_s=0.3, end_run=said.append
        ):
            for _ in range(12):
                begun[0] += 1
                time.sleep(0.1)
        assert bool(said) == is_step


def test_a_disk_that_hangs_holds_up_no_end(jobs, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(hang_watch, "WRITE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(hang_watch, "write_stacks", lambda *_: released.wait())
    jobs.measured()
    with jobs.watching(0), jobs.watching(1), jobs.watching(2):
        wait_for(lambda: all(jobs.failures))
    released.set()


def test_a_process_that_was_stopped_as_a_whole_does_not_hang(monkeypatch, tmp_path):
    clock, said = Clock(), []
    monkeypatch.setattr(hang_watch.time, "monotonic", clock)
    sections = Sections(10.0, 0.5, ("step",), clock)
    for _ in range(2):
        sections.begin("step", 1)
    with HangWatch(sections, ProcessGroup(), tmp_path, min_deadline_s=0.5, end_run=said.append):
        clock.s += 600.0  # between two looks
        wait_for_real(lambda: not sections.is_overdue)
        assert not said
        while not said:
            clock.s += 0.1
            threading.Event().wait(0.01)


def wait_for_real(condition) -> None:
    for _ in range(int(LIMIT_S * 100)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def test_afterwards_nothing_is_watched(tmp_path):
    peers, sections = ProcessGroup(), Sections(10.0, 0.1, ("step",))
    with HangWatch(sections, peers, tmp_path, min_deadline_s=0.1, end_run=lambda why: None):
        sections.begin("step", 0)
    assert sections.name == ""
    assert peers.status() == b""
    assert not [t for t in threading.enumerate() if t.name == "hang-watch"]
