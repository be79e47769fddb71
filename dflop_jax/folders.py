"""Folders and files that a user names, with a one-line error if they cannot be written; and log
streams that survive a full disk."""

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

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # gone once the user frees space

log = logging.getLogger("dflop_jax")


@contextmanager
def writable_path(path: str | Path, remedy: str) -> Iterator[Path]:
    """Make the parents of a path and yield it, for writing a file or making a folder; ValueError if
    it cannot be written, OSError if the disk is full."""
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
    """Return a writable folder, made if it is missing; raises the errors of `writable_path`."""
    with writable_path(folder, remedy) as path:
        path.mkdir(exist_ok=True)
        if not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return path


def missing_folders(folder: str | Path) -> list[Path]:
    """Return those of the folder and its parents that do not exist, the innermost first."""
    path = Path(folder)
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove folders in turn, up to the first that is not empty or does not exist."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def tolerate_full_disk(file: Path) -> Iterator[None]:
    """If the disk is full, log a warning and remove the partly written file."""
    try:
        yield
    except OSError as e:
        if e.errno not in DISK_FULL_ERRNOS:
            raise
        file.unlink(missing_ok=True)
        log.warning("%s: %s; it is not written", file, e.strerror)


class _LossyFile(io.FileIO):
    """A file that drops output while the disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in DISK_FULL_ERRNOS:
                raise
            return memoryview(data).nbytes


def is_standard_stream(stream: TextIO, descriptor: int) -> bool:
    """Return whether a stream writes to this file descriptor, and is not captured."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except OSError:  # no descriptor
        return False


def lossy_stream(template: TextIO, descriptor: int) -> TextIO:
    """Return a text stream to a file descriptor, which drops lines while the disk is full."""
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
    """Make standard output and error drop lines while their disk is full."""
    if is_standard_stream(sys.stdout, 1):
        sys.stdout = lossy_stream(sys.stdout, 1)
    if is_standard_stream(sys.stderr, 2):
        sys.stderr = lossy_stream(sys.stderr, 2)
