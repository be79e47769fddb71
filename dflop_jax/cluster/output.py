"""What a launch shows: the lines of its processes and its own, one at a time.

Process 0 inherits standard output and error: on a terminal its progress bar keeps working, and what
it prints for programs (`--json`) stays as it is. The lines of the others get a prefix, `[1] `.
"""

from __future__ import annotations

import os
import select
import threading
from typing import IO

from dflop_jax.cluster.ending import SAY_S

STDOUT, STDERR = 1, 2  # file descriptors
LINE_BYTES = 1 << 16  # longer lines are shown in parts
SHOW_CURSOR = b"\x1b[?25h"


class Output:
    """Writes lines whole, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one line at a time

    def show(self, process: int, pipe: IO[bytes], fd: int) -> None:
        """Thread: show what a process writes until it closes its end."""
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                with self._lock:
                    _write_all(fd, _line(fd, f"[{process}] ".encode() + line.rstrip(b"\n")))

    def say(self, text: str) -> None:
        """Say something in the launcher's own name."""
        self._say_bytes(_line(STDERR, f"dflop launch: {text}".encode()))

    def close(self) -> None:
        """A bar that was killed leaves no cursor."""
        if os.isatty(STDERR):
            self._say_bytes(SHOW_CURSOR)

    def _say_bytes(self, data: bytes) -> None:
        """Write to standard error unless nobody reads it: what is to be done waits for nothing."""
        if not self._lock.acquire(timeout=SAY_S):
            return
        try:
            room = select.poll()
            room.register(STDERR, select.POLLOUT)
            if room.poll(1000 * SAY_S):
                _write_all(STDERR, data)
        finally:
            self._lock.release()


def _line(fd: int, line: bytes) -> bytes:
    """On a terminal a line takes the place of process 0's bar, which is drawn again."""
    return (b"\r\x1b[2K" if os.isatty(fd) else b"") + line + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:  # nobody reads it any more; the processes shall not hang on that
        return
