"""Processes that are stopped while another talks to them: it ends in time, and names them.

Real processes and signals, no jax: each holds its part of the links and does as it is told.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dflop_jax.cluster.ending import TRY_AGAIN

TIMEOUT_S = 1.0
GRACE_S = 5.0  # the promise: an end this long after the time-out
LIMIT_S = 30.0

# Its number, how many there are, and the descriptors of its links by process. Then by line from
# standard input: keys of which process 0 shares many bytes, each in a thread of its own.
PROCESS = """
import json, socket, sys, threading
from dflop_jax.cluster.peers import Peers

number, count, timeout_s, links = json.loads(sys.argv[1])
links = {int(p): socket.socket(fileno=fd) for p, fd in links.items()}
peers = Peers(number, count, links, timeout_s=timeout_s)

def share(key):
    peers.share(key, bytes(1 << 24) if peers.is_hub else None)
    print(key, flush=True)

print("ready", flush=True)
for line in sys.stdin:
    threading.Thread(target=share, args=(line.strip(),), daemon=True).start()
threading.Event().wait()
"""


class Running(subprocess.Popen[str]):
    """A process of the test; `say` tells it a key, `hear` waits for a line of it."""

    def say(self, key: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{key}\n")
        self.stdin.flush()

    def hear(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().strip()


@contextmanager
def started(n: int) -> Iterator[list[Running]]:
    """`n` processes that have met; they are gone when this ends."""
    with ExitStack() as stack:
        pairs = {p: _connection(stack) for p in range(1, n)}
        links = [{p: ends[0] for p, ends in pairs.items()}]
        links += [{0: ends[1]} for ends in pairs.values()]
        processes = []
        for number, mine in enumerate(links):
            descriptors = {p: end.fileno() for p, end in mine.items()}
            told = json.dumps([number, n, TIMEOUT_S, descriptors])
            process = Running(
                [sys.executable, "-c", PROCESS, told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=list(descriptors.values()),
            )
            stack.callback(_kill, process)
            processes.append(process)
        for end in (end for ends in pairs.values() for end in ends):
            end.close()  # else a process that ends leaves its connection open
        for process in processes:
            assert process.hear() == "ready"
        yield processes


def _connection(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = stack.enter_context(socket.create_connection(server.getsockname()))
        far = stack.enter_context(server.accept()[0])
    return near, far


def _kill(process: Running) -> None:
    process.kill()
    process.communicate()


def test_two_stopped_processes_are_both_named():
    """Process 0 is in the middle of a message to each of them, in two threads, when they stop."""
    with started(3) as (hub, one, two):
        os.kill(two.pid, signal.SIGSTOP)
        for process in (one, hub):
            process.say("a")
        assert one.hear() == "a"  # so process 0 hangs in the message to process 2
        start_s = time.monotonic()
        os.kill(one.pid, signal.SIGSTOP)
        hub.say("b")
        _, err = hub.communicate(timeout=LIMIT_S)
    assert time.monotonic() - start_s < TIMEOUT_S + GRACE_S
    assert hub.returncode == TRY_AGAIN, err
    (line,) = err.splitlines()
    assert line.startswith("dflop: process ")
    for number, process in ((1, one), (2, two)):
        name = f"process {number} ({socket.gethostname()}, pid {process.pid})"
        assert f"{name} is silent for " in line
    assert line.endswith("continue it with --resume auto")
