"""What Linux shows of the processes of this host, in /proc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """(process id, environment) of every running process that shows it to us."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            yield int(folder.name), {k: v for k, _, v in (e.partition("=") for e in entries)}


def parent(pid: int) -> int:
    """The process that started one; 0 where it has ended."""
    return int(_stat(pid)[1])


def begun(pid: int) -> int:
    """When a process began, in ticks since the system did."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on; zeros where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["0"] * 50
