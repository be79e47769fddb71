"""Messages between the processes of a run, over the key-value store of jax's coordination service.

A message is bytes under a key that names one call; the last reader deletes it. It takes about 2 ms
and is stored in the memory of process 0. `runtime.communicator` exchanges arrays.

A thread in each process sends heartbeats, learns whether another process failed, and measures the
offset of its clock. Process 0 ends the run when a process is silent for `peer_timeout_s`. jax's own
heartbeat timeout is longer, as jax ends a process by SIGABRT without naming the lost one.
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
    END_TIMEOUT_S,
    FAILED,
    TRANSIENT_FAILURE,
    RunFailed,
    TransientError,
    exit_process,
    exit_with_message,
    run_with_timeout,
)
from dflop_jax.records import from_msgpack, to_msgpack

JAX_TIMEOUT_FACTOR = 2  # jax's timeouts over ours
# Seconds between heartbeats, and of each blocking read of the service: reads cannot be interrupted,
# so a wait polls. The service keeps 25 kB per poll that times out, until the key is written.
HEARTBEAT_S = 1.0
MESSAGE_TIMEOUT_S = 7200.0  # default of a wait: longer than any plan search or compilation
EXIT_TIMEOUT_S = 300.0  # of a wait when Python ends, as in jax
CLOCK_INTERVAL_S = 60.0  # between clock measurements; two hosts drift by 1.2 ms in this time
N_ROUND_TRIPS = 8  # per clock measurement; the shortest is used, since most wait for a thread
_ROOT = "dflop"  # of all keys
_HEARTBEAT_KEYS, _FAILURE_KEYS, _ACKNOWLEDGED_KEYS, _CLOCK_KEYS = (
    f"{_ROOT}/{n}" for n in ("alive", "failure", "heard", "clock")
)


def connection() -> State | None:
    """Return jax's connection to the coordination service; None if jax is not connected."""
    return global_state if global_state.client is not None else None


class _Failure(msgspec.Struct, frozen=True):
    """Reason and exit code of a run's failure; with `hangs` each process calls `on_hang` first."""

    reason: str
    exit_code: int = TRANSIENT_FAILURE
    hangs: bool = True


class _Heartbeat(msgspec.Struct, frozen=True):
    number: int
    host_and_pid: str
    status: bytes


