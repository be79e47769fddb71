"""What a user asks to be written, and one answer where that cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflop_jax.full_disk import FULL


@contextmanager
def writing(path: str | Path, remedy: str) -> Iterator[Path]:
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
        if e.errno in FULL:
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise ValueError(f"{path}: cannot be written ({e.strerror or e}); {remedy}") from None


def made(folder: str | Path, remedy: str) -> Path:
    """A folder that can be written, made where it is missing; raises as `writing` does."""
    with writing(folder, remedy) as path:
        path.mkdir(exist_ok=True)
        if not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return path


def missing(folder: str | Path) -> list[Path]:
    """The folder and those above it that are not there, the innermost first."""
    path = Path(folder)
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, in turn, up to the first that holds something or is not there."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
