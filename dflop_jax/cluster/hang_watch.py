"""Ends a run that hangs: says which process all wait for, and leaves everybody's stacks behind.

A process whose devices wait for ever, inside a collective in C++, still gives signs of life. So
each has a thread that looks whether its main thread has passed its section's deadline (`sections`).
The hub then asks all where they are. Only where the one that is behind is late itself does the run
hang; who waits for one that compiles or saves, in time, waits. Then every process writes its stacks
and last tasks, and all end with exit code 4.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.sections import Sections, Whereabouts, says, who_hangs

LATE, ASK, ANSWER, HUNG = "?late", "?where", "?here", "?hung"
LOOKS_A_DEADLINE = 10  # at least
LONGEST_LOOK_S = 5.0  # between two looks
STOPPED_S = 10.0  # later than it should: a look that comes so late says nothing of the main thread
ANSWER_S = 3.0  # longest wait for where the others are
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
        peers: Peers,
        folder: Path,
        end: Callable[[str], None] | None = None,
        least_s: float = 120.0,
    ):
        self._sections, self._peers, self._folder = sections, peers, folder
        self._end = end or peers.give_up
        self._every_s = min(LONGEST_LOOK_S, least_s / LOOKS_A_DEADLINE)
        self._name = f"{socket.gethostname()}, pid {os.getpid()}"
        self._changed = threading.Condition()
        self._closing = self._asked = self._hung = False
        self._answers: dict[int, Whereabouts] = {}
        peers.calls |= {LATE: self._late, ASK: self._say, ANSWER: self._hear, HUNG: self._leave}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(ANSWER_S)
        for key in (LATE, ASK, ANSWER, HUNG):
            self._peers.calls.pop(key, None)

    # ---- the thread ----

    def _watch(self) -> None:
        tasks, looked_s = self._sections.tasks(), time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._asked, self._every_s)
                if self._closing or self._hung:
                    return
                asked, self._asked = self._asked, False
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > self._every_s + STOPPED_S:
                self._sections.renew()  # all of this process was stopped, as by Ctrl-Z
            if (now := self._sections.tasks()) != tasks:
                tasks = now
                if not self._sections.is_step:  # as an evaluation, which gets on with its tasks
                    self._sections.renew()
            if not (asked or self._sections.is_late):
                continue
            if not self._peers.is_hub:
                self._peers.tell_hub(LATE, b"")
            elif hangs := who_hangs(self._everywhere()):
                self._end_all(hangs)
                return
            elif asked:  # somebody waits who is late: not before the next look again
                time.sleep(min(self._every_s, ANSWER_S))

    def _everywhere(self) -> list[Whereabouts]:
        """Where every process is that answers in time; a silent one is the others' to miss."""
        with self._changed:
            self._answers = {}
        deadline = time.monotonic() + ANSWER_S
        self._peers.tell_all(ASK, b"")
        with self._changed:
            whole = self._peers.count - 1
            self._changed.wait_for(
                lambda: self._closing or len(self._answers) == whole, deadline - time.monotonic()
            )
            answers = [self._answers[p] for p in sorted(self._answers)]
        if len(answers) < whole:
            return [self._here()] if self._peers.count == 1 else [_in_time(self._here())]
        return [self._here(), *answers]

    def _end_all(self, hangs: tuple[Whereabouts, ...]) -> None:
        why = says(hangs, self._peers.count)
        self._peers.tell_all(HUNG, why.encode())
        self._leave(0, why.encode())
        self._end(f"{why}; stacks and last tasks of all are in {self._folder}")

    # ---- called by who reads from the others ----

    def _late(self, process: int, _: bytes) -> None:
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def _say(self, process: int, _: bytes) -> None:
        self._peers.tell_hub(ANSWER, msgspec.json.encode(self._here()))

    def _hear(self, process: int, value: bytes) -> None:
        with self._changed:
            self._answers[process] = msgspec.json.decode(value, type=Whereabouts)
            self._changed.notify_all()

    def _leave(self, _: int, why: bytes) -> None:
        """Write where this process is."""
        if self._hung:
            return
        self._hung = True
        # The run's disk may be what hangs.
        where = self._folder, self._here(), why.decode()
        writing = threading.Thread(target=write_stacks, args=where, daemon=True)
        writing.start()
        writing.join(ANSWER_S)

    def _here(self) -> Whereabouts:
        return self._sections.whereabouts(self._peers.process, self._name)


def _in_time(here: Whereabouts) -> Whereabouts:
    return msgspec.structs.replace(here, seconds=0.0)


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
    peers: Peers,
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