class ProcessGroup:
    """The processes of a run, as seen from one of them. A run of one process needs no service.

    All processes make the same calls of each kind and key in the same order; calls under different
    keys may come in any order, also of several threads. A key whose calls carry a `step` is used
    once per step, and a process may leave out steps. `kind` is the type of a value for msgspec.

    Args:
      client: jax's client of the coordination service (`connection`); None for one process.
      peer_timeout_s: silence after which process 0 treats a process as lost.
      on_failure: called with a line and an exit code when another process fails.
    """

    def __init__(
        self,
        process_index: int = 0,
        n_processes: int = 1,
        client: Any = None,
        *,
        peer_timeout_s: float = 15.0,
        on_failure: Callable[[str, int], None] = exit_with_message,
        clock: Callable[[], float] = time.perf_counter,
    ):
        assert n_processes == 1 or client is not None, n_processes
        self.process_index, self.n_processes = process_index, n_processes
        self.message_timeout_s = MESSAGE_TIMEOUT_S  # of every wait
        self._peer_timeout_s = max(peer_timeout_s, 3 * HEARTBEAT_S)
        self.status: Callable[[], bytes] = bytes  # called with every heartbeat, for `statuses`
        self.on_hang: Callable[[str], None] = lambda reason: None  # called after a hang or loss
        self._client, self._on_failure = client, on_failure
        self._clock, self.clock_offset_s = clock, 0.0  # clock + offset is process 0's clock
        self.host_and_pid = f"{socket.gethostname()}, pid {os.getpid()}"
        self._changed = threading.Condition()
        self._run_number, self._call_counts, self._canceled_prefixes = 0, Counter[str](), set[str]()
        self._failed, self._announced, self._closing = False, threading.Event(), False
        self._n_blocked = 0  # threads inside a blocking read
        self._responsive = set(range(n_processes))  # processes that are not silent
        # By process: its newest heartbeat, and the time at which that arrived.
        self._heartbeats: dict[int, tuple[_Heartbeat, float]] = {}
        if n_processes > 1:
            for loop in [self._send_heartbeats, *[self._serve_clock] * self.is_primary]:
                threading.Thread(target=loop, daemon=True, name=loop.__name__.strip("_")).start()
            atexit.register(self._at_exit)

    @property
    def is_primary(self) -> bool:
        return self.process_index == 0

    def begin_run(self) -> None:
        """Begin another run of the same processes, whose keys differ from those of earlier runs."""
        with self._changed:
            self._run_number += 1
            self._call_counts.clear()
            self._canceled_prefixes.clear()
        # A process may still read the last messages of the run that has just ended.
        if self.is_primary and self.n_processes > 1 and self._run_number > 1:
            self._client.key_value_delete(f"{_ROOT}/{self._run_number - 2}")

    def cancel_waits(self, prefix: str) -> None:
        """Raise RunFailed in this process's threads that wait for a key with this prefix."""
        with self._changed:
            self._canceled_prefixes.add(prefix)

    def broadcast(self, key: str, value: Any, kind: Any, *, step: int | None = None) -> Any:
        """Return process 0's `value` on every process.

        Raises:
          RunFailed: the run has failed meanwhile, or waits for the key are canceled.
          TransientError: no message arrived by the deadline, or the service is lost.
        """
        full_key = self._call_key("broadcast", key, step)
        if self.is_primary:
            data = to_msgpack(value)
            if self.n_processes > 1:
                self._call_service(key, "set_bytes", full_key, data)
        else:
            data = self._receive(full_key, key, 0)
            n_readers = self._call_service(key, "increment", f"{full_key}/readers", 1)
            if n_readers == self.n_processes - 1:  # the last reader deletes the message
                self._call_service(key, "delete", full_key)
        return from_msgpack(data, kind)

    def gather(self, key: str, value: Any, kind: Any, *, step: int | None = None) -> list[Any]:
        """Return the values of all processes, in order, on process 0; [] on others."""
        full_key, data = self._call_key("gather", key, step), to_msgpack(value)
        if not self.is_primary:
            self._call_service(key, "set_bytes", f"{full_key}/{self.process_index}", data)
            return []
        messages = {0: data}
        while missing := [p for p in range(self.n_processes) if p not in messages]:
            messages[missing[0]] = self._receive(f"{full_key}/{missing[0]}", key, missing[0])
            if missing[1:]:
                found = self._call_service(key, "dir_get_bytes", full_key)
                messages |= {_last_number(k): v for k, v in found}
        if self.n_processes > 1:
            self._call_service(key, "delete", full_key)
        return [from_msgpack(messages[p], kind) for p in range(self.n_processes)]

    def all_gather(self, key: str, value: Any, kind: Any, *, step: int | None = None) -> list[Any]:
        """Return the values of all processes, in order, on every process."""
        values = self.gather(key, value, kind, step=step)
        return self.broadcast(key, values, list[kind], step=step)

    def barrier(self, key: str) -> None:
        """Wait until every process has called this."""
        self.all_gather(key, None, None)

    def statuses(self) -> dict[int, bytes]:
        """Return, on process 0, the newest status of each process that has sent one."""
        return {p: heartbeat.status for p, (heartbeat, _) in list(self._heartbeats.items())}

    def fail(self, reason: str, exit_code: int = FAILED) -> None:
        """End all other processes with this reason and exit code, and raise RunFailed in waiting
        threads of this one."""
        self._end_run(_Failure(reason, exit_code, hangs=False), caller_exits=True)

    def end_hung_run(self, reason: str) -> None:
        """End every process, including this one, since a process hangs or is lost."""
        self._end_run(_Failure(reason))

    def wait_for_peer_loss(self) -> None:
        """After an error: wait for the time in which process 0 notices a lost process, which may be
        the cause."""
        self._pause(self._peer_timeout_s + 3 * HEARTBEAT_S if self.n_processes > 1 else 0.0)

    def close(self) -> None:
        """Leave the run together with the other processes; afterwards they may end at any time."""
        if self.n_processes > 1 and not (self._closing or self._failed):
            self.barrier("close")
        self._stop_threads()

    def _at_exit(self) -> None:
        """At Python's end: send a script's error to the other processes, or wait for them."""
        if (error := getattr(sys, "last_value", None)) is not None:
            self.fail(f"process {self.process_index} stopped: {' '.join(str(error).split())}")
            exit_process(FAILED)  # jax would wait for the others, which have ended, and abort
        self.message_timeout_s = min(self.message_timeout_s, EXIT_TIMEOUT_S)
        with suppress(RunFailed):
            self.close()
        self._stop_threads()

    def _stop_threads(self) -> None:
        """End the threads: Python aborts if one is inside jax when the interpreter ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._n_blocked, 3 * HEARTBEAT_S)

    def _call_key(self, kind: str, key: str, step: int | None) -> str:
        """Return the key of a call, unique in the run."""
        name = f"{kind}/{key}"
        with self._changed:
            if step is None:
                self._call_counts[name] += 1
            number = self._call_counts[name] if step is None else f"step{step}"
            return f"{_ROOT}/{self._run_number}/{name}/{number}"

    def _call_service(self, key: str, call: str, *args: Any) -> Any:
        try:
            return getattr(self._client, f"key_value_{call}")(*args)
        except jax.errors.JaxRuntimeError as e:
            raise _service_lost(key, e) from None

    def _receive(self, full_key: str, key: str, sender: int, wait_s: float = 0.0) -> bytes:
        """Wait for the value of a key, by default for `message_timeout_s`."""
        wait_s = wait_s or self.message_timeout_s
        deadline = time.monotonic() + wait_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            with self._changed:
                is_canceled = any(key.startswith(p) for p in self._canceled_prefixes)
                if self._failed or self._closing or is_canceled:
                    raise RunFailed(f"waiting for {key!r}: the run has ended: start it again")
                self._n_blocked += 1
            try:
                poll_ms = max(1, round(1000 * min(remaining_s, HEARTBEAT_S)))
                return self._client.blocking_key_value_get_bytes(full_key, poll_ms)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise _service_lost(key, e) from None
            finally:
                with self._changed:
                    self._n_blocked -= 1
                    self._changed.notify_all()
        raise TransientError(f"process {sender} did not send {key!r} in {wait_s:g} s: start again")

    def _send_heartbeats(self) -> None:
        """Thread: send heartbeats, check for failures, and measure process 0's clock."""
        key, clock_measured_s = f"{_HEARTBEAT_KEYS}/{self.process_index}", float("-inf")
        for number in itertools.count():
            if self._pause(HEARTBEAT_S if number else 0.0):
                return
            # If the service is gone, jax ends this process.
            with suppress(jax.errors.JaxRuntimeError, RunFailed):
                heartbeat = _Heartbeat(number, self.host_and_pid, self.status())
                self._client.key_value_set_bytes(key, to_msgpack(heartbeat), allow_overwrite=True)
                if failures := self._client.key_value_dir_get_bytes(_FAILURE_KEYS):
                    self._end_run(from_msgpack(failures[0][1], _Failure), is_known=True)
                elif self.is_primary:
                    self._check_heartbeats()
                elif time.monotonic() - clock_measured_s > CLOCK_INTERVAL_S:
                    self.clock_offset_s = self._measure_clock_offset()
                    clock_measured_s = time.monotonic()

    def _pause(self, seconds: float) -> bool:
        """Wait at most `seconds`, and return whether the run has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._failed, seconds)

    def _check_heartbeats(self) -> None:
        """On process 0: end the run when a process has been silent for `peer_timeout_s`."""
        now_s, silent = time.monotonic(), {}
        _, own_s = self._heartbeats.get(0, (None, now_s))
        # After a pause of this process, such as Ctrl-Z, the others may have been paused, too.
        was_paused = now_s - own_s > HEARTBEAT_S + self._peer_timeout_s / 2
        for key, value in self._client.key_value_dir_get_bytes(_HEARTBEAT_KEYS):
            process, heartbeat = _last_number(key), from_msgpack(value, _Heartbeat)
            previous = self._heartbeats.get(process)
            if previous is None or was_paused or previous[0].number != heartbeat.number:
                self._heartbeats[process] = heartbeat, now_s
            elif (silent_s := now_s - previous[1]) > self._peer_timeout_s:
                name = f"process {process} ({heartbeat.host_and_pid})"
                silent[process] = f"{name} has been silent for {silent_s:.0f} s"
        if silent:
            self._responsive -= silent.keys()
            names = ", ".join(silent.values())
            self.end_hung_run(f"{names}; the run ends, continue it with --resume auto")

    def _measure_clock_offset(self) -> float:
        """Return the offset to process 0's clock from the shortest of several round trips, assuming
        that both directions take equally long."""
        round_trips: list[tuple[float, float]] = []
        for _ in range(N_ROUND_TRIPS):
            name = f"{_CLOCK_KEYS}/{self._client.key_value_increment(f'{_CLOCK_KEYS}s', 1)}"
            sent_s = self._clock()
            self._client.key_value_set_bytes(name, b"")
            answer = self._receive(f"{name}/answer", "the time", 0, END_TIMEOUT_S)
            received_s = self._clock()
            self._client.key_value_delete(name)
            offset_s = from_msgpack(answer, float) - (sent_s + received_s) / 2
            round_trips.append((received_s - sent_s, offset_s))
        return min(round_trips)[1]

    def _serve_clock(self) -> None:
        """Thread of process 0: answer each request for the time."""
        with suppress(jax.errors.JaxRuntimeError, RunFailed):
            for number in itertools.count(1):
                name = f"{_CLOCK_KEYS}/{number}"
                self._receive(name, "a request", 0, float("inf"))
                self._client.key_value_set_bytes(f"{name}/answer", to_msgpack(self._clock()))

    def _end_run(
        self, failure: _Failure, is_known: bool = False, caller_exits: bool = False
    ) -> None:
        """End the run unless it has already ended. `is_known`: another process has announced the
        failure. `caller_exits`: the calling thread will end this process."""
        with self._changed:
            is_first = not (self._closing or self._failed)
            self._failed |= is_first
            self._changed.notify_all()
        if not is_first:
            if caller_exits and not self._closing:  # another thread may end this process meanwhile
                self._announced.wait(2 * END_TIMEOUT_S)
            return
        if failure.hangs:
            self.on_hang(failure.reason)
        if self.n_processes > 1:  # in a thread, since the service may be gone
            run_with_timeout(END_TIMEOUT_S, self._announce, None if is_known else failure)
        if not caller_exits:
            self._on_failure(failure.reason, failure.exit_code)  # does not return in a real run
        self._announced.set()

    def _announce(self, failure: _Failure | None) -> None:
        """Announce a failure (None: it is announced) and acknowledge it. Process 0 waits until the
        others have acknowledged it, since the service ends with process 0."""
        client, deadline = self._client, time.monotonic() + END_TIMEOUT_S
        if failure:
            with suppress(jax.errors.JaxRuntimeError):  # another process was first
                client.key_value_set_bytes(f"{_FAILURE_KEYS}/first", to_msgpack(failure))
        with suppress(jax.errors.JaxRuntimeError):
            own_key = f"{_ACKNOWLEDGED_KEYS}/{self.process_index}"
            client.key_value_set_bytes(own_key, b"", allow_overwrite=True)
            while self.is_primary and time.monotonic() < deadline:
                acknowledged = client.key_value_dir_get_bytes(_ACKNOWLEDGED_KEYS)
                if {_last_number(k) for k, _ in acknowledged} >= self._responsive:
                    time.sleep(HEARTBEAT_S / 2)  # they exit now; jax aborts those that are slower
                    return
                time.sleep(HEARTBEAT_S / 20)


def _last_number(key: str) -> int:
    return int(key.rpartition("/")[2])


def _service_lost(key: str, error: Exception) -> TransientError:
    reason = str(error).partition("\n")[0]
    return TransientError(f"cannot exchange {key!r} with process 0 ({reason}): start again")
