"""Where jax keeps compiled programs, and how many a run compiles and finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler

_TOLD_CACHE: str | None = jax.config.values["jax_compilation_cache_dir"]  # before any run
_FOUND = "/jax/compilation_cache/cache_hits"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def use_cache(folder: str | Path) -> None:
    """Keep compiled programs in `folder`, so that a second run of the same plan compiles none, or
    where jax itself was told to (JAX_COMPILATION_CACHE_DIR)."""
    where = _TOLD_CACHE or str(Path(folder).resolve() / "xla")
    jax.config.update("jax_compilation_cache_dir", where)
    # The quick ones too: a run begins with dozens, which together take seconds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compiler._cache_write = _cache_write  # type: ignore[assignment]


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


@dataclass
class Compiles:
    """Programs that this process has compiled, and those that it found in the cache."""

    compiled: int = 0
    found: int = 0


@contextmanager
def compiles_counted() -> Iterator[Compiles]:
    """The programs of this process in here, so far."""
    counts = Compiles()

    def on_event(event: str, **_: str | int) -> None:
        counts.found += event == _FOUND

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        counts.compiled += event == _COMPILED

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)
