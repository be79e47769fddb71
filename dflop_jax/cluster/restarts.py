"""When a run that failed is started again, and when that is enough.

A failure that passes (a process that was killed, a lost host, a port in use) is tried again as long
as the limits allow. An error of the run's own is tried again too, as memory or a disk may have been
short, but not where it came three times at one step. Bad input never is.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflop_jax.cluster.ending import BAD_INPUT, PREEMPTED, TRY_AGAIN, how_ended, shell_code
from dflop_jax.cluster.told import Failure

SAME_ERRORS = 3  # errors at one step that stop a run
HOST_FAILURES = 2  # of a host, after which it is named
HOUR_S = 3600.0
# Between a failure and the start after it, where nothing was gained in between: the first comes at
# once, the second after this, each later one after twice as long, up to a minute.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
MOST_NAMED = 8  # samples in one line


@dataclass(frozen=True)
class Limits:
    """How often a run is started again: `restarts` times in all, `an_hour` times in any hour; and
    with how many processes it goes on at `least` where others are gone for good (0: with all only),
    as a host is that does not come back within `gone_after_s`.

    Raises:
      ValueError: one is below 0, or `an_hour` 0, or fewer processes without restarts.
    """

    restarts: int = 0
    an_hour: int = 20
    least: int = 0
    gone_after_s: float = 20.0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"--max-restarts {self.restarts} must be at least 0")
        if self.an_hour < 1:
            raise ValueError(
                f"--restarts-an-hour {self.an_hour} must be at least 1; --max-restarts 0 restarts "
                "nothing"
            )
        if self.least < 0 or not 0 <= self.gone_after_s < math.inf:
            raise ValueError(
                f"--min-processes {self.least} and --gone-after {self.gone_after_s:g} must be "
                "numbers from 0"
            )
        if self.least and not self.restarts:
            raise ValueError(
                f"--min-processes {self.least} goes on with fewer by a restart; give "
                "--max-restarts too"
            )


class End(msgspec.Struct, frozen=True):
    """How a process ended.

    Attributes:
      exit_code: as `subprocess` says it: below 0 it is the signal that killed it.
      by_itself: nobody had stopped it, or it had told a failure of its own.
      failure: what it told its agent.
      host: the name of its host.
    """

    process: int
    exit_code: int
    by_itself: bool = True
    failure: Failure | None = None
    host: str = ""

    @property
    def code(self) -> int:
        """What it ended by, as `dflop` would end: a script's own exit code says less than what its
        Trainer told."""
        return self.failure.exit_code if self.failure else self.exit_code


class Setback(msgspec.Struct, frozen=True):
    """A failure after which a run was started again, or (`is_last`) was not.

    Attributes:
      time_s: of the failure, seconds since 1970.
      error: it was the run's own.
      step, samples: of an error, see `told.Failure`.
      gained: a step had been done since the start before.
      host: the name of the host that is to blame; "": nobody knows.
      place: (host, place) of the process that failed, or whose device is broken.
      broken: a device computes wrong, and will again.
    """

    time_s: float
    why: str
    exit_code: int
    error: bool = False
    step: int | None = None
    samples: tuple[str, ...] = ()
    gained: bool = False
    is_last: bool = False
    host: str = ""
    place: tuple[int, int] | None = None
    broken: bool = False


def cause(ends: Iterable[End]) -> End | None:
    """The end that brought the others about, of those in the order they came; None: all is well, or
    the run was preempted.

    Bad input goes first, as another start changes nothing. A process that was killed goes before
    errors, since the others may meet those when it is gone; what says that another process is gone
    goes last, with aborts, by which jax ends a process for the same reason.
    """
    ranked = [(_rank(e), i, e) for i, e in enumerate(ends) if e.by_itself]
    failures = [r for r in ranked if r[2].code not in (0, PREEMPTED)]
    return min(failures)[2] if failures else None


def _rank(end: End) -> int:
    told, code = end.failure is not None, end.code
    if code == BAD_INPUT:
        return 0
    if end.failure is not None and (end.failure.host or end.failure.broken):
        return 1  # who hung or is broken is known, and the others may meet errors by it
    if end.exit_code < 0 and not told:
        return 5 if end.exit_code == -signal.SIGABRT else 1
    if code == TRY_AGAIN:
        return 4
    return 2 if told else 3  # the others end by the same code, without a reason of their own


def setback(end: End, now_s: float, gained: bool) -> Setback:
    """What is kept of a failure's cause."""
    failure = end.failure or Failure(end.code, "")
    error = end.code > 0 and end.code not in (BAD_INPUT, TRY_AGAIN)
    why = how_ended(end.process, end.exit_code) + (f" ({failure.why})" if failure.why else "")
    # That another process is gone says nothing of the host of the one that says so.
    host = failure.host or (end.host if end.code != TRY_AGAIN else "")
    step, samples = failure.step, failure.samples
    code, broken = shell_code(end.code), failure.broken
    return Setback(now_s, why, code, error, step, samples, gained, host=host, broken=broken)


