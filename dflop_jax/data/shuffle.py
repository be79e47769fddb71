"""Shuffled sample order with random access: each epoch is a new permutation of all indices.

The permutation is a Feistel cipher with the round function of Simon
(https://eprint.iacr.org/2013/404), applied again while its output is outside the range ("cycle
walking", Black and Rogaway 2002). The order equals that of Grain's `range(n).seed(seed).shuffle()
.repeat()`, except for n = 4^k + 1 > 65536, where Grain repeats an index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

ROUNDS = 4  # rounds of the Feistel cipher; with fewer the order does not look random
MIN_BITS = 16  # bits of a permuted number at least; numbers without a sample are skipped
MASK_32_BITS = 0xFFFFFFFF

Cipher = Callable[[np.ndarray], np.ndarray]


def mix_bits(z: np.ndarray) -> np.ndarray:
    """Return uint64 numbers mixed one to one by the last steps of SplitMix64 (OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffled_indices(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the sample index, int64 in 0..n-1, at each position of an endless epoch sequence."""
    epochs, position_in_epoch = np.divmod(np.asarray(positions, np.int64), n)
    indices = np.zeros_like(position_in_epoch)
    first_seed = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])  # of epoch 0
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        epoch_seed = (first_seed + int(epoch)) & MASK_32_BITS
        indices[is_in_epoch] = _permute(position_in_epoch[is_in_epoch], n, epoch_seed)
    return indices


def _permute(values: np.ndarray, n: int, seed: int) -> np.ndarray:
    if n == 1:
        return values
    bits = max(MIN_BITS, (n - 1).bit_length() + (n - 1).bit_length() % 2)
    encrypt = _cipher(bits, _round_keys(seed))
    values = encrypt(values)
    if bits == MIN_BITS:
        return _first_value_below(n, seed)[values]
    while (outside := values >= n).any():  # at least a quarter of all numbers is below n
        values[outside] = encrypt(values[outside])
    return values


@lru_cache(maxsize=4)
def _first_value_below(n: int, seed: int) -> np.ndarray:
    """Return the first value below n that repeated encryption of each MIN_BITS number reaches."""
    blocks = np.arange(1 << MIN_BITS)
    following = np.where(blocks < n, blocks, _cipher(MIN_BITS, _round_keys(seed))(blocks))
    for _ in range(MIN_BITS):  # doubles the steps; 2**MIN_BITS are enough
        following = following[following]
    return following


def _cipher(bits: int, keys: tuple[int, ...]) -> Cipher:
    half = bits // 2
    mask = (1 << half) - 1

    def rotated(x: np.ndarray, n_bits: int) -> np.ndarray:
        return ((x << n_bits) | (x >> (half - n_bits))) & mask

    def encrypt(blocks: np.ndarray) -> np.ndarray:
        left, right = blocks >> half, blocks & mask
        for key in keys:
            mixed = (rotated(right, 1) & rotated(right, 8)) ^ rotated(right, 2)
            left, right = right, left ^ mixed ^ (key & mask)
        return (left << half) | right

    return encrypt


def _round_keys(seed: int) -> tuple[int, ...]:
    """Return ROUNDS keys of 32 bits, as C++'s `std::seed_seq` of one number ([rand.util]) does."""
    keys = [0x8B8B8B8B] * ROUNDS
    for k in range(2 * ROUNDS):
        previous, current, following, next_but_one = ((k + i) % ROUNDS for i in range(-1, 3))
        if k < ROUNDS:
            mix = keys[current] ^ keys[following] ^ keys[previous]
            mix = 1664525 * (mix ^ (mix >> 27)) & MASK_32_BITS
            new = mix + (1 if k == 0 else 1 + seed if k == 1 else k) & MASK_32_BITS
            keys[following] = keys[following] + mix & MASK_32_BITS
            keys[next_but_one] = keys[next_but_one] + new & MASK_32_BITS
        else:
            mix = keys[current] + keys[following] + keys[previous] & MASK_32_BITS
            mix = 1566083941 * (mix ^ (mix >> 27)) & MASK_32_BITS
            new = mix - current & MASK_32_BITS
            keys[following] ^= mix
            keys[next_but_one] ^= new
        keys[current] = new
    return tuple(keys)
