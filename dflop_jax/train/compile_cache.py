"""Where jax keeps compiled programs, and how many a run compiles and finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler

_USER_CACHE_DIR: str | None = jax.config.values["jax_compilation_cache_dir"]  # before any run
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_cache(folder: str | Path) -> None:
    """Keep compiled programs in `folder`, so that a second run of the same plan compiles none, or
    where jax itself was told to (JAX_COMPILATION_CACHE_DIR)."""
    cache_dir = _USER_CACHE_DIR or str(Path(folder).resolve() / "xla")
    jax.config.update("jax_compilation_cache_dir", cache_dir)
    # The quick ones too: a run begins with dozens, which together take seconds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compiler._cache_write = _cache_write  # type: ignore[assignment]


def _cache_write(
    key: str, compile_s: float, name: str, backend: Any, executable: Any, *_: object
) -> None:
    """What stands in for jax's own, which keeps what process 0 compiled only: here every process
    compiles programs of its own."""
    min_seconds: float = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if compile_s >= min_seconds:
        put: Callable[..., None] = compilation_cache.put_executable_and_time
        with suppress(OSError):  # a full disk costs time in the next run only
            put(key, name, executable, backend, int(compile_s))


@dataclass
class CompileCounts:
    """Programs that this process has compiled, and those that it found in the cache."""

    compiled: int = 0
    cache_hits: int = 0


@contextmanager
def count_compiles() -> Iterator[CompileCounts]:
    """The programs of this process in here, so far."""
    counts = CompileCounts()

    def on_event(event: str, **_: str | int) -> None:
        counts.cache_hits += event == _CACHE_HIT_EVENT

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        counts.compiled += event == _COMPILE_EVENT

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)
