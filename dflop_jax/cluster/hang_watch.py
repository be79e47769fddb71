"""Ends a run that hangs: says which process all wait for, and leaves the stacks of all processes.

A process whose devices wait for ever, inside a collective in C++, still gives signs of life. So
each has a thread that looks whether its main thread has passed its section's deadline (`sections`),
and sends where it is with its signs of life (`messages`). Process 0 compares: only where the
process that is behind is late itself does the run hang; who waits for one that compiles or saves,
in time, waits. Then every process writes its stacks and last tasks, and all end with exit code 4.
So they do where a process gives no sign of life, before jax's heartbeat time-out aborts them.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.cluster.sections import Sections, Whereabouts, says, who_hangs

LOOKS_A_DEADLINE = 10  # at least
LONGEST_LOOK_S = 5.0  # between two looks
STOPPED_S = 10.0  # later than it should: a look that comes so late says nothing of the main thread
WRITE_S = 3.0  # longest wait for the disk
log = logging.getLogger("dflop_jax")


class HangWatch:
    """Watches over the sections of a process, with the others'.

    Args:
      folder: where stacks and tasks are written.
      end: called with the line that says what hangs, where all end by it; by default as `peers` end
        when one of them is lost.
    """

    def __init__(
        self,
        sections: Sections,
        peers: ProcessGroup,
        folder: Path,
        end: Callable[[str], None] | None = None,
        least_s: float = 120.0,
    ):
        self._sections, self._peers, self._folder = sections, peers, folder
        self._end = end or peers.give_up
        self._every_s = min(LONGEST_LOOK_S, least_s / LOOKS_A_DEADLINE)
        self._closing = threading.Event()
        self._hung = False
        self._behind: list[tuple[int, tuple[int, ...]]] = []  # at the last look, and how far
        self._here = self._whereabouts()
        peers.status, peers.on_hang = lambda: msgspec.json.encode(self._here), self._leave
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._closing.set()
        self._thread.join(WRITE_S)
        self._peers.status, self._peers.on_hang = bytes, lambda why: None

    def _watch(self) -> None:
        tasks, looked_s = self._sections.tasks(), time.monotonic()
        while not self._closing.wait(self._every_s):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > self._every_s + STOPPED_S:
                self._sections.renew()  # all of this process was stopped, as by Ctrl-Z
            if (now := self._sections.tasks()) != tasks:
                tasks = now
                if not self._sections.is_step:  # as an evaluation, which gets on with its tasks
                    self._sections.renew()
            self._here = self._whereabouts()
            if self._peers.is_hub and (hangs := self._who_hangs()):
                why = says(hangs, self._peers.count)
                self._leave(why)
                self._end(f"{why}; stacks and last tasks of all are in {self._folder}")
                return

    def _who_hangs(self) -> tuple[Whereabouts, ...]:
        """The processes that hang, at two looks: what others send of them is some seconds old."""
        others = [s for p, s in self._peers.statuses().items() if p and s]
        if len(others) < self._peers.count - 1:
            return ()  # nobody knows who is behind
        everywhere = [self._here, *(msgspec.json.decode(s, type=Whereabouts) for s in others)]
        hangs = who_hangs(everywhere)
        before, self._behind = self._behind, [(w.process, w.progress) for w in hangs]
        return hangs if self._behind == before else ()

    def _leave(self, why: str) -> None:
        """Write where this process is."""
        if self._hung:
            return
        self._hung = True
        # The run's disk may be what hangs.
        where = self._folder, self._whereabouts(), why
        writing = threading.Thread(target=write_stacks, args=where, daemon=True)
        writing.start()
        writing.join(WRITE_S)

    def _whereabouts(self) -> Whereabouts:
        return self._sections.whereabouts(self._peers.process, self._peers.name)


def write_stacks(folder: Path, here: Whereabouts, why: str) -> None:
    """Add a process's stacks and last tasks to its file in a folder, and say them in the log; what
    cannot be written is said only."""
    for line in (str(here), *here.tasks.lines, f"main thread: {here.stack}"):
        log.warning("%s", line)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"process-{here.process:05d}.txt").open("a") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(when, why, str(here), *here.tasks.lines, "", sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
            print(file=file)


@contextmanager
def hangs_watched(
    sections: Sections,
    peers: ProcessGroup,
    folder: Path,
    *,
    least_s: float,
    end: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Watch meanwhile; afterwards nothing is a section."""
    watch = HangWatch(sections, peers, folder, end, least_s)
    try:
        yield
    finally:
        sections.begin("")
        watch.close()
