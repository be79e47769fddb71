"""The agent of a host: with the agents of other hosts it agrees on each start of a run.

jax connects to other processes once in a process's life, so what outlives a failure lives here and
in `host_run`, which starts this host's processes. The agents come together (`assembly`) and then
agree over the same links (`peers`): each says how the last start ended, that of the first host
decides and says how the next one begins, or that the run is over. An agent whose process fails
tells the others, which stop theirs; then all meet again. An agent that was lost comes to that
meeting too, once somebody has started it anew; where the run goes on without it, it is taken in
later.
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dflop_jax.cluster.assembly import Assembly, assemble
from dflop_jax.cluster.cards import Card, bits_of
from dflop_jax.cluster.decide import Order, Report, decide
from dflop_jax.cluster.ending import TRY_AGAIN, RunFailed, TryAgain, signal_name
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
from dflop_jax.cluster.host_run import HostRun
from dflop_jax.cluster.job import Job, LaunchResult, Place, claimed
from dflop_jax.cluster.output import Output
from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.reception import Reception
from dflop_jax.cluster.restarts import Count, Limits
from dflop_jax.cluster.secret import SECRET_ENV

PEER_TIMEOUT_S = 30.0  # silence after which another host counts as lost


class _Signalled(Exception):
    """A signal ends an agent that waits for others."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


class Agent:
    """Runs a job on this host.

    Args:
      connect_s: longest wait for the agents of the other hosts.
    """

    def __init__(self, job: Job, place: Place, connect_s: float, limits: Limits):
        self._job, self._place, self._connect_s, self._limits = job, place, connect_s, limits
        self._again = limits.restarts > 0
        self._output = Output()
        self._here = HostRun(job, place, limits, self._output)
        self._events: Events = queue.SimpleQueue()
        self._count = Count()  # on the first host
        self._last: tuple[int, ...] = ()  # hosts of the last start, and those to be taken in then
        self._reception: Reception | None = None
        self._report = Report(number=len(job.cores), host=place.host, name=uuid.uuid4().hex)

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
                                return LaunchResult(code, self._here.exit_codes)
                            in_vain *= self._report.start == before
                    except TryAgain as e:
                        in_vain += 1
                        if in_vain > self._limits.restarts:
                            raise
                        self._output.say(f"{e}; meeting again")
            except _Signalled as e:
                return LaunchResult(128 + e.signum, self._here.exit_codes)
            finally:
                self._here.close()
                self._output.close()

    def _note(self, signum: int) -> None:
        self._events.put(signum)

    def _take_in_all(self) -> None:
        """What was left out on this host is well again, as SIGUSR1 says."""
        if self._here.left_out:
            self._here.left_out.clear()
            self._events.put(Regroup("SIGUSR1 came: all processes of this host take part again"))

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
            processes=len(self._here.active),
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
        events = self._events

        def failed(why: str, code: int) -> None:
            self._here.failed_s = time.time()
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
                    self._here.left_out.add(order.leaves_out[1])
                if not self._here.active:
                    return TRY_AGAIN
                if order.meets:
                    self._last = order.meets
                    # What ended the last start is counted by now.
                    changed = {"ends": (), "lost": "", "regroups": True, "waiting": ()}
                    changed |= {"number": len(self._here.active), "places": self._here.active}
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
        gathered = peers.gather("report", msgspec.json.encode(self._report))
        answer = b""
        if peers.is_hub:
            reports = [msgspec.json.decode(r, type=Report) for r in gathered]
            order = decide(reports, self._count, self._limits, time.time())
            if order.exit_code is None and not order.meets and self._place.hosts > 1:
                order = msgspec.structs.replace(order, start=claimed(order))
            answer = msgspec.json.encode(order)
        order = msgspec.json.decode(peers.share("order", answer), type=Order)
        if order.exit_code is None and not order.start:
            raise TryAgain("another part of this run goes on (wait), or its folder is read-only")
        return order

    def _start(self, order: Order, peers: Peers, folder: Path) -> bool:
        """Start this host's processes and await their end; whether all is well."""
        self._last = order.hosts
        if (event := before_start(self._events, order.wait_s)) is not None:
            why = f"{signal_name(event)} came" if isinstance(event, int) else event.why
            peers.fail(why)
            code = 128 + event if isinstance(event, int) else 0
            count_file = order.count_file
            self._report = self._here.report_of(
                order, exit_code=code, signalled=code > 0, lost=why, count_file=count_file
            )
            return False
        if self._limits.least and peers.is_hub and self._place.hosts > 1:
            at = self._place.addresses[self._place.host]
            self._reception = Reception(self._card(), at, self._secret)
        self._report = self._here.start(order, self._events, folder, peers.fail, self._come_back)
        return not self._report.lost and self._here.is_well

    def _come_back(self) -> tuple[int, ...]:
        """Hosts that were gone and ask to be taken in."""
        return self._reception.hosts if self._reception else ()
