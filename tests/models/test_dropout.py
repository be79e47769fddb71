"""What is left out: by hand, in its share, alike wherever a token stands."""

from __future__ import annotations

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from models.dropout import InputDropout

MASK = 2**32 - 1


def mixed(x: int) -> int:
    """The end of MurmurHash3, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


def by_hand(seed: int, name: str, layer: int | None, place: int, rate: float) -> bool:
    """Whether a value is seen."""
    number = zlib.crc32(name.encode())
    if layer is not None:
        number = mixed((number + layer * 0x9E3779B9) & MASK)
    if not seed:
        return True
    return mixed((mixed(seed ^ number) + place * 0x9E3779B9) & MASK) >= int(rate * 2**32)


def drawn(seeds, layer=3, rate=0.25, part="layers"):
    number = None if layer is None else jnp.int32(layer)
    return InputDropout(rate, part, jnp.asarray(seeds, jnp.uint32), number)


@pytest.mark.parametrize("layer", [None, 0, 3])
def test_every_value_by_hand(layer):
    seeds = np.array([[1, 77, 0], [2**32 - 1, 5, 6]])
    x = np.arange(1.0, 2 * 3 * 2 * 4 + 1, dtype=np.float32).reshape(2, 3, 2, 4)
    got = np.asarray(drawn(seeds, layer).drop(jnp.asarray(x), "out"))
    for row, token, i, j in np.ndindex(x.shape):
        seed = int(seeds[row, token])
        seen = by_hand(seed, "layers.out", layer, i * 4 + j, 0.25)
        scale = 1 / 0.75 if seed else 1.0
        assert got[row, token, i, j] == pytest.approx(x[row, token, i, j] * scale * seen)


def test_joined_tokens_and_pieces_have_numbers():
    x = jnp.ones((2, 3, 32))
    joined = drawn([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]).drop(x, "up")
    np.testing.assert_array_equal(joined, drawn([[1, 3, 5], [8, 10, 12]]).drop(x, "up"))
    pieces = np.asarray(drawn([9, 0]).drop(x, "up"))
    assert (pieces[1] == 1).all()
    assert 0 < (pieces[0] == 0).mean() < 0.5
    assert len({tuple(token > 0) for token in pieces[0]}) == 3
