"""This host's processes of a run, start after start, with spares for the next one."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dflop_jax.cluster import told
from dflop_jax.cluster.decide import Order, Report
from dflop_jax.cluster.ending import PREEMPTED
from dflop_jax.cluster.events import Events, Regroup
from dflop_jax.cluster.group import Group, Start
from dflop_jax.cluster.job import Job, Place, start_of
from dflop_jax.cluster.launch_keeper import MARK_ENV
from dflop_jax.cluster.output import Output
from dflop_jax.cluster.restarts import End, Limits

# Spares are started when a step is done, since what comes before it wants the cores itself; a
# program that tells of no step gets them after this.
SPARES_AFTER_S = 30.0
ComeBack = Callable[[], tuple[int, ...]]  # hosts that were gone and ask to be taken in


@dataclass
class _Begun:
    """A start that is under way."""

    order: Order
    folder: Path  # where its processes tell how far they are
    events: Events
    come_back: ComeBack
    since_s: float = field(default_factory=time.monotonic)
    gained: bool = False


class HostRun:
    """Starts this host's processes as it is told, and says how they ended.

    Attributes:
      left_out: places whose processes are not started any more.
      exit_codes: of the last start.
      failed_s: the last time that a process failed, or another host, in seconds since 1970.
    """

    def __init__(self, job: Job, place: Place, limits: Limits, output: Output):
        self._job, self._place, self._limits, self._output = job, place, limits, output
        self._again = limits.restarts > 0
        self.left_out: set[int] = set()
        self.exit_codes: tuple[int, ...] = ()
        self.failed_s = time.time()
        self._next: Group | None = None  # of spares
        self._spares_for: tuple[int, ...] = ()

    @property
    def active(self) -> tuple[int, ...]:
        """Places whose processes are started."""
        return tuple(i for i in range(len(self._job.cores)) if i not in self.left_out)

    @property
    def is_well(self) -> bool:
        """Whether no process of the last start failed."""
        return all(code in (0, PREEMPTED) for code in self.exit_codes)

    def start(
        self,
        order: Order,
        events: Events,
        folder: Path,
        fail: Callable[[str], object],
        come_back: ComeBack,
    ) -> Report:
        """Start the processes and await their end; what this host says of it.

        Args:
          folder: new ones are made in it.
          fail: tells the other hosts that something failed here.
        """
        begun = _Begun(order, Path(tempfile.mkdtemp(dir=folder)), events, come_back)
        first = self._first(order)
        group = self._group(first)
        begun.since_s = time.monotonic()

        def failed(why: str) -> None:
            self.failed_s = time.time()
            fail(why)

        try:
            starts = [self._how(order, i, begun.folder) for i in self.active]
            code = group.run(starts, events, failed, partial(self._tick, begun))
        finally:
            group.close()
        self.exit_codes = group.exit_codes
        begun.gained |= told.stepped_s(begun.folder) is not None
        ends = []
        for place, exit_code, by_itself in group.ends:
            failure = told.failure_of(begun.folder, first + place)
            by_itself |= failure is not None
            ends.append(End(first + place, exit_code, by_itself, failure, socket.gethostname()))
        return self.report_of(
            order,
            ends=tuple(ends),
            exit_code=code,
            signalled=group.signalled,
            regroups=group.regroups,
            waiting=come_back(),
            lost=group.stopped_by,
            gained=begun.gained,
            count_file=str(told.count_file(begun.folder) or order.count_file),
        )

    def report_of(self, order: Order, **seen: Any) -> Report:
        """What this host says of a start; its processes are those that may take part by now."""
        return Report(
            number=len(self.active),
            host=self._place.host,
            places=self.active,
            name=order.name,
            start=order.start,
            full=order.full,
            **seen,
        )

    def close(self) -> None:
        """End the spares."""
        if self._next is not None:
            self._next.close()

    def _first(self, order: Order) -> int:
        """The number in the run of this host's first process."""
        return sum(order.numbers[: order.hosts.index(self._place.host)])

    def _group(self, first: int) -> Group:
        """The group of a start, with the spares that fit."""
        group, self._next = self._next, None
        if group and group.number_from(first) and self._spares_for == self.active:
            return group
        if group:
            group.close()
        return self._new_group(first)

    def _new_group(self, first: int) -> Group:
        marks = self._job.environments[0].get(MARK_ENV, "")
        return Group(self._output, first, marks, again=self._again)

    def _how(self, order: Order, place: int, folder: Path) -> Start:
        """How this host's process in a place is started."""
        return start_of(self._job, self._place, order, self.active, place, folder, self._limits)

    def _tick(self, begun: _Begun) -> None:
        """Look how far this start is: once it does steps, the next one's spares begin, and hosts
        that have come back are taken in."""
        if not self._again:
            return
        if not begun.gained and (stepped_s := told.stepped_s(begun.folder)) is not None:
            begun.gained = True
            if begun.order.start > 1:
                after_s = stepped_s - self.failed_s
                name = f"restart {begun.order.start - 1}"
                self._output.say(f"{name} has done a step, {after_s:.1f} s after the failure")
        if begun.gained and (hosts := begun.come_back()):
            came = ", ".join(map(str, hosts))
            begun.events.put(Regroup(f"host {came} has come back"))
        late = time.monotonic() - begun.since_s > SPARES_AFTER_S
        if self._next is None and (begun.gained or late):
            self._next = self._new_group(self._first(begun.order))
            self._spares_for = self.active
            for i in self.active:
                self._next.add_spare(self._how(begun.order, i, begun.folder))
