"""HiGHS as every model here uses it: on one thread, and silent from its first moment."""

from __future__ import annotations

from typing import Any

import highspy


class Highs(highspy.Highs):
    """Prints nothing, though highspy 1.16 names itself on stdout as soon as callbacks are enabled,
    which its constructor does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name, value in {"threads": 1, "parallel": "off", **options}.items():
            self.setOptionValue(name, value)

    def enableCallbacks(self) -> None:  # as highspy spells it
        self.silent()
        super().enableCallbacks()
