"""Fields of nested frozen dataclasses: dotted names, checks, and parsing of text, also of settings
with several entries such as vision=2e-6,llm=1e-5."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator as op
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

_DESCRIPTIONS = {bool: "true or false", int: "a whole number", float: "a number"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SIZE = re.compile(r"(\d*\.?\d+(?:e[+-]?\d+)?)\s*([kmgtp]?)(i?)b?", re.ASCII | re.IGNORECASE)


class Field(NamedTuple):
    """A field with a value (not a nested dataclass), as described by its annotation."""

    name: str  # dotted, such as "train.steps"
    kind: Any  # bool, int, float, str, tuple[str, ...] or a Literal of strings
    bounds: Meta | None
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values of a `Literal`; () for other kinds."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def value(self, config: Any) -> Any:
        """Return the value of this field in `config`."""
        node: Any = config
        for attribute in self.name.split("."):
            node = getattr(node, attribute)
        return node

    def check(self, value: Any) -> None:
        """Raise ValueError if the annotation does not allow a value."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}")
        if self.bounds is not None:
            check_bounds(self.name, value, self.bounds)

    def parse(self, value: str | Sequence[str]) -> Any:
        """Return the value for a command line's text; ValueError if the text has another type."""
        if self.choices:
            return dtype_name(value) if isinstance(value, str) else value
        is_size, is_tuple = self.name.endswith("_bytes"), get_origin(self.kind) is tuple
        if is_size and isinstance(value, str) and (size := size_bytes(value)) is not None:
            return size
        if is_tuple and isinstance(value, str):
            value = [entry for entry in value.split(",") if entry]
        try:
            return msgspec.convert(value, self.kind, strict=False)
        except msgspec.ValidationError as e:
            reason = str(e).split(" - at ")[0]
            default = "names with commas between" if is_tuple else "a text"
            expected = _DESCRIPTIONS.get(self.kind, default)
            expected += ", or a size such as 80GB" * is_size
            raise ValueError(f"{reason} - at `{self.name}`; give {expected}") from None


def dtype_name(text: str) -> str:
    """Return numpy's name of bf16, fp16 or fp32; other text unchanged."""
    return _DTYPES.get(text.lower(), text)


def size_bytes(text: str) -> float | None:
    """Return the bytes of a size such as 80GB (10^9 each), 80 GiB (2^30) or 80G; None for other
    text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[0][-1].isdecimal():
        return None
    number, prefix, binary = match.groups()
    return float(number) * (1024 if binary else 1000) ** " kmgtp".index(prefix.lower() or " ")


def check_bounds(name: str, number: float, bounds: Meta) -> None:
    """Raise ValueError if a number is outside `bounds` or not finite."""
    limits = {rule: getattr(bounds, rule.__name__) for rule in (op.gt, op.ge, op.lt, op.le)}
    is_within = all(rule(number, x) for rule, x in limits.items() if x is not None)
    if not (is_within and math.isfinite(number)):
        raise ValueError(f"{name}={number} must be {bounds.description}")


@cache
def fields_of(kind: type, prefix: str = "") -> tuple[Field, ...]:
    """Return every field with a value of a dataclass, nested ones included."""
    all_fields: list[Field] = []
    hints = get_type_hints(kind, include_extras=True)
    for f in dataclasses.fields(kind):
        hint, name = hints[f.name], prefix + f.name
        if dataclasses.is_dataclass(hint):
            all_fields += fields_of(hint, f"{name}.")  # type: ignore[arg-type]
        else:
            bounds = next(iter(getattr(hint, "__metadata__", ())), None)
            field_type = hint.__origin__ if bounds else hint
            all_fields.append(Field(name, field_type, bounds, f.metadata["help"]))
    return tuple(all_fields)


def apply_overrides(
    config: Any, values: Mapping[str, str | Sequence[str]], alternatives: Mapping[str, str]
) -> Any:
    """Return `config` with dotted fields replaced and text converted to the fields' types. A field
    in `alternatives` sets its alternative to 0. ValueError for an unknown name, a value of a wrong
    type or out of bounds, or a field together with its alternative."""
    for name, alternative in alternatives.items():
        if name in values and alternative in values:
            raise ValueError(f"{name} and {alternative} set the same thing; give one of them")
    values = {alternatives[name]: "0" for name in values if name in alternatives} | dict(values)
    kind: type = type(config)
    fields_by_name = {f.name: f for f in fields_of(kind)}
    changed: dict[str, dict[str, Any]] = {}  # by section; "": fields without one
    for name, text in values.items():
        if name not in fields_by_name:
            nearest = difflib.get_close_matches(name, fields_by_name, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "; see --help for the names"
            raise ValueError(f"unknown override {name}{hint}")
        section, _, field_name = name.rpartition(".")
        changed.setdefault(section, {})[field_name] = fields_by_name[name].parse(text)
    # Replaced together, since some values are only allowed with others.
    top_level = changed.pop("", {})
    sections = {k: dataclasses.replace(getattr(config, k), **v) for k, v in changed.items()}
    return dataclasses.replace(config, **top_level, **sections)


# Fields of `train` with a number for each part.
RATES, DECAYS, RANKS = "learning_rates", "weight_decays", "lora_ranks"
_ENTRY_FORMS = {
    RATES: "NAME=RATE, such as vision=2e-6",
    DECAYS: "NAME=NUMBER, such as vision=0",
    RANKS: "PATTERN=RANK, such as vision=4 or llm.query=32",
}


def _parse_entries(
    entries: Iterable[str], field: str, form: str, kind: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the values of entries NAME=VALUE by name; ValueError for another form or a repeated
    name."""
    values: dict[str, Any] = {}
    for entry in entries:
        name, _, value = (part.strip() for part in entry.partition("="))
        if name in values:
            raise ValueError(f"{field} gives {name!r} twice; drop one of them")
        with suppress(ValueError):
            values |= {name: kind(value)} if name and value else {}
        if name not in values:
            raise ValueError(f"{field} has {entry!r}; write {form}")
    return values


def parse_numbers(entries: Iterable[str], field: str) -> dict[str, float]:
    """Return the numbers of `train.FIELD` by name."""
    return _parse_entries(entries, f"train.{field}", _ENTRY_FORMS[field], float)


def parse_adapter_ranks(entries: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return the (pattern, rank) pairs of `train.lora_ranks`."""
    ranks = parse_numbers(entries, RANKS)
    for pattern, rank in ranks.items():
        if not (rank >= 1 and rank.is_integer()):
            raise ValueError(f"train.{RANKS} {pattern}={rank:g} must be a whole number above 0")
    return tuple((pattern, int(rank)) for pattern, rank in ranks.items())


def parse_columns(entries: Iterable[str]) -> dict[str, str]:
    """Parse `data.columns`, entries FIELD=COLUMN, into {field: column}."""
    return _parse_entries(entries, "data.columns", "FIELD=COLUMN, such as messages=chat", str)


def parse_profile_steps(text: str) -> range:
    """Return the steps of `train.profile_steps`; an empty range for ""."""
    if not text:
        return range(0)
    first, _, last = (part.strip() for part in text.partition(":"))
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(
            f"train.profile_steps={text!r}: write FIRST:LAST, steps counted from 0, such as 3:5"
        )
    return range(int(first), int(last) + 1)
