"""Trying plans out on the devices, all processes together: whoever lacks memory says so to all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import jax
import msgspec

from dflop_jax.cluster.ending import RunFailed
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.hardware import GIB
from dflop_jax.pipeline.out_of_memory import ran_out, short_bytes
from dflop_jax.plan.on_devices import PlanTooLarge
from dflop_jax.records import Plan

T = TypeVar("T")
Sync = Callable[[], None]


class Shortage(msgspec.Struct):
    """That a process ran out of memory, and by how many bytes; 0: not known."""

    process: int
    short_bytes: float


def plan_words(plan: Plan) -> str:
    """What tells a plan from others, in a line."""
    meshes = ", ".join(f"{m.name} {m.text}" for m in plan.layout.submeshes)
    return f"{plan.policy}: {meshes}; buckets {', '.join(b.name for b in plan.layout.buckets)}"


def in_agreement(
    peers: ProcessGroup,
    plan: Plan,
    what: str,
    work: Callable[[Sync], T],
    limit_s: float | None = None,
) -> T:
    """Return what `work` gives, which all processes do together; it calls its argument where they
    wait for each other, and there they learn whether one of them has run out of memory.

    Args:
      what: is done, for the message, such as "compiling".
      limit_s: longest wait for the others after this process has run out, after which the run
        ends: they may wait on their devices for what it did not send. None: nothing is sent.

    Raises:
      PlanTooLarge: on every process, memory of one of them did not hold it.
    """

    def agree(mine: Shortage | None = None) -> None:
        told = peers.all_gather("memory", msgspec.json.encode(mine))
        known = (msgspec.json.decode(t, type=Shortage | None) for t in told)
        if short := max((s for s in known if s), key=lambda s: s.short_bytes, default=None):
            raise PlanTooLarge(_line(plan, what, short), short.short_bytes)

    shortage = None
    try:
        done = work(agree)
    except RuntimeError as e:
        shortage = _shortage(peers, e)
        if shortage is None:
            raise
    # The error is gone by now, and with it the arrays that its traceback holds.
    if shortage:
        too_large = PlanTooLarge(_line(plan, what, shortage), shortage.short_bytes)
        with _ends_the_run(peers, str(too_large), limit_s) if limit_s else nullcontext():
            try:
                agree(shortage)
            except RunFailed:  # the others did not come
                raise too_large from None
    agree()
    return done


@contextmanager
def said_in_a_line(peers: ProcessGroup, plan: Plan, what: str) -> Iterator[None]:
    """PlanTooLarge in place of XLA's error where this process runs out of memory; the others are
    not asked."""
    shortage = None
    try:
        yield
    except RuntimeError as e:
        shortage = _shortage(peers, e)
        if shortage is None:
            raise
    if shortage:
        raise PlanTooLarge(_line(plan, what, shortage), shortage.short_bytes)


def _shortage(peers: ProcessGroup, error: RuntimeError) -> Shortage | None:
    if not ran_out(error):
        return None
    return Shortage(peers.process, short_bytes(error, jax.local_devices()))


def _line(plan: Plan, what: str, shortage: Shortage) -> str:
    by = f", {shortage.short_bytes / GIB:.2f} GiB short" if shortage.short_bytes else ""
    return (
        f"plan {plan_words(plan)}: does not fit into memory, process {shortage.process} ran out of "
        f"it {what}{by}"
    )


@contextmanager
def _ends_the_run(peers: ProcessGroup, why: str, after_s: float) -> Iterator[None]:
    """End every process unless this is left in time."""
    timer = threading.Timer(after_s, peers.fail, (why, 2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
