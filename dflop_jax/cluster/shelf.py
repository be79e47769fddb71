"""Copies of runs in the memory of an agent, which outlives the processes that train.

A copy is what a checkpoint is on disk: a file of every process, and a manifest that is made once
all files are where they are to be. An agent holds some of the files. It keeps the newest copy whose
manifest it has, and the one that is being made.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field

import msgspec

from dflop_jax.cluster.host_memory import free_bytes

LEAST_FREE_BYTES = 256 << 20  # what a copy leaves of a host's memory


class CopyName(msgspec.Struct, frozen=True):
    """Which copy it is: of a run (its folder), made in that start of it, after so many steps."""

    run: str
    start: int
    step: int


class Held(msgspec.Struct, frozen=True):
    """What an agent has of a copy: its manifest or not, and the bytes of files by process."""

    name: CopyName
    sealed: bool
    files: dict[int, int]


class NoRoom(OSError):
    """A host's memory does not hold one more file."""


@dataclass
class _Copy:
    files: dict[int, mmap.mmap] = field(default_factory=dict)
    manifest: bytes = b""


class Shelf:
    """The copies that an agent has; threads share it."""

    def __init__(self) -> None:
        self._copies: dict[CopyName, _Copy] = {}
        self._lock = threading.Lock()

    def room_for(self, n_bytes: int) -> mmap.mmap:
        """Memory for a file.

        Raises:
          NoRoom: the host has none.
        """
        free = free_bytes()
        if free is not None and n_bytes + LEAST_FREE_BYTES > free:
            raise NoRoom(f"{n_bytes / 1e9:.1f} GB for a copy, {free / 1e9:.1f} GB are free")
        return mmap.mmap(-1, n_bytes)

    def begin(self, name: CopyName) -> None:
        """Another copy of a run is made: one that never got its manifest goes."""
        with self._lock:
            stale = [n for n, c in self._copies.items() if n.run == name.run and not c.manifest]
            for other in stale:
                if other != name:
                    del self._copies[other]

    def put(self, name: CopyName, process: int, file: mmap.mmap) -> None:
        """Keep a file that has come as a whole."""
        with self._lock:
            self._copies.setdefault(name, _Copy()).files[process] = file

    def seal(self, name: CopyName, manifest: bytes) -> None:
        """All files of a copy are where they are to be; older copies of the run go."""
        with self._lock:
            self._copies.setdefault(name, _Copy()).manifest = manifest
            self._drop(name.run, name)

    def keep_only(self, run: str, name: CopyName | None) -> None:
        """Drop all copies of a run but this one."""
        with self._lock:
            self._drop(run, name)

    def clear(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._copies.clear()

    def held(self, run: str) -> list[Held]:
        """What is here of a run."""
        with self._lock:
            return [
                Held(name, bool(c.manifest), {p: len(f) for p, f in c.files.items()})
                for name, c in self._copies.items()
                if name.run == run
            ]

    @property
    def n_bytes(self) -> int:
        """Of all that is here."""
        with self._lock:
            files = [len(f) for c in self._copies.values() for f in c.files.values()]
        return sum(files)

    def manifest(self, name: CopyName) -> bytes:
        """A copy's manifest; b"" where it is not here."""
        with self._lock:
            return self._copies[name].manifest if name in self._copies else b""

    def file(self, name: CopyName, process: int) -> mmap.mmap | None:
        """The file of a process; None where it is not here."""
        with self._lock:
            return self._copies[name].files.get(process) if name in self._copies else None

    def _drop(self, run: str, name: CopyName | None) -> None:
        for other in [n for n in self._copies if n.run == run and n != name]:
            del self._copies[other]
