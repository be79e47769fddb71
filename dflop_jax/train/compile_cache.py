"""Compiled programs on disk, each checked when it is read.

jax writes an entry in place and keeps what is there: one that a kill, a full disk or a flipped bit
has spoilt is compiled again by every later run, with a warning, or is loaded as it is. Here an
entry is renamed into place with a checksum before it, and a damaged one is removed and made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler

SUFFIX = "-checked"  # beside jax's own entries, which are others
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_TOLD_CACHE: str | None = jax.config.values["jax_compilation_cache_dir"]  # before any run
log = logging.getLogger("dflop_jax")


class CheckedFiles:
    """A folder of entries, as jax wants a cache: a checksum, then jax's bytes.

    Args:
      what: an entry is.
    """

    def __init__(self, folder: str | Path, what: str = "this compiled program"):
        self._path, self._what = Path(folder), what  # jax reads the path
        self._path.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """An entry, None where there is none; a damaged one is removed."""
        file = self._file(key)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:  # a disk that fails costs time, not the run
            log.warning("%s: %s; it is compiled again", file, e.strerror)
            return None
        value = content[_CHECKSUM_BYTES:]
        if hashlib.sha256(value).digest() == content[:_CHECKSUM_BYTES]:
            with suppress(OSError):
                os.utime(file)  # for `keep_used`
            return value
        log.warning("%s: %s is damaged; it is compiled again", file, self._what)
        with suppress(OSError):
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry, whole or not at all.

        Raises:
          OSError: it cannot be written.
        """
        file = self._file(key)
        fresh = file.with_name(f".{os.getpid()}-{file.name}")
        try:
            fresh.write_bytes(hashlib.sha256(value).digest() + value)
            fresh.replace(file)
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}{SUFFIX}"


def keep_used(folders: Sequence[Path], most_bytes: float) -> int:
    """Remove the entries that were used longest ago, of all these folders, so that the others take
    at most so many bytes; returns how many. Other runs may add and remove some meanwhile."""
    entries = []
    for file in (f for folder in folders for f in folder.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):
            known = file.stat()
            entries.append((known.st_mtime_ns, known.st_size, file))
    n_removed, n_bytes = 0, 0
    for _, size, file in sorted(entries, reverse=True):
        n_bytes += size
        if n_bytes > most_bytes:
            with suppress(OSError):  # a folder that others own
                file.unlink()
                n_removed += 1
    return n_removed


def use_cache(folder: str | Path) -> None:
    """Keep compiled programs in `folder`, so that a second run of the same plan starts at once, or
    where jax itself was told to (JAX_COMPILATION_CACHE_DIR). Where jax was told to bound the size,
    it keeps them itself."""
    where = _TOLD_CACHE or str(Path(folder).resolve() / "xla")
    jax.config.update("jax_compilation_cache_dir", where)
    # The quick ones too: a run begins with dozens, which together take seconds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compiler._cache_write = _cache_write  # type: ignore[assignment]
    compilation_cache.get_executable_and_time = _noted_read  # type: ignore[assignment]
    if jax.config.values["jax_compilation_cache_max_size"] == -1 and "://" not in where:
        compilation_cache.get_file_cache = _checked_files  # type: ignore[assignment]


def _checked_files(folder: str) -> tuple[CheckedFiles, str]:
    return CheckedFiles(folder), folder


def _cache_write(
    key: str, took_s: float, name: str, backend: Any, executable: Any, *_: object
) -> None:
    """What stands in for jax's own, which keeps what process 0 compiled only: here every process
    compiles programs of its own."""
    least_s: float = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if took_s >= least_s:
        put: Callable[..., None] = compilation_cache.put_executable_and_time
        with suppress(OSError):  # a full disk costs time in the next run only
            put(key, name, executable, backend, int(took_s))


@dataclass(frozen=True)
class Asked:
    """A program that jax looked for in the cache: its name there, and how it is compiled."""

    name: str
    options: bytes


_asking = threading.local()
_read = compilation_cache.get_executable_and_time


@contextmanager
def asked_here() -> Iterator[list[Asked]]:
    """What this thread looks for in the cache, in here, in their order."""
    before, _asking.asked = getattr(_asking, "asked", None), []
    try:
        yield _asking.asked
    finally:
        _asking.asked = before


def _noted_read(name: str, options: Any, *more: Any) -> Any:
    """What stands in for jax's own reading: `asked_here` knows of it."""
    if (asked := getattr(_asking, "asked", None)) is not None:
        asked.append(Asked(name, options.SerializeAsString()))
    return _read(name, options, *more)
