"""The agent of a host: starts its processes of a run and, with the agents of other hosts, starts
them again.

jax connects to other processes once in a process's life, so what outlives a failure lives here. The
agents come together (`assembly`) and then agree over the same links (`peers`): each says how the
last start ended, that of the first host decides and says how the next one begins, or that the run
is over. An agent whose process fails tells the others, which stop theirs; then all meet again. An
agent that was lost comes to that meeting too, once somebody has started it anew; where the run goes
on without it, it is taken in later.
"""

from __future__ import annotations

import queue
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dflop_jax.cluster import told
from dflop_jax.cluster.assembly import Assembly, assemble
from dflop_jax.cluster.cards import Card, bits_of
from dflop_jax.cluster.copy_keeper import CopyKeeper
from dflop_jax.cluster.decide import Order, Report, decide
from dflop_jax.cluster.ending import PREEMPTED, TRY_AGAIN, RunFailed, TryAgain, signal_name
from dflop_jax.cluster.events import (
    Answered,
    Event,
    Events,
    Regroup,
    Stop,
    before_start,
    next_event,
    signals_noted,
)
from dflop_jax.cluster.group import Group, Start
from dflop_jax.cluster.job import Job, LaunchResult, Place, claimed, start_of
from dflop_jax.cluster.launch_keeper import MARK_ENV
from dflop_jax.cluster.output import Output
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.reception import Reception
from dflop_jax.cluster.restarts import Count, End, Limits
from dflop_jax.cluster.secret import SECRET_ENV

