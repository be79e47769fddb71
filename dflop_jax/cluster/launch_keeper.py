"""The process that ends a launch's processes when the launcher cannot: it may be killed any time.

Run as a script, it holds the reading end of a pipe whose only writing end is the launcher's. End of
file means that the launcher is gone, however it went. All processes of the launch are in the
keeper's process group, which exists before the first of them starts, so none can be missed. One
that left the group (as `timeout` does) still carries the launch's mark in its environment.

Standard library only: it starts in milliseconds and imports nothing that could fail.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

MARK_ENV = "DFLOP_LAUNCH"  # the launches a process belongs to, nested ones too


def kill_marked(mark: str) -> None:
    """SIGKILL every other process that carries `mark`; only Linux shows who does.

    Repeated until none is left, since one may fork while the list is read.
    """
    wanted = f"{MARK_ENV}=".encode()
    for _ in range(10):
        any_left = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended, or belongs to someone else
                entries = (folder / "environ").read_bytes().split(b"\0")
                marked = any(e.startswith(wanted) and mark.encode() in e for e in entries)
                if marked and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
                    any_left = True
        if not any_left:
            return


def main() -> None:
    """Wait for the launcher's end, then end what it started, and this process with it."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
