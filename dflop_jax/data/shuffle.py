"""The order of samples: every index once an epoch, shuffled anew each epoch, with random access.

An epoch is a keyed permutation: a Feistel cipher with the round function of Simon
(https://eprint.iacr.org/2013/404) on blocks of at least 16 bits, applied again where it leaves the
range ("cycle walking", Black and Rogaway 2002). Keys, rounds and seeds are those of Grain's
`range(n).seed(seed).shuffle().repeat()`, with which earlier runs were trained: the order is its
own, number by number. Only for n = 4^k + 1 > 65536 it differs, where Grain's repeats an index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

ROUNDS = 4  # of the Feistel cipher, the least whose order looks random
LEAST_BITS = 16  # of the numbers that are permuted; those of no sample are passed over
WORD = 0xFFFFFFFF  # a mask of 32 bits

Cipher = Callable[[np.ndarray], np.ndarray]


def shuffled(places: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the index of 0..n-1 that stands at each place of an endless run of epochs, int64."""
    epochs, within = np.divmod(np.asarray(places, np.int64), n)
    indices = np.zeros_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permuted(within[here], n, (_first_seed(seed) + int(epoch)) & WORD)
    return indices


def _permuted(values: np.ndarray, n: int, seed: int) -> np.ndarray:
    if n == 1:
        return values
    bits = max(LEAST_BITS, (n - 1).bit_length() + (n - 1).bit_length() % 2)
    encrypt = _cipher(bits, _round_keys(seed))
    values = encrypt(values)
    if bits == LEAST_BITS:
        return _first_inside(n, seed)[values]
    while (outside := values >= n).any():  # a quarter of all blocks at least lies inside
        values[outside] = encrypt(values[outside])
    return values


@lru_cache(maxsize=4)
def _first_inside(n: int, seed: int) -> np.ndarray:
    """Return for every block of LEAST_BITS the first value below n on its way, itself included."""
    blocks = np.arange(1 << LEAST_BITS)
    ahead = np.where(blocks < n, blocks, _cipher(LEAST_BITS, _round_keys(seed))(blocks))
    for _ in range(LEAST_BITS):  # doubles the steps taken: no way is longer than all blocks
        ahead = ahead[ahead]
    return ahead


def _cipher(bits: int, keys: tuple[int, ...]) -> Cipher:
    half = bits // 2
    mask = (1 << half) - 1

    def rotated(x: np.ndarray, by: int) -> np.ndarray:
        return ((x << by) | (x >> (half - by))) & mask

    def encrypt(blocks: np.ndarray) -> np.ndarray:
        left, right = blocks >> half, blocks & mask
        for key in keys:
            mixed = (rotated(right, 1) & rotated(right, 8)) ^ rotated(right, 2)
            left, right = right, left ^ mixed ^ (key & mask)
        return (left << half) | right

    return encrypt


def _first_seed(seed: int) -> int:
    """Return the seed of epoch 0; each later epoch has the next."""
    return int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])


def _round_keys(seed: int) -> tuple[int, ...]:
    """Return ROUNDS keys of 32 bits: those of C++'s `std::seed_seq` of one number ([rand.util])."""
    keys = [0x8B8B8B8B] * ROUNDS
    for k in range(2 * ROUNDS):
        here, after, last, next_but_one = (k % ROUNDS, (k + 1) % ROUNDS, (k - 1) % ROUNDS,
                                           (k + 2) % ROUNDS)  # fmt: skip
        if k < ROUNDS:
            mix = keys[here] ^ keys[after] ^ keys[last]
            mix = 1664525 * (mix ^ (mix >> 27)) & WORD
            new = mix + (1 if k == 0 else 1 + seed if k == 1 else k) & WORD
            keys[after] = keys[after] + mix & WORD
            keys[next_but_one] = keys[next_but_one] + new & WORD
        else:
            mix = keys[here] + keys[after] + keys[last] & WORD
            mix = 1566083941 * (mix ^ (mix >> 27)) & WORD
            new = mix - here & WORD
            keys[after] ^= mix
            keys[next_but_one] ^= new
        keys[here] = new
    return tuple(keys)
