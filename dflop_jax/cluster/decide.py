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
    setback,
    wait_s,
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows when the agents meet.

    Attributes:
      number: processes of its host.
      name: of the launch; before the first start the one that it would give.
      start: the last start that it took part in; 0: none.
      ends: how its processes ended, as they did.
      exit_code: of its first process that failed; 0: none did.
      signalled: a signal came to it, so the run is to end.
      lost: why it stopped its processes, where that was news from elsewhere.
      gained: a step was done.
      count_file: where process 0 says that restarts are counted; "" elsewhere.
    """

    number: int
    name: str
    start: int = 0
    ends: tuple[End, ...] = ()
    exit_code: int = 0
    signalled: bool = False
    lost: str = ""
    gained: bool = False
    count_file: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all agents do next.

    Attributes:
      exit_code: the run is over and they end by it; None: they start their processes.
      says: what is said about it.
      name: of the launch.
      start: the number of this start, from 1.
      numbers: processes of every host.
      port: of the processes' meeting, on host 0.
      wait_s: seconds until the start.
    """

    exit_code: int | None = None
    says: str = ""
    name: str = ""
    start: int = 0
    numbers: tuple[int, ...] = ()
    port: int = 0
    wait_s: float = 0.0


def decide(reports: Sequence[Report], count: Count, limits: Limits, now_s: float) -> Order:
    """What follows from the reports of all hosts, by host; `count` is kept."""
    last = max(r.start for r in reports)
    # One that was started anew knows nothing: the others tell it.
    name = next((r.name for r in reports if r.start == last), reports[0].name)
    if last == 0:
        return _start(reports, name, 1)
    if count_file := reports[0].count_file:
        count.keep_in(Path(count_file))
    codes = [r.exit_code for r in reports]
    if any(r.signalled for r in reports):
        return Order(exit_code=next((c for c in codes if c), 0))
    trouble = _trouble(reports, last, now_s)
    if trouble is None:
        if PREEMPTED in codes:
            return Order(exit_code=PREEMPTED)
        count.add(Setback(now_s, "done", 0, is_last=True))
        return Order(exit_code=0)
    before = list(count.setbacks)
    if why := enough(before, trouble, limits):
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
    return _start(reports, name, last + 1, says, delay_s)


def _trouble(reports: Sequence[Report], last: int, now_s: float) -> Setback | None:
    """Why the last start failed; None where it did not."""
    gained = any(r.gained for r in reports)
    if first := cause([end for r in reports for end in r.ends]):
        return setback(first, now_s, gained)
    gone = [f"the launcher of host {i} was lost" for i, r in enumerate(reports) if r.start < last]
    lost = gone or [r.lost for r in reports if r.lost]
    return Setback(now_s, lost[0], TRY_AGAIN, gained=gained) if lost else None


def _start(
    reports: Sequence[Report], name: str, start: int, says: str = "", delay_s: float = 0.0
) -> Order:
    numbers = tuple(r.number for r in reports)
    return Order(
        name=name, start=start, numbers=numbers, port=free_port(), wait_s=delay_s, says=says
    )
