"""Configuration fields that the command line derives, with value and origin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dflop_jax.config import Config, fields, override


class Setting(NamedTuple):
    """A derived value of a configuration field; `name` is dotted, `origin` is for people."""

    name: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        """The value in the format of a command-line flag."""
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return ",".join(self.value) if isinstance(self.value, tuple) else str(self.value)


def with_settings(config: Config, settings: Iterable[Setting]) -> Config:
    """Return the configuration with these values; of several for a field the last one counts."""
    return override(config, {s.name: s.text for s in settings})


def experiment_source(config: Config, settings: Sequence[Setting], file: str) -> tuple[str, int]:
    """Return the Python source of an experiment with this configuration, and its number of fields:
    those that differ from `Config()`, with their origins as comments."""
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
