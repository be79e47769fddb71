"""A mixture of datasets: parts with weights and subset rules, in YAML or Python.

    parts:
      - path: notes/train.json   # or a folder, shards-{000..127}.tar, data-*.parquet, OWNER/NAME
        root: photos             # folder or folders of the media; default: that of the file
        subset: first:30%        # all, first:N, end:N, random:N; N a number or a percentage
        weight: 2                # how often an epoch contains each record
        columns: {messages: chat, image: pictures}   # columns of fields that have other names

LLaVA-NeXT's `datasets`, `json_path` and `sampling_strategy` are also read.

The seed and a hash of a record's id (`split_hash`) decide whether it is held out, so the order of
records does not matter and processes need not communicate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, inf
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

from dflop_jax.data.bounds import MAX_ROWS, MAX_YAML_BYTES, errors_as, read_bounded
from dflop_jax.data.datasets.readers import HUB_ID, HUB_PREFIX
from dflop_jax.data.datasets.record_parser import short_digest
from dflop_jax.data.shuffle import mix_bits

RULE = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)")


class MixtureEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dataset of a mixture."""

    path: str
    weight: float = 1.0  # how often an epoch contains each record
    subset: str = "all"
    root: tuple[str, ...] = ()  # folders of its media; empty: the folder of the file
    columns: Mapping[str, str] = {}  # columns of fields that have other names

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("a part of the mixture has no path")
        if not 0 < self.weight < inf:
            raise ValueError(f"{self.path}: weight={self.weight} is not above 0 and finite")
        subset_size(self.subset, 1)

    @property
    def key(self) -> str:
        """Key of its dataset in an index."""
        columns = map("=".join, sorted(self.columns.items()))
        return "|".join([self.path, ",".join(self.root), *columns])


Mixture = tuple[MixtureEntry, ...]  # datasets that are trained on together


def load_mixture(file: str | Path) -> Mixture:
    """Return the mixture of a .yaml or .yml file; its paths are relative to its folder."""
    file = Path(file)
    with errors_as(f"{file}: not a readable mixture"):
        raw = msgspec.yaml.decode(read_bounded(file, MAX_YAML_BYTES))
    items = raw.get("parts", raw.get("datasets")) if isinstance(raw, dict) else raw
    if not isinstance(items, list):
        raise ValueError(f"{file}: expected `parts`, a list of datasets")
    try:
        entries = tuple(_parse_entry(item, file.parent) for item in items)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    if not entries:
        raise ValueError(f"{file}: a mixture needs at least one part")
    return entries


def subset_size(rule: str, n: int) -> int:
    """Return the number of records that a rule selects from `n`. ValueError: an unknown rule."""
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
        raise ValueError(f"subset {rule!r}: {match[2]} is not a whole number; add % for a share")
    return int(min(amount, n))


def select_subset(entry: MixtureEntry, n: int, seed: int) -> np.ndarray:
    """Return the indices in 0..n-1 that the entry's rule selects, int64, ascending."""
    size = subset_size(entry.subset, n)
    if entry.subset.startswith("end"):
        return np.arange(n - size, n)
    if entry.subset.startswith("random"):
        return np.sort(_generator(seed, "subset", entry).permutation(n)[:size])
    return np.arange(size)


def repeat_by_weight(entry: MixtureEntry, rows: np.ndarray, seed: int) -> np.ndarray:
    """Return the rows of an epoch: each repeated by the weight's whole part, then a random part."""
    if entry.weight * max(len(rows), 1) > MAX_ROWS:
        raise ValueError(f"{entry.path}: more than {MAX_ROWS:,} samples an epoch; lower its weight")
    n_repeats = int(entry.weight)
    n_extra = round((entry.weight - n_repeats) * len(rows))
    drawn = np.sort(_generator(seed, "weight", entry).permutation(len(rows))[:n_extra])
    return np.concatenate([np.tile(rows, n_repeats), rows[drawn]])


def _generator(seed: int, use: str, entry: MixtureEntry) -> np.random.Generator:
    """Return a random generator that does not depend on the mixture's other parts."""
    text = f"{use}:{entry.path}:{','.join(entry.root)}:{entry.subset}"
    return np.random.default_rng([seed, int(short_digest(text.encode()), 16)])


def _parse_entry(raw: Any, folder: Path) -> MixtureEntry:
    if isinstance(raw, str):
        raw = {"path": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"a part is {raw!r:.50}, not a path or a mapping")
    renamed = {"json_path": "path", "sampling_strategy": "subset"}
    fields_by_name = {renamed.get(str(k), str(k)): v for k, v in raw.items()}
    path, root = fields_by_name.get("path"), fields_by_name.get("root", ())
    if isinstance(path, str) and path and not path.startswith(HUB_PREFIX):
        is_local = not HUB_ID.fullmatch(path) or (folder / path).exists()
        fields_by_name["path"] = str(folder / path) if is_local else path
    fields_by_name["root"] = [root] if isinstance(root, str) else root
    try:
        entry = msgspec.convert(fields_by_name, MixtureEntry)
    except msgspec.ValidationError as e:
        raise ValueError(f"part {path}: {e}") from None
    return msgspec.structs.replace(entry, root=tuple(str(folder / r) for r in entry.root if r))


