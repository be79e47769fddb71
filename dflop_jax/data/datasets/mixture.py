"""A mixture of datasets: parts with weights and subset rules, in YAML or Python.

    parts:
      - path: notes/train.json   # or a folder, shards-{000..127}.tar, data-*.parquet, OWNER/NAME
        root: photos             # folder of the media, or several; the file's own unless given
        subset: first:30%        # all, first:N, end:N, random:N; N a number or a percentage
        weight: 2                # how often an epoch shows each of them
        columns: {messages: chat, image: pictures}   # where fields have other names

LLaVA-NeXT's `datasets`, `json_path` and `sampling_strategy` are read as well.

Which records of a dataset are held out is drawn by the seed, by a number that each record's id
gives (`llava_records.lot`), so that order and neighbours do not count and no process has to ask
another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

from dflop_jax.data.bounds import MAX_SHOWN, MAX_YAML_BYTES, named, read_bounded
from dflop_jax.data.datasets.find_tables import HUB, HUB_ID
from dflop_jax.data.datasets.llava_records import short_digest

MAX_WEIGHT = 1000.0  # times that an epoch shows a part
RULE = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)")


@dataclass(frozen=True)
class MixturePart:
    """One dataset of a mixture. `root` are the folders of its media, empty: the file's own;
    `columns` are the columns of its fields where these have other names."""

    path: str
    weight: float = 1.0
    subset: str = "all"
    root: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("a part of the mixture has no path")
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ValueError(f"{self.path}: weight={self.weight} is not in (0, {MAX_WEIGHT:g}]")
        subset_size(self.subset, 1)


Mixture = tuple[MixturePart, ...]  # datasets that are trained on together


def load_mixture(file: str | Path) -> Mixture:
    """The mixture of a .yaml or .yml file; relative paths in it start at its folder.

    Raises:
      ValueError: no such file, no YAML, or an unknown field or rule, with its place.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; give a mixture of datasets in YAML")
    with named(f"{file}: not a readable mixture"):
        raw = msgspec.yaml.decode(read_bounded(file, MAX_YAML_BYTES))
    items = raw.get("parts", raw.get("datasets")) if isinstance(raw, dict) else raw
    if not isinstance(items, list):
        raise ValueError(f"{file}: expected `parts`, a list of datasets")
    try:
        parts = tuple(_part(item, file.parent) for item in items)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if not parts:
        raise ValueError(f"{file}: a mixture needs at least one part")
    return parts


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
    given = {renamed.get(str(k), str(k)): v for k, v in raw.items()}
    known = [f.name for f in fields(MixturePart)]
    if unknown := [k for k in given if k not in known]:
        raise ValueError(
            f"part {given.get('path')}: unknown field {unknown[0]!r:.50}; known: {', '.join(known)}"
        )
    path, root = given.get("path"), given.get("root", ())
    if isinstance(path, str) and path:
        is_here = not HUB_ID.fullmatch(path) or (folder / path).exists()
        given["path"] = str(folder / path) if is_here and not path.startswith(HUB) else path
    given["root"] = [root] if isinstance(root, str) else root
    try:
        part = msgspec.convert(given, MixturePart)
    except msgspec.ValidationError as e:
        raise ValueError(f"part {path}: {e}") from None
    return replace(part, root=tuple(str(folder / r) for r in part.root if r))


def names(parts: Sequence[MixturePart]) -> list[str]:
    """Each part's name in an index: parts of one dataset share its table."""
    return [
        "|".join([p.path, ",".join(p.root), *map("=".join, sorted(p.columns.items()))])
        for p in parts
    ]


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


def held_out(lots: Sequence[np.ndarray], n: int | float, seed: int) -> list[np.ndarray]:
    """Which records of each part are held out, bool [records].

    Of a float `n` those whose id draws a number in the lowest share `n` of all. Whether a record is
    does not depend on any other, so that data may grow. Else `n` of all, each part in its share, at
    least one of each part that has two where `n` suffices.

    Records that draw the same number have the same id: they may be one, in several parts. They are
    held out together and all count, so that no part shows in training what another holds out; there
    may then be more than `n`.

    Args:
      lots: uint64 [records] of each part.

    Raises:
      ValueError: nothing would be left to train on; of a share, no record is held out, either.
    """
    if isinstance(n, float):
        return _held_share(lots, n, seed)
    sizes = [len(part) for part in lots]
    wanted = shares(sizes, min(n, sum(sizes)), least=2)
    taken = np.zeros(0, np.uint64)
    for part in np.argsort(sizes, kind="stable"):  # ids of small parts take of others' shares, too
        lacking = wanted[part] - np.isin(lots[part], taken).sum()
        ids, counts = np.unique(lots[part], return_counts=True)
        order = np.argsort(_drawn(ids, seed), kind="stable")
        order = order[~np.isin(ids[order], taken)]
        before = np.cumsum(counts[order]) - counts[order]
        taken = np.append(taken, ids[order[before < lacking]])
    masks = [np.isin(numbers, taken) for numbers in lots]
    if all(mask.all() for mask in masks):
        raise ValueError(
            f"{n} held-out samples of {sum(sizes)} records; lower train.eval_samples, so that some "
            "are left to train on"
        )
    return masks


def shares(sizes: Sequence[int], n: int, least: int = 1) -> list[int]:
    """`n` by parts of so many records, in proportion; at least one of each part that has `least`
    records, where `n` suffices."""
    ends = np.cumsum(sizes) * n / max(1, sum(sizes))
    counts = np.diff(np.round(ends), prepend=0).astype(int).tolist()
    for part, size in enumerate(sizes):
        largest = counts.index(max(counts))
        if not counts[part] and size >= least and counts[largest] > 1:
            counts[largest] -= 1
            counts[part] = 1
    return counts


def _held_share(lots: Sequence[np.ndarray], share: float, seed: int) -> list[np.ndarray]:
    below = np.uint64(int(share * 2**64))
    masks = [_drawn(numbers, seed) < below for numbers in lots]
    n, n_held = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    if n_held in (0, n):
        which = "every record" if n_held else "no record"
        raise ValueError(
            f"train.eval_fraction={share:g} of {n} records holds out {which}; give another share, "
            "or more data"
        )
    return masks


def _drawn(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Other numbers below 2**64 for each seed, one to one (the last steps of splitmix64)."""
    x = numbers ^ np.random.SeedSequence([seed, 2]).generate_state(1, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
