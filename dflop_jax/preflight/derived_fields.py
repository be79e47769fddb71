"""A field of the configuration, the value that the front door gives it, and where that is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dflop_jax.config import Config, fields, override


class Setting(NamedTuple):
    """`name` is dotted; `why` says where the value is from, in a few words."""

    name: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        """The value as a flag says it."""
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return ",".join(self.value) if isinstance(self.value, tuple) else str(self.value)


def with_settings(config: Config, settings: Iterable[Setting]) -> Config:
    """The configuration with these values; a later one of a field goes before an earlier one."""
    return override(config, {s.name: s.text for s in settings})


def experiment_source(config: Config, settings: Sequence[Setting], file: str) -> tuple[str, int]:
    """The Python text of an experiment with this configuration, and how many fields it names: those
    that differ from a `Config()`, each with where it is from."""
    usual, origins = Config(), {s.name: s.origin for s in settings}
    sections: dict[str, list[str]] = {}
    for leaf in fields():
        if (value := leaf.value(config)) != leaf.value(usual):
            section, _, name = leaf.name.rpartition(".")
            comment = f"  # {origins[leaf.name]}" if leaf.name in origins else ""
            sections.setdefault(section, []).append(f"{name}={value!r},{comment}")
    kinds = {name: f"{type(getattr(config, name)).__name__}" for name in sections if name}
    lines = [f'"""Written by `dflop init`. Command: dflop train {file}"""', ""]
    lines += [f"from dflop_jax import {', '.join(sorted(['Config', *kinds.values()]))}", "", ""]
    lines += ["def config() -> Config:", "    return Config("]
    for section, kind in kinds.items():
        lines += [f"        {section}={kind}(", *(f"            {x}" for x in sections[section])]
        lines += ["        ),"]
    lines += [f"        {x}" for x in sections.get("", [])] + ["    )"]
    return "\n".join(lines) + "\n", sum(map(len, sections.values()))
