"""The agent of a host: starts its processes of a run and, with the agents of other hosts, starts
them again.

jax connects to other processes once in a process's life, so what outlives a failure lives here. The
agents meet as processes do (`rendezvous`) and then agree over the same links (`peers`): each says
how the last start ended, that of host 0 decides and says how the next one begins, or that the run
is over. An agent whose process fails tells the others, which stop theirs; then all meet again. An
agent that was lost comes to that meeting too, once somebody has started it anew.
"""

from __future__ import annotations

import queue
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.cluster import told
from dflop_jax.cluster.addresses import LOOPBACK, Address
from dflop_jax.cluster.decide import Order, Report, decide
from dflop_jax.cluster.ending import (
    PREEMPTED,
    RunFailed,
    TryAgain,
    signal_name,
)
from dflop_jax.cluster.events import Answered, Ended, Event, Events, Stop, next_event, signals_noted
from dflop_jax.cluster.group import Group, Start
from dflop_jax.cluster.launch_keeper import MARK_ENV
from dflop_jax.cluster.output import Output
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.processes import Processes
from dflop_jax.cluster.rendezvous import Meeting, meet
from dflop_jax.cluster.restarts import Count, End, Limits
from dflop_jax.cluster.secret import SECRET_ENV
from dflop_jax.cluster.variables import (
    AGENT_ENV,
    COORDINATOR_ENV,
    LOCAL_INDEX_ENV,
    LOCAL_NUMBER_ENV,
    NUM_PROCESSES_ENV,
    PROCESS_ID_ENV,
    RESTARTS_ENV,
    RUN_ENV,
)

# Spares are started when a step is done, since what comes before it wants the cores itself; a
# program that tells of no step gets them after this.
SPARES_AFTER_S = 30.0
PEER_TIMEOUT_S = 30.0  # silence after which another host counts as lost


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
      exit_code: of the first process that failed, 0 when none did; 128+s when signal s killed it.
      exit_codes: of every process of this host, at their last start.
    """

    exit_code: int
    exit_codes: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What runs on this host: a program, and the variables and cores of each of its processes."""

    program: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    cores: Sequence[set[int] | None]


