"""A stand-in for jax's client of the coordination service: processes are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest

from dflop_jax.distributed import messages
from dflop_jax.distributed.messages import ProcessGroup

LIMIT_S = 15.0  # of waits that end as soon as what they wait for is there


class Service:
    """The calls of `DistributedRuntimeClient` that messages use, over a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.written: list[str] = []  # every key, in order
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = bytes(value)
            self.written.append(key)
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() of {key}")
            return self.values[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for k in [k for k in self.values if k == key or k.startswith(f"{key}/")]:
                del self.values[k]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + increment).encode()
            return int(self.values[key])

    def messages(self) -> list[str]:
        return [k for k in self.values if "/broadcast/" in k or "/gather/" in k]


@dataclass
class Job:
    groups: list[ProcessGroup]
    service: Service
    failures: list[list[tuple[str, int]]] = field(default_factory=list)

    def together(self, run: Callable[[ProcessGroup], Any]) -> list[Any]:
        """What `run` returns in each process, called in all at once."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return [f.result(LIMIT_S) for f in [pool.submit(run, g) for g in self.groups]]

    def stop(self) -> None:
        for group in self.groups:
            group._stop_threads()

    def wait_for_failures(self, at: list[int]) -> None:
        wait_for(lambda: all(self.failures[p] for p in at))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + LIMIT_S
    while not condition():
        assert time.perf_counter() < deadline, "waited in vain"
        threading.Event().wait(0.01)


@pytest.fixture
def job(monkeypatch):
    """Makes a job of `n` processes, whose threads end with the test."""
    made = []
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.05)

    def make(*args, **kwargs):
        made.append(make_job(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def make_job(
    n: int,
    timeout_s: float = 600.0,
    clock: Callable[[int], Callable[[], float]] = lambda p: time.perf_counter,
    wait_s: float = LIMIT_S,
) -> Job:
    job = Job([], Service(), [[] for _ in range(n)])
    for p in range(n):
        told = job.failures[p]
        group = ProcessGroup(
            p,
            n,
            job.service,
            peer_timeout_s=timeout_s,
            on_failure=lambda why, code, told=told: told.append((why, code)),
            clock=clock(p),
        )
        group.message_timeout_s = wait_s
        job.groups.append(group)
    return job
