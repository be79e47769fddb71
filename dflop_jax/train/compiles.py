"""Counts XLA compilations, so that a run can show it compiles nothing after warm-up."""

from __future__ import annotations

import jax

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
