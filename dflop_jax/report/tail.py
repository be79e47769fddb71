"""What is added to a file of rows, read as it comes; cut where a run is resumed, it begins anew."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.report.row_file import key_of

_MARK_BYTES = 4096  # before where reading goes on; other ones there mean another file


@dataclass(frozen=True)
class Added:
    """Whole lines without their ends; `anew`: those read before are void, these are the first ones.
    `left_bytes` are still to be read."""

    lines: tuple[bytes, ...]
    anew: bool = False
    left_bytes: int = 0


class Tail:
    """Reads a file on from where it was read to. A last line without an end waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._mark = b""  # what stands before `_at`

    def read(self, most_bytes: int, *, closed: bool = False) -> Added:
        """What was added: whole lines of `most_bytes` about.

        A file that is shorter than what was read of it, gone, or has other bytes there has been
        cut or made anew. `closed`: nobody writes to it, so that a whole last row needs no end.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._at - len(self._mark), 0))
                anew = size < self._at or file.read(len(self._mark)) != self._mark
                if anew:
                    self._at, self._mark = 0, b""
                file.seek(self._at)
                data = file.read(most_bytes)
                data += file.readline() if not data.endswith(b"\n") else b""
        except FileNotFoundError:
            anew = self._at > 0
            self._at, self._mark = 0, b""
            return Added((), anew)
        end = data.rfind(b"\n") + 1
        if closed and key_of(data[end:]) is not None:
            end = len(data)
        lines = data[:end].split(b"\n")
        if not lines[-1]:
            lines.pop()
        self._at += end
        self._mark = (self._mark + data[:end])[-_MARK_BYTES:]
        return Added(tuple(lines), anew, max(size - self._at, 0))
