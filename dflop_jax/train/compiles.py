"""Counts XLA compilations and what the cache had, so that a run can show what it compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

_FOUND = "/jax/compilation_cache/cache_hits"
_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Compilations of the thread that made it, since then; `read` gives the count. Another one may
    compile what no step waits for (`programs_ahead`)."""

    def __init__(self) -> None:
        self._count, self._thread = 0, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._count += event == _EVENT and threading.get_ident() == self._thread

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
