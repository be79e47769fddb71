"""A field of the configuration, the value that the front door gives it, and where that is from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dflop_jax.config import Config, override


class Setting(NamedTuple):
    """`name` is dotted; `why` says where the value is from, in a few words."""

    name: str
    value: Any
    why: str

    @property
    def text(self) -> str:
        """The value as a flag says it."""
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return ",".join(self.value) if isinstance(self.value, tuple) else str(self.value)


def with_settings(config: Config, settings: Iterable[Setting]) -> Config:
    """The configuration with these values; a later one of a field goes before an earlier one."""
    return override(config, {s.name: s.text for s in settings})