def failed_twice(setbacks: Iterable[Setback]) -> tuple[str, ...]:
    """The hosts whose processes were killed or hung twice or more, not by an error of the run's:
    a run that has others goes on without them."""
    failures = Counter(s.host for s in setbacks if s.host and not s.error)
    return tuple(host for host, n in failures.items() if n >= HOST_FAILURES)


def enough(before: Sequence[Setback], last: Setback, limits: Limits) -> str:
    """Why a run is not started again after its `last` failure, having been so after those `before`;
    "" where it is. Where restarts are off or the input is bad there is nothing to explain: " "."""
    if not limits.restarts or last.exit_code == BAD_INPUT:
        return " "
    same = [s for s in before if s.error and s.step == last.step]
    if last.error and len(same) + 1 >= SAME_ERRORS:
        where = "before the first step" if last.step is None else f"at step {last.step}"
        named = ", ".join(last.samples[:MOST_NAMED])
        named += ", ..." if len(last.samples) > MOST_NAMED else ""
        batch = f"; the samples of its batch: {named}" if named else ""
        return f"{SAME_ERRORS} errors of its own {where} stop the run; the last: {last.why}{batch}"
    if len(before) >= limits.restarts:
        return f"no restart is left of --max-restarts {limits.restarts}"
    if sum(last.time_s - s.time_s < HOUR_S for s in before) >= limits.an_hour:
        return f"--restarts-an-hour {limits.an_hour} is reached"
    return ""


def leaves_out(
    before: Sequence[Setback], last: Setback, left: int, limits: Limits
) -> tuple[str, str]:
    """(which process the run goes on without, that in the place of the `last` failure, as `left`
    processes are enough; "" with all of them; why there is no other start; "" where there is)."""
    may_leave = last.place is not None and 0 < limits.least <= left
    if last.broken:
        if may_leave:
            return "the process whose device computes wrong", ""
        who = f"--min-processes does not allow for {left} processes" * (last.place is not None)
        return "", f"{who or 'nobody knows whose device it is'}; {last.why}"
    twice = may_leave and fails_again(before, last)
    return "this process, which failed twice before a step" * twice, ""


def wait_s(before: Sequence[Setback], last: Setback) -> float:
    """Seconds until the next start: more with every failure that came before a step was done."""
    in_vain = 0
    for s in (last, *reversed(before)):
        if s.gained:
            break
        in_vain += 1
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (in_vain - 2)) if in_vain > 1 else 0.0


def fails_again(before: Sequence[Setback], last: Setback) -> bool:
    """Whether the same process failed twice with no step between."""
    return bool(before) and not last.gained and before[-1].place == last.place is not None


class Count:
    """The setbacks of a run, in a file of its folder once that is known: there they survive the job
    that is requeued, and every host sees them. Those before one that was the last count no more."""

    def __init__(self) -> None:
        self.setbacks: list[Setback] = []
        self._file: Path | None = None
        self._unwritten: list[Setback] = []

    def keep_in(self, file: Path | None) -> None:
        """Read what is in the file already, and write what is not there yet."""
        if file is None or file == self._file:
            return
        self._file = file
        self.setbacks = [*read(file), *self._unwritten]
        self._write()

    def add(self, setback: Setback) -> None:
        """Count one. An end that nothing went before counts only where a device is to be named."""
        if setback.is_last and not self.setbacks and not setback.broken:
            return
        self.setbacks.append(setback)
        self._unwritten.append(setback)
        self._write()

    def _write(self) -> None:
        if self._file is None or not self._unwritten:
            return
        rows = b"".join(msgspec.json.encode(s) + b"\n" for s in self._unwritten)
        with suppress(OSError):  # a full disk does not keep a run from its restart
            with self._file.open("ab+") as file:
                if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    rows = b"\n" + rows  # after one that a kill cut short
                file.write(rows)
                file.flush()
                os.fsync(file.fileno())
            self._unwritten.clear()


def read(file: Path) -> list[Setback]:
    """The setbacks that still count; a line that a kill cut short does not."""
    rows: list[Setback] = []
    with suppress(OSError):
        for line in file.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                row = msgspec.json.decode(line, type=Setback)
                rows = [] if row.is_last else [*rows, row]
    return rows
