"""What the agents of a run agree on: how the next start begins, or that the run is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflop_jax.cluster.addresses import free_port
from dflop_jax.cluster.ending import PREEMPTED, TRY_AGAIN
from dflop_jax.cluster.restarts import (
    Count,
    End,
    Limits,
    Setback,
    cause,
    enough,
    failed_twice,
    leaves_out,
    setback,
    wait_s,
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows when the agents meet.

    Attributes:
      number: processes of its host.
      host: its number.
      places: of those processes among all that its host has; () where it has these only.
      name: of the launch; before the first start the one that it would give.
      start: the last start that it took part in; 0: none.
      full: processes of the run's first start; 0: not known.
      ends: how its processes ended, as they did.
      exit_code: of its first process that failed; 0: none did.
      signalled: a signal came to it, so the run is to end.
      regroups: its processes saved and ended so that others can take part.
      waiting: hosts that are to be taken in, as the first host knows.
      lost: why it stopped its processes, where that was news from elsewhere.
      gained: a step was done.
      count_file: where restarts are counted; "" where the run has not begun.
    """

    number: int
    host: int = 0
    places: tuple[int, ...] = ()
    name: str
    start: int = 0
    full: int = 0
    ends: tuple[End, ...] = ()
    exit_code: int = 0
    signalled: bool = False
    regroups: bool = False
    waiting: tuple[int, ...] = ()
    lost: str = ""
    gained: bool = False
    count_file: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all agents do next.

    Attributes:
      exit_code: the run is over and they end by it; None: they start their processes.
      says: what is said about it.
      meets: they meet anew, with these hosts; () where they start their processes.
      leaves_out: (host, place) of a process that is not started any more.
      name: of the launch.
      start: the number of this start, from 1.
      after: that of the start before it; 0: there was none.
      full: processes of the first start.
      hosts: that take part, by number.
      numbers: processes of each of them.
      port: of the processes' meeting, on the first host.
      wait_s: seconds until the start.
      count_file: where restarts are counted; "" where the run has not begun.
    """

    exit_code: int | None = None
    says: str = ""
    meets: tuple[int, ...] = ()
    leaves_out: tuple[int, int] | None = None
    name: str = ""
    start: int = 0
    after: int = 0
    full: int = 0
    hosts: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = ()
    port: int = 0
    wait_s: float = 0.0
    count_file: str = ""


def decide(reports: Sequence[Report], count: Count, limits: Limits, now_s: float) -> Order:
    """What follows from the reports of the hosts that have come, in their order; `count` is kept by
    `count_file`, where one of them knows it."""
    last = max(r.start for r in reports)
    # One that was started anew knows nothing: the others tell it.
    if last == 0:
        return _start(reports, "", sum(r.number for r in reports))
    if count_file := next((r.count_file for r in reports if r.count_file), ""):
        count.keep_in(Path(count_file))
    codes = [r.exit_code for r in reports]
    if any(r.signalled for r in reports):
        return Order(exit_code=next((c for c in codes if c), 0))
    trouble = _trouble(reports, last, now_s)
    full = max(r.full for r in reports)
    if trouble is None:
        waiting = tuple(h for r in reports for h in r.waiting)
        if any(r.regroups for r in reports) and any(codes):
            if waiting:
                hosts = tuple(sorted({*(r.host for r in reports), *waiting}))
                return Order(meets=hosts, says=f"{_names(waiting)} is back", start=last)
            number = sum(r.number for r in reports)
            return _start(reports, f"starting anew with {number} processes", full)
        if PREEMPTED in codes:
            return Order(exit_code=PREEMPTED)
        count.add(Setback(now_s, "done", 0, is_last=True))
        return Order(exit_code=0)
    before = list(count.setbacks)
    left = sum(r.number for r in reports) - 1
    without, stays = leaves_out(before, trouble, left, limits)
    if why := enough(before, trouble, limits) or stays:
        if limits.restarts:
            count.add(msgspec.structs.replace(trouble, is_last=True))
        exit_code = codes[0] if len(reports) == 1 else trouble.exit_code
        return Order(exit_code=exit_code, says=why.strip())
    count.add(trouble)
    delay_s = wait_s(before, trouble)
    when = f" in {delay_s:g} s" if delay_s else ""
    says = f"{trouble.why}; restart {len(before) + 1} of {limits.restarts}{when}"
    if len(reports) > 1 and (bad := failed_twice(count.setbacks)):
        says += f"; failed twice or more: host {', '.join(bad)}"
    if without:
        says += f", without {without}: {left} are left"
        return _start(reports, says, full, delay_s, trouble.place)
    number = sum(r.number for r in reports)
    if number < full:
        says += f", with {number} of {full} processes"
    return _start(reports, says, full, delay_s)


def _trouble(reports: Sequence[Report], last: int, now_s: float) -> Setback | None:
    """Why the last start failed; None where it did not."""
    gained = any(r.gained for r in reports)
    if first := cause([end for r in reports for end in r.ends]):
        found = setback(first, now_s, gained)
        to_blame: End | None = first
        if first.failure and first.failure.broken:
            named = first.failure.process
            ends = (e for r in reports for e in r.ends)
            to_blame = next((e for e in ends if e.process == named), None)
        place = _place_of(to_blame, reports) if to_blame else None
        return msgspec.structs.replace(found, place=place)
    regroups = any(r.regroups for r in reports)
    gone = [f"the launcher of {_names((r.host,))} was lost" for r in reports if r.start < last]
    lost = ([] if regroups else gone) or [r.lost for r in reports if r.lost]
    return Setback(now_s, lost[0], TRY_AGAIN, gained=gained) if lost else None


def _place_of(end: End, reports: Sequence[Report]) -> tuple[int, int]:
    """(host, place) of a process that has ended."""
    report = next(r for r in reports if end in r.ends)
    numbers = sorted(e.process for e in report.ends)
    nth = numbers.index(end.process)
    places = report.places or tuple(range(report.number))
    return report.host, places[nth] if nth < len(places) else nth


def _start(
    reports: Sequence[Report],
    says: str,
    full: int,
    delay_s: float = 0.0,
    leaves_out: tuple[int, int] | None = None,
) -> Order:
    last = max(r.start for r in reports)
    name = next((r.name for r in reports if r.start == last), reports[0].name)
    out = leaves_out[0] if leaves_out else -1
    numbers = tuple(r.number - (r.host == out) for r in reports)
    hosts = tuple(r.host for r in reports)
    order = Order(
        name=name,
        start=last + 1,
        after=last,
        full=full,
        hosts=hosts,
        numbers=numbers,
        port=free_port(),
        wait_s=delay_s,
        says=says,
        leaves_out=leaves_out,
        count_file=next((r.count_file for r in reports if r.count_file), ""),
    )
    if 0 in numbers:  # that host's agent ends
        rest = tuple(h for h, n in zip(hosts, numbers, strict=True) if n)
        return msgspec.structs.replace(order, meets=rest, start=last)
    return order


def _names(hosts: Sequence[int]) -> str:
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, hosts))}"
