"""A mixture of datasets: parts with weights and subset rules, in YAML or Python.

    parts:
      - path: notes/train.json   # or a folder, shards-{000..127}.tar, data-*.parquet, OWNER/NAME
        root: photos             # folder of the media, or several; the file's own unless given
        subset: first:30%        # all, first:N, end:N, random:N; N a number or a percentage
        weight: 2                # how often an epoch shows each of them
        columns: {messages: chat, image: pictures}   # where fields have other names

LLaVA-NeXT's `datasets`, `json_path` and `sampling_strategy` are read as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

from dflop_jax.data.bounds import (
    MAX_SHOWN,
    MAX_YAML_BYTES,
    MAX_YAML_DEPTH,
    MAX_YAML_EVENTS,
    named,
    read_bounded,
)
from dflop_jax.data.datasets.find_tables import HUB, HUB_ID
from dflop_jax.data.datasets.llava_records import short_digest

MAX_WEIGHT = 1000.0  # times that an epoch shows a part
RULE = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)")


@dataclass(frozen=True)
class MixturePart:
    """One dataset of a mixture. `root` are the folders of its media, empty: the file's own;
    `columns` are (field, column) where a record's fields have other names."""

    path: str
    weight: float = 1.0
    subset: str = "all"
    root: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("a part of the mixture has no path")
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ValueError(f"{self.path}: weight={self.weight} is not in (0, {MAX_WEIGHT:g}]")
        subset_size(self.subset, 1)


@dataclass(frozen=True)
class Mixture:
    """Datasets that are trained on together."""

    parts: tuple[MixturePart, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a mixture needs at least one part")


def load_mixture(file: str | Path) -> Mixture:
    """The mixture of a .yaml or .yml file; relative paths in it start at its folder.

    Raises:
      ValueError: no such file, no YAML, or an unknown field or rule, with its place.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; give a mixture of datasets in YAML")
    with named(f"{file}: not a readable mixture"):
        raw = _yaml(read_bounded(file, MAX_YAML_BYTES))
    items = raw.get("parts", raw.get("datasets")) if isinstance(raw, dict) else raw
    if not isinstance(items, list):
        raise ValueError(f"{file}: expected `parts`, a list of datasets")
    try:
        return Mixture(tuple(_part(item, file.parent) for item in items))
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None


def _yaml(data: bytes) -> Any:
    """What a YAML file holds. Aliases, by which few bytes become many, are refused."""
    import yaml  # which few runs need, and every process that opens data would load

    depth = 0
    for n, event in enumerate(yaml.parse(data, Loader=yaml.CSafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*name); write the value out")
        if n > MAX_YAML_EVENTS or depth > MAX_YAML_DEPTH:
            raise ValueError("too much of it, or nested too deeply")
    return msgspec.yaml.decode(data)


def subset_size(rule: str, n: int) -> int:
    """How many of `n` records a subset rule takes. ValueError for an unknown rule."""
    if rule == "all":
        return n
    match = RULE.fullmatch(rule)
    if not match:
        raise ValueError(f"subset {rule!r} is not all, first:N, end:N or random:N (N or N%)")
    amount = float(match[2])
    if match[3]:
        if amount > 100:
            raise ValueError(f"subset {rule!r} takes more than 100%")
        return ceil(amount * n / 100)
    if not amount.is_integer():
        raise ValueError(f"subset {rule!r}: {match[2]} is no whole number; add % for a share")
    return int(min(amount, n))


def chosen(part: MixturePart, n: int, seed: int) -> np.ndarray:
    """Records 0..n-1 that the part's rule takes, int64, ascending; the same for the same seed."""
    size = subset_size(part.subset, n)
    if part.subset.startswith("end"):
        return np.arange(n - size, n)
    if part.subset.startswith("random"):
        return np.sort(_generator(seed, "subset", part).permutation(n)[:size])
    return np.arange(size)


def shown(part: MixturePart, rows: np.ndarray, seed: int) -> np.ndarray:
    """The rows once for each time that an epoch shows them: whole times, then a drawn share."""
    if part.weight * len(rows) > MAX_SHOWN:
        raise ValueError(f"{part.path}: more than {MAX_SHOWN:,} samples an epoch; lower its weight")
    times = int(part.weight)
    rest = round((part.weight - times) * len(rows))
    drawn = np.sort(_generator(seed, "weight", part).permutation(len(rows))[:rest])
    return np.concatenate([np.tile(rows, times), rows[drawn]])


def _generator(seed: int, use: str, part: MixturePart) -> np.random.Generator:
    """Draws of a part do not depend on the parts beside it."""
    text = f"{use}:{part.path}:{','.join(part.root)}:{part.subset}"
    return np.random.default_rng([seed, int(short_digest(text.encode()), 16)])


def _part(raw: Any, folder: Path) -> MixturePart:
    if isinstance(raw, str):
        raw = {"path": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"a part is {raw!r:.50}, not a path or a mapping")
    renamed = {"json_path": "path", "sampling_strategy": "subset"}
    fields = {renamed.get(str(k), str(k)): v for k, v in raw.items()}
    name, known = raw.get("path", raw.get("json_path")), _RawPart.__struct_fields__
    if unknown := [k for k in fields if k not in known]:
        raise ValueError(
            f"part {name}: unknown field {unknown[0]!r:.50}; known: {', '.join(known)}"
        )
    try:
        part = msgspec.convert(fields, _RawPart)
    except msgspec.ValidationError as e:
        raise ValueError(f"part {name}: {e}") from None
    given = [part.root] if isinstance(part.root, str) else part.root
    root = tuple(str(folder / r) for r in given if r)
    from_hub = part.path.startswith(HUB) or (
        HUB_ID.fullmatch(part.path) and not (folder / part.path).exists()
    )
    path = part.path if from_hub or not part.path else str(folder / part.path)
    return MixturePart(path, part.weight, part.subset, root, tuple(sorted(part.columns.items())))


class _RawPart(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    weight: float = 1.0
    subset: str = "all"
    root: str | list[str] = ""
    columns: dict[str, str] = {}


def names(parts: Sequence[MixturePart]) -> list[str]:
    """Each part's name in an index: parts of one dataset share its table."""
    return ["|".join([p.path, ",".join(p.root), *map("=".join, p.columns)]) for p in parts]


def short_names(parts: Sequence[MixturePart]) -> list[str]:
    """Each part's name for people: its file's or folder's, with as many folders before it as tell
    it from the others; parts of one path are numbered."""
    steps = [PurePath(part.path).parts for part in parts]
    names = []
    for path in steps:
        others = [s for s in steps if s != path]
        n = next((k for k in range(1, len(path)) if all(s[-k:] != path[-k:] for s in others)), 0)
        names.append("/".join(path[-n:]) if n else str(PurePath(*path)))
    times = Counter(names)
    seen: Counter[str] = Counter()
    for k, name in enumerate(names):
        seen[name] += 1
        if times[name] > 1:
            names[k] = f"{name} ({seen[name]})"
    return names
