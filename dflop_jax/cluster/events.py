"""What an agent waits for, in one queue: signals, ends of processes, other hosts."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from dflop_jax.cluster.ending import ONE_SIGNAL_S, handled_by

TICK_S = 0.25  # between two looks at what processes have told


@dataclass(frozen=True)
class Stop:
    """A failure elsewhere ends the processes of a group."""

    why: str


@dataclass(frozen=True)
class Ended:
    """The process in this place has ended; `exit_code` as `subprocess` says it; `by_itself`: nobody
    had asked it to."""

    place: int
    exit_code: int
    by_itself: bool


@dataclass(frozen=True)
class Answered:
    """Other hosts have answered what their agent waited for."""


@dataclass(frozen=True)
class Regroup:
    """The processes are to save and end, so that more can take part."""

    why: str


Event = int | Ended | Stop | Answered | Regroup  # an int is the number of a signal that came
# Unlike other queues it may be put to in a signal handler.
Events = queue.SimpleQueue[Event]


def next_event(
    events: Events, until_s: float, tick: Callable[[], None] = lambda: None
) -> Event | None:
    """What comes next; None: too late."""
    while (left_s := until_s - time.monotonic()) > 0:
        with suppress(queue.Empty):
            return events.get(timeout=min(TICK_S, left_s))
        tick()
    return None


def before_start(events: Events, wait_s: float) -> int | Stop | None:
    """Wait for the time to start; returns what comes in between, and then there is none."""
    until_s = time.monotonic() + wait_s
    while isinstance(event := next_event(events, until_s), Regroup):
        pass  # it takes effect with the start
    assert not isinstance(event, Ended | Answered), "nothing runs"
    return event


@contextmanager
def signals_noted(note: Callable[[int], None], take_in: Callable[[], None]) -> Iterator[None]:
    """Have `note` called with each SIGINT, SIGTERM and SIGHUP that comes meanwhile, `take_in` at
    each SIGUSR1."""
    last_s = float("-inf")

    def handle(signum: int, _: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s > ONE_SIGNAL_S:
            last_s = now_s
            note(signum)

    former = signal.signal(signal.SIGUSR1, lambda *_: take_in())
    try:
        with handled_by(handle):
            yield
    finally:
        signal.signal(signal.SIGUSR1, former)
