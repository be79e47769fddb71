"""Counts XLA compilations and what the cache had, so that a run can show what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

_FOUND = "/jax/compilation_cache/cache_hits"
_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Compilations of this process since it was made; `read` gives the count."""

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._count += event == _EVENT

    def read(self) -> int:
        return self._count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)


@contextmanager
def found_counted() -> Iterator[Callable[[], int]]:
    """How many programs this process has found in the compilation cache in here, so far."""
    found: list[str] = []

    def note(event: str, **_: str | int) -> None:
        if event == _FOUND:
            found.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield lambda: len(found)
    finally:
        jax.monitoring.unregister_event_listener(note)
