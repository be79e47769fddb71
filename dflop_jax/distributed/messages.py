"""Messages between the processes of a run, over the key-value store of jax's coordination service.

A message is bytes under a key that names one call; its last reader deletes it. It takes about 2 ms
and lies in the memory of process 0. `runtime.communicator` exchanges arrays. All threads may send.

A thread in each process sends a heartbeat every second, learns whether another process failed, and
measures the offset of its clock (two hosts drift by some 20 ppm). Process 0 ends the run when a
process is silent for `timeout_s`. jax's own heartbeat timeout is `HEARTBEATS` times as long,
because jax ends a process by SIGABRT (exit code 134) without naming the lost one.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import msgspec
from jax._src.distributed import State, global_state

from dflop_jax.distributed.process_exit import (
    FAILED,
    TRY_AGAIN,
    RunFailed,
    TryAgain,
    end_now,
    leave,
    within,
)

HEARTBEATS = 2  # jax's heartbeat time-out over `timeout_s`
BEAT_S = 1.0  # between two signs of life; a time-out below 5 s has shorter beats
BEATS_PER_TIMEOUT = 5
# A blocking read of the service cannot be interrupted, so waits are cut into slices. The service
# keeps 25 kB for each slice that times out, until the key is written.
SLICE_S = 1.0
WAIT_S = 7200.0  # default deadline of a wait: the longest search for a plan or compilation
EXIT_S = 300.0  # deadline at the end of Python, as jax's own
ANNOUNCE_S = 3.0  # process 0 waits so long for the others to read why the run fails
CLOCK_S = 60.0  # between two measurements, in which clocks of two hosts come 1.2 ms apart
ROUND_TRIPS = 8  # per measurement; the shortest counts, since most wait for a thread
ANSWER_S = 5.0  # longest wait for the time
_ROOT = "dflop"  # of all keys
_ALIVE, _FAILURE, _HEARD, _CLOCK = (f"{_ROOT}/{n}" for n in ("alive", "failure", "heard", "clock"))


def connection() -> State | None:
    """jax's connection to the coordination service; None where jax is not connected."""
    return global_state if global_state.client is not None else None


class _Failure(msgspec.Struct, frozen=True):
    """Why the run fails; every process ends with `exit_code`, after `on_hang` where `hangs`."""

    why: str
    exit_code: int
    hangs: bool = False


class _Life(msgspec.Struct, frozen=True):
    """A sign of life: its number, the host and pid of the process, and what `status` returned."""

    beat: int
    name: str
    status: bytes