def display_names(entries: Sequence[MixtureEntry]) -> list[str]:
    """Return a unique name of each entry: its file name, with parent folders where needed."""
    paths = [PurePath(entry.path).parts for entry in entries]
    names = []
    for path in paths:
        other_paths = [p for p in paths if p != path]
        lengths = (k for k in range(1, len(path)) if all(p[-k:] != path[-k:] for p in other_paths))
        n = next(lengths, 0)
        names.append("/".join(path[-n:]) if n else str(PurePath(*path)))
    return [
        f"{name} ({names[: k + 1].count(name)})" if names.count(name) > 1 else name
        for k, name in enumerate(names)
    ]


def select_rows(
    mixture: Mixture,
    usable_rows: Sequence[np.ndarray],
    split_hashes: np.ndarray,
    seed: int,
    split: str,
    n_held_out: int | float,
) -> list[np.ndarray]:
    """Return the rows of each entry in an epoch of a split, int64, ascending per repeat.

    Args:
      usable_rows: rows of each entry's dataset that the model can take.
      split_hashes: uint64 hash of every row.
    """
    rows = [
        usable[select_subset(entry, len(usable), seed)]
        for entry, usable in zip(mixture, usable_rows, strict=True)
    ]
    if n_held_out:
        masks = select_held_out([split_hashes[r] for r in rows], n_held_out, seed)
        rows = [r[mask == (split == "eval")] for r, mask in zip(rows, masks, strict=True)]
    if split == "train":
        rows = [repeat_by_weight(e, r, seed) for e, r in zip(mixture, rows, strict=True)]
    return rows


def select_held_out(
    split_hashes: Sequence[np.ndarray], n: int | float, seed: int
) -> list[np.ndarray]:
    """Return a mask of held-out records for each part, bool [records], given their uint64 hashes.

    A float `n` holds out records whose hash is in the lowest fraction `n`, independent of other
    records, so data may be added later. A whole `n` holds out `n` records, split over the parts by
    size, with at least one from each part of two or more if `n` suffices. Records of one id are
    held out together, so that no part trains on another's held-out record; this may exceed `n`.

    Raises:
      ValueError: no record would be left to train on, or a float `n` holds out none.
    """
    sizes = [len(hashes) for hashes in split_hashes]
    if isinstance(n, float):
        bound = np.uint64(int(n * 2**64))
        masks = [_mix_hashes(hashes, seed) < bound for hashes in split_hashes]
    else:
        held_out_hashes = np.zeros(0, np.uint64)
        n_wanted = split_proportionally(sizes, min(n, sum(sizes)), min_records=2)
        for k in np.argsort(sizes, kind="stable"):  # ids of small parts also count in larger ones
            n_missing = n_wanted[k] - np.isin(split_hashes[k], held_out_hashes).sum()
            hashes, counts = np.unique(split_hashes[k], return_counts=True)
            order = np.argsort(_mix_hashes(hashes, seed), kind="stable")
            order = order[~np.isin(hashes[order], held_out_hashes)]
            n_before = np.cumsum(counts[order]) - counts[order]
            held_out_hashes = np.append(held_out_hashes, hashes[order[n_before < n_missing]])
        masks = [np.isin(hashes, held_out_hashes) for hashes in split_hashes]
    n_held = sum(int(mask.sum()) for mask in masks)
    if isinstance(n, float) and n_held in (0, sum(sizes)):
        amount = "every record" if n_held else "no record"
        raise ValueError(
            f"train.eval_fraction={n:g} of {sum(sizes)} records holds out {amount}; give another "
            "share, or more data"
        )
    if n_held == sum(sizes):
        raise ValueError(
            f"{n} held-out samples of {sum(sizes)} records; lower train.eval_samples, so that some "
            "are left to train on"
        )
    return masks


def _mix_hashes(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the hashes mixed one to one by the seed."""
    return mix_bits(hashes ^ np.random.SeedSequence([seed, 2]).generate_state(1, np.uint64))


def split_proportionally(sizes: Sequence[int], n: int, min_records: int = 1) -> list[int]:
    """Split `n` in proportion to sizes; a size of at least `min_records` gets 1 if `n` suffices."""
    ends = np.cumsum(sizes) * n / max(1, sum(sizes))
    counts = np.diff(np.round(ends), prepend=0).astype(int).tolist()
    for k, size in enumerate(sizes):
        largest = counts.index(max(counts))
        if not counts[k] and size >= min_records and counts[largest] > 1:
            counts[largest] -= 1
            counts[k] = 1
    return counts
