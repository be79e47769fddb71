"""Which records of a dataset are held out: drawn by the seed, by a number that each record's id
gives (`llava_records.lot`), so that order and neighbours do not count and no process has to ask
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def held_out(lots: Sequence[np.ndarray], n: int, seed: int) -> list[np.ndarray]:
    """Which records of each part are held out, bool [records]: `n` of all, each part in its share,
    at least one of each part that has two where `n` suffices.

    Records that draw the same number have the same id: they may be one, in several parts. They are
    held out together and all count, so that no part shows in training what another holds out; there
    may then be more than `n`.

    Args:
      lots: uint64 [records] of each part.

    Raises:
      ValueError: nothing would be left to train on.
    """
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


def _drawn(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Other numbers below 2**64 for each seed, one to one (the last steps of splitmix64)."""
    x = numbers ^ np.random.SeedSequence([seed, 2]).generate_state(1, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