class ProcessGroup:
    """The processes of a run, of which this is number `process`. One process needs no service.

    All processes make the same calls of each kind and key in the same order. The order of calls
    under different keys is free. A key whose calls carry a `step` is used once for each step, also
    by a process that leaves out steps.

    Args:
      client: jax's client of the coordination service (`connection`); None for one process.
      timeout_s: silence after which process 0 takes a process for lost.
      on_failure: called with a line and an exit code when another process fails, instead of ending
        this one.
      clock: of this process, in seconds; traces use it.

    Attributes:
      name: host and pid of this process.
      offset_s: what to add to this process's clock to get process 0's.
      wait_s: deadline of every wait.
      status: called every second; process 0 reads what it returned in `statuses`.
      on_hang: called with the reason before a run ends because a process hangs or is lost.
    """

    def __init__(
        self,
        process: int = 0,
        count: int = 1,
        client: Any = None,
        *,
        timeout_s: float = 15.0,
        on_failure: Callable[[str, int], None] = end_now,
        clock: Callable[[], float] = time.perf_counter,
        wait_s: float = WAIT_S,
    ):
        assert count == 1 or client is not None, count
        self.process, self.count = process, count
        self.status: Callable[[], bytes] = bytes
        self.on_hang: Callable[[str], None] = lambda why: None
        self._client, self._timeout_s, self.wait_s = client, timeout_s, wait_s
        self._on_failure, self._clock, self.offset_s = on_failure, clock, 0.0
        self.name = f"{socket.gethostname()}, pid {os.getpid()}"
        self._changed = threading.Condition()
        self._run, self._calls, self._abandoned = 0, Counter[str](), set[str]()
        self._failed, self._told, self._closing = False, threading.Event(), False
        self._waiting = 0  # threads inside a blocking read
        self._listening = set(range(count))  # processes that are not silent
        # By process: its newest sign of life, and when that came.
        self._alive: dict[int, tuple[_Life, float]] = {}
        if count > 1:
            for run in [self._watch, *[self._answer_clocks] * self.is_hub]:
                threading.Thread(target=run, daemon=True, name=run.__name__.strip("_")).start()
            atexit.register(self._at_exit)

    @property
    def is_hub(self) -> bool:
        return self.process == 0

    # ---- messages ----

    def new_run(self) -> None:
        """Begin another run of the same processes, which reads no message of the run before."""
        with self._changed:
            self._run += 1
            self._calls.clear()
            self._abandoned.clear()
        # A process may still read the last messages of the run that has just ended.
        if self.is_hub and self.count > 1 and self._run > 1:
            self._client.key_value_delete(f"{_ROOT}/{self._run - 2}")

    def abandon(self, prefix: str) -> None:
        """A thread of this process that waits for a key with this prefix gets RunFailed."""
        with self._changed:
            self._abandoned.add(prefix)

    def broadcast(self, key: str, value: bytes | None = None, *, step: int | None = None) -> bytes:
        """Return process 0's `value` on every process; the others wait for it.

        Raises:
          RunFailed: the run has failed meanwhile, or the key is abandoned.
          TryAgain: nothing came by the deadline, or the service is gone.
        """
        name = self._call_name("broadcast", key, step)
        if self.is_hub:
            assert value is not None, key
            if self.count > 1:
                self._ask(key, "set_bytes", name, value)
            return value
        got = self._read(name, key, 0)
        # The last of the readers deletes.
        if self._ask(key, "increment", f"{name}/readers", 1) == self.count - 1:
            self._ask(key, "delete", name)
        return got

    def gather(self, key: str, value: bytes, *, step: int | None = None) -> list[bytes]:
        """Return the values of all processes, in order, on process 0, which waits; [] on others.
        See `broadcast` for errors."""
        name = self._call_name("gather", key, step)
        if not self.is_hub:
            self._ask(key, "set_bytes", f"{name}/{self.process}", value)
            return []
        values = {0: value}
        while missing := [p for p in range(self.count) if p not in values]:
            values[missing[0]] = self._read(f"{name}/{missing[0]}", key, missing[0])
            if missing[1:]:
                found = self._ask(key, "dir_get_bytes", name)
                values |= {int(k.rpartition("/")[2]): v for k, v in found}
        if self.count > 1:
            self._ask(key, "delete", name)
        return [values[p] for p in range(self.count)]

    def broadcast_record(self, key: str, record: Any, kind: Any, *, step: int | None = None) -> Any:
        """Return process 0's `record`, of a type that msgspec knows, on every process."""
        data = msgspec.msgpack.encode(record) if self.is_hub else None
        return msgspec.msgpack.decode(self.broadcast(key, data, step=step), type=kind)

    def gather_records(self, key: str, record: Any, kind: Any, *, step: int | None = None) -> list:
        """Return the records of all processes, in order, on process 0; [] on others."""
        values = self.gather(key, msgspec.msgpack.encode(record), step=step)
        return [msgspec.msgpack.decode(v, type=kind) for v in values]

    def all_gather(self, key: str, record: Any, kind: Any, *, step: int | None = None) -> list:
        """Return the records of all processes, in order, on every process."""
        every = self.gather_records(key, record, kind, step=step)
        return self.broadcast_record(key, every, list[kind], step=step)

    def barrier(self, key: str) -> None:
        """Wait until every process is here."""
        self.all_gather(key, None, None)

    def statuses(self) -> dict[int, bytes]:
        """On process 0: the newest status of each process that has sent one."""
        return {p: life.status for p, (life, _) in list(self._alive.items())}

    # ---- the end ----

    def fail(self, why: str, exit_code: int = FAILED) -> None:
        """End all other processes with this reason and exit code; a thread of this one that waits
        gets RunFailed."""
        self._end_run(_Failure(why, exit_code), goes_on=True)

    def give_up(self, why: str) -> None:
        """End every process, this one as well, since one of them hangs or is lost."""
        self._end_run(_Failure(why, TRY_AGAIN, hangs=True))

    def notice(self) -> None:
        """Wait before an error of this process is told, which the loss of another may have caused,
        until process 0 would have noticed that loss."""
        self._pause(self._timeout_s + 3 * BEAT_S if self.count > 1 else 0.0)

    def close(self) -> None:
        """Leave together with the others: from here on, a process that ends is no failure."""
        if self.count > 1 and not (self._closing or self._failed):
            self.barrier("close")
        self._stop()

    def _at_exit(self) -> None:
        """Before Python ends, which an error of a script may cause, tell or await the others."""
        if (error := getattr(sys, "last_value", None)) is not None:
            self.fail(f"process {self.process} stopped: {' '.join(str(error).split())}")
            leave(FAILED)  # jax would wait for the others, which have ended, and abort
        self.wait_s = min(self.wait_s, EXIT_S)
        with suppress(RunFailed):
            self.close()
        self._stop()

    def _stop(self) -> None:
        """End the threads. Python aborts where one is inside of jax when the interpreter ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, 3 * SLICE_S)

    # ---- keys and waits ----

    def _call_name(self, kind: str, key: str, step: int | None) -> str:
        """The key of a call: no two calls of a run have the same."""
        name = f"{kind}/{key}"
        with self._changed:
            if step is None:
                self._calls[name] += 1
            number = self._calls[name] if step is None else f"step{step}"
            return f"{_ROOT}/{self._run}/{name}/{number}"

    def _ask(self, key: str, call: str, *args: Any) -> Any:
        """Call the service; TryAgain where it is gone."""
        try:
            return getattr(self._client, f"key_value_{call}")(*args)
        except jax.errors.JaxRuntimeError as e:
            raise _gone(key, e) from None

    def _read(self, name: str, key: str, sender: int, wait_s: float = 0.0) -> bytes:
        """Wait for the value of a key, by default for the longest that a call may take."""
        wait_s = wait_s or self.wait_s
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            with self._changed:
                abandoned = any(key.startswith(p) for p in self._abandoned)
                if self._failed or self._closing or abandoned:
                    raise RunFailed(f"waiting for {key!r}: the run has ended: start it again")
                self._waiting += 1
            try:
                slice_ms = max(1, round(1000 * min(left_s, SLICE_S)))
                return self._client.blocking_key_value_get_bytes(name, slice_ms)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise _gone(key, e) from None
            finally:
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
        raise TryAgain(f"process {sender} did not send {key!r} within {wait_s:g} s: start again")

    # ---- threads ----

    def _watch(self) -> None:
        """Thread: tell that this process lives, and learn of failures and of the time."""
        key, measured_s = f"{_ALIVE}/{self.process}", float("-inf")
        every_s = min(BEAT_S, self._timeout_s / BEATS_PER_TIMEOUT)
        for beat in itertools.count():
            if self._pause(every_s if beat else 0.0):
                return
            # Where the service is gone, jax ends this process.
            with suppress(jax.errors.JaxRuntimeError, RunFailed):
                life = msgspec.msgpack.encode(_Life(beat, self.name, self.status()))
                self._client.key_value_set_bytes(key, life, allow_overwrite=True)
                if failure := self._client.key_value_dir_get_bytes(_FAILURE):
                    first = msgspec.json.decode(failure[0][1], type=_Failure)
                    self._end_run(first, heard=True)
                elif self.is_hub:
                    self._look_for_silence(every_s)
                elif time.monotonic() - measured_s > CLOCK_S:
                    self.offset_s = self._measured_offset()
                    measured_s = time.monotonic()

    def _pause(self, seconds: float) -> bool:
        """Wait; whether the run has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._failed, seconds)

    def _look_for_silence(self, every_s: float) -> None:
        """On process 0: end the run when a process gives no sign of life any more."""
        now_s, silent = time.monotonic(), {}
        own = self._alive.get(0)
        # After a pause of this process, such as Ctrl-Z, the others may have been paused, too.
        paused = own is not None and now_s - own[1] > every_s + self._timeout_s / 2
        for key, value in self._client.key_value_dir_get_bytes(_ALIVE):
            process, life = int(key.rpartition("/")[2]), msgspec.msgpack.decode(value, type=_Life)
            before = self._alive.get(process)
            if before is None or paused or before[0].beat != life.beat:
                self._alive[process] = life, now_s
            elif (silent_s := now_s - before[1]) > self._timeout_s:
                silent[process] = f"process {process} ({life.name}) is silent for {silent_s:.0f} s"
        if silent:
            self._listening -= silent.keys()
            self.give_up(
                f"{', '.join(silent.values())}; the run ends, continue it with --resume auto"
            )

    def _measured_offset(self) -> float:
        """The offset by the shortest of some round trips, the way there taken for as long as the
        way back: the error is at most half of the trip."""
        trips: list[tuple[float, float]] = []
        for _ in range(ROUND_TRIPS):
            name = f"{_CLOCK}/{self._client.key_value_increment(f'{_CLOCK}s', 1)}"
            sent_s = self._clock()
            self._client.key_value_set_bytes(name, b"")
            answer = self._read(f"{name}/answer", "the time", 0, ANSWER_S)
            back_s = self._clock()
            self._client.key_value_delete(name)
            here_s = (sent_s + back_s) / 2
            trips.append((back_s - sent_s, msgspec.json.decode(answer, type=float) - here_s))
        return min(trips)[1]

    def _answer_clocks(self) -> None:
        """Thread of process 0: say what time it is, to each question in turn."""
        with suppress(jax.errors.JaxRuntimeError, RunFailed):
            for question in itertools.count(1):
                self._read(f"{_CLOCK}/{question}", "a question", 0, float("inf"))
                now = msgspec.json.encode(self._clock())
                self._client.key_value_set_bytes(f"{_CLOCK}/{question}/answer", now)

    # ---- failures ----

    def _end_run(self, failure: _Failure, *, heard: bool = False, goes_on: bool = False) -> None:
        """End the run unless it has ended or failed before.

        Args:
          heard: another process has told the failure.
          goes_on: the thread that calls this ends this process.
        """
        with self._changed:
            is_first = not (self._closing or self._failed)
            self._failed |= is_first
            self._changed.notify_all()
        if not is_first:
            if goes_on and not self._closing:  # another thread may end this process meanwhile
                self._told.wait(2 * ANNOUNCE_S)
            return
        if failure.hangs:
            self.on_hang(failure.why)
        if self.count > 1:  # in a thread, since the service may be gone
            within(ANNOUNCE_S, self._tell, None if heard else failure)
        if not goes_on:
            self._on_failure(failure.why, failure.exit_code)  # does not return in a real run
        self._told.set()

    def _tell(self, failure: _Failure | None) -> None:
        """Tell the others of a failure, and that this process knows of one. Process 0 waits for
        them, since the service ends with it."""
        client, deadline = self._client, time.monotonic() + ANNOUNCE_S
        with suppress(jax.errors.JaxRuntimeError):
            if failure:
                with suppress(jax.errors.JaxRuntimeError):  # another process was first
                    client.key_value_set_bytes(f"{_FAILURE}/first", msgspec.json.encode(failure))
            client.key_value_set_bytes(f"{_HEARD}/{self.process}", b"", allow_overwrite=True)
            while self.is_hub and time.monotonic() < deadline:
                heard = client.key_value_dir_get_bytes(_HEARD)
                if {int(k.rpartition("/")[2]) for k, _ in heard} >= self._listening:
                    return
                time.sleep(BEAT_S / 20)


def _gone(key: str, error: Exception) -> TryAgain:
    why = (str(error).splitlines() or [""])[0]
    return TryAgain(f"{key!r} could not be exchanged with process 0 ({why}): start the run again")
