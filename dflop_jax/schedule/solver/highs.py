"""HiGHS as every model here uses it: on one thread, and silent from its first moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import highspy

_PLAIN = highspy.Highs


class Highs(_PLAIN):
    """Prints nothing, though highspy 1.16 names itself on stdout as soon as callbacks are enabled,
    which its constructor does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in {"threads": 1, "parallel": "off", **options}.items():
            self.setOptionValue(name, value)

    def enableCallbacks(self) -> None:  # as highspy spells it
        self.silent()
        super().enableCallbacks()


@contextmanager
def silent_for_others() -> Iterator[None]:
    """Whoever makes a solver meanwhile, as cvxpy does, makes a silent one: what HiGHS prints would
    stand in the middle of an answer on stdout."""
    highspy.Highs = Highs  # type: ignore[misc]
    try:
        yield
    finally:
        highspy.Highs = _PLAIN  # type: ignore[misc]