# Spares are started when a step is done, since what comes before it wants the cores itself; a
# program that tells of no step gets them after this.
SPARES_AFTER_S = 30.0
PEER_TIMEOUT_S = 30.0  # silence after which another host counts as lost


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
    """Runs a job on this host.

    Args:
      connect_s: longest wait for the agents of the other hosts.
    """

    def __init__(self, job: Job, place: Place, connect_s: float, limits: Limits):
        self._job, self._place, self._connect_s, self._limits = job, place, connect_s, limits
        self._again = limits.restarts > 0
        self._output = Output()
        self._events: Events = queue.SimpleQueue()
        self._count = Count()  # on the first host
        self._left_out: set[int] = set()  # places whose processes are not started any more
        self._last: tuple[int, ...] = ()  # hosts of the last start, and those to be taken in then
        self._reception: Reception | None = None
        self._copies = CopyKeeper(self._secret, on=self._again)
        self._report = Report(number=len(job.cores), host=place.host, name=uuid.uuid4().hex)
        self._codes: tuple[int, ...] = ()
        self._next: Group | None = None  # of spares
        self._spares_for: tuple[int, ...] = ()
        self._failed_s = time.time()  # the last time that one did

    def run(self) -> LaunchResult:
        """Start, and start again, until the run is over.

        Raises:
          ValueError: the program cannot be started, or the hosts do not fit together.
          TryAgain: the agents of other hosts did not come, or the run goes on without this host.
        """
        in_vain = 0
        with (
            signals_noted(self._note, self._take_in_all),
            tempfile.TemporaryDirectory() as folder,
        ):
            try:
                while True:
                    self._fresh_events()
                    try:
                        with self._meeting() as peers:
                            before = self._report.start
                            if (code := self._together(peers, Path(folder))) is not None:
                                return LaunchResult(code, self._codes)
                            in_vain *= self._report.start == before
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
                self._copies.close()
                self._output.close()

    def _note(self, signum: int) -> None:
        self._events.put(signum)

    def _take_in_all(self) -> None:
        """What was left out on this host is well again, as SIGUSR1 says."""
        if self._left_out:
            self._left_out.clear()
            self._events.put(Regroup("SIGUSR1 came: all processes of this host take part again"))

    @property
    def _active(self) -> tuple[int, ...]:
        """Places whose processes are started."""
        return tuple(i for i in range(len(self._job.cores)) if i not in self._left_out)

    # ---- with the other hosts ----

    def _fresh_events(self) -> None:
        """Forget what came for the last start, but no signal."""
        old, self._events = self._events, queue.SimpleQueue()
        with suppress(queue.Empty):
            while True:
                event = old.get_nowait()
                if isinstance(event, int):
                    self._events.put(event)

    def _card(self) -> Card:
        return Card(
            host=self._place.host,
            hosts=self._place.hosts,
            what=f"dflop launch, jax {version('jax')}",
            processes=len(self._active),
            start=self._report.start,
            begun=bool(self._report.count_file),
            last=bits_of(self._last),
        )

    @property
    def _secret(self) -> bytes:
        return self._job.environments[0][SECRET_ENV].encode()

    @contextmanager
    def _meeting(self) -> Iterator[Peers]:
        """The agents that have come; the connections end with it."""
        met = Assembly((self._place.host,), MappingProxyType({}))
        if self._place.hosts > 1:
            come = partial(
                assemble,
                self._card(),
                self._place.addresses,
                self._secret,
                least=self._limits.least,
                patience_s=self._limits.gone_after_s,
                timeout_s=self._connect_s,
                waiting=self._output.say,
            )
            met = self._awaited(come)
        self._copies.meet(self._place, met)
        events = self._events

        def failed(why: str, code: int) -> None:
            self._failed_s = time.time()
            events.put(Stop(why))

        try:
            yield Peers(
                met.hosts.index(self._place.host),
                len(met.hosts),
                met.links,
                timeout_s=PEER_TIMEOUT_S,
                on_failure=failed,
                remedy="",
                names=[f"host {h}" for h in met.hosts],
            )
        finally:
            if self._reception:
                self._reception.close()
                self._reception = None
            for link in met.links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()

    def _awaited(self, get: Callable[[], Any]) -> Any:
        """What `get` returns, which waits for other hosts; a signal ends the wait."""
        if self._place.hosts == 1:
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
            if not isinstance(event, Regroup):  # nothing runs
                news.append(event)
        for event in news:  # of a failure, which the next start is to hear
            events.put(event)
        return answer.result()

    def _together(self, peers: Peers, folder: Path) -> int | None:
        """Start after start, until the run is over (its exit code) or we part, to meet again."""
        try:
            while True:
                order = self._awaited(lambda: self._agree(peers))
                if order.says:
                    self._output.say(order.says)
                if order.exit_code is not None:
                    with suppress(RunFailed):
                        self._awaited(peers.close)
                    return order.exit_code
                if order.leaves_out and order.leaves_out[0] == self._place.host:
                    self._left_out.add(order.leaves_out[1])
                if not self._active:
                    return TRY_AGAIN
                if order.meets:
                    self._last = order.meets
                    # What ended the last start is counted by now.
                    changed = {"ends": (), "lost": "", "regroups": True, "waiting": ()}
                    changed |= {"number": len(self._active), "places": self._active}
                    self._report = msgspec.structs.replace(self._report, **changed)
                    return None
                if not self._start(order, peers, folder):
                    return None
        except TryAgain:
            raise
        except RunFailed:
            return None

    def _agree(self, peers: Peers) -> Order:
        """How it goes on; the same on every host.

        Raises:
          TryAgain: another part of the run goes on.
        """
        report = self._copies.told_in(self._report)
        gathered = peers.gather("report", msgspec.json.encode(report))
        answer = b""
        if peers.is_hub:
            reports = [msgspec.json.decode(r, type=Report) for r in gathered]
            order = decide(reports, self._count, self._limits, time.time())
            if order.exit_code is None and not order.meets and self._place.hosts > 1:
                order = msgspec.structs.replace(order, start=claimed(order))
            answer = msgspec.json.encode(self._copies.told_of(order, reports))
        order = msgspec.json.decode(peers.share("order", answer), type=Order)
        if order.exit_code is None and not order.start:
            raise TryAgain("another part of this run goes on (wait), or its folder is read-only")
        if order.exit_code is None and not order.meets:
            self._copies.follow(order, self._report.start)
        return order

    # ---- on this host ----

    def _start(self, order: Order, peers: Peers, folder: Path) -> bool:
        """Start this host's processes and await their end; whether all is well."""
        begun = _Begun(order, Path(tempfile.mkdtemp(dir=folder)))
        first = self._first(order)
        self._last = order.hosts
        if (event := before_start(self._events, order.wait_s)) is not None:
            why = f"{signal_name(event)} came" if isinstance(event, int) else event.why
            peers.fail(why)
            code = 128 + event if isinstance(event, int) else 0
            count_file = order.count_file
            self._report = self._report_of(
                order, exit_code=code, signalled=code > 0, lost=why, count_file=count_file
            )
            return False
        if self._limits.least and peers.is_hub and self._place.hosts > 1:
            at = self._place.addresses[self._place.host]
            self._reception = Reception(self._card(), at, self._secret)
        group = self._group(first)
        begun.since_s = time.monotonic()

        def failed(why: str) -> None:
            self._failed_s = time.time()
            peers.fail(why)

        try:
            starts = [self._how(order, i, begun.folder) for i in self._active]
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
        self._report = self._report_of(
            order,
            ends=tuple(ends),
            exit_code=code,
            signalled=group.signalled,
            regroups=group.regroups,
            waiting=self._reception.hosts if self._reception else (),
            lost=group.stopped_by,
            gained=begun.gained,
            count_file=str(told.count_file(begun.folder) or order.count_file),
        )
        return not (group.stopped_by or any(c not in (0, PREEMPTED) for c in self._codes))

    def _first(self, order: Order) -> int:
        """The number in the run of this host's first process."""
        return sum(order.numbers[: order.hosts.index(self._place.host)])

    def _report_of(self, order: Order, **seen: Any) -> Report:
        """What this host says of a start; its processes are those that may take part by now."""
        return Report(
            number=len(self._active),
            host=self._place.host,
            places=self._active,
            name=order.name,
            start=order.start,
            full=order.full,
            **seen,
        )

    def _group(self, first: int) -> Group:
        """The group of a start, with the spares that fit."""
        group, self._next = self._next, None
        if group and group.number_from(first) and self._spares_for == self._active:
            return group
        if group:
            group.close()
        return self._new_group(first)

    def _new_group(self, first: int) -> Group:
        marks = self._job.environments[0].get(MARK_ENV, "")
        return Group(self._output, first, marks, again=self._again)

    def _how(self, order: Order, place: int, folder: Path) -> Start:
        """How this host's process in a place is started."""
        return start_of(self._job, self._place, order, self._active, place, folder, self._limits)

    def _tick(self, begun: _Begun) -> None:
        """Look how far this start is: once it does steps, the next one's spares begin, and hosts
        that have come back are taken in."""
        if not self._again:
            return
        if not begun.gained and (stepped_s := told.stepped_s(begun.folder)) is not None:
            begun.gained = True
            if begun.order.start > 1:
                after_s = stepped_s - self._failed_s
                name = f"restart {begun.order.start - 1}"
                self._output.say(f"{name} has done a step, {after_s:.1f} s after the failure")
        if begun.gained and self._reception and (hosts := self._reception.hosts):
            came = ", ".join(map(str, hosts))
            self._events.put(Regroup(f"host {came} has come back"))
        late = time.monotonic() - begun.since_s > SPARES_AFTER_S
        if self._next is None and (begun.gained or late):
            self._next = self._new_group(self._first(begun.order))
            self._spares_for = self._active
            for i in self._active:
                self._next.add_spare(self._how(begun.order, i, begun.folder))
