"""Settings that are written as text: what they say."""

from __future__ import annotations

from collections.abc import Iterable

# Fields of `train` with a number for each part.
RATES, DECAYS, RANKS = "learning_rates", "weight_decays", "lora_ranks"


_FORMS = {
    RATES: "NAME=RATE, such as vision=2e-6",
    DECAYS: "NAME=NUMBER, such as vision=0",
    RANKS: "PATTERN=RANK, such as vision=4 or llm.query=32",
}


def named_numbers(entries: Iterable[str], field: str) -> dict[str, float]:
    """The entries of `train.FIELD` by name.

    Raises:
      ValueError: an entry that is not NAME=NUMBER, or a name given twice.
    """
    numbers: dict[str, float] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if name in numbers:
            raise ValueError(f"train.{field} gives {name!r} twice; drop one of them")
        try:
            numbers[name] = float(value)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise ValueError(f"train.{field} has {entry!r}; write {_FORMS[field]}")
    return numbers


def adapter_ranks(entries: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """The entries of `train.lora_ranks`: (pattern, rank).

    Raises:
      ValueError: see `named_numbers`; a rank that is no whole number above 0.
    """
    ranks = named_numbers(entries, RANKS)
    for pattern, rank in ranks.items():
        if not (rank >= 1 and rank.is_integer()):
            raise ValueError(f"train.{RANKS} {pattern}={rank:g} must be a whole number above 0")
    return tuple((pattern, int(rank)) for pattern, rank in ranks.items())


def named_columns(entries: Iterable[str]) -> dict[str, str]:
    """The entries of `data.columns`: column by field.

    Raises:
      ValueError: an entry that is not FIELD=COLUMN, or a field given twice.
    """
    columns: dict[str, str] = {}
    for entry in entries:
        field, _, column = (part.strip() for part in entry.partition("="))
        if not (field and column):
            raise ValueError(
                f"data.columns has {entry!r}; write FIELD=COLUMN, such as messages=chat"
            )
        if field in columns:
            raise ValueError(f"data.columns gives {field!r} twice; drop one of them")
        columns[field] = column
    return columns


def profiled_steps(text: str) -> range:
    """The steps that `train.profile_steps` names; none for an empty text.

    Raises:
      ValueError: text that is not A:B with A up to B.
    """
    if not text:
        return range(0)
    first, _, last = (part.strip() for part in text.partition(":"))
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(
            f"train.profile_steps={text!r}: write FIRST:LAST, steps counted from 0, such as 3:5"
        )
    return range(int(first), int(last) + 1)
