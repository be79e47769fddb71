"""Every picture there is, cut as the published processors cut it; each is decoded only once."""

from __future__ import annotations

import numpy as np

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.internvl_tiles import DynamicTiling
from tests.data.media.test_anyres import reference  # noqa: F401
from tests.data.media.test_internvl_tiles import processor  # noqa: F401
from tests.data.media_cases import made_pictures, normalized, read_upright, shared_files, upright

ALONE = np.array([True])


def test_every_picture_is_cut_as_published(reference, processor, tmp_path):
    for k, path in enumerate([*shared_files("images"), *made_pictures(tmp_path)]):
        given, image = upright(path), read_upright(path)
        assert image.size == given.size
        sides = np.array([[image.width], [image.height]])

        expected, _ = reference.pixels([given])
        tiles = AnyRes().cut(image, True)
        _, (n,), (n_tokens,) = AnyRes().count(*sides, ALONE)
        assert len(tiles) == len(expected[0]) == n
        assert n_tokens == reference.tokens(*image.size)
        assert np.array_equal(tiles, expected[0]), path

        full = k % 10 == 0  # normalising is slow, and the same for all
        out = processor([given], return_tensors="np", do_rescale=full, do_normalize=full)
        tiles = DynamicTiling().cut(image, True)
        (n,) = out["num_patches"]
        _, (found,), (n_tokens,) = DynamicTiling().count(*sides, ALONE)
        assert (len(tiles), n_tokens) == (found, 256 * found) == (n, 256 * n)
        expected = out["pixel_values"].transpose(0, 2, 3, 1)
        same = np.allclose(normalized(tiles), expected, 0, 1e-5) if full else (
            np.array_equal(tiles, expected)
        )  # fmt: skip
        assert same, path
