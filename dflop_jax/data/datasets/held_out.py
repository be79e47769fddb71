"""Which records of a dataset are held out: drawn by the seed, by a number that each record's id
gives (`llava_records.lot`), so that order and neighbours do not count and no process has to ask
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SPARE_RECORDS = 64  # more of each part than it gives, since some cannot be taken


def shares(sizes: Sequence[int], n: int, least: int = 1) -> list[int]:
    """`n` by parts of so many records, in proportion; at least one of each part that has `least`
    records, where `n` suffices."""
    ends = np.cumsum(sizes) * n / max(1, sum(sizes))
    counts = np.diff(np.round(ends), prepend=0).astype(int).tolist()
    for part, size in enumerate(sizes):
        if not counts[part] and size >= least:
            largest = counts.index(max(counts))
            if counts[largest] > 1:
                counts[largest] -= 1
                counts[part] = 1
    return counts


def held_out(lots: Sequence[np.ndarray], n: int, seed: int) -> list[np.ndarray]:
    """Which records of each part are held out, bool [records]: `n` of all, each part in its share
    (one with a single record may give none).

    Records that draw the same number have the same id: they may be one, in several parts. They are
    held out together and all count, so that no part shows in training what another holds out; and
    there are fewer than `n` where such records leave no other way.

    Args:
      lots: uint64 [records] of each part.

    Raises:
      ValueError: `n` is not less than all records, or less than every id has.
    """
    sizes = [len(part) for part in lots]
    if n >= sum(sizes):
        raise ValueError(
            f"{n} held-out samples of {sum(sizes)} records; lower train.eval_samples, so that some "
            "are left to train on"
        )
    wanted = shares(sizes, n, least=2)
    ids = _candidates(lots, wanted, seed)
    counts = np.stack([_times(ids, numbers) for numbers in lots], 1)  # of an id in each part
    taken, given = np.zeros(len(ids), bool), np.zeros(len(lots), int)
    # Small parts first: an id of theirs takes of others' shares too.
    smallest = np.where(counts > 0, sizes, sum(sizes)).min(axis=1)
    order = np.argsort(smallest, kind="stable").tolist()
    for limits in (wanted, None):  # what no share has room for may still stand in for others
        for i in order:
            count = counts[i]
            if given.sum() == n:
                break
            if taken[i] or given.sum() + count.sum() > n:
                continue
            if limits is None or (given + count <= limits).all():
                taken[i] = True
                given += count
    if n and not taken.any():
        raise ValueError(
            f"{n} held-out samples, and each id stands for more records; raise train.eval_samples"
        )
    return [np.isin(numbers, ids[taken]) for numbers in lots]


def held_share(lots: Sequence[np.ndarray], share: float, seed: int) -> list[np.ndarray]:
    """Which records of each part are held out, bool [records]: those whose id draws a number in the
    lowest `share` of all. Whether a record is does not depend on any other, so that data may grow.

    Args:
      lots: uint64 [records] of each part.

    Raises:
      ValueError: no record is, or all are.
    """
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


def _times(ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """How often each id is among the numbers, int64 [ids]."""
    order = np.argsort(ids)
    place = np.searchsorted(ids, numbers, sorter=order)
    is_inside, place = place < len(ids), place.clip(max=len(ids) - 1)
    place = order[place]
    return np.bincount(place[is_inside & (ids[place] == numbers)], minlength=len(ids))


def _candidates(lots: Sequence[np.ndarray], wanted: Sequence[int], seed: int) -> np.ndarray:
    """Ids, uint64 in the order in which they are drawn, among which those of every part are."""
    ids: list[np.ndarray] = []
    for numbers, n in zip(lots, wanted, strict=True):
        first = min(len(numbers), 2 * n + _SPARE_RECORDS)
        drawn = _drawn(numbers, seed)
        if first < len(numbers):
            ids.append(numbers[np.argpartition(drawn, first)[:first]])
        else:
            ids.append(numbers)
    every = np.unique(np.concatenate(ids))
    return every[np.argsort(_drawn(every, seed), kind="stable")]


def _drawn(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Other numbers below 2**64 for each seed, one to one (the last steps of splitmix64)."""
    x = numbers ^ np.random.SeedSequence([seed, 2]).generate_state(1, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
