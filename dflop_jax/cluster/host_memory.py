"""How much memory of this host is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of this process, where it is in a container of its own


def free_bytes() -> int | None:
    """Bytes that programs can still take, of the host or of the container that this process is in;
    None where nobody says how many."""
    known = [_free_in_group()]
    if MEMORY.exists():
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        known.append(1024 * int(lines["MemAvailable"].split()[0]))
    return min((n for n in known if n is not None), default=None)


def _free_in_group() -> int | None:
    with suppress(OSError, ValueError):  # no group, or one without a limit ("max")
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]))
    return None
