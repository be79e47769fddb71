"""Processes of a run, played by threads over socket pairs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.tree import children_of, parent_of

LIMIT_S = 15.0  # of waits that end as soon as what they wait for is there
SMALL_S = 1.0  # a silence that counts


class Wire(socket.socket):
    """A socket that can hang, as if its process did: it then sends and reads nothing any more."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(fileno=end.detach())
        self.hung, self.released = False, threading.Event()

    def sendall(self, data: Any, flags: int = 0) -> None:
        if not self.hung:
            super().sendall(data, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if self.hung:
            self.released.wait(LIMIT_S)
        return data


@dataclass
class Job:
    """Processes, what each was told of failures, and the wires: of process p, its parent's end
    first."""

    peers: list[Peers]
    failures: list[list[str]]
    wires: dict[int, tuple[Wire, Wire]] = field(default_factory=dict)
    fan_out: int = 32

    def together(self, run: Callable[[Peers], Any], among: tuple[int, ...] = ()) -> list[Any]:
        """`run` in all processes (or some) at once; what each returned."""
        chosen = [self.peers[p] for p in among] if among else self.peers
        with ThreadPoolExecutor(len(chosen)) as pool:
            return [f.result(LIMIT_S) for f in [pool.submit(run, p) for p in chosen]]

    def ends_of(self, p: int) -> list[Wire]:
        """The ends that process `p` holds."""
        below = children_of(p, len(self.peers), self.fan_out)
        return [self.wires[q][0] for q in below] + ([self.wires[p][1]] if p else [])

    def wait_for_failures(self, at: list[int]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not all(self.failures[p] for p in at):
            assert time.monotonic() < deadline, f"not everybody failed: {self.failures}"
            time.sleep(0.01)


@pytest.fixture
def job():
    """Makes a job of `n` processes; it ends with the test."""
    made: list[Job] = []

    def make(
        n: int,
        timeout_s: float = 600.0,
        clock: Callable[[int], Callable[[], float]] = lambda p: time.perf_counter,
        fan_out: int = 32,
    ) -> Job:
        wires = {}
        for p in range(1, n):
            wires[p] = tuple(map(Wire, socket.socketpair()))
        failures: list[list[str]] = [[] for _ in range(n)]

        def start(p: int) -> Peers:
            links = {q: wires[q][0] for q in children_of(p, n, fan_out)}
            if p:
                links[parent_of(p, fan_out)] = wires[p][1]
            return Peers(
                p,
                n,
                links,
                timeout_s=timeout_s,
                on_failure=lambda why, code: failures[p].append(why),
                clock=clock(p),
            )

        with ThreadPoolExecutor(n) as pool:
            peers = list(pool.map(start, range(n)))
        made.append(Job(peers, failures, wires, fan_out))
        return made[-1]

    yield make
    for each in made:
        for peers in each.peers:  # ends its threads
            peers.fail("the test is over")
        for end in (end for wire in each.wires.values() for end in wire):
            end.released.set()
            hang_up(end)
            end.close()


def hang_up(end: socket.socket) -> None:
    if end.fileno() >= 0:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end did
