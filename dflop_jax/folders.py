"""What a user asks to be written, one answer where that cannot be, and what goes on without room: a
full disk ends no run."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # errors that end when somebody makes room

log = logging.getLogger("dflop_jax")


@contextmanager
def writable_path(path: str | Path, remedy: str) -> Iterator[Path]:
    """Inside, a file is written or a folder made: its path, whose folder is there.

    Raises:
      ValueError: it cannot be written, or a file is where a folder should be; with the remedy.
      OSError: the disk is full.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except (FileExistsError, NotADirectoryError):
        file = next((p for p in (path, *path.parents) if p.is_file()), None)
        if file is None:
            raise
        raise ValueError(f"{file}: is a file; {remedy}") from None
    except OSError as e:
        if e.errno in DISK_FULL_ERRNOS:
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise ValueError(f"{path}: cannot be written ({e.strerror or e}); {remedy}") from None


def make_folder(folder: str | Path, remedy: str) -> Path:
    """A folder that can be written, made where it is missing; raises as `writing` does."""
    with writable_path(folder, remedy) as path:
        path.mkdir(exist_ok=True)
        if not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return path


def missing_folders(folder: str | Path) -> list[Path]:
    """The folder and those above it that are not there, the innermost first."""
    path = Path(folder)
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove folders, in turn, up to the first that holds something or is not there."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def tolerate_full_disk(file: Path) -> Iterator[None]:
    """Where the disk is full the file is not written, which is said; a part of it does not stay."""
    try:
        yield
    except OSError as e:
        if e.errno not in DISK_FULL_ERRNOS:
            raise
        file.unlink(missing_ok=True)
        log.warning("%s: %s; it is not written", file, e.strerror)


class _LossyFile(io.FileIO):
    """A file that takes what finds no room, and drops it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in DISK_FULL_ERRNOS:
                raise
            return memoryview(data).nbytes


def is_standard_stream(stream: TextIO, descriptor: int) -> bool:
    """Whether a stream is what a process writes to its descriptor 1 or 2; else it is captured."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except OSError:  # it has none
        return False


def lossy_stream(template: TextIO, descriptor: int) -> TextIO:
    """A stream of text to an open file, such as a log, that loses lines where the disk is full and
    raises nothing; with the encoding and buffering of another one."""
    assert isinstance(template, io.TextIOWrapper)
    template.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False)),
        encoding=template.encoding,
        errors=template.errors,
        line_buffering=template.line_buffering,
        write_through=template.write_through,
    )


def tolerate_lost_log_lines() -> None:
    """Let standard output and error lose lines where the disk that they go to is full."""
    if is_standard_stream(sys.stdout, 1):
        sys.stdout = lossy_stream(sys.stdout, 1)
    if is_standard_stream(sys.stderr, 2):
        sys.stderr = lossy_stream(sys.stderr, 2)