class _Signalled(Exception):
    """A signal ends an agent that waits for others."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


@dataclass
class _Begun:
    """A start that is under way."""

    order: Order
    folder: Path  # where its processes tell how far they are
    since_s: float = field(default_factory=time.monotonic)
    gained: bool = False


class Agent:
    """Runs a job on this host, which is one of `hosts`.

    Args:
      connect_s: longest wait for the agents of the other hosts.
    """

    def __init__(self, job: Job, hosts: Processes, connect_s: float, limits: Limits):
        self._job, self._hosts, self._connect_s, self._limits = job, hosts, connect_s, limits
        self._again = limits.restarts > 0
        self._output = Output()
        self._events: Events = queue.SimpleQueue()
        self._count = Count()  # on host 0
        self._report = Report(number=len(job.cores), name=uuid.uuid4().hex)
        self._codes: tuple[int, ...] = ()
        self._next: Group | None = None  # of spares
        self._failed_s = time.time()  # the last time that one did

    def run(self) -> LaunchResult:
        """Start, and start again, until the run is over.

        Raises:
          ValueError: the program cannot be started, or the hosts do not fit together.
          TryAgain: the agents of other hosts did not come.
        """
        in_vain = 0
        with (
            signals_noted(self._note),
            tempfile.TemporaryDirectory() as folder,
        ):
            try:
                while True:
                    self._fresh_events()
                    try:
                        with self._meeting() as peers:
                            in_vain = 0
                            if (code := self._together(peers, Path(folder))) is not None:
                                return LaunchResult(code, self._codes)
                    except TryAgain as e:
                        in_vain += 1
                        if in_vain > self._limits.restarts:
                            raise
                        self._output.say(f"{e}; meeting again")
            except _Signalled as e:
                return LaunchResult(128 + e.signum, self._codes)
            finally:
                if self._next is not None:
                    self._next.close()
                self._output.close()

    def _note(self, signum: int) -> None:
        self._events.put(signum)

    # ---- with the other hosts ----

    def _fresh_events(self) -> None:
        """Forget what came for the last start, but no signal."""
        old, self._events = self._events, queue.SimpleQueue()
        with suppress(queue.Empty):
            while True:
                event = old.get_nowait()
                if isinstance(event, int):
                    self._events.put(event)

    @contextmanager
    def _meeting(self) -> Iterator[Peers]:
        """The agents of all hosts; the connections end with it."""
        here = self._hosts
        meeting = Meeting(LOOPBACK, {})
        if here.coordinator is not None:
            secret = self._job.environments[0][SECRET_ENV].encode()
            what = f"dflop launch, jax {version('jax')}"
            come = partial(meet, here.coordinator, here.index, here.number, what, secret)
            meeting = self._awaited(partial(come, self._connect_s))
        try:
            events = self._events
            yield Peers(
                here.index,
                here.number,
                meeting.links,
                timeout_s=PEER_TIMEOUT_S,
                on_failure=lambda why, code: events.put(Stop(why)),
                remedy="",
                noun="host",
            )
        finally:
            for link in meeting.links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()

    def _awaited(self, get: Callable[[], Any]) -> Any:
        """What `get` returns, which waits for other hosts; a signal ends the wait."""
        if self._hosts.number == 1:
            return get()
        events, answer = self._events, Future[Any]()

        def run() -> None:
            try:
                answer.set_result(get())
            except Exception as e:
                answer.set_exception(e)
            events.put(Answered())

        threading.Thread(target=run, daemon=True).start()
        news: list[Event] = []
        while not isinstance(event := next_event(events, float("inf")), Answered):
            if isinstance(event, int):
                raise _Signalled(event)
            assert event is not None, "it waits for ever"
            news.append(event)
        for event in news:  # of a failure, which the next start is to hear
            events.put(event)
        return answer.result()

    def _together(self, peers: Peers, folder: Path) -> int | None:
        """Start after start, until the run is over (its exit code) or a failure parts us."""
        try:
            while True:
                order = self._awaited(lambda: self._agree(peers))
                if order.says:
                    self._output.say(order.says)
                if order.exit_code is not None:
                    with suppress(RunFailed):
                        self._awaited(peers.close)
                    return order.exit_code
                if not self._start(order, peers, folder):
                    return None
        except RunFailed:
            return None

    def _agree(self, peers: Peers) -> Order:
        """How it goes on; the same on every host."""
        reports = peers.gather("report", msgspec.json.encode(self._report))
        answer = b""
        if peers.is_hub:
            decoded = [msgspec.json.decode(r, type=Report) for r in reports]
            answer = msgspec.json.encode(decide(decoded, self._count, self._limits, time.time()))
        return msgspec.json.decode(peers.share("order", answer), type=Order)

    # ---- on this host ----

    def _start(self, order: Order, peers: Peers, folder: Path) -> bool:
        """Start this host's processes and await their end; whether all is well."""
        begun = _Begun(order, Path(tempfile.mkdtemp(dir=folder)))
        number = len(self._job.cores)
        first = sum(order.numbers[: self._hosts.index])
        report = partial(Report, number=number, name=order.name, start=order.start)
        if (event := self._awaited_start(order.wait_s)) is not None:
            why = f"{signal_name(event)} came" if isinstance(event, int) else event.why
            peers.fail(why)
            code = 128 + event if isinstance(event, int) else 0
            self._report = report(exit_code=code, signalled=code > 0, lost=why)
            return False
        group = self._next or self._group(first)
        self._next = None
        begun.since_s = time.monotonic()

        def failed(why: str) -> None:
            self._failed_s = time.time()
            peers.fail(why)

        try:
            starts = [self._how(order, i, begun.folder) for i in range(number)]
            code = group.run(starts, self._events, failed, partial(self._tick, begun))
        finally:
            group.close()
        self._codes = group.exit_codes
        begun.gained |= told.stepped_s(begun.folder) is not None
        ends = []
        for place, exit_code, by_itself in group.ends:
            failure = told.failure_of(begun.folder, first + place)
            by_itself |= failure is not None
            ends.append(End(first + place, exit_code, by_itself, failure, socket.gethostname()))
        self._report = report(
            ends=tuple(ends),
            exit_code=code,
            signalled=group.signalled,
            lost=group.stopped_by,
            gained=begun.gained,
            count_file=str(told.count_file(begun.folder) or ""),
        )
        return not (group.stopped_by or any(c not in (0, PREEMPTED) for c in self._codes))

    def _awaited_start(self, wait_s: float) -> int | Stop | None:
        """Wait for the time to start; returns what comes in between, and then there is none."""
        event = next_event(self._events, time.monotonic() + wait_s)
        assert not isinstance(event, Ended | Answered), "nothing runs"
        return event

    def _group(self, first: int) -> Group:
        return Group(
            self._output, first, self._job.environments[0].get(MARK_ENV, ""), again=self._again
        )

    def _how(self, order: Order, place: int, folder: Path) -> Start:
        """How this host's process in a place is started."""
        coordinator = self._hosts.coordinator or Address(LOOPBACK, order.port)
        place_in_run = {
            COORDINATOR_ENV: str(Address(coordinator.host, order.port)),
            NUM_PROCESSES_ENV: str(sum(order.numbers)),
            PROCESS_ID_ENV: str(sum(order.numbers[: self._hosts.index]) + place),
            LOCAL_NUMBER_ENV: str(len(self._job.cores)),
            LOCAL_INDEX_ENV: str(place),
        }
        if self._again:
            restarts = str(order.start - 1)
            place_in_run |= {AGENT_ENV: str(folder), RUN_ENV: order.name, RESTARTS_ENV: restarts}
        environment = {**self._job.environments[place], **place_in_run}
        return Start(self._job.program, environment, self._job.cores[place])

    def _tick(self, begun: _Begun) -> None:
        """Look how far this start is: the next one's spares begin once it does steps."""
        if not self._again:
            return
        if not begun.gained and (stepped_s := told.stepped_s(begun.folder)) is not None:
            begun.gained = True
            if begun.order.start > 1:
                after_s = stepped_s - self._failed_s
                name = f"restart {begun.order.start - 1}"
                self._output.say(f"{name} has done a step, {after_s:.1f} s after the failure")
        late = time.monotonic() - begun.since_s > SPARES_AFTER_S
        if self._next is None and (begun.gained or late):
            self._next = self._group(sum(begun.order.numbers[: self._hosts.index]))
            for i in range(len(self._job.cores)):
                self._next.add_spare(self._how(begun.order, i, begun.folder))
