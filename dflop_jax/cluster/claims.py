"""Which part of a run goes on after a partition: the one whose claim to the next start is first.

Both sides of a partition know the same last start, and each may have enough processes to go on. The
run folder is on storage that all see, so the side that makes the file of the next start there is
the one that goes on; a file is made once. The other side writes nothing more: its agents wait to be
taken in, and a process 0 that still runs looks for a newer claim at each commit of a checkpoint.

A claim names its hosts. A start needs all of them, so one that any of them has not begun and is
elsewhere by now never happens: who has that host with it goes past the claim.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

CLAIMS = "claims"  # the folder in a run's; files are named LAUNCH.START


def claim(run_dir: str | Path, launch: str, start: int, hosts: Sequence[int]) -> int:
    """Claim a start of a launch for hosts none of which has begun it, or the next one that is free;
    returns its number, 0 where the run is somebody else's.

    Raises:
      OSError: the run folder cannot be written.
    """
    folder = Path(run_dir, CLAIMS)
    folder.mkdir(exist_ok=True)
    while (last := newest(run_dir, launch)) >= start:
        if not set(hosts).intersection(_hosts(folder, launch, last)):
            return 0
        start = last + 1
    fresh = folder / f"{uuid.uuid4().hex}.part"
    file = folder / f"{launch}.{start}"
    try:
        with fresh.open("wb") as out:
            out.write(msgspec.json.encode(hosts))
            out.flush()
            os.fsync(out.fileno())
        os.link(fresh, file)
    except FileExistsError:
        return 0
    finally:
        fresh.unlink(missing_ok=True)
    if newest(run_dir, launch) > start:  # this one was claimed, used and removed in between
        file.unlink(missing_ok=True)
        return 0
    for older in [n for n in _starts(run_dir, launch) if n < start]:
        (folder / f"{launch}.{older}").unlink(missing_ok=True)
    return start


def newest(run_dir: str | Path, launch: str) -> int:
    """The latest start of a launch that is claimed; 0: none is."""
    return max(_starts(run_dir, launch), default=0)


def _starts(run_dir: str | Path, launch: str) -> Iterator[int]:
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = os.listdir(Path(run_dir, CLAIMS))
    for name in names:
        if found := re.fullmatch(rf"{re.escape(launch)}\.(\d+)", name):
            yield int(found[1])


def _hosts(folder: Path, launch: str, start: int) -> list[int]:
    """Who claimed a start; nobody where the file has gone, for a later one."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode((folder / f"{launch}.{start}").read_bytes(), type=list[int])
    return []
