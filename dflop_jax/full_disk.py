"""A full disk ends no run: what goes on without the room that it lacks."""

from __future__ import annotations

import errno
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors that end when somebody makes room

log = logging.getLogger("dflop_jax")


@contextmanager
def despite_full_disk(file: Path) -> Iterator[None]:
    """Where the disk is full the file is not written, which is said; a part of it does not stay."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL:
            raise
        file.unlink(missing_ok=True)
        log.warning("%s: %s; it is not written", file, e.strerror)


class _Dropping(io.FileIO):
    """A file that takes what finds no room, and drops it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in FULL:
                raise
            return memoryview(data).nbytes


def is_standard(stream: TextIO, descriptor: int) -> bool:
    """Whether a stream is what a process writes to its descriptor 1 or 2; else it is captured."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except OSError:  # it has none
        return False


def dropping(like: TextIO, descriptor: int) -> TextIO:
    """A stream of text to an open file, such as a log, that loses lines where the disk is full and
    raises nothing; with the encoding and buffering of another one."""
    assert isinstance(like, io.TextIOWrapper)
    like.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Dropping(descriptor, "w", closefd=False)),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def need_no_log() -> None:
    """Let standard output and error lose lines where the disk that they go to is full."""
    if is_standard(sys.stdout, 1):
        sys.stdout = dropping(sys.stdout, 1)
    if is_standard(sys.stderr, 2):
        sys.stderr = dropping(sys.stderr, 2)
